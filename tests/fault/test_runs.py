"""Runs that fail in every way, through the real command: one line names the cause, and RUN/failure.json has it all."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import QUICKSTART, hpc_rl

pytestmark = pytest.mark.xdist_group("fault")
REWARD = """
import asyncio, os, re, signal, time

calls = 0

def score(prompt, response, fields, how=""):
    global calls
    calls += 1
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if is_last and calls > 20:  # 16 samples a step on each of two ranks
        if how == "hang":
            time.sleep(600)
        if how == "kill":  # at once: the phase is noted as it begins
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "lock":
            re.match(r"(a+)+$", "a" * 60 + "b")
        if how == "raise":
            raise asyncio.CancelledError("boom")  # no Exception, so no reward's policy deals with it
    return float(response == fields["answer"])
"""


def train(place: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    (place / "bad.py").write_text(REWARD)
    usual = ["steps=3", "run.dir=run", "data.prompts_per_step=8", "reward.function=bad:score"]
    return hpc_rl("train", QUICKSTART, *usual, *overrides, cwd=place, python_path=place, timeout_s=120)


def report(place: Path) -> dict[str, Any]:
    return json.loads((place / "run/failure.json").read_text())


def test_a_rank_hangs(tmp_path: Path) -> None:
    done = train(tmp_path, "reward.kwargs={how: hang}", "fault.phase_timeout_s={reward: 3, generation: 3}")
    node = report(tmp_path)["node"]
    assert re.fullmatch(
        rf"hpc-rl: the run stopped: rank 1 on {node} hung in reward of step 2: no progress for 3 s, at score "
        r"\(bad.py:12\) \(more: run/failure.json, run/logs/rank_1.log\)\n",
        done.stderr,
    )
    assert done.returncode == 79
    written = report(tmp_path)
    assert (written["rank"], written["kind"], written["phase"], written["step"]) == (1, "hang", "reward", 2)
    assert written["stack"][-1].endswith("time.sleep(600)")
    (other,) = written["others"]
    assert (other["rank"], other["kind"]) == (0, "hang")
    assert other["collective"].startswith("all_gather_object from _draw (collect.py:")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("stop", "the process is stopped (SIGSTOP or a debugger)"),
        ("lock", "stuck in C code (holds the interpreter lock), at "),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_cannot_say_why_it_hangs(how: str, why: str, ranks: int, tmp_path: Path) -> None:
    """None of its threads runs; that of two ranks the other one waits for it must not become the cause."""
    limits = "fault.phase_timeout_s={reward: 3, generation: 3}"
    done = train(tmp_path, f"reward.kwargs={{how: {how}}}", limits, f"launch.nproc={ranks}")
    assert done.returncode, done.stderr
    assert f" hung in reward of step {1 if ranks == 1 else 2}: no progress" in done.stderr and why in done.stderr, done.stderr
    written = report(tmp_path)
    assert (written["rank"], written["kind"], written["phase"]) == (ranks - 1, "hang", "reward")
    assert why in written["message"]
    if how == "lock":
        assert "in score" in " ".join(written["stack"][:16]), "the thread that hangs leads"


def test_a_rank_is_killed(tmp_path: Path) -> None:
    done = train(tmp_path, "reward.kwargs={how: kill}")
    assert done.stderr.startswith("hpc-rl: the run stopped: rank 1 on ") and done.stderr.count("\n") == 1
    assert " was killed in reward of step 2: SIGKILL, " in done.stderr
    assert "memory" in done.stderr
    assert done.returncode == 137
    written = report(tmp_path)
    assert (written["rank"], written["kind"], written["phase"], written["step"]) == (1, "killed", "reward", 2)
    assert [(o["rank"], o["kind"]) for o in written["others"]] == [(0, "exception")]
    assert re.search("Connection (closed|reset) by peer", (tmp_path / "run/logs/rank_0.log").read_text())


def test_a_rank_raises(tmp_path: Path) -> None:
    done = train(tmp_path, "reward.kwargs={how: raise}")
    *traceback, last = done.stderr.splitlines()
    assert " failed in reward of step 2: CancelledError: boom, at score (bad.py:" in last
    assert traceback[0] == "  | Traceback (most recent call last):" or len(traceback) == 20
    assert traceback[-1].endswith("CancelledError: boom")
    assert all(line.startswith("  | ") for line in traceback)
    assert "Connection" not in done.stderr, "of the others, which only lost it"
    assert done.returncode == 1
    assert report(tmp_path)["rank"] == 1


def test_a_loss_is_not_finite(tmp_path: Path) -> None:
    done = train(tmp_path, "actor.lr=1e30", "actor.clip_grad=0")
    assert done.returncode == 1
    assert done.stderr.startswith("hpc-rl: the run stopped: rank 0 on ") and done.stderr.count("\n") == 1
    assert " failed in actor of step 1: actor: loss is " in done.stderr and "Lower actor.lr" in done.stderr
    written = report(tmp_path)
    assert (written["rank"], written["kind"], written["phase"], written["step"]) == (0, "nan", "actor", 1)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.max_prompt_tokens=2", "all 4096 prompts are longer than data.max_prompt_tokens = 2"),
        ("rollout.block_size=7", "rollout.block_size = 7"),
    ],
)
def test_what_only_the_ranks_can_find_wrong_is_one_line(override: str, named: str, tmp_path: Path) -> None:
    done = train(tmp_path, override)
    assert done.stderr.startswith(f"hpc-rl: {named}") and done.stderr.count("\n") == 1, done.stderr
    assert done.returncode == 2
    assert report(tmp_path)["kind"] == "user"


@pytest.mark.parametrize("how", ["hang", "lock"])
def test_an_evaluation_that_hangs(how: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(REWARD)
    usual = ["run.dir=run", "reward.function=bad:score", f"reward.kwargs={{how: {how}}}", "launch.nproc=1"]
    limits = "fault.phase_timeout_s={reward: 2, eval: 2}"
    done = hpc_rl("eval", QUICKSTART, *usual, limits, cwd=tmp_path, python_path=tmp_path, timeout_s=120)
    assert done.returncode and " hung in " in done.stderr, done.stderr
    written = json.loads((tmp_path / "run/logs/eval/failure.json").read_text())
    assert (written["rank"], written["kind"]) == (0, "hang") and written["phase"] in ("eval", "reward")
