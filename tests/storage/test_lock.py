"""Two jobs on one run directory: the second is refused by name, unless the first is gone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpc_rl.errors import RunError, UserError
from hpc_rl.storage import lock
from hpc_rl.storage.lock import RunLock

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from hpc_rl.storage.lock import RunLock
lock = RunLock(sys.argv[1], job_id="4711")
print("held", flush=True)
time.sleep(60)
"""


def hold(run_dir: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_refused_by_name_until_the_first_is_killed(tmp_path: Path) -> None:
    process = hold(tmp_path)
    with pytest.raises(UserError, match=f"in use by process {process.pid} on {socket.gethostname()}, job 4711"):
        RunLock(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    RunLock(tmp_path).release()
    RunLock(tmp_path).release()


def test_held_by_this_very_process_is_held(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(UserError, match="in use by process"):
        RunLock(tmp_path)


def foreign(tmp_path: Path, **changes: object) -> Path:
    """A lock file as a process of another host wrote it."""
    owner = {"host": "node7", "boot": "x", "pid": 1, "started": "5", "job_id": "8", "nonce": "n", "count": 3, **changes}
    path = tmp_path / "lock"
    path.write_text(json.dumps(owner).ljust(512))
    return path


def test_of_another_host_it_is_held_while_its_counter_moves(tmp_path: Path) -> None:
    path = foreign(tmp_path)
    stop = threading.Event()

    def beat() -> None:
        count = 0
        while not stop.wait(0.05):
            count += 1
            foreign(tmp_path, count=count)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(UserError, match="in use by process 1 on node7, job 8"):
            RunLock(tmp_path, beat_s=0.2)
    finally:
        stop.set()
        thread.join()
    before = time.monotonic()
    RunLock(tmp_path, beat_s=0.1).release()
    assert time.monotonic() - before > 0.3, "it must look for a while before it takes a foreign lock"
    assert path.read_text() == ""


def test_a_requeued_job_takes_its_own_lock_at_once(tmp_path: Path) -> None:
    foreign(
        tmp_path, boot=lock.boot_id(), host=socket.gethostname(), pid=os.getpid(), started=lock.started(os.getpid())
    )
    before = time.monotonic()
    RunLock(tmp_path, job_id="8").release()
    assert time.monotonic() - before < 5


def test_without_flock_a_reused_process_id_is_not_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "flock", lambda fd: None)  # a file system without locks
    here = {"boot": lock.boot_id(), "host": socket.gethostname(), "pid": os.getpid()}
    foreign(tmp_path, **here, started=lock.started(os.getpid()))
    with pytest.raises(UserError, match="in use"):
        RunLock(tmp_path)
    foreign(tmp_path, **here, started="1")
    RunLock(tmp_path).release()


def test_a_frozen_job_learns_that_it_lost_the_directory(tmp_path: Path) -> None:
    with RunLock(tmp_path, beat_s=0.05) as held:
        held.check()
        foreign(tmp_path)
        time.sleep(0.3)
        with pytest.raises(RunError, match="taken over by process 1 on node7"):
            held.check()


def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written .*: set run.dir to a writable one"):
        RunLock(tmp_path / "file")


def test_a_removed_or_replaced_lock_is_told_at_the_next_look(tmp_path: Path) -> None:
    for change, message in ((Path.unlink, "lock: removed, so other jobs"), (renew, "taken over by process 1 on")):
        run_dir = tmp_path / change.__name__
        with RunLock(run_dir) as held:
            held.check()
            change(run_dir / "lock")
            with pytest.raises(RunError, match=f"{message}.*: this job must stop"):
                held.check()


def renew(path: Path) -> None:
    """Another job's lock, in a file of its own."""
    path.unlink()
    foreign(path.parent)


def test_of_two_jobs_that_find_the_same_stale_lock_the_last_to_write_has_it(tmp_path: Path) -> None:
    path = foreign(tmp_path)

    def rival() -> None:
        deadline = time.monotonic() + 60
        while '"node7"' in path.read_text() and time.monotonic() < deadline:
            time.sleep(0.005)
        foreign(tmp_path, host="node9", nonce="rival")

    thread = threading.Thread(target=rival)
    thread.start()
    try:
        with pytest.raises(UserError, match="in use by process 1 on node9, job 8"):
            RunLock(tmp_path, beat_s=0.5)
    finally:
        thread.join()


def test_a_lock_from_before_this_hosts_last_boot_is_stale_at_once() -> None:
    owner = {"host": socket.gethostname(), "boot": "before", "pid": os.getpid(), "job_id": "8"}
    owner["started"] = lock.started(os.getpid())
    assert not lock.alive(owner, None, flock_told=False, look=lambda: pytest.fail("there is nothing to wait for"))
