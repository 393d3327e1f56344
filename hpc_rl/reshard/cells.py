"""Cutting a target box into disjoint cells, each with all the source pieces that hold it whole."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hpc_rl.errors import UserError
from hpc_rl.tensors.shardmap import Piece

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start, shape
Holder = tuple[int, Piece]  # (number of a source map, its piece)
Cell = tuple[Box, tuple[Holder, ...]]


def cells_of(target: Piece, holders: Sequence[Holder]) -> list[Cell]:
    """Disjoint boxes that make up ``target``, each with every holder that has the whole of it.

    Args:
        target: a piece of some rank's target map.
        holders: all pieces of the same canonical tensor in the source maps.

    Raises:
        UserError: naming the tensor, if no source holds some of its elements.
    """
    by_box: dict[Box, list[Holder]] = {}
    for holder in holders:
        box = common_box((target.start, target.shape), (holder[1].start, holder[1].shape))
        if box is not None:
            by_box.setdefault(box, []).append(holder)
    cells: list[Cell] = [(box, tuple(who)) for box, who in by_box.items()]
    if len(cells) > 1 and not _disjoint(list(by_box)):
        cells = _refine(cells)
    found = sum(prod(box[1]) for box, _ in cells)
    if found != target.numel:
        raise UserError(
            f"{target.name}: the target {target.local} needs the box of shape {list(target.shape)} at "
            f"{list(target.start)}, of whose {target.numel} elements the sources hold only {found}"
        )
    return cells


def common_box(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes, or None."""
    if a == b:
        return a
    start, shape = [], []
    for s, n, t, m in zip(*a, *b, strict=True):
        low = s if s > t else t
        size = (s + n if s + n < t + m else t + m) - low
        if size <= 0:
            return None
        start.append(low)
        shape.append(size)
    return tuple(start), tuple(shape)


def _disjoint(boxes: list[Box]) -> bool:
    # Boxes cut along one dim only, the usual case, are compared as intervals; anything else pair by pair.
    ends = {(start[1:], shape[1:]) for start, shape in boxes}
    if len(ends) == 1:
        spans = sorted((start[0], start[0] + shape[0]) for start, shape in boxes)
        return all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    return all(common_box(a, b) is None for i, a in enumerate(boxes) for b in boxes[:i])


def _refine(cells: list[Cell]) -> list[Cell]:
    done: list[Cell] = []
    for box, who in cells:
        rest, next_done = [box], []
        for old, old_who in done:
            both = common_box(old, box)
            if both is None:
                next_done.append((old, old_who))
                continue
            next_done.append((both, old_who + who))
            next_done += [(part, old_who) for part in _minus(old, both)]
            rest = [part for r in rest for part in _minus(r, common_box(r, both))]
        done = next_done + [(part, who) for part in rest]
    return done


def _minus(box: Box, hole: Box | None) -> list[Box]:
    """Disjoint boxes that make up ``box`` without ``hole``, which lies inside it (None: is nothing)."""
    if hole is None:
        return [box]
    out: list[Box] = []
    start, shape = list(box[0]), list(box[1])
    for dim, (h, n) in enumerate(zip(*hole, strict=True)):
        for low, high in ((start[dim], h), (h + n, start[dim] + shape[dim])):
            if low < high:
                part_start, part_shape = start.copy(), shape.copy()
                part_start[dim], part_shape[dim] = low, high - low
                out.append((tuple(part_start), tuple(part_shape)))
        start[dim], shape[dim] = h, n
    return out
