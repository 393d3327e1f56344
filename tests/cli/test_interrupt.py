"""Ctrl-C at the terminal: the step that runs is the last one, and nothing of it is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.command import QUICKSTART, python_env

pytestmark = pytest.mark.xdist_group("cli-quickstart")


def test_ctrl_c(tmp_path: Path) -> None:
    overrides = ["run.dir=run", "steps=1000", "data.prompts_per_step=8", "checkpoint.every=0"]
    job = subprocess.Popen(
        [sys.executable, "-m", "hpc_rl.cli", "train", str(QUICKSTART), *overrides],
        cwd=tmp_path,
        env=python_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics, end = tmp_path / "run/metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and metrics.read_text()):
        assert job.poll() is None and time.monotonic() < end, "no step was made"
        time.sleep(0.05)
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=120)
    steps = metrics.read_text().count("\n")
    assert (job.returncode, err) == (143, "")
    assert "Interrupted: this step is the last" in out
    assert out.endswith(f"Stopped by SIGTERM after step {steps} of 1000, saved: resume=auto goes on\n")
    assert (tmp_path / f"run/checkpoints/checkpoint_{steps}_complete/manifest.json").is_file()
