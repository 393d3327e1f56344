"""One shard file: a small HDF5 skeleton made in memory, around a few datasets written as large aligned blocks.

HDF5 lays the file out; the bytes go to disk through `Files`, because that is several times faster than through
HDF5, can be killed at every write by a test, and lets the digests be taken on the way.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5p, h5s

from hpc_rl.storage.blocks import write_data
from hpc_rl.storage.files import Files
from hpc_rl.storage.plan import Extent, Region, regions, state_name, with_state
from hpc_rl.storage.tensor_io import digest, h5_type, itemsize


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a shard file: what it writes, and the size of its own bytes."""

    rank: int
    extents: tuple[Extent, ...]
    state_bytes: int

    def regions(self) -> tuple[Region, ...]:
        return regions(self.extents, self.rank, self.state_bytes)

    def dataset(self, extent: Extent) -> str:
        """Name, in the rank's group, of the dataset that holds one of its extents."""
        return "state" if extent.name == state_name(self.rank) else extent.dtype

    def all_extents(self) -> tuple[Extent, ...]:
        return with_state(self.extents, self.rank, self.state_bytes)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A shard file without its data: ``pages`` as (offset, bytes), ``offsets`` of its datasets, its size."""

    pages: tuple[tuple[int, bytes], ...]
    offsets: dict[str, int]
    nbytes: int
    gap_digest: bytes  # of all bytes outside the extents, in file order


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank wrote: handed to the rank that finishes the checkpoint."""

    rank: int
    file: str
    nbytes: int
    gap_digest: str
    offsets: list[int]  # of its extents in the file, in bytes
    digests: list[str]  # of its extents

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class SparseFile(io.RawIOBase):
    """An in-memory file that keeps only what was written: HDF5 datasets without data take no room."""

    def __init__(self) -> None:
        self.pos = self.size = 0
        self.segments: list[tuple[int, bytes]] = []

    def seek(self, offset: int, whence: int = 0) -> int:
        self.pos = offset + (0, self.pos, self.size)[whence]
        return self.pos

    def tell(self) -> int:
        return self.pos

    def write(self, data: Any) -> int:
        chunk = bytes(data)
        self.segments.append((self.pos, chunk))
        self.pos += len(chunk)
        self.size = max(self.size, self.pos)
        return len(chunk)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view[:] = self.bytes_at(self.pos, view.nbytes)
        self.pos += view.nbytes
        return view.nbytes

    def truncate(self, size: int | None = None) -> int:
        self.size = self.pos if size is None else size
        return self.size

    def bytes_at(self, offset: int, nbytes: int) -> bytes:
        """The content there; zeros where nothing was written."""
        out = bytearray(nbytes)
        for begin, chunk in self.segments:
            low, high = max(begin, offset), min(begin + len(chunk), offset + nbytes)
            if low < high:
                out[low - offset : high - offset] = chunk[low - begin : high - begin]
        return bytes(out)

    def runs(self) -> list[tuple[int, bytes]]:
        """What was written, as few (offset, bytes) as possible."""
        spans: list[list[int]] = []
        for begin, end in sorted((begin, begin + len(chunk)) for begin, chunk in self.segments):
            if spans and begin <= spans[-1][1] + 4096:  # one write rather than two, zeros between
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([begin, end])
        return [(begin, self.bytes_at(begin, end - begin)) for begin, end in spans]


def skeleton(members: Sequence[Member], alignment_bytes: int) -> Skeleton:
    """The shard file of ``members``, the same on each of them; datasets begin at multiples of ``alignment_bytes``."""
    sparse = SparseFile()
    offsets: dict[str, int] = {}
    with h5py.File(
        sparse, "w", libver=("earliest", "v110"), alignment_threshold=4096, alignment_interval=alignment_bytes
    ) as file:
        for member in members:
            offsets |= add_group(file, member)
    size = max([sparse.size, *(offsets[r.dataset] + r.nbytes for m in members for r in m.regions())])
    gaps, position = [], 0
    for begin, nbytes in sorted(spans(members, offsets)):
        gaps.append(sparse.bytes_at(position, begin - position))
        position = begin + nbytes
    gaps.append(sparse.bytes_at(position, size - position))
    return Skeleton(tuple(sparse.runs()), offsets, size, digest(b"".join(gaps)))


