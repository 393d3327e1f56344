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
from queue import SimpleQueue
from threading import Condition, Thread

from hpc_rl.errors import RunError
from hpc_rl.storage.files import Files, remove_tree
from hpc_rl.storage.finish import Finish, IndexFile, Whole, finish, mark, prune, sweep
from hpc_rl.storage.shards import Member, Report, Skeleton, alignment, skeleton, write_shard
from hpc_rl.storage.stage import stage


@dataclass(frozen=True, slots=True)
class Job:
    """One save of one rank. ``members``: the ranks that share its shard file. ``finish``: on the finishing rank only.

    ``stage``: node-local directory that the shard goes to first; the host buffer is free once it is there.
    """

    serial: int  # of the save in this run: 0, 1, 2, ...
    step: int
    rank: int
    partial: Path
    final: Path
    file: str
    members: tuple[Member, ...]
    alignment_bytes: int
    direct: bool
    stage: Path | None
    files: Files
    finish: Finish | None
    report: Report | None = None  # of a shard that is written already


@dataclass(frozen=True, slots=True)
class Filled:
    """The parent's progress: the first ``nbytes`` of the host buffer hold this job's state. -1: give the job up."""

    serial: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Staged:
    """To the parent: the host buffer may be used again."""

    serial: int


@dataclass(frozen=True, slots=True)
class Ended:
    """To the parent: the job is done (on the finishing rank: the checkpoint is whole), or failed."""

    serial: int
    error: str | None


class ParentGone(BaseException):
    """The training process closed the pipe in the middle of a job."""


class Inbox(Thread):
    """Receives in the background, so that progress and the next job arrive while one is written."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(daemon=True)
        self.pipe = pipe
        self.jobs: SimpleQueue[Job | Whole | None] = SimpleQueue()
        self.filled: dict[int, int] = {}
        self.gone = False
        self.news = Condition()

    def run(self) -> None:
        while not self.gone:
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):
                message = None
            if not isinstance(message, Filled):
                self.jobs.put(message)
            with self.news:
                self.gone = message is None
                if isinstance(message, Filled):
                    self.filled[message.serial] = message.nbytes
                self.news.notify_all()

    def wait_filled(self, serial: int, nbytes: int) -> None:
        """Returns once the first ``nbytes`` of the buffer are there."""
        with self.news:
            self.news.wait_for(lambda: self.gone or not 0 <= self.filled.get(serial, 0) < nbytes)
        if self.aborted(serial):
            raise RuntimeError("the copy of the state to host memory failed")

    def aborted(self, serial: int) -> bool:
        """Whether the parent gave this job up."""
        if self.gone:
            raise ParentGone
        return self.filled.get(serial, 0) < 0


class Writer:
    """The jobs of one rank, one after the other."""

    def __init__(self, pipe: Connection, memory_fd: int) -> None:
        self.pipe, self.memory_fd = pipe, memory_fd
        self.inbox = Inbox(pipe)
        self.memory: mmap.mmap | None = None
        self.whole: Whole | None = None
        self.index_file = IndexFile()
        self.frame: tuple[tuple[Member, ...], Skeleton] | None = None

    def serve(self) -> None:
        """Until the parent closes the pipe."""
        self.inbox.start()
        while (message := self.inbox.jobs.get()) is not None:
            if isinstance(message, Whole):
                self.whole, self.index_file = message, IndexFile()
                continue
            error = self.attempt(message)
            with suppress(OSError):
                self.pipe.send(Ended(message.serial, error))
            if not error:
                self.tidy(message)

    def attempt(self, job: Job) -> str | None:
        """Runs a job. Returns its error."""
        try:
            self.run_job(job)
            return None
        except Exception as error:
            if not isinstance(error, OSError | RunError):  # what the disk did, the rank tells in a line
                traceback.print_exc()
            give_up(job, error)
            return describe(error)

    def run_job(self, job: Job) -> None:
        """Writes the shard and leaves its marker; the finishing rank then completes the checkpoint."""
        job.files.makedirs(job.partial)
        if job.finish:
            sweep(job.files, job.final.parent, job.partial)
            self.index_file.begin(job.files, job.partial)
        report = job.report or self.write(job)
        mark(job.files, job.partial, job.rank, report.to_json(), "json")
        if job.finish:
            assert self.whole is not None, "the finishing rank needs the plan of all ranks"
            finish(
                job.files, job.partial, job.final, job.step, self.whole, job.finish,
                lambda: self.inbox.aborted(job.serial), self.index_file,
            )  # fmt: skip

    def write(self, job: Job) -> Report:
        """This rank's part of the shard file: from the host buffer, or from the staging disk once all is there."""

        def wait_filled(nbytes: int) -> None:
            self.inbox.wait_filled(job.serial, nbytes)

        staged = job.stage / f"{job.partial.name}_{job.rank:05d}" if job.stage else None
        buffer: mmap.mmap = self.host_buffer()
        if staged:
            nbytes = sum(region.nbytes for m in job.members if m.rank == job.rank for region in m.regions())
            try:
                buffer = stage(job.files, staged, memoryview(buffer), nbytes, wait_filled)
            finally:
                with suppress(FileNotFoundError):
                    job.files.unlink(staged)  # its bytes stay until the map is gone, whatever happens to this process
            self.pipe.send(Staged(job.serial))
        if self.frame is None or self.frame[0] != job.members:  # the same at each save
            self.frame = job.members, skeleton(job.members, alignment(job.members, job.alignment_bytes))
        return write_shard(
            job.files, job.partial, job.file, job.members, job.rank, self.frame[1], memoryview(buffer),
            (lambda nbytes: None) if staged else wait_filled, job.direct,
        )  # fmt: skip

    def host_buffer(self) -> mmap.mmap:
        """The memory that the parent fills."""
        size = os.fstat(self.memory_fd).st_size
        if self.memory is None or len(self.memory) != size:
            self.memory = mmap.mmap(self.memory_fd, size)  # the parent made it grow
        return self.memory

    def tidy(self, job: Job) -> None:
        """Prunes, after the checkpoint is whole and told to be; an old one that cannot go is no failure of the new."""
        if job.finish:
            try:
                prune(job.files, job.final.parent, job.finish)
            except OSError:
                traceback.print_exc()


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


def main() -> None:
    """Arguments: descriptor of the pipe, of the shared memory, and the parent's process id."""
    pipe_fd, memory_fd, parent = (int(arg) for arg in sys.argv[1:4])
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        return
    with suppress(ParentGone):
        Writer(Connection(pipe_fd), memory_fd).serve()
