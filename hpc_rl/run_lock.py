"""The run directory in the hands of this job: taken, looked after, given back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_rl import run_dir
from hpc_rl.config import Config
from hpc_rl.errors import RunError
from hpc_rl.parallel.collectives import agree
from hpc_rl.parallel.state import ParallelState
from hpc_rl.storage.lock import RunLock
from launch.env import job_id

_LOCKS: list[RunLock] = []  # of this process; at most one


def prepare_run_dir(config: Config, hf_config: Mapping[str, Any], parallel: ParallelState, launcher: str) -> None:
    """Takes the run directory for this job, sets an earlier run aside and writes what a run starts with.

    The lock is rank 0's until `release_run_dir`, or until its process ends.
    """
    error: BaseException | None = None
    if parallel.rank == 0:
        try:
            if not _LOCKS:
                _LOCKS.append(RunLock(config.run.dir, job_id()))
            run_dir.say(run_dir.set_aside(config, keep_logs=launcher != "none"))
            run_dir.write_start(config, hf_config)
        except Exception as caught:  # the other ranks wait in `agree` to hear of it
            error = caught
    agree(error)


def release_run_dir() -> None:
    """Gives the run directory back, if this process holds it."""
    while _LOCKS:
        _LOCKS.pop().release()


def check_run_dir() -> None:
    """All ranks go on while this job holds its run directory. Raises: RunError on every rank."""
    error: BaseException | None = None
    try:
        for lock in _LOCKS:
            lock.check()
    except RunError as caught:
        error = caught
    agree(error)