def add_group(file: h5py.File, member: Member) -> dict[str, int]:
    """The group of one rank: a table of its extents, and its datasets, empty. Returns where these begin in the file."""
    group = file.create_group(f"rank_{member.rank:05d}")
    table = [asdict(extent) for extent in member.all_extents()]
    group.create_dataset("extents.json", data=np.bytes_(json.dumps(table)), track_times=False)
    return {region.dataset: create_dataset(file, region) for region in member.regions()}


def create_dataset(file: h5py.File, region: Region) -> int:
    """An empty contiguous dataset with its room in the file. Returns where that room begins, in bytes."""
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_layout(h5d.CONTIGUOUS)
    plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)  # the same bytes on every member
    space = h5s.create_simple((region.nbytes // itemsize(region.dtype),))
    dataset = h5d.create(file.id, region.dataset.encode(), h5_type(region.dtype), space, plist)
    offset: int = dataset.get_offset()
    return offset


def spans(members: Sequence[Member], offsets: dict[str, int]) -> list[tuple[int, int]]:
    """(offset in the file, bytes) of every extent, in the order of members and their extents."""
    out = []
    for member in members:
        group = f"rank_{member.rank:05d}"
        for extent in member.all_extents():
            out.append(
                (offsets[f"{group}/{member.dataset(extent)}"] + extent.begin * itemsize(extent.dtype), extent.nbytes)
            )
    return out


def shard_files(hosts: Sequence[str], files_per_node: int) -> list[tuple[str, tuple[int, ...]]]:
    """For every rank: its shard file, and the ranks that share it. Directories hold at most 256 files each.

    Args: hosts: of every rank. files_per_node: 0 for one file per rank.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks = [r for r, other in enumerate(hosts) if other == host]
        part = ranks.index(rank) * files_per_node // len(ranks) if files_per_node else rank
        groups.setdefault((host, part), []).append(rank)
    out: list[tuple[str, tuple[int, ...]]] = [("", ())] * len(hosts)
    for ranks in groups.values():
        fan = f"{ranks[0] // 256:03d}/" if len(hosts) > 256 else ""
        for rank in ranks:
            out[rank] = (f"shards/{fan}rank_{ranks[0]:05d}.h5", tuple(ranks))
    return out


def gap_digest(path: Path, extents: Sequence[tuple[int, int]]) -> bytes:
    """Digest of all bytes of a shard file outside its extents, given as (offset, bytes)."""
    gaps: list[bytes] = []
    with path.open("rb") as file:
        for offset, nbytes in sorted(extents):
            gaps.append(file.read(max(0, offset - file.tell())))
            file.seek(offset + nbytes)
        gaps.append(file.read())
    return digest(b"".join(gaps))


def alignment(members: Sequence[Member], wanted_bytes: int) -> int:
    """``wanted_bytes``, unless that would blow up a small file."""
    total = sum(region.nbytes for member in members for region in member.regions())
    return wanted_bytes if total >= 16 * wanted_bytes else 4096


def write_shard(
    files: Files, directory: Path, file: str, members: Sequence[Member], rank: int, frame: Skeleton,
    buffer: memoryview, wait_filled: Callable[[int], None], direct: bool,
) -> Report:  # fmt: skip
    """Writes one rank's part of a shard file from its host buffer, and fsyncs it.

    Args: frame: of the file. buffer: bytes of its regions. wait_filled(n): returns once the first n bytes are there.
    """
    path = directory / file
    files.makedirs(path.parent)
    if rank == members[0].rank:
        write_skeleton(files, path, frame)
    member = next(m for m in members if m.rank == rank)
    fd = files.open(path, direct)
    try:
        digests = write_data(partial(files.pwrite, fd), member, frame.offsets, buffer, wait_filled)
        files.fsync(fd)
    finally:
        os.close(fd)
    files.fsync_dir(path.parent)
    offsets = [offset for offset, _ in spans([member], frame.offsets)]
    return Report(rank, file, frame.nbytes, frame.gap_digest.hex(), offsets, [d.hex() for d in digests])


def write_skeleton(files: Files, path: Path, frame: Skeleton) -> None:
    """Everything of the file but its data, to its full size; synced with the data."""
    fd = files.open(path)
    try:
        for offset, data in frame.pages:
            files.pwrite(fd, data, offset)
        files.truncate(fd, frame.nbytes)
    finally:
        os.close(fd)
