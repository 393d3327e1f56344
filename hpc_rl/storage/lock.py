"""One job per run directory. No clock is compared: a lock is stale when its owner is gone, or its counter stands."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

from hpc_rl.errors import RunError, UserError

logger = logging.getLogger(__name__)


class RunLock:
    """Holds ``RUN/lock`` for this process; rank 0 of a job takes it before anything is written to the directory.

    The file names its owner (host, process, job) and a counter that the owner advances every ``beat_s``. On one host,
    and on file systems with real locks, flock tells whether the owner lives. A lock from another host is stale if its
    counter stands still for ``3 * beat_s``, or at once if it is of this very job (requeued).

    Args: job_id: of the batch system, None without one.
    Raises: UserError when another job holds it, or the directory cannot be written.
    """

    def __init__(self, run_dir: str | Path, job_id: str | None = None, beat_s: float = 10.0) -> None:
        self.path = Path(run_dir) / "lock"
        self.beat_s = beat_s
        self._stop = Event()
        self._lost: str | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror}): set run.dir to a writable one"
            ) from error
        try:
            self._take(job_id)
        except BaseException:
            os.close(self._fd)
            raise
        self._thread = Thread(target=self._beat, daemon=True, name="run lock")
        self._thread.start()

    def check(self) -> None:
        """Looks at the file. Raises RunError when it is gone, or another job's (this one was frozen for long)."""
        self._lost = self._lost or self._taken()
        if self._lost:
            raise RunError(self._lost)

    def release(self) -> None:
        """Gives the directory back. May be called twice."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            if not self._lost:
                os.ftruncate(self._fd, 0)
            os.close(self._fd)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self, job_id: str | None) -> None:
        can_lock = flock(self._fd)
        other = self._read()
        if can_lock is False or (other and alive(other, job_id, flock_told=can_lock is True, look=self._look)):
            raise UserError(f"{self.path.parent}: in use by {describe(other)}: end that job, or set another run.dir")
        if other:
            logger.warning("took over the run directory from %s, which is gone", describe(other))
        self.owner = {
            "host": socket.gethostname(), "boot": boot_id(), "pid": os.getpid(), "started": started(os.getpid()),
            "job_id": job_id, "nonce": os.urandom(8).hex(),
        }  # fmt: skip
        self._write(0)
        if other and other.get("boot") != self.owner["boot"] and (job_id is None or other.get("job_id") != job_id):
            time.sleep(self.beat_s)  # two jobs may have found the same stale lock: the last to write has it
            if self._read().get("nonce") != self.owner["nonce"]:
                raise UserError(
                    f"{self.path.parent}: in use by {describe(self._read())}: end that job, or set another run.dir"
                )

    def _look(self) -> bool:
        """Whether the owner's counter moves."""
        before = self._read()
        for _ in range(12):
            time.sleep(self.beat_s / 4)
            if self._read() != before:
                return True
        return False

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(self.beat_s):
            self._lost = self._lost or self._taken()
            if self._lost:
                return
            count += 1
            self._write(count)

    def _taken(self) -> str | None:
        """How this process lost the lock; None while it holds it."""
        try:
            replaced = not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return f"{self.path}: removed, so other jobs may write to the run directory: this job must stop"
        except OSError:
            return None  # the file system stumbles: that is no word of another job
        other = self._parse(self.path.read_bytes()) if replaced else self._read()
        if other.get("nonce") == self.owner["nonce"]:
            return None
        return f"{self.path.parent}: taken over by {describe(other)}: this job must stop"

    def _read(self) -> dict[str, Any]:
        return self._parse(os.pread(self._fd, 4096, 0))

    @staticmethod
    def _parse(raw: bytes) -> dict[str, Any]:
        try:
            found = json.loads(raw) if raw else {}
        except ValueError:
            found = {"host": "unknown"}
        return found if isinstance(found, dict) else {}

    def _write(self, count: int) -> None:
        data = json.dumps({**self.owner, "count": count}).encode().ljust(512)  # one write, never shorter than before
        os.pwrite(self._fd, data, 0)


def flock(fd: int) -> bool | None:
    """True: locked. False: another process has it. None: this file system has no such locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None


def alive(owner: dict[str, Any], job_id: str | None, *, flock_told: bool, look: Any) -> bool:
    """Whether the owner that a lock file names still runs, as far as can be told without asking it."""
    if job_id is not None and owner.get("job_id") == job_id:
        return False  # requeued: the batch system does not run one job twice
    if owner.get("boot") == boot_id():
        return not flock_told and started(owner.get("pid", -1)) == owner.get("started")
    if owner.get("host") == socket.gethostname():
        return False  # it was before this host's last boot
    return bool(look())


def boot_id() -> str:
    """Differs after each boot, and between hosts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def started(pid: int) -> str | None:
    """When a process began, in clock ticks since boot: a reused process id has another. None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def describe(owner: dict[str, Any]) -> str:
    """Host, process and job, as an error names them."""
    job = f", job {owner['job_id']}" if owner.get("job_id") else ""
    return f"process {owner.get('pid', '?')} on {owner.get('host', 'another host')}{job}"
