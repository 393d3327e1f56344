"""Every algorithm learns: held-out exact match of the quickstart's task, sampled at temperature 1, on one rank.

`hpc-rl bench learning` does the same with two ranks, its published length and several seeds.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.learning import ALGORITHMS, GAIN_GOAL
from hpc_rl.config import Config
from hpc_rl.config_load import load_config
from hpc_rl.train import RLTrainer
from tests.ranks import run_ranks

CONFIG = Path(__file__).parents[2] / "configs" / "grpo_addition.yaml"


def before_and_after(config: Config) -> tuple[float, float]:
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = RLTrainer(config)
    before = trainer.evaluate()["eval/pass_at_1"]
    trainer.train()
    after = trainer.evaluate()["eval/pass_at_1"]
    trainer.close()
    return before, after


@pytest.mark.parametrize("name", ALGORITHMS)
def test_learns(name: str, tmp_path: Path) -> None:
    values = ["eval.every=0", "checkpoint.rollouts=false"]
    config = load_config(CONFIG, [f"algorithm.name={name}", f"run.dir={tmp_path}", "launch.device=cpu", *values])
    ((before, after),) = run_ranks(1, before_and_after, config)
    print(f"{name}: {before:.3f} -> {after:.3f}")
    assert after - before >= GAIN_GOAL, f"{name} went from {before:.3f} to {after:.3f} only"
