"""Every change to a checkpoint directory, one system call per method, so that a test can stop at each of them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

BLOCK_BYTES = 4096  # direct I/O wants offsets, lengths and addresses to be multiples of this


class Files:
    """The real file system. Tests subclass it to die, fail or forget at the n-th operation."""

    def makedirs(self, path: Path) -> None:
        os.makedirs(path, exist_ok=True)

    def open(self, path: Path, direct: bool = False) -> int:
        """A descriptor to write ``path`` with, created if missing. ``direct``: bypass the page cache where possible."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        if direct and hasattr(os, "O_DIRECT"):
            try:
                return os.open(path, flags | os.O_DIRECT, 0o644)
            except OSError as error:  # tmpfs and some network file systems
                if error.errno != errno.EINVAL:
                    raise
        return os.open(path, flags, 0o644)

    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        """All of ``data`` at ``offset``."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fsync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def exchange(self, a: Path, b: Path) -> bool:
        """Swaps two names at once (renameat2). False where the system or the file system cannot."""
        at_cwd, flag_exchange = -100, ctypes.c_uint(2)
        renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
        return bool(renameat2 and renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), flag_exchange) == 0)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)


def write_file(files: Files, path: Path, data: bytes | memoryview, durable: bool = True) -> None:
    """A small file, whole; on the disk before this returns if ``durable``."""
    fd = files.open(path)
    try:
        files.pwrite(fd, data, 0)
        if durable:
            files.fsync(fd)
    finally:
        os.close(fd)


def remove_tree(files: Files, path: Path) -> None:
    """Removes a directory and all in it; what is gone already is no error."""
    try:
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                remove_tree(files, Path(entry.path))
            else:
                files.unlink(Path(entry.path))
        files.rmdir(path)
    except FileNotFoundError:
        return


def align(nbytes: int, to: int = BLOCK_BYTES) -> int:
    """``nbytes`` rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to


def new_buffer(nbytes: int) -> memoryview:
    """Page-aligned memory, in huge pages where the system gives them: touched for the first time many times faster."""
    memory = mmap.mmap(-1, align(nbytes, 2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
