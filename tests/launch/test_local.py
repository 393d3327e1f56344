"""Local ranks, as real processes: one world, one end, one cause named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HELLO = Path(__file__).with_name("hello.py")
ROOT = HELLO.parents[2]
START = """
import sys
from launch.local import run_local
nproc, timeout_s, hello, out, *rest = sys.argv[1:]
limits = dict(timeout_s=float(timeout_s), grace_s=1.0, stop_grace_s=5.0)
sys.exit(run_local(int(nproc), [sys.executable, hello, out, *rest], out + "/logs", threads=1, **limits))
"""


def start(
    out: Path, nproc: int, *rest: str, timeout_s: float = 300, program: Path = HELLO
) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", START, str(nproc), str(timeout_s), str(program), str(out), *rest]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def seen(out: Path, nproc: int) -> list[dict]:
    """What each rank saw, once all have written it."""
    files = [out / f"rank_{rank}.json" for rank in range(nproc)]
    wait_until(lambda: all(f.exists() and f.read_text().endswith("}") for f in files))
    return [json.loads(f.read_text()) for f in files]


def wait_until(condition, timeout_s: float = 200) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_one_world(tmp_path: Path) -> None:
    job = start(tmp_path, 3)
    out, err = job.communicate()
    assert job.returncode == 0, err
    ranks = seen(tmp_path, 3)
    assert [(r["rank"], r["local_rank"], r["size"], r["sum"], r["launcher"]) for r in ranks] == [
        (n, n, 3, 3.0, "local") for n in range(3)
    ]
    assert out == "hello from rank 0\n"  # the terminal is rank 0's
    assert (tmp_path / "logs/rank_2.log").read_text() == "hello from rank 2\n"


@pytest.mark.parametrize(("how", "code", "named"), [("exit", 7, "exit code 7"), ("kill", 137, "signal SIGKILL")])
def test_first_failing_rank_ends_the_job(tmp_path: Path, how: str, code: int, named: str) -> None:
    job = start(tmp_path, 3, "--fail", "1", how)
    pids = [r["pid"] for r in seen(tmp_path, 3)]
    begin = time.monotonic()
    _, err = job.communicate()
    assert time.monotonic() - begin < 20  # seconds on a busy machine, not the minutes of a collective's time-out
    assert job.returncode == code
    assert f"rank 1 failed first ({named})" in err
    assert "hello from rank 1" in err  # its last lines
    assert not any(map(alive, pids))


def test_exception_of_rank_0_is_told(tmp_path: Path) -> None:
    job = start(tmp_path, 2, "--fail", "0", "raise")
    _, err = job.communicate()
    assert job.returncode == 1
    assert "RuntimeError: boom" in err
    assert "rank 0 failed first (exit code 1)" in err


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """A process that a failing rank had started goes too, and ranks that ignore SIGTERM are killed."""
    job = start(tmp_path, 2, "--fail", "1", "child")
    job.communicate()
    assert job.returncode == 7
    child = int((tmp_path / "child.pid").read_text())
    wait_until(lambda: not alive(child), 20)


def test_ranks_that_ignore_sigterm_are_killed_at_the_time_limit(tmp_path: Path) -> None:
    program = tmp_path / "deaf.py"
    program.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}.pid', 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    job = start(tmp_path, 2, timeout_s=4, program=program)
    _, err = job.communicate()
    assert job.returncode == 124
    assert "not finished after 4 s" in err
    assert not any(alive(int((tmp_path / f"{rank}.pid").read_text())) for rank in range(2))


def test_ranks_die_with_their_parent(tmp_path: Path) -> None:
    job = start(tmp_path, 2, "--fail", "1", "hang")
    pids = [r["pid"] for r in seen(tmp_path, 2)]
    job.kill()
    job.wait()
    try:
        wait_until(lambda: not any(map(alive, pids)), 20)
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_reach_every_rank(tmp_path: Path, number: int, code: int) -> None:
    job = start(tmp_path, 2, "--fail", "1", "sleep")
    pids = [r["pid"] for r in seen(tmp_path, 2)]
    wait_until(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
    job.send_signal(number)
    _, err = job.communicate(timeout=100)
    assert job.returncode == code, err
    assert not any(map(alive, pids))
    assert "failed first" not in err  # asked for, not a failure


def test_second_interrupt_kills(tmp_path: Path) -> None:
    job = start(tmp_path, 2, "--fail", "1", "hang")
    pids = [r["pid"] for r in seen(tmp_path, 2)]
    wait_until(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
    job.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert job.poll() is None  # the ranks ignore it, and may be saving
    job.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    job.communicate(timeout=100)
    assert time.monotonic() - begin < 3
    assert not any(map(alive, pids))
