"""slurm/*.sh: Slurm takes every one as it is, and one of them trains on two nodes with no line of it changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.cluster import PYTHON, ROOT, Cluster

pytestmark = pytest.mark.slurm
SCRIPTS = sorted((ROOT / "slurm").glob("*.sh"))


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """The environment of this test run, where the scripts look for it."""
    program = tmp_path / "venv/bin/hpc-rl"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {PYTHON} -m hpc_rl.cli "$@"\n')
    program.chmod(0o755)
    return tmp_path / "venv"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_slurm_accepts_the_script(cluster: Cluster, script: Path) -> None:
    done = cluster.run("sbatch", "--test-only", "--nodes=1", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_training_on_two_nodes(cluster: Cluster, tmp_path: Path, venv: Path) -> None:
    """Two ranks on two nodes under srun: rollouts, update, checkpoint, as the script is."""
    options = ("--nodes=2", "--ntasks-per-node=1", "--chdir", ROOT, "-o", tmp_path / "log")
    overrides = ("steps=1", "data.prompts_per_step=8", "checkpoint.every=1")
    env = {"CONFIG": "configs/quickstart.yaml", "RUN": str(tmp_path / "run"), "VENV": str(venv), "HPC_RL": str(ROOT)}
    job = cluster.sbatch(*options, ROOT / "slurm/ppo_8b.sh", *overrides, **env)
    assert cluster.wait(job) == "COMPLETED", (tmp_path / "log").read_text()
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps] == [1]
    assert len(list((tmp_path / "run/checkpoints").glob("checkpoint_*_complete"))) == 1
