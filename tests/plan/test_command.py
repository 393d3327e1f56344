"""`hpc-rl plan` as a user calls it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plan.jobs import PPO_70B, write_70b

ROOT = Path(__file__).parents[2]


def hpc_rl(*words: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "160"}
    command = [sys.executable, "-m", "hpc_rl.cli", "plan", *map(str, words)]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_70b(tmp_path)


def test_70b_on_512_ranks_in_five_seconds(config: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = hpc_rl(config, "--nodes", 64, "--gpus-per-node", 8, "--gpu", "h100", "--json", "parallel.pp=8")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5.0  # of CPU: others may run beside it
    report = json.loads(done.stdout)
    assert report["fits"] is True
    assert {"reason", "peak_gb", "phases", "layout"} <= set(report)
    assert set(report["phases"]) == {"start", "generation", "scoring", "actor update", "critic update", "reshard"}
    assert len(report["layout"]["ranks"]) == 512
    assert "estimated_seconds" in report


def test_tables_and_exit_codes(config: Path) -> None:
    fits = hpc_rl(config)
    assert fits.returncode == 0, fits.stderr
    for words in ("fits", "memory per GPU (GB)", "actor optimizer", "layers 0-19", "checkpoint", "not measured"):
        assert words in fits.stdout, words
    short = hpc_rl(config, "--nodes", 4)
    assert short.returncode == 3, short.stderr
    assert "any of these makes it fit" in short.stdout
    wrong = hpc_rl(config, "--nodes", 3)
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert wrong.stderr.startswith("hpc-rl: ")
    assert len(wrong.stderr.strip().splitlines()) == 1


def test_wrong_words_exit_with_2(config: Path, tmp_path: Path) -> None:
    for words, message in (
        ((config, "--gpu", "tpu"), "--gpu = tpu"),
        ((config, "parallel.tq=2"), "parallel.tq"),
        ((config, "--nodes", "many"), "--nodes"),
        ((config, "--nodes", 0), "--nodes = 0: must be at least 1"),
        ((config, "--nodes", 1_000_000), "at most 65536 are planned"),
        ((config, "--gpus-per-node", 0), "--gpus-per-node = 0: must be at least 1"),
        ((tmp_path / "none.yaml",), "none.yaml"),
    ):
        done = hpc_rl(*words)
        assert done.returncode == 2, done.stdout
        assert message in done.stderr


def test_quickstart_on_the_cpu_has_no_limit_unless_given(tmp_path: Path) -> None:
    report = json.loads(hpc_rl("configs/quickstart.yaml", "launch.device=cpu", "--json").stdout)
    assert report["fits"] is True
    assert report["limit_gb"] is None
    assert "no limit was given" in report["reason"]
    done = hpc_rl("configs/quickstart.yaml", "launch.device=cpu", "--gpu-memory-gb", 0.01, "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["fits"] is False


@pytest.mark.parametrize("path", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_every_configuration_fits_where_it_says(path: str) -> None:
    done = hpc_rl(f"configs/{path}", "--json", *(["--gpu", "h200"] if path == "bench_1b.yaml" else []))
    assert done.returncode == 0, done.stdout[:500] + done.stderr
    report = json.loads(done.stdout)
    assert not [warning for warning in report["warnings"] if "is not there" not in warning]


def test_a_plan_needs_neither_tokenizer_nor_prompts() -> None:
    """Of a model without a directory, such as the benchmark's, and of one with."""
    for words in (("configs/bench_1b.yaml", "--gpu", "h200"), ("configs/grpo_32b.yaml", "data.prompts=null")):
        assert hpc_rl(*words, "--json").returncode == 0, words


def test_nothing_is_written(config: Path) -> None:
    hpc_rl(config, f"run.dir={config.parent / 'run'}")
    assert [path.name for path in config.parent.iterdir()] == [config.name]
    assert config.read_text() == PPO_70B
