"""`parallel: auto`: the layout is chosen by the memory model, for a plan and for a run alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rl.config_load import load_config
from hpc_rl.errors import UserError
from hpc_rl.plan.choose import SAME, choices, chosen
from hpc_rl.plan.hardware import CPU, GPUS, gpu_named
from hpc_rl.plan.job import plan_job
from hpc_rl.plan.memory import memory
from hpc_rl.run import placed
from launch.env import detect
from tests.plan.test_command import ROOT, hpc_rl

H100 = GPUS["h100"]
CONFIGS = ROOT / "configs"


def test_small_models_stay_whole_and_large_ones_are_cut() -> None:
    small = load_config(CONFIGS / "grpo_smollm2.yaml", ["parallel=auto"])
    best = choices(small, H100, 1, 8)[0]
    assert (best.config.parallel.tp, best.config.parallel.pp, best.dp) == (1, 1, 8)
    assert "ZeRO" in best.engine


def test_the_layout_of_70b_on_16_nodes() -> None:
    """The configuration leaves it to the plan: TP inside a node, PP over eight, and two copies, so that DP can shrink."""
    best = choices(load_config(CONFIGS / "ppo_70b.yaml"), H100, 16, 8)[0]
    parallel = best.config.parallel
    assert (parallel.tp, parallel.pp, best.dp, best.config.rollout.tp) == (8, 8, 2, 8)
    assert best.engine.startswith("Megatron TP8 PP8 DP2")
    assert best.peak_gb < 0.96 * 79.2


def test_all_choices_fit_and_the_best_is_first() -> None:
    config = load_config(CONFIGS / "ppo_8b.yaml", ["parallel=auto"])
    found = choices(config, H100, 1, 8)
    assert len({choice.change for choice in found}) == len(found) > 4
    seconds = [choice.step_s or 0.0 for choice in found]
    assert seconds[0] <= SAME * min(seconds)
    assert [s for s in seconds if s > SAME * min(seconds)] == sorted(seconds)[sum(s <= SAME * min(seconds) for s in seconds) :]
    equals = [choice.config.parallel for choice in found if (choice.step_s or 0.0) <= SAME * min(seconds)]
    assert [p.tp * p.pp for p in equals] == sorted(p.tp * p.pp for p in equals), "of those as good, the least cut first"
    for choice in found[:: max(1, len(found) // 8)]:
        assert memory(plan_job(choice.config, H100, 1, 8)).fits
        assert not choice.config.parallel.auto


def test_what_never_fits_says_how_near_it_came() -> None:
    config = load_config(CONFIGS / "ppo_70b.yaml", ["parallel=auto"])
    with pytest.raises(UserError, match=r"parallel = auto: no layout fits on 1 x 8 h100; the nearest, .* takes .* GB.*more nodes"):
        choices(config, H100, 1, 8)


def test_what_no_layout_can_make_right_is_named() -> None:
    config = load_config(CONFIGS / "quickstart.yaml", ["parallel=auto", "rollout.tp=3"])
    with pytest.raises(UserError, match="rollout.tp"):
        choices(config, H100, 1, 4)


def test_given_values_are_kept(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("parallel: auto\nmodel: {path: models/Llama-3.1-8B}\nrollout: {tp: 4}\n")
    config = load_config(tmp_path / "c.yaml", ["data.prompts=p.jsonl"])
    assert config.parallel.auto
    best = chosen(config, GPUS["h200"], 1, 8)
    assert best.rollout.tp == 4
    assert chosen(replace(config, parallel=best.parallel), CPU, 1, 8).parallel == best.parallel, "not auto: as it is"


def test_a_run_takes_the_plan_of_its_machine() -> None:
    config = load_config(CONFIGS / "quickstart.yaml", ["parallel=auto", "launch.device=cpu"])
    found = placed(config, detect({}))
    assert (found.parallel.tp, found.parallel.pp, found.parallel.auto) == (1, 1, False)


def test_gpus_by_what_the_driver_calls_them() -> None:
    assert gpu_named("NVIDIA H100 80GB HBM3", "81559").name == "h100"
    assert gpu_named("NVIDIA A100-SXM4-40GB", "40960").name == "a100-40"
    assert gpu_named("NVIDIA A100-SXM4-80GB", "81920").name == "a100"
    h200 = gpu_named("NVIDIA H200", "143771")
    assert h200.name == "h200" and h200.memory_gb == pytest.approx(139.7, abs=0.2)
    other = gpu_named("NVIDIA T4", "15360")
    assert other.bf16_tflops is None and other.memory_gb == pytest.approx(14.9, abs=0.1)


def test_command() -> None:
    report = json.loads(hpc_rl("configs/ppo_8b.yaml", "parallel=auto", "--json").stdout)
    assert report["fits"] and "parallel.tp=" in report["chosen"]["change"] and report["alternatives"]
    assert "other layouts that fit" in hpc_rl("configs/ppo_8b.yaml", "parallel=auto").stdout
