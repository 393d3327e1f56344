"""Ranks started by srun inside a job: their output goes on, and what srun says about failed tasks is kept."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TASK = re.compile(r"srun: error: (?P<node>[\w.-]+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
_NODE = re.compile(r"srun: error: Node failure on (?P<node>[\w.-]+)")


@dataclass(frozen=True, slots=True)
class TaskError:
    """What srun said of a task: ``rank`` -1 and ``how`` "node failure" for a whole node."""

    node: str
    rank: int
    how: str


def parse_error(line: str) -> TaskError | None:
    """``srun: error: node2: tasks 1,3: Killed`` -> the first of the tasks; None for other lines."""
    if match := _TASK.search(line):
        return TaskError(match["node"], int(re.split("[,-]", match["tasks"])[0]), match["how"].strip())
    if match := _NODE.search(line):
        return TaskError(match["node"], -1, "node failure")
    return None


class SrunStep:
    """One srun. Its standard error is read line by line, so that the first failed task is known; it is shown as well."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._errors: list[TaskError] = []
        self.last_words = ""  # the last line of srun's own, for a step that never began
        self._process = subprocess.Popen(
            argv, env=dict(env), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def errors(self) -> Sequence[TaskError]:
        """Tasks that failed, in the order in which srun told of them."""
        return self._errors

    def poll(self) -> int | None:
        """The exit code once srun has ended."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """As `poll`, after at most so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        code = self._process.poll()
        if code is not None:
            self._reader.join(timeout=1.0)
        return code

    def signal(self, number: signal.Signals) -> None:
        """To every rank: srun hands it on."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """Ends srun; its tasks may live on, see `SlurmJob.answering`."""
        self._process.kill()
        self._process.wait()
        self._reader.join(timeout=1.0)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            sys.stderr.write(line)
            sys.stderr.flush()
            if "srun: " in line:
                self.last_words = line.strip()
            if (error := parse_error(line)) is not None:
                self._errors.append(error)
