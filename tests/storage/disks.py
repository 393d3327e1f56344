"""Disks of another temper than the real one. No torch here: the writer process imports this."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpc_rl.storage.files import Files


class Slow(Files):
    """Takes its time over each write."""

    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        time.sleep(0.2)
        super().pwrite(fd, data, offset)


class Broken(Files):
    """Neither data nor the marker that says so can be written."""

    def open(self, path: Path, direct: bool = False) -> int:
        raise OSError(5, os.strerror(5))


class SlowSync(Files):
    """Takes its time over each fsync, and says that it has begun."""

    def __init__(self, begun: Path) -> None:
        self.begun = begun

    def fsync(self, fd: int) -> None:
        self.begun.touch()
        time.sleep(1.0)
        super().fsync(fd)
