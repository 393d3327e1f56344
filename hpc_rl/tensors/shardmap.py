"""Shard maps: which boxes of which canonical tensors the local tensors of one rank hold.

Every tensor of the system has one global name and shape: the Hugging Face name and layout, optionally behind a role
and a kind (``actor/param/model.norm.weight``, ``actor/exp_avg/model.norm.weight``). An engine describes what a rank
holds as *pieces*: box of a canonical tensor <-> strided view of a local tensor's flat storage. A strided view is
enough for every layout in use: fused QKV (one piece per query group), gate_up, padded vocabularies, row- and
column-parallel slices, experts, and the flat ranges of a distributed optimizer (at most 2 * dims - 1 boxes a range).

Loading HF weights, exporting them, resharding, and reading a checkpoint at another layout are all the same thing:
the intersection of two shard maps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from hpc_rl.errors import UserError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A canonical tensor: global shape, and the dtype it has as stored (``float32``, ``bfloat16``, ...)."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Piece:
    """The box ``[start, start + shape)`` of canonical tensor ``name``, held in local tensor ``local``.

    Element ``index`` of the box lies at ``offset + sum(index * strides)`` in the flat storage order of the local
    tensor (which is contiguous); offset and strides count elements.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    local: str
    offset: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """True if the box is one run of the local tensor, in the box's row-major order."""
        expected = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != expected:
                return False
            expected *= n
        return True


@dataclass(frozen=True, slots=True)
class ShardMap:
    """All that one rank holds.

    ``specs`` names the canonical tensors its pieces speak of. ``padding``: local tensor -> number of its elements that
    no canonical tensor fills (pad rows of a vocabulary); every other element of a local tensor belongs to one piece.
    """

    specs: Mapping[str, TensorSpec]
    pieces: tuple[Piece, ...]
    padding: Mapping[str, int] = field(default_factory=dict)


def row_piece(name: str, shape: tuple[int, ...], low: int, high: int, local: str, row: int = 0) -> Piece:
    """Rows ``[low, high)`` of canonical ``name`` (of ``shape``), which lie in ``local`` from its row ``row`` on."""
    strides = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    return Piece(name, (low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:]), local, row * strides[0], strides)


def column_piece(name: str, shape: tuple[int, int], low: int, high: int, local: str, offset: int = 0) -> Piece:
    """Columns ``[low, high)`` of matrix ``name``, which fill ``local`` (that wide) from its element ``offset`` on."""
    return Piece(name, (0, low), (shape[0], high - low), local, offset, (high - low, 1))


def whole_piece(name: str, shape: tuple[int, ...], local: str) -> Piece:
    """All of canonical ``name``, which ``local`` holds as it is."""
    return row_piece(name, shape, 0, shape[0], local)


def prefixed(shard_map: ShardMap, canonical: str = "", local: str = "") -> ShardMap:
    """The map with ``canonical`` put before every canonical name and ``local`` before every local one."""
    pieces = tuple(
        Piece(canonical + p.name, p.start, p.shape, local + p.local, p.offset, p.strides) for p in shard_map.pieces
    )
    specs = {canonical + name: spec for name, spec in shard_map.specs.items()}
    return ShardMap(specs, pieces, {local + name: n for name, n in shard_map.padding.items()})


def merged(maps: Iterable[ShardMap]) -> ShardMap:
    """One map of all ``maps``' pieces.

    Raises:
        UserError: if two of them give one canonical tensor different shapes or dtypes.
    """
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    padding: dict[str, int] = {}
    for shard_map in maps:
        for name, spec in shard_map.specs.items():
            if specs.setdefault(name, spec) != spec:
                raise UserError(f"{name} is {specs[name]} in one shard map and {spec} in another")
        pieces += shard_map.pieces
        padding |= shard_map.padding
    return ShardMap(specs, tuple(pieces), padding)


