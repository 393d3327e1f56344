"""Proofs about shard maps: every element of a local tensor belongs to one piece; how much of a tensor boxes cover."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod

import numpy as np

from hpc_rl.errors import UserError
from hpc_rl.tensors.shardmap import Piece, ShardMap


def check_local_coverage(shard_map: ShardMap, numels: Mapping[str, int]) -> None:
    """Proves that the pieces fill every local tensor exactly once, up to the declared padding.

    Args:
        shard_map: of one rank.
        numels: local tensor -> number of elements it has, all local tensors.

    Raises:
        UserError: naming a local tensor that is uncovered, covered twice, or too small for its pieces.
    """
    by_local: dict[str, list[Piece]] = defaultdict(list)
    for piece in shard_map.pieces:
        by_local[piece.local].append(piece)
    if unknown := sorted(set(by_local) - set(numels)):
        raise UserError(f"the shard map speaks of {unknown[0]} ({by_local[unknown[0]][0].name}), which this rank lacks")
    for local, numel in numels.items():
        pieces = by_local.get(local, [])
        names = ", ".join(sorted({p.name for p in pieces})) or "no canonical tensor"
        if any(_last(p) >= numel or p.offset < 0 for p in pieces):
            raise UserError(f"{local} has {numel} elements, too few for {names}")
        covered = sum(p.numel for p in pieces)
        if _overlap(pieces, numel):
            raise UserError(f"{local} is written more than once in places by {names}")
        if covered + shard_map.padding.get(local, 0) != numel:
            raise UserError(
                f"{local} has {numel} elements, of which {names} fill {covered} "
                f"and {shard_map.padding.get(local, 0)} are padding: {numel - covered} are left uncovered"
            )


def check_same_tensors(maps: Iterable[ShardMap], what: str = "maps") -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape over all ``maps``.

    Raises:
        UserError: naming a canonical tensor that has two shapes.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for shard_map in maps:
        for name, spec in shard_map.specs.items():
            if shapes.setdefault(name, spec.shape) != spec.shape:
                raise UserError(
                    f"{name} is {list(shapes[name])} on one rank and {list(spec.shape)} on another, in {what}"
                )
    return shapes


def covered_numel(boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> int:
    """Number of elements in the union of ``boxes`` = (start, shape), which may overlap."""
    todo = list(dict.fromkeys(boxes))
    if not todo:
        return 0
    if len(todo) == 1 or not todo[0][0]:
        return prod(todo[0][1])
    # Cut along the first dim wherever a box begins or ends; in each slab the other dims are a smaller problem.
    cuts = sorted({s[0] for s, _ in todo} | {s[0] + n[0] for s, n in todo})
    total = 0
    for low, high in zip(cuts, cuts[1:], strict=False):
        slab = [(s[1:], n[1:]) for s, n in todo if s[0] <= low and high <= s[0] + n[0]]
        total += (high - low) * covered_numel(slab)
    return total


def _last(piece: Piece) -> int:
    return piece.offset + sum((n - 1) * k for n, k in zip(piece.shape, piece.strides, strict=True))


def _overlap(pieces: list[Piece], numel: int) -> bool:
    if all(p.is_contiguous for p in pieces):
        spans = sorted((p.offset, p.offset + p.numel) for p in pieces)
        return any(a[1] > b[0] for a, b in zip(spans, spans[1:], strict=False))
    count = np.zeros(numel, dtype=np.uint8)
    for p in pieces:
        view = np.lib.stride_tricks.as_strided(count[p.offset :], p.shape, p.strides)
        if np.any(view):
            return True
        view[...] = 1
    return False
