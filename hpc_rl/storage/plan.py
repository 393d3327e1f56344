"""Who writes which box of which canonical tensor: a pure function of the maps of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from hpc_rl.storage.files import align
from hpc_rl.storage.tensor_io import itemsize
from hpc_rl.tensors.shardmap import ShardMap, TensorSpec

MAX_EXTENT_BYTES = 32 << 20  # unit of digest, of reading and of balance
MIN_EXTENT_BYTES = 256 << 10

RESERVED = ("state", "_layout")  # names in index.h5 that are no component's

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start, shape


@dataclass(frozen=True, slots=True)
class Holding:
    """The boxes that one rank holds, by canonical name. What every rank tells every other."""

    specs: Mapping[str, TensorSpec]
    boxes: Mapping[str, tuple[Box, ...]]


@dataclass(frozen=True, slots=True)
class Extent:
    """A box that one rank writes in one stretch, row-major, from element ``begin`` of its dataset of ``dtype`` on."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    begin: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Region:
    """One HDF5 dataset of one rank: ``nbytes`` (padded to 4096) from ``offset`` on in its host buffer."""

    dataset: str
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """``ranks[r]``: what rank r writes, in file order; each element of each canonical tensor occurs exactly once."""

    specs: Mapping[str, TensorSpec]
    ranks: tuple[tuple[Extent, ...], ...]


def holding(maps: Mapping[str, ShardMap]) -> Holding:
    """The boxes of one rank's components, under their full names ``component/name``."""
    specs: dict[str, TensorSpec] = {}
    boxes: dict[str, dict[Box, None]] = defaultdict(dict)
    for component, shard_map in maps.items():
        assert component not in RESERVED, f"a component may not be called {component}"
        for name, spec in shard_map.specs.items():
            specs[full_name(component, name)] = spec
        for piece in shard_map.pieces:
            if piece.numel:
                boxes[full_name(component, piece.name)][(piece.start, piece.shape)] = None
    return Holding(specs, {name: tuple(found) for name, found in boxes.items()})


def full_name(component: str, name: str) -> str:
    """``component/name``, once."""
    return name if name.startswith(f"{component}/") else f"{component}/{name}"