def flat_ranges(
    shard_map: ShardMap, ranges: Mapping[str, tuple[int, int, str, int]], prefix: str, dtype: str
) -> ShardMap:
    """The map of a distributed optimizer's share of one kind of state (``param``, ``exp_avg``, ...).

    Args:
        shard_map: of the whole local parameters.
        ranges: local parameter -> (begin, end, flat tensor, base): its elements ``[begin, end)`` lie in the 1-D local
            tensor ``flat tensor`` from element ``base`` on. Parameters that are not named are another rank's.
        prefix: put before canonical names (``exp_avg/``).
        dtype: of the flat tensors.
    """
    pieces = [
        Piece(prefix + q.name, q.start, q.shape, q.local, q.offset, q.strides)
        for piece in shard_map.pieces
        if piece.local in ranges
        for q in flat_range(piece, *ranges[piece.local])
    ]
    shapes = {prefix + name: TensorSpec(spec.shape, dtype) for name, spec in shard_map.specs.items()}
    return ShardMap({p.name: shapes[p.name] for p in pieces}, tuple(pieces))


def view(piece: Piece, local: Any) -> Any:
    """The view of ``local`` (a contiguous torch tensor) that ``piece`` describes: writing to it writes the shard."""
    assert local.is_contiguous(), f"{piece.local} must be contiguous"
    return local.view(-1).as_strided(piece.shape, piece.strides, local.storage_offset() + piece.offset)


def intersect(a: Piece, b: Piece) -> tuple[Piece, Piece] | None:
    """The common box of two pieces of the same canonical tensor, as (part of a, part of b), or None."""
    if a.name != b.name:
        return None
    start = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    stop = tuple(min(x + n, y + m) for x, n, y, m in zip(a.start, a.shape, b.start, b.shape, strict=True))
    if any(lo >= hi for lo, hi in zip(start, stop, strict=True)):
        return None
    shape = tuple(hi - lo for lo, hi in zip(start, stop, strict=True))
    return crop(a, start, shape), crop(b, start, shape)


def crop(piece: Piece, start: tuple[int, ...], shape: tuple[int, ...]) -> Piece:
    """The part of ``piece`` that holds the box ``[start, start + shape)``, which must lie inside it."""
    shift = sum((s - p) * k for s, p, k in zip(start, piece.start, piece.strides, strict=True))
    return Piece(piece.name, start, shape, piece.local, piece.offset + shift, piece.strides)


def flat_range(piece: Piece, begin: int, end: int, local: str, base: int) -> list[Piece]:
    """Pieces for a flat slice of a local tensor, as a distributed optimizer shards it.

    The slice ``[begin, end)`` of the local tensor that ``piece`` is part of is stored in the 1-D tensor ``local``
    from element ``base`` on. The piece's dims, by falling stride, must nest (as those of a sliced tensor do).

    Returns:
        The boxes of ``piece`` inside the slice: at most 2 * dims - 1 if the piece is contiguous.
    """
    out: list[Piece] = []
    order = sorted(range(len(piece.shape)), key=lambda d: (piece.shape[d] > 1, piece.strides[d]), reverse=True)

    def visit(start: tuple[int, ...], shape: tuple[int, ...], offset: int, level: int) -> None:
        stop = offset + sum((n - 1) * k for n, k in zip(shape, piece.strides, strict=True)) + 1
        if stop <= begin or offset >= end:
            return
        if begin <= offset and stop <= end:
            out.append(Piece(piece.name, start, shape, local, offset - begin + base, piece.strides))
            return
        dim = order[level]
        n, stride = shape[dim], piece.strides[dim]
        inner = stop - offset - (n - 1) * stride  # what one index of this dim spans
        first = min(n, max(0, -(-(begin - offset) // stride)))  # first index that starts inside the slice
        last = max(first, min(n, (end - offset - inner) // stride + 1))  # one past the last that ends inside it
        cut = [(max(0, first - 1), first, level + 1), (first, last, level), (last, min(n, last + 1), level + 1)]
        for low, high, next_level in cut:
            if low < high:
                next_start = (*start[:dim], start[dim] + low, *start[dim + 1 :])
                visit(next_start, (*shape[:dim], high - low, *shape[dim + 1 :]), offset + low * stride, next_level)

    visit(piece.start, piece.shape, piece.offset, 0)
    return out
