"""A reward function in a process of its own, which is killed when it takes too long.

Python's pools do not fit: a fork of a process that uses CUDA is not allowed, a spawned one runs the user's script again,
and a time limit kills the worker but not the programs that a verifier has started. So this is a plain child process, in
a session of its own, that is killed with all that belongs to it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from hpc_rl.errors import RunError

START_TIMEOUT_S = 600.0  # for the imports of the function's module, on a slow file system
_PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from hpc_rl.reward.worker import serve; serve({}, {})"
)


class RewardFailed(Exception):
    """A call gave no score. ``kind``: name of the exception, TimeoutError, or ProcessDied."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class KillableFunction:
    """``module:function`` with a deadline for each call.

    The process is started by the first call and again by the first one after it died. It ends with `close`, and with
    the process that made it, even if that is killed.

    Args:
        name: module:function, on this process's ``sys.path``.
        kwargs: keyword arguments of every call.
        timeout_s: longest time of a call, from when the function begins to run.
    """

    def __init__(self, name: str, kwargs: Mapping[str, Any], timeout_s: float) -> None:
        self._name, self._kwargs, self._timeout_s = name, dict(kwargs), timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __call__(self, prompt: str, response: str, fields: Mapping[str, Any]) -> float:
        """The score. Raises RewardFailed."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        return float(self._ask((prompt, response, dict(fields)), self._timeout_s))

    def close(self) -> None:
        """Kills the process and whatever it has started."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children may be there when it itself is not
            process.wait()
        if connection is not None:
            connection.close()

    def _start(self) -> None:
        here, there = socket.socketpair()
        with there:
            program = _PROGRAM.format(there.fileno(), os.getpid())
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, json.dumps([str(path) or os.getcwd() for path in sys.path])],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(here.detach())
        try:
            self._ask((self._name, self._kwargs), START_TIMEOUT_S)
        except RewardFailed as error:
            self.close()
            raise RunError(
                f"reward.function = {self._name} cannot be loaded in a process of its own ({error.kind}: {error}): "
                "correct it, or set reward.timeout_s=null"
            ) from error

    def _ask(self, message: Any, timeout_s: float) -> Any:
        connection, process = self._connection, self._process
        assert connection is not None and process is not None, "the process was not started"
        try:
            connection.send(message)
            if not connection.poll(timeout_s):
                self.close()
                raise RewardFailed(
                    "TimeoutError", f"it took longer than reward.timeout_s = {timeout_s:g} and was killed"
                )
            succeeded, result, reason = connection.recv()
        except (EOFError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)  # it may still be ending: its own status says more than our signal
            self.close()
            raise RewardFailed("ProcessDied", f"its process {_ending(process.returncode)}") from None
        if not succeeded:
            raise RewardFailed(result, reason)
        return result


def _ending(returncode: int) -> str:
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with status {returncode}"
