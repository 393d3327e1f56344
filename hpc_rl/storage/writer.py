"""The writer process: takes host buffers through shared memory, writes them, reports. One per rank, without torch.

A process rather than a thread: training holds the interpreter lock, a crash in here cannot take the run down, and
what it does to the page cache is not the trainer's. It ends with its parent: after a SIGKILL of the rank nothing may
go on changing the run directory that the restarted job reads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from hpc_rl.storage.files import Files, remove_tree
from hpc_rl.storage.finish import Finish, Whole, finish, mark, sweep
from hpc_rl.storage.shards import Member, write_shard


@dataclass(frozen=True, slots=True)
class Job:
    """One save of one rank. ``members``: the ranks that share its shard file. ``finish``: on the finishing rank only."""

    step: int
    rank: int
    partial: Path
    final: Path
    file: str
    members: tuple[Member, ...]
    buffer_bytes: int
    alignment_bytes: int
    direct: bool
    files: Files
    finish: Finish | None


class ParentGone(BaseException):
    """The training process closed the pipe in the middle of a job."""


class Feed:
    """The parent's progress: how many bytes of the host buffer are there."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.filled = pipe, 0

    def wait(self, nbytes: int) -> None:
        """Returns once the first ``nbytes`` of the buffer are filled."""
        while self.filled < nbytes:
            try:
                self.filled = self.pipe.recv()
            except EOFError as error:
                raise ParentGone from error
            if self.filled < 0:
                raise RuntimeError("the copy of the state to host memory failed")

    def aborted(self) -> bool:
        """Whether the parent wants this job to end. Raises ParentGone."""
        while self.pipe.poll():
            try:
                if self.pipe.recv() == -1:
                    return True
            except EOFError as error:
                raise ParentGone from error
        return False


def run_job(job: Job, whole: Whole | None, buffer: memoryview, feed: Feed) -> None:
    """Writes the shard and leaves its marker; the finishing rank then completes the checkpoint."""
    try:
        job.files.makedirs(job.partial)
        if job.finish:
            sweep(job.files, job.final.parent, keep=job.partial)
        report = write_shard(
            job.files, job.partial, job.file, job.members, job.rank, buffer, feed.wait, job.alignment_bytes, job.direct
        )
        mark(job.files, job.partial, job.rank, report.to_json(), "json")
        if job.finish:
            assert whole is not None, "the finishing rank needs the plan of all ranks"
            finish(job.files, job.partial, job.final, job.step, whole, job.finish, feed.aborted)
    except Exception as error:
        give_up(job, error)
        raise


def give_up(job: Job, error: Exception) -> None:
    """Tells the finishing rank; there, frees the room of the failed save. A full disk must not hide the first error."""
    with suppress(OSError):
        if job.finish:
            remove_tree(job.files, job.partial)
        else:
            mark(job.files, job.partial, job.rank, f"rank {job.rank}: {describe(error)}".encode(), "error")


def describe(error: BaseException) -> str:
    """One line."""
    return f"{type(error).__name__}: {error}"


def serve(pipe: Connection, memory_fd: int) -> None:
    """Jobs until the parent closes the pipe. A message is a `Whole` (kept), a `Job`, or bytes filled of the job's buffer."""
    whole: Whole | None = None
    memory = None
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if isinstance(message, Whole):
            whole = message
        if not isinstance(message, Job):
            continue  # progress of a job that failed before it took it
        feed = Feed(pipe)
        try:
            if memory is None or len(memory) < message.buffer_bytes:
                memory = mmap.mmap(memory_fd, 0)
            run_job(message, whole, memoryview(memory), feed)
            pipe.send(None)
        except ParentGone:
            return
        except Exception as error:
            traceback.print_exc()
            pipe.send(describe(error))


def main() -> None:
    """Arguments: descriptor of the pipe, of the shared memory, and the parent's process id."""
    pipe_fd, memory_fd, parent = (int(arg) for arg in sys.argv[1:4])
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the trainer, which then waits for this process
    serve(Connection(pipe_fd), memory_fd)

