"""The trainer's side of the writer process: the shared host buffer, the pipe, and the outcome."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from hpc_rl.storage.finish import Whole
from hpc_rl.storage.writer import Ended, Filled, Job

_WRITER = "from hpc_rl.storage.writer import main; main()"  # not -m: pickled jobs name the module

_MADV_POPULATE_WRITE = 23


class HostBuffer:
    """Host memory shared with the writer process, reused by every save; page-locked where there is a GPU."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("hpc_rl_checkpoint")
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int, touch: bool = False) -> Tensor:
        """uint8 [>= nbytes], the same memory each time unless it has to grow. ``touch``: its pages are made at once."""
        if self.tensor.numel() < max(1, nbytes):
            self._unpin()
            os.ftruncate(self.fd, nbytes)
            memory = mmap.mmap(self.fd, nbytes)
            if touch:
                with suppress(OSError):  # before Linux 5.14: at the first save, then
                    memory.madvise(_MADV_POPULATE_WRITE)
            self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
            if torch.cuda.is_available():
                torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), nbytes, 0)
        return self.tensor

    def free(self) -> None:
        """Gives the memory back to the system; `reserve` makes it anew."""
        self._unpin()
        self.tensor = torch.empty(0, dtype=torch.uint8)
        os.ftruncate(self.fd, 0)  # the writer process maps it too

    def _unpin(self) -> None:
        if self.tensor.numel() and torch.cuda.is_available():
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())

    def close(self) -> None:
        self._unpin()
        self.tensor = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """A child started here never gets the job's signals: they are for the trainer, which then waits for the writer."""
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Spool:
    """One writer process, and what became of the jobs handed to it."""

    def __init__(self) -> None:
        self.buffer = HostBuffer()
        ours, theirs = socket.socketpair()
        with theirs, blocked_signals():
            self.process = subprocess.Popen(
                [sys.executable, "-c", _WRITER, str(theirs.fileno()), str(self.buffer.fd), str(os.getpid())],
                pass_fds=(theirs.fileno(), self.buffer.fd),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
            )
        self.pipe = Connection(ours.detach())
        self.staged: set[int] = set()  # jobs whose data has left the host buffer, by serial number
        self.ended: dict[int, str | None] = {}  # job -> error
        self.dead: str | None = None

    def start(self, job: Job, whole: Whole | None) -> None:
        """Hands over a job; its data follows through the buffer, announced by `filled`."""
        if whole is not None:
            self._send(whole)
        self._send(job)

    def filled(self, serial: int, nbytes: int) -> None:
        """The first ``nbytes`` of the buffer may be written; -1: give the job up."""
        self._send(Filled(serial, nbytes))

    def outcome(self, serial: int, block: bool) -> tuple[bool, str | None]:
        """(ended, error) of a job; waits for its end if ``block``."""
        self._receive(lambda: serial in self.ended, block)
        if self.dead:
            return True, self.ended.get(serial) or self.dead
        return serial in self.ended, self.ended.get(serial)

    def wait_buffer(self, serial: int) -> None:
        """Returns when a job no longer needs the host buffer."""
        self._receive(lambda: serial in self.staged or serial in self.ended, block=True)

    def close(self) -> None:
        """Ends the process; it may still remove old checkpoints, but a job in progress is lost: wait for it first."""
        self.pipe.close()
        try:
            self.process.wait(60.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.buffer.close()

    def _receive(self, until: Callable[[], bool], block: bool) -> None:
        while not self.dead and not until() and (block or self.pipe.poll()):
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):
                self._gone()
                continue
            if isinstance(message, Ended):
                self.ended[message.serial] = message.error
            else:
                self.staged.add(message.serial)

    def _send(self, message: object) -> None:
        if not self.dead:
            try:
                self.pipe.send(message)
            except OSError:
                self._gone()

    def _gone(self) -> None:
        self.dead = f"the checkpoint writer process died with exit code {self.process.wait()}"


def first_error(states: list[tuple[bool, str | None]]) -> str | None:
    """The first of all ranks' errors, with its rank."""
    return next((f"rank {rank}: {error}" for rank, (_, error) in enumerate(states) if error), None)
