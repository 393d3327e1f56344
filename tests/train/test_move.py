"""A run moves between engines and layouts: its checkpoint holds canonical tensors, so the next step is the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.train.kills import run_to_end
from tests.train.runs import quickstart
from tests.train.test_kills import figures

pytestmark = pytest.mark.xdist_group("train")

ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "megatron-tp2": (2, {"parallel__tp": 2}),
    "fsdp2-dp3": (3, {"parallel__engine": "fsdp2"}),
    "zero2": (2, {"parallel__engine": "zero2"}),
}
MOVES = (("megatron-tp2", "fsdp2-dp3"), ("fsdp2-dp3", "zero2"), ("zero2", "megatron-tp2"))


def run(engine: str, run_dir: Path, steps: int, **values: Any) -> list[dict[str, float]]:
    world_size, parallel = ENGINES[engine]
    common = {"run__dir": run_dir, "checkpoint__every": 1, "checkpoint__keep_last": 9, "actor__decay": "linear"}
    config = quickstart(**{**common, "rollout__tp": 1, "actor__decay_steps": 40, "steps": steps, **parallel, **values})
    run_ranks(world_size, run_to_end, config)
    return figures(run_dir)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[dict[str, float]]]]:
    """Four steps of each engine."""
    dirs = {engine: tmp_path_factory.mktemp(engine) for engine in ENGINES}
    return {engine: (path, run(engine, path, 4)) for engine, path in dirs.items()}


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_the_steps_after_a_move_are_those_without_it(before: str, after: str, runs: Any, tmp_path: Path) -> None:
    source, expected = runs[before]
    moved = tmp_path / "run"
    shutil.copytree(source, moved, ignore=shutil.ignore_patterns("checkpoint_[34]_*", "step_00000[34]", "*.lock"))
    curve = run(after, moved, 4, resume="auto")
    assert [line["step"] for line in curve] == [1, 2, 3, 4]
    for want, got in zip(expected[2:], curve[2:], strict=True):
        for name in ("loss", "reward_mean", "kl", "actor/grad_norm", "critic/grad_norm", "actor/lr", "actor/entropy"):
            assert got[name] == pytest.approx(want[name], rel=5e-4, abs=2e-5), f"{name} at step {want['step']}"
