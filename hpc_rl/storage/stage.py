"""Burst buffer: a rank's bytes wait on a node-local disk, so that its host buffer is free before the shard is there."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

from hpc_rl.storage.files import Files

BLOCK_BYTES = 32 << 20


def stage(files: Files, path: Path, buffer: memoryview, nbytes: int, wait_filled: Callable[[int], None]) -> mmap.mmap:
    """Writes the first ``nbytes`` of the host buffer to ``path``; returns them mapped from there.

    Not synced: what a crash loses here belongs to a checkpoint that was not whole.
    """
    files.makedirs(path.parent)
    fd = files.open(path, direct=True)
    try:
        for begin in range(0, nbytes, BLOCK_BYTES):
            end = min(begin + BLOCK_BYTES, nbytes)
            wait_filled(end)
            files.pwrite(fd, buffer[begin:end], begin)
    finally:
        os.close(fd)
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
