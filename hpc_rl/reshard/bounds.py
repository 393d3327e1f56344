"""What a plan must move at least, what it does move, and proofs that it writes everything once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpc_rl.reshard.cells import Box, common_box
from hpc_rl.tensors.coverage import covered_numel
from hpc_rl.tensors.dtypes import ITEM_BYTES, wire_dtype
from hpc_rl.tensors.shardmap import ShardMap, TensorSpec

if TYPE_CHECKING:
    from hpc_rl.reshard.plan import Plan

Boxes = list[Box]


class Needs:
    """What one target map needs, counted from the boxes alone: independent of any plan."""

    def __init__(self, target: ShardMap, specs: Mapping[str, TensorSpec]) -> None:
        self.boxes: dict[str, Boxes] = defaultdict(list)
        for piece in target.pieces:
            self.boxes[piece.name].append((piece.start, piece.shape))
        self.item_bytes = {
            name: ITEM_BYTES[wire_dtype(specs[name].dtype, target.specs[name].dtype)] for name in self.boxes
        }
        self.total_bytes = sum(self.item_bytes[name] * covered_numel(boxes) for name, boxes in self.boxes.items())

    def missing_bytes(self, source: ShardMap) -> int:
        """Bytes of the target tensors that a rank holding ``source`` lacks: the least it must receive.

        sum over canonical tensors of (|T| - |T & S|) * item bytes, with T and S the elements named by the two maps.
        """
        at_hand: dict[str, Boxes] = defaultdict(list)
        for piece in source.pieces:
            for box in self.boxes.get(piece.name, ()):
                if both := common_box(box, (piece.start, piece.shape)):
                    at_hand[piece.name].append(both)
        return self.total_bytes - sum(self.item_bytes[name] * covered_numel(boxes) for name, boxes in at_hand.items())


def coverage_errors(plan: Plan, targets: Sequence[ShardMap], ranks: Iterable[int] | None = None) -> list[str]:
    """Target boxes that the plan does not write exactly once, told by rank and canonical name.

    Args:
        plan: the plan.
        targets: map of each rank's target tensors.
        ranks: those to look at; None: all.
    """
    chosen = range(plan.num_ranks) if ranks is None else ranks
    written: dict[int, dict[tuple[str, str], Boxes]] = {r: defaultdict(list) for r in chosen}
    for rank, boxes in written.items():
        for link in plan.local[rank]:
            boxes[link.target.name, link.target.local].append((link.target.start, link.target.shape))
    for route in plan.routes:
        if route.target in written:
            for link in route.links:
                written[route.target][link.target.name, link.target.local].append(
                    (link.target.start, link.target.shape)
                )
    return [error for rank, boxes in written.items() for error in _compare(rank, boxes, targets[rank])]


def _compare(rank: int, written: Mapping[tuple[str, str], Boxes], target: ShardMap) -> list[str]:
    wanted: dict[tuple[str, str], Boxes] = defaultdict(list)
    for piece in target.pieces:
        wanted[piece.name, piece.local].append((piece.start, piece.shape))
    out = [
        f"rank {rank}: {key[0]} is written into {key[1]}, which has no place for it"
        for key in written
        if key not in wanted
    ]
    for key, boxes in wanted.items():
        got = written.get(key, [])
        times = sum(covered_numel([box]) for box in got)
        if covered_numel(got + boxes) != covered_numel(boxes) or not covered_numel(got) == times == covered_numel(
            boxes
        ):
            out.append(f"rank {rank}: {key[0]} in {key[1]}: {times} elements written into {covered_numel(boxes)}")
    return out


def plan_summary(plan: Plan) -> dict[str, Any]:
    """What moves where: totals, the busiest rank, pair and node, in bytes."""
    sent, received, pairs, out_of, into = Counter(), Counter(), Counter(), Counter(), Counter()  # type: ignore[var-annotated]
    within = 0
    for route in plan.routes:
        sent[route.source] += route.nbytes
        received[route.target] += route.nbytes
        pairs[route.source, route.target] += route.nbytes
        here, there = route.source // plan.node_size, route.target // plan.node_size
        if here == there:
            within += route.nbytes
        else:
            out_of[here] += route.nbytes
            into[there] += route.nbytes
    total = sum(received.values())
    busiest = max(pairs, key=lambda p: pairs[p], default=None)
    return {
        "ranks": plan.num_ranks,
        "bytes_total": total,
        "bytes_within_nodes": within,
        "bytes_between_nodes": total - within,
        "bytes_lower_bound": sum(plan.lower_bound_bytes),
        "bytes_local": sum(sum(link.nbytes for link in links) for links in plan.local),
        "busiest_sender_bytes": max(sent.values(), default=0),
        "mean_sender_bytes": total // plan.num_ranks,
        "busiest_receiver_bytes": max(received.values(), default=0),
        "busiest_pair": busiest,
        "busiest_pair_bytes": pairs[busiest] if busiest else 0,
        "busiest_node_out_bytes": max(out_of.values(), default=0),
        "busiest_node_in_bytes": max(into.values(), default=0),
    }
