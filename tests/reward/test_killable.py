"""Rewards that hang, loop in C, or take their process down: each is the failure of its sample, not of the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_rl.config import RewardConfig
from hpc_rl.errors import RunError
from hpc_rl.reward.score import RewardFunction
from tests.reward.test_score import sample

MODULE = """
import ctypes, itertools, os, subprocess, sys, time
def judge(prompt, response, fields, **kwargs):
    if response == "sleep": time.sleep(1e6)
    if response == "loop in C": return sum(itertools.repeat(0))
    if response == "exit": os._exit(3)
    if response == "segfault": ctypes.string_at(0)
    if response == "raise": raise KeyError("no\\nkey")
    if response == "nan": return float("nan")
    if response == "large": return 1e39
    if response == "sys.exit": sys.exit(4)
    if response == "pid": return os.getpid()
    if response == "child":
        child = subprocess.Popen(["sleep", "1000"])
        open(fields["answer"], "w").write(str(child.pid))
        child.wait()
    time.sleep(kwargs.get("nap", 0))
    return len(response) + kwargs.get("bonus", 0.0) + float(fields["answer"])
"""
HUNG = "TimeoutError: it took longer than reward.timeout_s = 0.5 and was killed"


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_judge_for_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("my_judge_for_test", None)


@pytest.fixture
def made() -> Iterator[list[RewardFunction]]:
    rewards: list[RewardFunction] = []
    yield rewards
    for reward in rewards:
        reward.close()


def judge(made: list[RewardFunction], **config: Any) -> RewardFunction:
    values = {"timeout_s": 0.5, **config}
    made.append(RewardFunction.from_config(RewardConfig(function="my_judge_for_test:judge", **values)))
    return made[-1]


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def ends(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


FAILURES = [
    ("sleep", HUNG),
    ("loop in C", HUNG),
    ("exit", "ProcessDied: its process ended with status 3"),
    ("segfault", "ProcessDied: its process was killed by SIGSEGV"),
    ("raise", "KeyError: 'no\\nkey'"),
    ("nan", "ValueError: the result is nan, but must be finite"),
    ("large", "ValueError: the result is 1e+39, but a score is a float32, at most 3.40282e+38"),
    ("sys.exit", "SystemExit: 4"),
]


@pytest.mark.parametrize(("response", "reason"), FAILURES)
def test_fail_names_the_sample(response: str, reason: str, made: list[RewardFunction]) -> None:
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        judge(made).score([sample(response)])
    assert time.monotonic() - began < 15, "half a second, the process's start, and a busy machine"
    message = str(caught.value)
    assert "\n" not in message
    for part in ("prompt_id 5", "sample_id 3", f"response {response!r}", reason, "reward.on_error=score"):
        assert part in message, message


def test_score_policy_scores_and_counts_each_and_goes_on(made: list[RewardFunction]) -> None:
    reward = judge(made, on_error="score", error_score=-0.5, kwargs={"bonus": 0.25})
    responses = [part for response, _ in FAILURES for part in (response, "good")]
    assert reward.score([sample(response) for response in responses]) == [-0.5, 6.25] * len(FAILURES)
    assert reward.num_errors == len(FAILURES)


def test_it_runs_elsewhere_and_stays(made: list[RewardFunction]) -> None:
    """One process for all calls, after torch has run here; the clock does not count its start nor calls before."""
    torch.ones(8, 8).mm(torch.ones(8, 8))
    reward = judge(made, kwargs={"nap": 0.2})
    first, *_, last = reward.score([sample("pid"), *[sample("x")] * 4, sample("pid")])
    assert first == last != os.getpid()
    reward.close()
    assert not is_alive(int(first))
    assert reward.score([sample("pid")]) != [first], "the next call starts another one"


def test_without_a_limit_it_runs_here(made: list[RewardFunction]) -> None:
    assert judge(made, timeout_s=None).score([sample("pid")]) == [os.getpid()]


def test_each_has_its_own_process_and_close_ends_them(made: list[RewardFunction]) -> None:
    pids = {int(judge(made).score([sample("pid")])[0]) for _ in range(3)}
    assert len(pids) == 3 and all(map(is_alive, pids))
    for reward in made:
        reward.close()
    assert not any(map(is_alive, pids))


def test_programs_that_a_function_started_die_with_it(made: list[RewardFunction], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="TimeoutError"):
        judge(made).score([sample("child", answer=str(tmp_path / "pid"))])
    assert ends(int((tmp_path / "pid").read_text()))


def test_signals_to_the_job_are_the_ranks_business(made: list[RewardFunction]) -> None:
    reward = judge(made)
    (pid,) = reward.score([sample("pid")])
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(int(pid), number)
    assert reward.score([sample("pid")]) == [pid]


def test_a_process_killed_between_calls_is_replaced(made: list[RewardFunction]) -> None:
    reward = judge(made)
    (pid,) = reward.score([sample("pid")])
    os.kill(int(pid), signal.SIGKILL)
    assert ends(int(pid))
    assert reward.score([sample("abc")]) == [5.0] and reward.num_errors == 0


@pytest.mark.parametrize("response", ["loop in C", "idle"])
def test_it_ends_when_its_rank_is_killed(response: str, tmp_path: Path) -> None:
    """The rank is killed while the function runs, or between two calls; its user's script has no __main__ guard."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from hpc_rl.config import RewardConfig\n"
        "from hpc_rl.reward.score import RewardFunction\n"
        "from tests.reward.test_score import sample\n"
        "reward = RewardFunction.from_config(RewardConfig(function='my_judge_for_test:judge', timeout_s=100))\n"
        "print(int(reward.score([sample('pid')])[0]), flush=True)\n"
        f"if {response!r} != 'idle': reward.score([sample({response!r})])\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        time.sleep(0.3)
        assert is_alive(pid)
        rank.kill()
    assert ends(pid)


def test_a_module_that_cannot_be_imported_there(made: list[RewardFunction], tmp_path: Path) -> None:
    reward = judge(made)
    (tmp_path / "my_judge_for_test.py").write_text("raise OSError('gone')\n")
    with pytest.raises(RunError, match="cannot be loaded in a process of its own.*OSError: gone.*timeout_s=null"):
        reward.score([sample("x")])
