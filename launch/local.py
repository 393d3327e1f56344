"""Ranks on this machine without any launcher: start them, watch them, end them together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Ended(NamedTuple):
    """A rank that ended by itself, with no success: its number, ``Popen.returncode``, seconds since the epoch."""

    rank: int
    code: int
    time: float


@dataclass
class _Job:
    """The running ranks and what has been asked of them."""

    stop_grace_s: float
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    stop_signals: int = 0
    stop_by: float | None = None  # time.monotonic() at which patience ends


def run_local(
    nproc: int,
    argv: Sequence[str],
    log_dir: str | Path,
    *,
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    grace_s: float = 10.0,
    stop_grace_s: float = 120.0,
    on_failure: Callable[[Sequence[Ended]], int] | None = None,
) -> int:
    """Runs ``argv`` as ``nproc`` ranks of one world and waits for the end of all.

    Rank 0 writes to this terminal, the others to ``log_dir/rank_N.log``. When one rank fails, the others are ended
    (SIGTERM, after ``grace_s`` SIGKILL), its last lines are shown and its exit code is returned. SIGINT, SIGTERM,
    SIGHUP, SIGUSR1 and SIGUSR2 are handed on; a second SIGINT or SIGTERM, or ``stop_grace_s`` after the first, kills.
    When this process dies, however, the kernel kills the ranks.

    Args:
        nproc: number of ranks.
        argv: program and arguments, the same for each rank.
        log_dir: made if missing.
        threads: OpenMP threads of each rank; None: as in this process.
        env: variables set for every rank, beside those of this process.
        timeout_s: longest run; None: no limit.
        on_failure: told of the ranks that ended by themselves, the likely cause first, once no rank is left; says why to
            the user and returns the exit code.

    Returns:
        0 when every rank returned 0; the first failing rank's exit code, 128 + N for a signal N; 124 after a time-out.
    """
    log_dir = Path(log_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    job = _Job(stop_grace_s)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with _handle_signals(job):
        try:
            _start(job, nproc, argv, log_dir, {**os.environ, **thread_env(threads), **(env or {})})
            failed = _wait(job, deadline)
        finally:
            _end(job, grace_s)
    if not failed and any(rank.returncode for rank in job.ranks):
        print(f"hpc-rl: not finished after {timeout_s:g} s (timeout_s): all {nproc} ranks ended", file=sys.stderr)
        return 124
    if not failed:
        return 0
    if job.stop_signals > 0:
        return _exit_code(job.ranks[failed[0].rank].returncode)
    return on_failure(failed) if on_failure is not None else _report(failed[0], log_dir)


def thread_env(threads: int | None) -> dict[str, str]:
    """Variables for ``threads`` OpenMP threads; waiting ones sleep, since ranks here may share cores."""
    return {} if threads is None else {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}


def _start(job: _Job, nproc: int, argv: Sequence[str], log_dir: Path, env: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener, contextlib.ExitStack() as files:
        world = {
            "HPC_RL_LOCAL": "1",
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "HPC_RL_STORE_FD": str(listener.fileno()),
        }
        for rank in range(nproc):
            log = None if rank == 0 else files.enter_context(open(log_dir / f"rank_{rank}.log", "wb"))
            job.ranks.append(
                subprocess.Popen(
                    list(argv),
                    env={**env, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log and subprocess.STDOUT,
                    pass_fds=(listener.fileno(),) if rank == 0 else (),
                    start_new_session=True,  # its own group: ended as a whole; Ctrl-C comes once, through us
                    preexec_fn=_die_with_parent(os.getpid()),
                )
            )


def _die_with_parent(parent: int) -> Callable[[], None]:
    def run_in_child() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os.kill(os.getpid(), signal.SIGKILL)

    return run_in_child


def _wait(job: _Job, deadline: float | None) -> list[Ended]:
    """Returns the ranks that failed, the first one first; none when all succeeded or time ran out."""
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as pidfds:
        for rank, process in enumerate(job.ranks):
            fd = os.pidfd_open(process.pid)
            pidfds.callback(os.close, fd)
            selector.register(fd, selectors.EVENT_READ, rank)
        while selector.get_map():
            limits = [t for t in (deadline, job.stop_by) if t is not None]
            left_s = min(limits) - time.monotonic() if limits else None
            if left_s is not None and left_s <= 0:
                late = [] if job.stop_by is None else [key.data for key in selector.get_map().values()]
                return [Ended(rank, -signal.SIGTERM, time.time()) for rank in late]
            # At most 1 s at a time: a signal may set stop_by meanwhile.
            ended = [key for key, _ in selector.select(min(left_s or 1.0, 1.0))]
            for key in ended:
                selector.unregister(key.fileobj)
            if any(job.ranks[key.data].wait() for key in ended):
                now, codes = time.time(), {rank: process.poll() for rank, process in enumerate(job.ranks)}
                # Ranks that ended in the same instant: a killed one is the cause, the others saw it go.
                failed = [Ended(rank, code, now) for rank, code in codes.items() if code]
                return sorted(failed, key=lambda one: (one.code >= 0, one.rank))
    return []


def _end(job: _Job, grace_s: float) -> None:
    """SIGTERM to every rank, SIGKILL to what is left after ``grace_s``, or at once after a second stop signal."""
    _signal_groups(job, signal.SIGTERM, only_running=True)
    end = time.monotonic() + (grace_s if job.stop_signals < 2 else 0)
    for process in job.ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0))
    _signal_groups(job, signal.SIGKILL, only_running=False)  # also what a rank started and left behind
    for process in job.ranks:
        process.wait()


def _signal_groups(job: _Job, number: int, *, only_running: bool) -> None:
    for process in job.ranks:
        if not only_running or process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)


@contextlib.contextmanager
def _handle_signals(job: _Job) -> Iterator[None]:
    def forward(number: int, _frame: FrameType | None) -> None:
        if number in STOPPING:
            job.stop_signals += 1
            job.stop_by = time.monotonic() + (job.stop_grace_s if job.stop_signals == 1 else 0.0)
        _signal_groups(job, number, only_running=True)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _report(first: Ended, log_dir: Path) -> int:
    rank, code = first.rank, first.code
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    print(f"\nhpc-rl: rank {rank} failed first ({how}); all other ranks were ended.", file=sys.stderr)
    if rank == 0:
        print("hpc-rl: rank 0's messages are above", file=sys.stderr)
    else:
        log = log_dir / f"rank_{rank}.log"
        lines = log.read_text(errors="replace").splitlines()[-20:]
        print(f"hpc-rl: the last lines of {log}:\n" + "\n".join("  | " + line for line in lines), file=sys.stderr)
    return _exit_code(code)
