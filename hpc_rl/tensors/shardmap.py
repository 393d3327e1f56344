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

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any


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


@dataclass(frozen=True, slots=True)
class ShardMap:
    """All that one rank holds. ``specs`` names the canonical tensors its pieces speak of."""

    specs: Mapping[str, TensorSpec]
    pieces: tuple[Piece, ...]


def view(piece: Piece, local: Any) -> Any:
    """The strided view of ``local`` (contiguous torch tensor) that ``piece`` describes; writing to it writes it."""
    assert local.is_contiguous(), f"{piece.local} must be contiguous"
    return local.view(-1).as_strided(piece.shape, piece.strides, local.storage_offset() + piece.offset)


def intersect(a: Piece, b: Piece) -> tuple[Piece, Piece] | None:
    """The common box of two pieces of the same canonical tensor, as (part of a, part of b), or None."""
    if a.name != b.name:
        return None
    start = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    stop = tuple(
        min(x + n, y + m) for x, n, y, m in zip(a.start, a.shape, b.start, b.shape, strict=True)
    )
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
    from element ``base`` on. Returns the boxes of ``piece`` inside the slice (at most 2 * dims - 1 when piece is
    dense in its last dim).
    """
    out: list[Piece] = []

    def visit(start: tuple[int, ...], shape: tuple[int, ...], offset: int, dim: int) -> None:
        low, high = offset, offset + sum((n - 1) * s for n, s in zip(shape, piece.strides, strict=True)) + 1
        if high <= begin or low >= end:
            return
        if begin <= low and high <= end:
            out.append(Piece(piece.name, start, shape, local, offset - begin + base, piece.strides))
            return
        n, stride = shape[dim], piece.strides[dim]
        inner = sum((m - 1) * s for m, s in zip(shape[dim + 1 :], piece.strides[dim + 1 :], strict=True)) + 1
        first = min(n, max(0, -(-(begin - offset) // stride)))  # first index that starts inside the slice
        last = max(first, min(n, (end - offset - inner) // stride + 1))  # one past the last that ends inside it

        def part(lo: int, hi: int, next_dim: int) -> None:
            if lo < hi:
                visit(
                    start[:dim] + (start[dim] + lo,) + start[dim + 1 :],
                    shape[:dim] + (hi - lo,) + shape[dim + 1 :],
                    offset + lo * stride,
                    next_dim,
                )

        for lo in range(max(0, first - 1), first):
            part(lo, lo + 1, dim + 1)
        part(first, last, dim)
        for lo in range(last, min(n, last + 1)):
            part(lo, lo + 1, dim + 1)

    if piece.shape:
        visit(piece.start, piece.shape, piece.offset, 0)
    elif begin <= piece.offset < end:
        out.append(Piece(piece.name, (), (), local, piece.offset - begin + base, ()))
    return out
