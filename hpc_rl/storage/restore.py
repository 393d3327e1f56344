"""Reading a checkpoint at any layout: which extents meet the boxes that a rank wants, then few large reads."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from hpc_rl.errors import UserError
from hpc_rl.storage.files import BLOCK_BYTES, align, new_buffer
from hpc_rl.storage.index import Index
from hpc_rl.storage.manifest import DamagedCheckpoint
from hpc_rl.storage.plan import full_name
from hpc_rl.storage.tensor_io import digest
from hpc_rl.tensors.shardmap import Piece, ShardMap, TensorSpec, intersect

# Small reads, many at a time: memory touched for the first time can be slower than the disk, and a block that was just
# read is still in the processor's cache for its digest and its copy.
READ_BYTES, NUM_IN_FLIGHT, BUFFER_BYTES = 4 << 20, 8, 96 << 20  # of all buffers, unless extents are larger
GAP_BYTES = 1 << 20  # two extents closer than this are read in one go


@dataclass(frozen=True, slots=True)
class Copy:
    """A common box: as a piece of the extent (row-major), and as a piece of a local tensor of ``component``."""

    component: str
    stored: Piece
    local: Piece


@dataclass(frozen=True, slots=True)
class Read:
    """One stretch of a file, the rows of the index that lie in it, and what to copy from each."""

    file: str
    offset: int
    nbytes: int
    rows: tuple[int, ...]


def copies(index: Index, wanted: Mapping[str, ShardMap], source: Path) -> dict[int, list[Copy]]:
    """Row of the index -> copies out of it. Args: wanted: component -> its map.

    Raises: UserError for a tensor that is missing, has another shape or dtype, or is not stored whole.
    """
    out: dict[int, list[Copy]] = {}
    for component, shard_map in wanted.items():
        names = {name: full_name(component, name) for name in shard_map.specs}
        check_specs(index, {names[name]: spec for name, spec in shard_map.specs.items()}, source)
        rows = index.rows(list(names.values()))
        for piece in shard_map.pieces:
            found = 0
            for row in meeting(index, rows[names[piece.name]], piece):
                start, shape = index.box(row)
                pair = intersect(Piece(piece.name, start, shape, "", 0, row_major(shape)), piece)
                if pair:
                    out.setdefault(row, []).append(Copy(component, *pair))
                    found += pair[0].numel
            if found != piece.numel:
                raise UserError(f"{source}: {names[piece.name]} holds {found} of {piece.numel} wanted elements")
    return out


def check_specs(index: Index, specs: Mapping[str, TensorSpec], source: Path) -> None:
    """Every wanted tensor is there with its shape and dtype. Raises UserError."""
    missing = [name for name in specs if name not in index.specs]
    if missing:
        kinds = sorted({name.rsplit("/", 1)[0] for name in missing})
        raise UserError(
            f"{source}: {len(missing)} of {len(specs)} tensors are not in it ({', '.join(kinds)}; first {missing[0]}): "
            "use a checkpoint of the same model that holds its optimizer"
        )
    for name, spec in specs.items():
        saved = index.specs[name]
        if (saved.shape, saved.dtype) != (tuple(spec.shape), spec.dtype):
            raise UserError(
                f"{source}: {name} is {list(saved.shape)} {saved.dtype}, but the run has {list(spec.shape)} "
                f"{spec.dtype}: use the configuration that it was saved with"
            )


def meeting(index: Index, rows: Any, piece: Piece) -> list[int]:
    """Those of ``rows`` whose box shares an element with ``piece``."""
    dims = len(piece.shape)
    start, shape = index.start[rows, :dims], index.shape[rows, :dims]
    low = np.array(piece.start, dtype=np.int64)
    hit = (start < low + np.array(piece.shape, dtype=np.int64)) & (low < start + shape)
    found: list[int] = rows[hit.all(axis=1)].tolist()
    return found


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def reads(index: Index, rows: Sequence[int]) -> list[Read]:
    """Few large stretches that hold all ``rows``, in file order."""
    order = sorted(rows, key=lambda row: (index.file[row], index.offset[row]))
    out: list[Read] = []
    for row in order:
        file, begin, nbytes = index.files[index.file[row]], int(index.offset[row]), int(index.nbytes[row])
        if out and out[-1].file == file:
            last = out[-1]
            near = begin - (last.offset + last.nbytes) <= GAP_BYTES
            if near and begin + nbytes - last.offset <= READ_BYTES:
                out[-1] = Read(file, last.offset, begin + nbytes - last.offset, (*last.rows, row))
                continue
        out.append(Read(file, begin, nbytes, (row,)))
    return out


class Reader:
    """Reads, verifies and hands over stretches of files, several at a time (all of it leaves the interpreter lock)."""

    def __init__(
        self, directory: Path, index: Index, verify: bool, direct: bool = True,
        on_damage: Callable[[DamagedCheckpoint], None] | None = None,
    ) -> None:  # fmt: skip
        self.directory, self.index, self.verify, self.direct = directory, index, verify, direct
        self.on_damage = on_damage  # None: raise
        self.descriptors: dict[str, int] = {}

    def each(self, plan: Sequence[Read], use: Callable[[int, memoryview], None]) -> None:
        """Calls ``use(row, bytes of its extent)`` for each row of ``plan``, in threads of the reader's.

        The bytes are valid during the call only.
        """
        size = align(max((read.nbytes for read in plan), default=0)) + BLOCK_BYTES
        buffers: SimpleQueue[memoryview] = SimpleQueue()
        num_threads = max(3, min(NUM_IN_FLIGHT, BUFFER_BYTES // size))
        for _ in range(min(num_threads, len(plan))):
            buffers.put(new_buffer(size))

        def run(read: Read) -> None:
            buffer = buffers.get()
            try:
                shift = -self.fetch(read, buffer, self.descriptors[read.file])
                for row in read.rows:
                    begin = int(self.index.offset[row]) + shift
                    use(row, buffer[begin : begin + int(self.index.nbytes[row])])
            finally:
                buffers.put(buffer)

        try:
            for file in {read.file for read in plan}:
                self.open(file)
            with ThreadPoolExecutor(num_threads) as pool:
                for _ in pool.map(run, plan):
                    pass
        finally:
            self.close()

    def fetch(self, read: Read, buffer: memoryview, fd: int) -> int:
        """Fills ``buffer`` and checks the digests. Returns the offset in the file of its first byte."""
        begin = read.offset // BLOCK_BYTES * BLOCK_BYTES
        end, position = read.offset + read.nbytes, begin
        while position < end:
            count = os.preadv(fd, [buffer[position - begin : align(end) - begin]], position)
            if count == 0:
                raise DamagedCheckpoint(f"{self.directory / read.file}: ends at {position}, wanted up to {end}")
            position += count
        for row in read.rows if self.verify else ():
            offset = int(self.index.offset[row]) - begin
            self.check(row, buffer[offset : offset + int(self.index.nbytes[row])])
        return begin

    def check(self, row: int, data: memoryview) -> None:
        """Compares the digest of an extent. Raises DamagedCheckpoint, or tells ``on_damage``."""
        if digest(data) == self.index.digest[row].tobytes():
            return
        start, shape = self.index.box(row)
        where = f"{self.directory / self.index.files[self.index.file[row]]}: {self.index.names[self.index.name[row]]}"
        error = DamagedCheckpoint(
            f"{where}, box {list(start)} + {list(shape)}: its digest does not match: use an older checkpoint"
        )
        if self.on_damage is None:
            raise error
        self.on_damage(error)

    def open(self, file: str) -> None:
        """One descriptor per file."""
        path = self.directory / file
        try:
            direct = getattr(os, "O_DIRECT", 0) if self.direct else 0
            self.descriptors[file] = os.open(path, os.O_RDONLY | direct)
        except OSError as error:
            if error.errno == errno.EINVAL:  # no direct I/O here
                self.descriptors[file] = os.open(path, os.O_RDONLY)
            else:
                raise DamagedCheckpoint(f"{path}: {error.strerror}: use an older checkpoint") from error

    def close(self) -> None:
        for fd in self.descriptors.values():
            os.close(fd)
        self.descriptors.clear()
