"""What gives way when a configuration meets another model or fewer steps than it was written for."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.config import Config
from hpc_rl.config_check import cross_check
from hpc_rl.config_load import load_config
from hpc_rl.errors import UserError
from hpc_rl.plan.choose import chosen
from hpc_rl.plan.fit import fit, notes
from hpc_rl.plan.hardware import CPU
from hpc_rl.run import placed
from launch.env import detect
from tests.plan.test_command import ROOT, hpc_rl

CLUSTER = ("ppo_70b", "ppo_8b", "grpo_32b", "dapo_32b")
TINY = ["model.path=configs/quickstart/model", "steps=2"]


def cluster_config(name: str, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / f"{name}.yaml", [f"model.path={ROOT}/configs/quickstart/model", *overrides])


@pytest.mark.parametrize("name", CLUSTER)
def test_a_tiny_model_runs_with_each_configuration_of_a_cluster(name: str) -> None:
    config = cluster_config(name, "steps=2", "launch.device=cpu")
    for nodes in (1, 2, 3):
        cross_check(chosen(config, CPU, nodes, 1), nodes)


def test_what_is_lowered_is_said() -> None:
    config = cluster_config("ppo_70b", "steps=2")
    fitted = fit(config)
    assert fitted.algorithm.critic_warmup_steps == 1
    assert (fitted.data.max_prompt_tokens, fitted.rollout.max_response_tokens) == (32, 32)
    assert notes(config, fitted) == [
        "algorithm.critic_warmup_steps = 5 is lowered to 1: steps = 2, and the actor learns in the last one at least",
        "data.max_prompt_tokens = 1024 is lowered to 32: the model's max_position_embeddings leave no room for more",
        "rollout.max_response_tokens = 4096 is lowered to 32: the model's max_position_embeddings leave no room for more",
    ]
    assert fit(fitted) == fitted
    assert placed(config, detect({})).algorithm.critic_warmup_steps == 1
    said = hpc_rl("configs/ppo_70b.yaml", *TINY, "--nodes", 2, "--gpus-per-node", 1)
    assert "critic_warmup_steps = 5 is lowered" in " ".join(said.stdout.split())


def test_short_prompts_leave_the_response_what_they_do_not_need() -> None:
    fitted = fit(cluster_config("ppo_70b", "data.max_prompt_tokens=8"))
    assert (fitted.data.max_prompt_tokens, fitted.rollout.max_response_tokens) == (8, 56)


def test_what_fits_stays() -> None:
    config = cluster_config("ppo_70b", "data.max_prompt_tokens=32", "rollout.max_response_tokens=32")
    assert fit(config) == config and notes(config, config) == []


def test_a_layout_by_hand_keeps_its_lengths() -> None:
    config = cluster_config("ppo_70b", "parallel.auto=false")
    assert fit(config) == config
    with pytest.raises(UserError, match="max_position_embeddings is 64"):
        cross_check(fit(config), 1)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs/ppo_70b.yaml", [f"model.path={tmp_path / 'none'}"])
    with pytest.raises(UserError, match="model.path = .* is not there|model.path = .*not there"):
        fit(config)
