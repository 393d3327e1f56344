"""Where a rank's errors end: each becomes a `Failure` on disk, before anything is torn down."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import NotFiniteError, RunError, UserError
from hpc_rl.fault.cause import is_consequence
from hpc_rl.fault.phase import chain_of, place_of
from hpc_rl.fault.report import Failure, Kind, final_report, record
from hpc_rl.fault.stacks import lines_of, place_in

_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|unable to allocate|bad_alloc|std::length_error",
    re.IGNORECASE,
)
_MAX_CHARS = 1000  # of a message
_FAILURE = "_hpc_rl_failure"  # of an exception: what was recorded of it


@dataclass(frozen=True, slots=True)
class Reporter:
    """How this rank reports.

    Attributes:
        run_dir: of the run.
        rank, node: of this process.
        is_alone: nobody reads the ranks' reports, so the rank that is the cause writes the final one itself.
        log: from a failure on, what this process writes to stderr goes there; None: it stays on stderr.
    """

    run_dir: Path
    rank: int
    node: str
    is_alone: bool = False
    log: Path | None = None


@contextlib.contextmanager
def reporting(reporter: Reporter) -> Iterator[None]:
    """Records what the block raises, and lets it pass on. Ctrl-C and an exit are no failures."""
    try:
        yield
    except BaseException as error:
        if recorded(error) is not None or isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        failure = failure_of(error, reporter.rank, reporter.node)
        setattr(error, _FAILURE, failure)
        if record(failure, reporter.run_dir) is None:  # a full disk: then only this console can say it
            print(f"hpc-rl: rank {reporter.rank}: {failure.message} (no report could be written)", file=sys.stderr, flush=True)
        if reporter.is_alone and not is_consequence(failure):
            final_report(reporter.run_dir, failure, decided="the run ends")
        if reporter.log is not None:
            _send_stderr_to(reporter.log)
        raise


def recorded(error: BaseException) -> Failure | None:
    """What `reporting` made of an error, if it came through there."""
    return getattr(error, _FAILURE, None)


def failure_of(error: BaseException, rank: int, node: str) -> Failure:
    """An exception as data. What it was raised from counts too: a reward function that ran out of memory did so."""
    frames = traceback.extract_tb(chain_of(error)[-1].__traceback__)
    phase, step = place_of(error)
    message = text_of(error)
    if not isinstance(error, UserError | RunError):
        message += f", at {place_in(frames)}"
    return Failure(rank, node, kind_of(error), phase, step, message, time.time(), tuple(lines_of(frames)))


def kind_of(error: BaseException) -> Kind:
    """What kind of failure an exception is."""
    if any(map(_is_out_of_memory, chain_of(error))):
        return "out_of_memory"
    if isinstance(error, NotFiniteError):
        return "nan"
    return "user" if isinstance(error, UserError) else "exception"


def text_of(error: BaseException) -> str:
    """An exception in one line; with its type, unless it is one of this project's, whose messages are sentences."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + " ..."
    if isinstance(error, UserError | RunError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which need not be imported for it
        return True
    foreign = isinstance(error, RuntimeError) and not isinstance(error, RunError)
    return foreign and bool(_OUT_OF_MEMORY.search(str(error)))


def _send_stderr_to(log: Path) -> None:
    """Also what C++ code writes, and what background threads say while the process is torn down."""
    with contextlib.suppress(OSError):
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 2)
        os.close(fd)
