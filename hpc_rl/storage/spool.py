"""The trainer's side of the writer process: the shared host buffer, the pipe, and the outcome."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from hpc_rl.storage.finish import Whole
from hpc_rl.storage.writer import Job

_WRITER = "from hpc_rl.storage.writer import main; main()"  # not -m: pickled jobs name the module


class HostBuffer:
    """Host memory shared with the writer process, reused by every save; page-locked where there is a GPU."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("hpc_rl_checkpoint")
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> Tensor:
        """uint8 [>= nbytes], the same memory each time unless it has to grow."""
        if self.tensor.numel() < max(1, nbytes):
            self._unpin()
            os.ftruncate(self.fd, nbytes)
            self.tensor = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)
            if torch.cuda.is_available():
                torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), nbytes, 0)
        return self.tensor

    def _unpin(self) -> None:
        if self.tensor.numel() and torch.cuda.is_available():
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())

    def close(self) -> None:
        self._unpin()
        self.tensor = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)


class Spool:
    """One writer process and at most one job in it."""

    def __init__(self) -> None:
        self.buffer = HostBuffer()
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _WRITER, str(theirs.fileno()), str(self.buffer.fd), str(os.getpid())],
                pass_fds=(theirs.fileno(), self.buffer.fd),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
            )
        self.pipe = Connection(ours.detach())
        self.result: tuple[bool, str | None] = True, None  # of the last job: (ended, error)
        self.dead: str | None = None

    def start(self, job: Job, whole: Whole | None) -> None:
        """Hands over a job; its data follows through the buffer, announced by `filled`."""
        assert self.result[0], "one job at a time"
        self.result = False, None
        if whole is not None:
            self._send(whole)
        self._send(job)

    def filled(self, nbytes: int) -> None:
        """The first ``nbytes`` of the buffer may be written; -1: give the job up."""
        self._send(nbytes)

    def outcome(self, block: bool) -> tuple[bool, str | None]:
        """(ended, error) of the last job; waits for its end if ``block``."""
        if not self.result[0] and (block or self.dead or self.pipe.poll()):
            try:
                self.result = True, self.dead or self.pipe.recv()
            except (EOFError, OSError):
                self.result = True, self._gone()
        return self.result

    def close(self) -> None:
        """Ends the process. A job in progress is lost: wait for its outcome first."""
        self.pipe.close()
        self.process.wait()
        self.buffer.close()

    def _send(self, message: object) -> None:
        if not self.dead:
            try:
                self.pipe.send(message)
            except OSError:
                self._gone()

    def _gone(self) -> str:
        self.dead = f"the checkpoint writer process died with exit code {self.process.wait()}"
        return self.dead
