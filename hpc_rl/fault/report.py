"""Failures on disk: written by the rank that fails, read by whoever decides what comes next.

Each failing rank leaves ``RUN/logs/failures/ATTEMPT/rank_NNNNN.json``; `first_cause` finds the cause among them, and
`final_report` writes it to ``RUN/failure.json``. Imports neither torch nor anything else of this project.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hpc_rl.fault.cause import first_cause
from hpc_rl.fault.failure import EXIT_HANG, Failure, Kind
from hpc_rl.fault.stacks import watchers_last

__all__ = [
    "ATTEMPT_VARIABLE", "EXIT_HANG", "PLACE_CHARS", "Failure", "Kind", "attempt_number", "begin_attempt", "describe",
    "failures_dir", "final_report", "first_cause", "last_place", "place_line", "read_failures", "record", "stack_path",
]  # fmt: skip

ATTEMPT_VARIABLE = "HPC_RL_ATTEMPT"


def attempt_number() -> int:
    """Which try of the job this is, counted from 0: `ATTEMPT_VARIABLE`, set by whoever restarts the ranks."""
    return int(os.environ.get(ATTEMPT_VARIABLE, "0"))


def failures_dir(run_dir: str | Path, attempt: int | None = None) -> Path:
    """Where the ranks of an attempt (None: this one) leave their failures and stacks."""
    return Path(run_dir) / "logs" / "failures" / str(attempt_number() if attempt is None else attempt)


def begin_attempt(run_dir: str | Path, attempt: int | None = None) -> None:
    """Removes what an earlier run left under this attempt's number; the first attempt also its final report.

    Whoever starts the ranks calls it, once, before any of them runs.
    """
    attempt = attempt_number() if attempt is None else attempt
    shutil.rmtree(failures_dir(run_dir, attempt), ignore_errors=True)
    if attempt == 0:
        with contextlib.suppress(OSError):
            os.unlink(Path(run_dir) / "failure.json")


def record(failure: Failure, run_dir: str | Path, attempt: int | None = None) -> Path | None:
    """Writes ``rank_NNNNN.json`` (``node_NAME.json`` for a rank unknown) in one go.

    What a process says of a rank first stays: later troubles follow from it. An earlier process's file is replaced.

    Returns: its path; None if it could not be written, since a full disk must not hide what it was to say.
    """
    name = f"rank_{failure.rank:05d}.json" if failure.rank >= 0 else f"node_{failure.node}.json"
    path = failures_dir(run_dir, attempt) / name
    if (os.getpid(), path) in _said:
        return path
    if not _write_json(path, asdict(failure)):
        return None
    _said.add((os.getpid(), path))
    return path


_said: set[tuple[int, Path]] = set()


def read_failures(run_dir: str | Path, attempt: int | None = None) -> list[Failure]:
    """All failures that ranks of an attempt (None: this one) have left, by rank; unreadable files are passed over.

    A rank that left a stack but could not say more (C code that holds the interpreter lock) hung.
    """
    known, found = {field.name for field in fields(Failure)}, {}
    for path in sorted(failures_dir(run_dir, attempt).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            values = {name: value for name, value in json.loads(path.read_text()).items() if name in known}
            found[path.stem] = Failure(**{**values, "stack": tuple(values.get("stack", ()))})
    for path in sorted(failures_dir(run_dir, attempt).glob("rank_*.stack")):
        with contextlib.suppress(OSError, ValueError):
            if path.stem not in found and (silent := _from_stack(path)) is not None:
                found[path.stem] = silent
    return sorted(found.values(), key=lambda failure: failure.rank)


def stack_path(run_dir: str | Path, rank: int, attempt: int | None = None) -> Path:
    """The file whose first line says where a running rank is, and which holds the stacks of one that hangs."""
    return failures_dir(run_dir, attempt) / f"rank_{rank:05d}.stack"


def place_line(rank: int, node: str, phase: str, step: int) -> str:
    """The first line of `stack_path`, always of one length: it is written anew in place."""
    return f"rank {rank} on {node}, {phase} of step {step}".ljust(PLACE_CHARS)


def last_place(run_dir: str | Path, rank: int, attempt: int | None = None) -> tuple[str, str, int]:
    """(node, phase, step) that a rank has noted last: of one that died without a word.

    It notes each as it begins. What a node that is lost has noted may not have reached a file system of others. An
    unknown node is empty; an unknown phase is ``start`` of step 0.
    """
    with contextlib.suppress(OSError), open(stack_path(run_dir, rank, attempt)) as file:
        if match := _PLACE.match(file.readline()):
            return match[2], match[3], int(match[4])
    return "", "start", 0


PLACE_CHARS = 200
_PLACE = re.compile(r"rank (\d+) on (\S*), (\w+) of step (\d+)")
_FROM_C = ("Timeout (", "Current thread 0x", "Thread 0x")  # faulthandler's first words


def _from_stack(path: Path) -> Failure | None:
    head, *stack = watchers_last(path.read_text(errors="replace")).splitlines() or [""]
    match = _PLACE.match(head)
    if match is None or not stack or not stack[0].startswith(_FROM_C):
        return None
    message = "no progress, stuck in C code (holds the interpreter lock)"
    step, time = int(match[4]), path.stat().st_mtime
    return Failure(int(match[1]), match[2], "hang", match[3], step, message, time, tuple(stack))


def describe(failure: Failure) -> str:
    """``rank 3 on node7 failed in generation of step 5: ValueError: ...``, one line."""
    if failure.kind == "no_progress":
        return f"the job came no further: {failure.message}"
    who = f"rank {failure.rank} on {failure.node or 'an unknown node'}" if failure.rank >= 0 else f"node {failure.node}"
    where = f"{failure.phase} of step {failure.step}" if failure.step else failure.phase
    verb = {"hang": "hung", "killed": "was killed", "out_of_memory": "ran out of memory", "node_lost": "was lost"}
    return f"{who} {verb.get(failure.kind, 'failed')} in {where}: {' '.join(failure.message.split())}"


def final_report(
    run_dir: str | Path,
    cause: Failure,
    *,
    decided: str,
    attempt: int | None = None,
    failures: Sequence[Failure] = (),
    restarts: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Writes ``RUN/failure.json``: the cause, what was decided, who else failed, and the restarts before.

    Args:
        run_dir: of the run.
        cause: from `first_cause`.
        decided: one line, as ``the run ends`` or ``restart without node7``.
        attempt: that failed; None: this one.
        failures: all of the attempt; those other than the cause are listed without stacks.
        restarts: of earlier attempts, oldest first, whatever the one who restarts wants kept of each.

    Returns: what was written.
    """
    others = [failure for failure in failures if failure != cause]
    brief = ("rank", "node", "kind", "phase", "step", "collective", "message", "time")
    report = {
        **asdict(cause),
        "summary": describe(cause),
        "attempt": attempt_number() if attempt is None else attempt,
        "decided": decided,
        "others": [{name: getattr(failure, name) for name in brief} for failure in others],
        "restarts": [dict(restart) for restart in restarts],
    }
    _write_json(Path(run_dir) / "failure.json", report)
    return report


def _write_json(path: Path, value: Mapping[str, Any]) -> bool:
    """Whole or not at all, also for one who reads meanwhile; False if the file system refuses."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "w") as file:
            json.dump(value, file, indent=2, default=str)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        return False
    return True
