"""SIGKILL in every phase of a step: the resumed run is, bit by bit, the run that was never killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_rl.config import Config
from tests.ranks import RankFailed, run_ranks
from tests.train.kills import PHASES, rollouts, run_and_die, run_to_end, stop_by_signal
from tests.train.runs import quickstart

pytestmark = pytest.mark.xdist_group("train")
TIMES = ("seconds", "per_second")


def config_of(run_dir: Path, **values: Any) -> Config:
    adaptive = {"algorithm__kl_target": 0.01, "algorithm__kl_horizon": 100}  # so that the coefficient is a state too
    usual = {"run__dir": run_dir, "steps": 3, "checkpoint__every": 1, "data__prompts_per_step": 8, **adaptive}
    return quickstart(**{**usual, **values})


def figures(run_dir: Path) -> list[dict[str, float]]:
    """metrics.jsonl without the clock, and without how many samples came from the journal."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    skip = (*TIMES, "reused_samples")
    return [{k: v for k, v in line.items() if not any(word in k for word in skip)} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    return run_dir, run_ranks(2, run_to_end, config_of(run_dir))[0]["weights"]


@pytest.mark.parametrize("phase", PHASES)
def test_killed_and_resumed_is_bitwise_the_same(
    phase: str, undisturbed: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    step, victim = 2, PHASES.index(phase) % 2
    in_flight = phase == "save"  # the save of step 1 or 2 may be lost with the rank that wrote it
    with pytest.raises(RankFailed, match=r"died without a word|rank \d"):
        run_ranks(2, run_and_die, config_of(tmp_path, checkpoint__asynchronous=in_flight), phase, step, victim)
    done = run_ranks(2, run_to_end, config_of(tmp_path, resume="auto"))[0]
    assert in_flight or done["began_after"] in (1, 2), "the run did not go on from its newest checkpoint"
    run_dir, weights = undisturbed
    for name, expected in weights.items():
        assert np.array_equal(done["weights"][name], expected), name
    assert figures(tmp_path) == figures(run_dir)
    assert rollouts(tmp_path) == rollouts(run_dir)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_rank_stops_all_at_the_same_step_saved(number: signal.Signals, tmp_path: Path) -> None:
    for stopped_by, steps in run_ranks(2, stop_by_signal, config_of(tmp_path, checkpoint__every=0), number, 1):
        assert (stopped_by, steps) == (number.name, 1)
    assert (tmp_path / "checkpoints" / "checkpoint_1_complete" / "manifest.json").is_file()
