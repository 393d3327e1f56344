"""Ends a rank that makes no progress, having said where it stands.

A thread looks at the clock of `phase`. A rank that waits in a collective is given longer than one that does not, so the
rank that the others wait for reports first; they see its report, and leave their own stacks before they are ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from traceback import FrameSummary
from typing import IO

from hpc_rl.config import FaultConfig
from hpc_rl.fault import phase
from hpc_rl.fault.report import EXIT_HANG, Failure, describe, failures_dir, final_report, place_line, record, stack_path
from hpc_rl.fault.stacks import all_stacks, collective_of, lines_of, place_in, stack_of
from hpc_rl.fault.witness import DUMP_SIGNAL, LAST, Witness, state_of

SLOW = ("start", "load", "save", "end")  # phases that report no progress of their parts
SLOW_FACTOR = 3.0
GRACE = 1.5  # a rank in a collective is given so many times its limit
_POLL_S = 1.0
_NOTICE_S = 5.0  # a rank silent for so long looks whether another has reported


def limit_of(config: FaultConfig, phase_name: str) -> float:
    """The longest silence in a phase, in seconds; 0: no limit."""
    usual = config.timeout_s * (SLOW_FACTOR if phase_name in SLOW else 1.0)
    return config.phase_timeout_s.get(phase_name, usual)


class Watchdog:
    """Watches the thread that makes it, from `start` to `stop`, and keeps the first line of `stack_path` current.

    Args:
        run_dir: of the run; the stacks go to ``logs/failures/ATTEMPT/rank_NNNNN.stack``.
        rank, node: of this process.
        limit_s: phase -> longest silence, in seconds; 0: no limit.
        announce: also say on stderr why this process ends.
        is_alone: nobody reads the ranks' reports, so the rank that is the cause writes the final one itself.
    """

    def __init__(
        self,
        run_dir: str | Path,
        rank: int,
        node: str,
        limit_s: Callable[[str], float],
        *,
        announce: bool = True,
        is_alone: bool = False,
    ) -> None:
        self._run_dir, self._rank, self._node, self._limit_s = run_dir, rank, node, limit_s
        self._announce, self._is_alone = announce, is_alone
        self._watched = threading.current_thread()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._has_told = False
        self._file: IO[str] | None = None
        self._witness: Witness | None = None
        self._armed_for = -1.0  # seconds: what the witness was told last
        self._old = self._reports()  # of an earlier run under the same number

    def start(self) -> None:
        """Begins to watch."""
        phase.beat()
        path = stack_path(self._run_dir, self._rank)
        with contextlib.suppress(OSError):  # a disk that refuses: then without a stack from C
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)  # of an earlier run under the same number
            self._file = open(path, "w")  # noqa: SIM115  # faulthandler writes to it at the very end
            self._file.write(place_line(self._rank, self._node, *phase.current()) + "\n")
            self._file.flush()
            faulthandler.register(DUMP_SIGNAL, file=self._file, all_threads=True)
        self._witness = Witness(self._run_dir, self._rank, announce=self._announce, is_alone=self._is_alone)
        phase.on_change(self._note)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch. A rank that is well leaves no file."""
        self._stop.set()
        self._thread.join(timeout=10 * _POLL_S)
        phase.on_change(None)
        faulthandler.cancel_dump_traceback_later()
        if self._witness is not None:
            self._witness.stop()
        if self._file is None:
            return
        faulthandler.unregister(DUMP_SIGNAL)
        self._file.close()
        directory = failures_dir(self._run_dir)
        with contextlib.suppress(OSError):
            if not self._has_told and not (directory / f"rank_{self._rank:05d}.json").exists():
                os.unlink(self._file.name)
            os.rmdir(directory)  # the last one out
            os.rmdir(directory.parent)

    def _watch(self) -> None:
        last, poll_s = time.monotonic(), 0.0
        while not self._stop.wait(poll_s):
            now = time.monotonic()
            if now - last > poll_s + 10 * _POLL_S:  # the process was suspended, or the machine was
                phase.beat()
            last = now
            name, step = phase.current()
            limit = self._limit_s(name)
            poll_s = min(_POLL_S, limit / 16) if limit > 0 else _POLL_S
            self._arm(limit)
            if limit > 0:
                self._look(name, step, limit, poll_s)

    def _look(self, name: str, step: int, limit: float, poll_s: float) -> None:
        silent = phase.silent_s()
        if silent < min(_NOTICE_S, limit / 4):
            return
        told_by_others = not self._has_told and bool(self._reports() - self._old)
        if silent < limit and not told_by_others:
            return
        stack = stack_of(self._watched)
        collective = collective_of(stack, _is_on_gpu())
        is_over = silent >= limit * (GRACE if collective else 1.0)
        if is_over or told_by_others:
            self._tell(name, step, silent, stack, collective, is_failure=is_over or bool(collective))
        if is_over:
            time.sleep(0.0 if told_by_others else 4 * poll_s + 0.2)  # the others are to leave their stacks too
            os._exit(EXIT_HANG)

    def _tell(
        self, name: str, step: int, silent: float, stack: list[FrameSummary], collective: str, *, is_failure: bool
    ) -> None:
        if self._has_told:
            return
        self._has_told = True
        faulthandler.cancel_dump_traceback_later()
        where = f"waiting in {collective}" if collective else f"at {place_in(stack)}"
        if state := state_of(os.getpid(), self._watched.native_id):
            where += f", {state}"
        message = f"no progress for {silent:.0f} s, {where}"
        with contextlib.suppress(OSError):
            head = f"{place_line(self._rank, self._node, name, step)}: {message}\n\n"
            stack_path(self._run_dir, self._rank).write_text(head + all_stacks(self._watched))
        if is_failure:
            lines = tuple(lines_of(stack))
            hang = Failure(self._rank, self._node, "hang", name, step, message, time.time(), lines, collective)
            record(hang, self._run_dir)
            if self._is_alone and not collective:
                final_report(self._run_dir, hang, decided="the run ends")
            if self._announce:
                os.write(2, f"hpc-rl: {describe(hang)}\n".encode())

    def _note(self, name: str, step: int) -> None:
        """Says where this rank is, for those who look when it is no more: a write into the page cache, no wait for it."""
        if self._file is not None and not self._has_told:
            with contextlib.suppress(OSError, ValueError):
                os.pwrite(self._file.fileno(), place_line(self._rank, self._node, name, step).encode(), 0)
        if self._witness is not None and (limit := self._limit_s(name)) != self._armed_for:
            self._armed_for = limit
            self._witness.alive(limit)  # else the sign of life each second is enough

    def _arm(self, limit: float) -> None:
        """Puts off what ends this rank if this thread does not come back to do so: C code may hold the interpreter lock."""
        self._armed_for = limit
        has_witness = self._witness is not None and self._witness.alive(limit)
        if self._file is not None and limit > 0 and not has_witness and not self._has_told:
            faulthandler.dump_traceback_later(limit * LAST, exit=True, file=self._file)

    def _reports(self) -> set[tuple[str, int]]:
        """The failures that other ranks have reported, each with the time of its file."""
        mine, found = f"rank_{self._rank:05d}.json", set()
        with contextlib.suppress(OSError), os.scandir(failures_dir(self._run_dir)) as entries:
            for entry in entries:
                if entry.name.endswith(".json") and entry.name != mine and not entry.name.startswith("."):
                    found.add((entry.name, entry.stat().st_mtime_ns))
        return found


def _is_on_gpu() -> bool:
    torch = sys.modules.get("torch")  # not imported yet: no GPU either
    return torch is not None and bool(torch.cuda.is_initialized())
