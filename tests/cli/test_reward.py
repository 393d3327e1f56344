"""A reward function that raises, in a whole run: the sample is named, and the policy of the configuration followed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import QUICKSTART, hpc_rl

pytestmark = pytest.mark.xdist_group("cli-quickstart")
FUNCTION = """
import os
import torch

def score(prompt, response, fields):
    print("threads", os.environ["OMP_NUM_THREADS"], torch.get_num_threads())
    if fields["answer"] == "bad":
        raise ValueError(f"no rule for {prompt}")
    return float(response == fields["answer"])
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Four prompts, of which the reward function cannot score the last; with two ranks the other one draws it."""
    (tmp_path / "myreward.py").write_text(FUNCTION)
    answers = {1: "32", 2: "34", 3: "36", 4: "bad"}
    lines = [{"prompt_id": i, "text": f"1{i}+2{i}=", "answer": answer} for i, answer in answers.items()]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def overrides(*more: str) -> list[str]:
    return [
        "steps=1", "run.dir=run", "data.prompts=p.jsonl", "data.shuffle=false", "data.prompts_per_step=4",
        "reward.function=myreward:score", *more,
    ]  # fmt: skip


def test_fail(place: Path) -> None:
    done = hpc_rl("train", QUICKSTART, *overrides(), cwd=place, python_path=place)
    assert done.returncode == 1
    named = "the reward function failed on prompt_id 4, sample_id 0, response '"
    assert f"in reward of step 1: {named}" in done.stderr
    assert done.stderr.startswith("hpc-rl: the run stopped: rank 1 on ") and done.stderr.count("\n") == 1
    assert "ValueError: no rule for 14+24=: correct the function, or set reward.on_error=score" in done.stderr
    assert "Traceback" not in done.stderr
    assert (place / "run/metrics.jsonl").read_text() == ""
    assert not list((place / "run").glob("checkpoints/*_complete"))


def test_score(place: Path) -> None:
    policy = ["reward.on_error=score", "reward.error_score=-2", "checkpoint.rollouts=false"]
    policy += ["launch.nproc=1", "launch.threads=2"]  # one rank, in the command's own process
    done = hpc_rl("train", QUICKSTART, *overrides(*policy), cwd=place, python_path=place)
    assert done.returncode == 0, done.stderr
    assert "threads 2 2\n" in done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 3, "the first three failures are told, all are counted"
    for sample, line in enumerate(lines):
        assert line.startswith(f"hpc-rl: warning: the reward function failed on prompt_id 4, sample_id {sample}, ")
        assert line.endswith("scored -2.0 (reward.on_error is score)")
    metrics = json.loads((place / "run/metrics.jsonl").read_text())
    assert metrics["reward_errors"] == 4
    assert metrics["reward_mean"] <= (3 * 4 * 1 - 2 * 4) / 16
