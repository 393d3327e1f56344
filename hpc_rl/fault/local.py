"""The end of a failed run whose ranks this machine's launcher started: one line for the user, one report on disk."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from hpc_rl.fault.report import (
    EXIT_HANG,
    Failure,
    describe,
    final_report,
    first_cause,
    last_place,
    read_failures,
    record,
)

_TRACEBACK = "Traceback (most recent call last)"
_MAX_LINES = 20  # of a traceback
_EXIT_CODES = {"user": 2, "hang": EXIT_HANG}


def conclude(
    run_dir: Path, log_dir: Path, world_size: int, ended: Sequence[tuple[int, int, float]], node: str, oom_kills: int
) -> int:
    """Names the cause, writes ``failure.json``; returns the exit code of the run.

    Args:
        run_dir, log_dir: where the ranks' failures and their messages are.
        world_size: number of ranks.
        ended: rank, return code (negative: a signal) and time of those that ended by themselves.
        node: this one.
        oom_kills: `num_oom_kills` before the ranks started.
    """
    failures = read_failures(run_dir)
    known = {failure.rank for failure in failures}
    for rank, code, time in ended:
        if rank not in known:
            _, phase, step = last_place(run_dir, rank)
            silent = _without_a_word(log_dir, rank, code, time, node, (phase, step), oom_kills)
            record(silent, run_dir)
            failures.append(silent)
    cause = first_cause(failures, world_size)
    final_report(run_dir, cause, decided="the run ends", failures=failures)
    _say(cause, run_dir, log_dir)
    codes = {rank: code if code >= 0 else 128 - code for rank, code, _ in ended}
    return _EXIT_CODES.get(cause.kind) or codes.get(cause.rank, 1)


def num_oom_kills() -> int:
    """How many processes the kernel has killed on this machine for lack of memory; 0 if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, value = line.split()
            if name == "oom_kill":
                return int(value)
    return 0


def _without_a_word(
    log_dir: Path, rank: int, code: int, time: float, node: str, where: tuple[str, int], oom_kills: int
) -> Failure:
    phase, step = where
    if code < 0:
        return Failure(rank, node, "killed", phase, step, _why_killed(-code, oom_kills), time)
    said = [line for line in _lines(log_dir, rank) if line.strip()]
    last = f", having said last: {said[-1].strip()}" if said else ""
    return Failure(rank, node, "exception", phase, step, f"ended with exit code {code}{last}", time)


def _why_killed(number: int, oom_kills: int) -> str:
    name = signal.Signals(number).name
    if number != signal.SIGKILL:
        native = number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
        return f"{name}, a fault of native code" if native else name
    if num_oom_kills() > oom_kills:
        return "SIGKILL, while the kernel was killing for lack of memory: use fewer ranks, or smaller ones"
    return "SIGKILL, by a user, the batch system, or the kernel for lack of memory (dmesg tells)"


def _say(cause: Failure, run_dir: Path, log_dir: Path) -> None:
    if cause.kind == "user":
        print(f"hpc-rl: {cause.message}", file=sys.stderr)
        return
    for line in _traceback(log_dir, cause.rank) if cause.kind == "exception" else ():
        print(f"  | {line}", file=sys.stderr)
    log = log_dir / f"rank_{cause.rank}.log"
    more = f"{run_dir / 'failure.json'}" + (f", {log}" if log.exists() else "")
    print(f"hpc-rl: the run stopped: {describe(cause)} (more: {more})", file=sys.stderr)


def _traceback(log_dir: Path, rank: int) -> list[str]:
    """The last one that the rank wrote, if any; of a long one the end."""
    lines = _lines(log_dir, rank)
    begins = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    found = lines[begins[-1] :] if begins else []
    return list(takewhile(lambda line: not line.startswith("hpc-rl: "), found))[-_MAX_LINES:]


def _lines(log_dir: Path, rank: int) -> list[str]:
    with contextlib.suppress(OSError):
        return (log_dir / f"rank_{rank}.log").read_text(errors="replace").splitlines()
    return []
