"""A small process beside each rank that says why the rank went silent where the rank itself cannot, and ends it.

No thread of a stopped process runs, and none of Python's while C code holds the interpreter lock. So the watchdog's
thread sends a sign of life to this process, which looks at ``/proc`` when none comes. Imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from hpc_rl.fault.failure import Failure
from hpc_rl.fault.report import (
    PLACE_CHARS,
    describe,
    failures_dir,
    final_report,
    last_place,
    read_failures,
    record,
    stack_path,
)
from hpc_rl.fault.stacks import watchers_last

LAST = 1.25  # of the limit: so long without a sign of life
DUMP_SIGNAL = signal.SIGUSR2  # has faulthandler write a rank's stacks, whoever holds the interpreter lock
_POLL_S = 0.5
_DUMP_S = 10.0  # for which the stacks of a rank that runs are waited for: the machine may be busy
_JUMP_S = 10.0  # a longer gap between two looks: all of the machine, or this process as well, was suspended
_END = b"end\n"
_STATES = {
    "T": "the process is stopped (SIGSTOP or a debugger)",
    "t": "the process is stopped (SIGSTOP or a debugger)",
    "D": "uninterruptible in the kernel (disk or file system)",
}
STUCK_IN_C = "stuck in C code (holds the interpreter lock)"


def state_of(pid: int, thread: int | None = None) -> str:
    """Why the kernel does not let a process's main thread (or another) run on, in words; empty if it does."""
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        return _STATES.get(Path(path).read_text().rpartition(") ")[2][:1], "")
    except OSError:
        return ""


class Witness:
    """The rank's side: starts the process, and gives it signs of life."""

    def __init__(self, run_dir: str | Path, rank: int, *, announce: bool, is_alone: bool) -> None:
        root = str(Path(__file__).resolve().parents[2])
        program = f"import sys; sys.path.insert(0, {root!r}); from hpc_rl.fault.witness import main; main()"
        words = [str(Path(run_dir).absolute()), str(rank), str(os.getpid()), str(int(announce)), str(int(is_alone))]
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # no process to be had: then without
            self._process = subprocess.Popen(
                [sys.executable, "-IS", "-c", program, *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)

    def alive(self, limit_s: float) -> bool:
        """Gives a sign of life; ``limit_s`` of the phase, 0: no limit. Returns whether there is a witness."""
        self._send(b"%f\n" % limit_s)
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Ends the process."""
        self._send(_END)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)

    def _send(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(line)


def main() -> None:
    """The process: ``RUN_DIR RANK PID ANNOUNCE IS_ALONE``, signs of life on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its rank
    run_dir, rank, pid, announce, is_alone = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    silent_s = watch(pid)
    if silent_s is None:
        return
    failure = testimony(run_dir, rank, pid, silent_s)
    if failure is not None:
        record(failure, run_dir)
        if is_alone:
            final_report(run_dir, failure, decided="the run ends")
        if announce:
            os.write(2, f"hpc-rl: {describe(failure)}\n".encode())
    if silent_s > 0 and os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)


def watch(pid: int) -> float | None:
    """Until the rank says that it ends (None), is gone without that (0), or has been silent too long (seconds)."""
    limit = 0.0
    heard_at = last = time.monotonic()
    while True:
        ready, _, _ = select.select([0], [], [], _POLL_S if limit <= 0 else min(_POLL_S, limit / 16))
        now = time.monotonic()
        if now - last > _JUMP_S:
            heard_at = now
        last = now
        if ready:
            data = os.read(0, 1 << 16)
            if data.endswith(_END):
                return None
            if not data:
                return 0.0
            limit, heard_at = float(data.split()[-1]), now
        if os.getppid() != pid:  # a process that the rank forked may keep the pipe open
            return 0.0
        if limit > 0 and now - heard_at > LAST * limit:
            return now - heard_at


def testimony(run_dir: Path, rank: int, pid: int, silent_s: float) -> Failure | None:
    """What is to be said of the rank; None if it has said itself why it ends, or did not hang."""
    if (failures_dir(run_dir) / f"rank_{rank:05d}.json").exists():
        return None
    node, phase, step = last_place(run_dir, rank)
    why = state_of(pid) if silent_s > 0 else ""
    if silent_s > 0 and not why:
        os.kill(pid, DUMP_SIGNAL)
    stack = stack_left(run_dir, rank, wait_s=0.0 if why or silent_s == 0 else _DUMP_S)
    if silent_s == 0 and not stack:
        return None
    place = f", at {stack_place(stack)}" if stack else ""
    waited = f"no progress for {silent_s:.0f} s, " if silent_s > 0 else "no progress, "
    return Failure(rank, node, "hang", phase, step, f"{waited}{why or STUCK_IN_C}{place}", time.time(), tuple(stack))


def stack_left(run_dir: Path, rank: int, wait_s: float) -> tuple[str, ...]:
    """The stacks that faulthandler has left, or leaves in ``wait_s``, the main thread's first; the file then has them so."""
    path, end = stack_path(run_dir, rank), time.monotonic() + wait_s
    with contextlib.suppress(OSError):
        while path.stat().st_size <= PLACE_CHARS + 1 and time.monotonic() < end:
            time.sleep(0.05)
        if wait_s > 0:
            time.sleep(0.1)  # it is being written
        path.write_text(watchers_last(path.read_text(errors="replace")))
        return next((f.stack for f in read_failures(run_dir) if f.rank == rank), ())
    return ()


def stack_place(stack: tuple[str, ...]) -> str:
    """The innermost frame of faulthandler's text, as ``score (rewards.py:12)``."""
    for line in stack:
        words = line.split()
        if words[:1] == ["File"] and len(words) >= 6:
            file = Path(words[1].strip('",')).name  # 3.11 knows no backslash within an f-string
            return f"{words[-1]} ({file}:{words[3].rstrip(',')})"
    return "an unknown place"


if __name__ == "__main__":
    main()
