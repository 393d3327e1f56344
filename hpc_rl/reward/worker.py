"""The process in which `KillableFunction` runs a reward function: answers one call after another until its rank ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from hpc_rl.reward.score import finite, import_function

_PR_SET_PDEATHSIG = 1


def serve(fd: int, parent: int) -> None:
    """Imports the function that the first message names, then calls it for each further one.

    Answers are (True, score, "") or (False, name of the exception, its text); the first says whether it was imported.

    Args:
        fd: of this process's end of a socket pair.
        parent: process id of the rank, with which this process ends, whatever the function is doing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that call
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # Slurm sends them to every process of a job, but the rank decides. A handler, unlike SIG_IGN, is not inherited
        # by the programs that a function runs.
        signal.signal(number, lambda *_: None)
    with Connection(fd) as connection:
        try:
            name, kwargs = connection.recv()
            loaded: list[Callable[..., Any]] = []
            connection.send(_answer(lambda: loaded.append(import_function(name))))
            while loaded:
                prompt, response, fields = connection.recv()
                connection.send(_answer(lambda: finite(loaded[0](prompt, response, fields, **kwargs))))  # noqa: B023
        except (EOFError, ConnectionError):
            return


def _answer(call: Callable[[], Any]) -> tuple[bool, Any, str]:
    try:
        return True, call(), ""
    except (Exception, SystemExit) as error:  # a user's code may raise anything, sys.exit() included
        return False, type(error).__name__, str(error)
