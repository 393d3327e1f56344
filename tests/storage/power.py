"""A disk that loses power: what was not synced may be there, in part, or not at all.

`Notes` runs a save on a real directory and writes down every operation. `after_power_loss` replays the notes up to some
operation on a model of the disk. Content of a file is sure up to its last fsync, of what came later any subset of the
writes may have got there. An entry of a directory is sure up to its last fsync_dir; later entries got there up to any
point, in their order (as journaling file systems do it), each directory for itself.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl.storage.files import Files


class Notes(Files):
    """Does each operation, and writes it down."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self._paths: dict[int, Path] = {}  # descriptors are reused: the latest is meant

    def makedirs(self, path: Path) -> None:
        for parent in [*reversed(path.parents), path]:
            if not parent.exists():
                self.log.append(("mkdir", parent))
        super().makedirs(path)

    def open(self, path: Path, direct: bool = False) -> int:
        if not path.exists():
            self.log.append(("create", path))
        fd = super().open(path, direct)
        self._paths[fd] = path
        return fd

    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        super().pwrite(fd, data, offset)
        self.log.append(("write", self._paths[fd], offset, bytes(data)))

    def truncate(self, fd: int, nbytes: int) -> None:
        super().truncate(fd, nbytes)
        self.log.append(("truncate", self._paths[fd], nbytes))

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self.log.append(("fsync", self._paths[fd]))

    def fsync_dir(self, path: Path) -> None:
        super().fsync_dir(path)
        self.log.append(("fsync_dir", path))

    def rename(self, source: Path, target: Path) -> None:
        assert source.parent == target.parent, "the model knows renames within a directory only"
        super().rename(source, target)
        self.log.append(("rename", source, target))

    def exchange(self, a: Path, b: Path) -> bool:
        assert a.parent == b.parent
        done = super().exchange(a, b)
        assert done, "these tests need renameat2"
        self.log.append(("exchange", a, b))
        return done

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.log.append(("remove", path))

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        self.log.append(("remove", path))


@dataclass
class File:
    """What is sure of a file, and what is not."""

    content: bytearray = field(default_factory=bytearray)
    pending: list[tuple[Any, ...]] = field(default_factory=list)

    def apply(self, operations: list[tuple[Any, ...]]) -> None:
        for name, *args in operations:
            if name == "truncate":
                del self.content[args[0] :]
                self.content.extend(bytes(args[0] - len(self.content)))
            else:
                offset, data = args
                self.content.extend(bytes(max(0, offset + len(data) - len(self.content))))
                self.content[offset : offset + len(data)] = data


@dataclass
class Directory:
    """``entries`` as a running system sees them; ``sure`` as the disk has them, ``pending`` changes in their order."""

    entries: dict[str, File | Directory] = field(default_factory=dict)
    sure: dict[str, File | Directory] = field(default_factory=dict)
    pending: list[tuple[Any, ...]] = field(default_factory=list)


def change(entries: dict[str, File | Directory], operation: tuple[Any, ...]) -> None:
    """Applies one change to the entries of a directory. What it speaks of may itself have got lost."""
    name, *args = operation
    if name == "add":
        entries[args[0]] = args[1]
    elif name == "remove":
        entries.pop(args[0], None)
    elif name == "rename":
        if args[0] in entries:
            entries[args[1]] = entries.pop(args[0])
    else:
        entries[args[0]], entries[args[1]] = entries[args[1]], entries[args[0]]


class Disk:
    """The model, starting from a real directory that is sure."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = self._read(root)

    def _read(self, path: Path) -> Directory:
        found: dict[str, File | Directory] = {}
        for entry in os.scandir(path):
            child = Path(entry.path)
            found[entry.name] = self._read(child) if entry.is_dir() else File(bytearray(child.read_bytes()))
        return Directory(dict(found), dict(found))

    def find(self, path: Path) -> Any:
        node: Any = self.top
        for part in path.relative_to(self.root).parts:
            node = node.entries[part]
        return node

    def do(self, operation: tuple[Any, ...]) -> None:
        """One operation of the notes."""
        name, path, *args = operation
        if name in ("write", "truncate"):
            self.find(path).pending.append((name, *args))
        elif name == "fsync":
            file = self.find(path)
            file.apply(file.pending)
            file.pending.clear()
        elif name == "fsync_dir":
            directory = self.find(path)
            for pending in directory.pending:
                change(directory.sure, pending)
            directory.pending.clear()
        else:
            directory = self.find(path.parent)
            new = {"mkdir": Directory, "create": File}.get(name)
            entry = ("add", path.name, new()) if new else (name, path.name, *(other.name for other in args))
            change(directory.entries, entry)
            directory.pending.append(entry)

    def lose_power(self, target: Path, rng: random.Random) -> None:
        """Writes one of the states that the disk may be in to ``target``."""
        self._write(self.top, target, rng)

    def _write(self, node: File | Directory, target: Path, rng: random.Random) -> None:
        if isinstance(node, File):
            survived = rng.choice([0.0, 0.5, 1.0])
            lucky = File(bytearray(node.content))
            lucky.apply([operation for operation in node.pending if rng.random() < survived])
            target.write_bytes(lucky.content)
            return
        target.mkdir()
        entries = dict(node.sure)
        for operation in node.pending[: rng.choice([0, rng.randint(0, len(node.pending)), len(node.pending)])]:
            change(entries, operation)
        for name, child in entries.items():
            self._write(child, target / name, rng)


def after_power_loss(before: Path, log: list[tuple[Any, ...]], count: int, target: Path, rng: random.Random) -> None:
    """The disk ``before``, after ``count`` operations of ``log`` and a loss of power, written to ``target``."""
    disk = Disk(before)
    for operation in log[:count]:
        disk.do(operation)
    disk.lose_power(target, rng)
