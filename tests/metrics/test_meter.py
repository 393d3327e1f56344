from __future__ import annotations

import math
import time

import pytest

from hpc_rl.metrics.meter import Meter


def test_phases_add_up_and_fit_in_the_step() -> None:
    meter = Meter()
    for _ in range(2):
        with meter.phase("update"):
            time.sleep(0.02)
    with meter.phase("rollout"):
        time.sleep(0.01)
    figures = meter.summary(num_tokens=300, num_response_tokens=100)
    assert 0.04 <= figures["seconds/update"] <= figures["step_seconds"]
    assert figures["seconds/rollout"] >= 0.01
    assert figures["seconds/update"] + figures["seconds/rollout"] <= figures["step_seconds"]
    assert figures["tokens_per_second"] == pytest.approx(300 / figures["step_seconds"])
    assert (figures["num_tokens"], figures["num_response_tokens"]) == (300, 100)


def test_a_phase_waits_for_the_device_and_counts_a_failed_block() -> None:
    calls: list[str] = []
    meter = Meter(synchronize=lambda: calls.append("sync"))
    with meter.phase("a"):
        calls.append("work")
    assert calls == ["work", "sync"]
    with pytest.raises(KeyError), meter.phase("b"):
        raise KeyError
    assert meter.summary()["seconds/b"] >= 0


def test_sums_and_weighted_means() -> None:
    meter = Meter()
    meter.add("errors", 1)
    meter.add("errors", 2)
    meter.mean("kl", 1.0, weight=3)
    meter.mean("kl", 5.0, weight=1)
    meter.mean("nothing", 7.0, weight=0)
    figures = meter.summary()
    assert figures["errors"] == 3
    assert figures["kl"] == 2.0
    assert math.isnan(figures["nothing"])
