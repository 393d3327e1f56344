"""The KL of a run: its reference, its value, where it goes and what it does to its coefficient, against plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_rl.batch import Batch
from tests.ranks import run_ranks
from tests.train.kl import ACTOR, plain_log_probs, run_scored, write_reference
from tests.train.runs import quickstart

pytestmark = pytest.mark.xdist_group("train")

TARGET, HORIZON, COEF, STEPS = 0.01, 100, 0.25, 3
SHARED = {
    "algorithm__kl_target": TARGET, "algorithm__kl_horizon": HORIZON, "algorithm__kl_coef": COEF,
    "rollout__temperature": 0.8, "algorithm__mini_batches": 1, "actor__lr": 1e-3,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "reward": {"algorithm__kl_placement": "reward", "algorithm__kl_estimator": "k1"},
    "loss": {"algorithm__name": "grpo", "algorithm__kl_placement": "loss", "algorithm__kl_estimator": "k3"},
    "loss-two-mini-batches": {
        "algorithm__name": "grpo", "algorithm__kl_placement": "loss", "algorithm__kl_estimator": "k3",
        "algorithm__mini_batches": 2, "actor__lr": 1e-30,
    },
    "critic-warm-up": {
        "algorithm__kl_placement": "loss", "algorithm__kl_estimator": "k3", "algorithm__critic_warmup_steps": 2,
        "steps": STEPS,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reference(tmp_path_factory.mktemp("reference"))


def plain_kl(batch: Batch, old: Tensor, ref: Tensor, estimator: str) -> float:
    difference = (old.double() - ref.double())[batch["response_mask"]]
    value = difference if estimator == "k1" else (-difference).exp() - 1 + difference
    return float(value.mean())


@pytest.mark.parametrize("run", list(RUNS))
def test_reference_kl_and_coefficient(run: str, reference: Path) -> None:
    values = {**SHARED, **RUNS[run], "model__reference_path": reference}
    (result,) = run_ranks(1, run_scored, quickstart(**values), STEPS)
    estimator = values["algorithm__kl_estimator"]
    coef, first = COEF, result["batches"][0]
    actor = plain_log_probs(ACTOR, first, 0.8)
    for step, (batch, metrics) in enumerate(zip(result["batches"], result["metrics"], strict=True)):
        mask = batch["response_mask"]
        ref = plain_log_probs(reference, batch, 0.8)
        torch.testing.assert_close(batch["ref_log_probs"].double()[mask], ref[mask], rtol=0, atol=1e-4)
        # Before the first update (and in the warm-up, or at no learning rate) the policy is the model of the directory.
        is_initial = step == 0 or run == "critic-warm-up" or run == "loss-two-mini-batches"
        old = plain_log_probs(ACTOR, batch, 0.8) if is_initial else batch["rollout_log_probs"]
        kl = plain_kl(batch, old, ref, estimator)
        assert metrics["kl"] == pytest.approx(kl, rel=1e-2, abs=2e-5), f"step {step + 1}"
        assert metrics["kl_coef"] == pytest.approx(coef, rel=1e-9), f"step {step + 1}"
        assert "mismatch/kl" in metrics
        if "old_log_probs" in batch and is_initial:
            torch.testing.assert_close(batch["old_log_probs"].double()[mask], old.double()[mask], rtol=0, atol=1e-4)
        check_where_it_goes(run, batch, metrics, kl)
        coef *= 1 + min(max(metrics["kl"] / TARGET - 1, -0.2), 0.2) * len(batch) / HORIZON
    assert plain_kl(first, actor, plain_log_probs(reference, first, 0.8), "k3") > 1e-4, "the reference is the actor"
    assert coef != COEF


def check_where_it_goes(run: str, batch: Batch, metrics: dict[str, float], kl: float) -> None:
    mask, coef = batch["response_mask"], metrics["kl_coef"]
    plain = float(batch["token_level_scores"][mask].double().mean())
    expected = plain - coef * kl if run == "reward" else plain
    assert metrics["token_level_rewards_mean"] == pytest.approx(expected, rel=1e-4, abs=2e-5 * coef + 1e-6)
    if run == "reward" or (run == "critic-warm-up" and "actor/loss" not in metrics):
        assert "actor/loss/kl" not in metrics
    else:
        weight = (
            metrics["actor/loss/kl"] / metrics["actor/kl_loss"]
        )  # aggregation weighs tokens otherwise than the mean
        assert metrics["actor/kl_loss"] == pytest.approx(kl, rel=2e-2, abs=2e-5)
        assert weight == pytest.approx(coef, rel=0.5)
        assert abs(metrics["actor/loss/policy"] + metrics["actor/loss/kl"] - metrics["actor/loss"]) < 1e-6


def test_warm_up_measures_and_then_learns(reference: Path) -> None:
    """Two steps without the actor's pass: mismatch and KL are there, and the actor does not move before the third."""
    values = {**SHARED, **RUNS["critic-warm-up"], "model__reference_path": reference}
    (result,) = run_ranks(1, run_scored, quickstart(**values), STEPS)
    assert ["old_log_probs" in batch for batch in result["batches"]] == [True, True, False]
    assert ["actor/loss" in m for m in result["metrics"]] == [False, False, True]
    assert all(m["kl"] > 1e-4 and "mismatch/ess" in m for m in result["metrics"])