def plan(holdings: Sequence[Holding]) -> Plan:
    """Assigns every element to one of its holders, balanced by bytes.

    Args: holdings: of every rank, in rank order. Returns: the plan, the same on every rank.
    Raises: AssertionError where elements of a tensor are held by no rank, or two ranks disagree on a tensor.
    """
    specs = merge_specs(holdings)
    held: dict[str, dict[Box, list[int]]] = {name: {} for name in specs}
    for rank, one in enumerate(holdings):
        for name, boxes in one.boxes.items():
            for box in boxes:
                held[name].setdefault(box, []).append(rank)
    limit = extent_limit(specs, len(holdings))
    work: list[tuple[Extent, list[int]]] = []
    for name in sorted(specs):
        spec = specs[name]
        for (start, shape), ranks in carve(name, spec, held[name]):
            for part_start, part_shape in split(start, shape, max(1, limit // itemsize(spec.dtype))):
                work.append((Extent(name, part_start, part_shape, spec.dtype), ranks))
    return Plan(specs, assign(work, len(holdings)))


def merge_specs(holdings: Iterable[Holding]) -> dict[str, TensorSpec]:
    """The tensors of all ranks, which must agree."""
    specs: dict[str, TensorSpec] = {}
    for rank, one in enumerate(holdings):
        for name, spec in one.specs.items():
            known = specs.setdefault(name, spec)
            assert known == spec, f"{name} is {spec} on rank {rank}, but {known} on an earlier rank"
    return specs


def extent_limit(specs: Mapping[str, TensorSpec], num_ranks: int) -> int:
    """Largest extent, in bytes: small enough that 16 of them make an equal share."""
    total = sum(prod(spec.shape) * itemsize(spec.dtype) for spec in specs.values())
    share = max(1, total // (16 * num_ranks))
    return min(MAX_EXTENT_BYTES, max(MIN_EXTENT_BYTES, 1 << (share - 1).bit_length()))


def carve(name: str, spec: TensorSpec, held: Mapping[Box, list[int]]) -> list[tuple[Box, list[int]]]:
    """Disjoint boxes with their holders. Boxes held alike by several ranks are one; partial overlaps are cut away."""
    boxes = sorted(held, key=lambda box: (-prod(box[1]), box[0], box[1]))
    if overlapping(boxes):
        disjoint: list[tuple[Box, list[int]]] = []
        for box in boxes:
            rest = [box]
            for other, _ in disjoint:
                rest = [part for piece in rest for part in subtract(piece, other)]
            disjoint += [(part, held[box]) for part in rest]
    else:
        disjoint = [(box, held[box]) for box in boxes]
    missing = prod(spec.shape) - sum(prod(shape) for (_, shape), _ in disjoint)
    assert missing == 0, f"{name}: {missing} of {prod(spec.shape)} elements are held by no rank"
    return disjoint


def overlapping(boxes: Sequence[Box]) -> bool:
    """Whether any two boxes share an element."""
    if len(boxes) < 2 or not boxes[0][0]:
        return False
    start = np.array([box[0] for box in boxes])
    stop = start + np.array([box[1] for box in boxes])
    for i in range(len(boxes) - 1):
        common = (start[i] < stop[i + 1 :]) & (start[i + 1 :] < stop[i])
        if common.all(axis=1).any():
            return True
    return False


def subtract(box: Box, other: Box) -> list[Box]:
    """``box`` without ``other``, as at most 2 * dims boxes."""
    start, shape = list(box[0]), list(box[1])
    if any(s >= o + m or o >= s + n for s, n, o, m in zip(start, shape, *other, strict=True)):
        return [box]
    out: list[Box] = []
    for dim, (low, size) in enumerate(zip(*other, strict=True)):
        for begin, end in ((start[dim], low), (low + size, start[dim] + shape[dim])):
            if begin < end:
                out.append(((*start[:dim], begin, *start[dim + 1 :]), (*shape[:dim], end - begin, *shape[dim + 1 :])))
        begin, end = max(start[dim], low), min(start[dim] + shape[dim], low + size)
        start[dim], shape[dim] = begin, end - begin
    return out


def split(start: tuple[int, ...], shape: tuple[int, ...], max_numel: int) -> list[Box]:
    """A box cut into boxes of at most ``max_numel`` elements, along its first dims, in row-major order."""
    if prod(shape) <= max_numel:
        return [(start, shape)]
    dim = next(d for d, n in enumerate(shape) if n > 1)
    rows = max(1, max_numel // prod(shape[dim + 1 :]))
    out: list[Box] = []
    for low in range(0, shape[dim], rows):
        part_start = (*start[:dim], start[dim] + low, *start[dim + 1 :])
        part_shape = (*shape[:dim], min(rows, shape[dim] - low), *shape[dim + 1 :])
        out += split(part_start, part_shape, max_numel)
    return out


def assign(work: list[tuple[Extent, list[int]]], num_ranks: int) -> tuple[tuple[Extent, ...], ...]:
    """Largest first to the least loaded holder, those with fewest holders before all others."""
    loads = [0] * num_ranks
    chosen: list[list[Extent]] = [[] for _ in range(num_ranks)]
    for extent, ranks in sorted(work, key=lambda item: (len(item[1]), -item[0].nbytes)):
        rank = min(ranks, key=lambda r: loads[r])
        loads[rank] += extent.nbytes
        chosen[rank].append(extent)
    return tuple(place(extents) for extents in chosen)


def place(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """File order of one rank: by dtype, then name and position; sets ``begin``."""
    filled: dict[str, int] = defaultdict(int)
    out = []
    for extent in sorted(extents, key=lambda e: (e.dtype, e.name, e.start)):
        out.append(Extent(extent.name, extent.start, extent.shape, extent.dtype, filled[extent.dtype]))
        filled[extent.dtype] += extent.numel
    return tuple(out)


def regions(extents: Sequence[Extent], rank: int, state_bytes: int) -> tuple[Region, ...]:
    """The datasets of one rank: one per dtype and, last, ``state`` with the rank's own bytes (RNG states and such)."""
    used: dict[str, int] = defaultdict(int)
    for extent in extents:
        used[extent.dtype] += extent.nbytes
    out: list[Region] = []
    offset = 0
    for dataset, dtype, nbytes in [*((d, d, n) for d, n in used.items()), ("state", "uint8", state_bytes)]:
        if nbytes:
            out.append(Region(f"rank_{rank:05d}/{dataset}", dtype, offset, align(nbytes)))
            offset += align(nbytes)
    return tuple(out)


def with_state(extents: tuple[Extent, ...], rank: int, state_bytes: int) -> tuple[Extent, ...]:
    """The extents of a rank with its own bytes as a last one, named ``state/rank_NNNNN``."""
    state = Extent(state_name(rank), (0,), (state_bytes,), "uint8")
    return (*extents, state) if state_bytes else extents


def state_name(rank: int) -> str:
    """Canonical name of a rank's own bytes."""
    return f"state/rank_{rank:05d}"
