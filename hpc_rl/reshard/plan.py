"""Who sends which box to whom: pure, from shard maps alone, for any number of ranks.

Ranks that hold the same shards are planned as one group, so that 512 ranks cost what their 64 different maps do.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

from hpc_rl.errors import UserError
from hpc_rl.reshard.bounds import Needs
from hpc_rl.reshard.cells import Box, Cell, Holder, cells_of
from hpc_rl.reshard.routes import Bundle, Dtypes, Link, Route, Router, links_of
from hpc_rl.tensors.coverage import check_same_tensors
from hpc_rl.tensors.dtypes import wire_dtype
from hpc_rl.tensors.shardmap import ShardMap, TensorSpec

P = ParamSpec("P")
T = TypeVar("T")
PLANNER_VERSION = 1


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part of a plan. ``max_peers``: most messages partners of any rank, senders and receivers counted.

    ``sends`` and ``receives``: (peer, boxes), by peer; both ends of a pair list the same boxes in the same order.
    """

    rank: int
    num_ranks: int
    local: tuple[Link, ...]
    sends: tuple[tuple[int, tuple[Link, ...]], ...]
    receives: tuple[tuple[int, tuple[Link, ...]], ...]
    lower_bound_bytes: int
    max_peers: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole transfer over ``num_ranks`` ranks.

    ``local``: per rank, the boxes it copies within itself. ``lower_bound_bytes``: per rank, what it lacks of its target
    tensors, counted independently of the routes.
    """

    num_ranks: int
    node_size: int
    local: tuple[tuple[Link, ...], ...]
    routes: tuple[Route, ...]
    lower_bound_bytes: tuple[int, ...]

    def received_bytes(self) -> list[int]:
        """Bytes that each rank receives."""
        out = [0] * self.num_ranks
        for route in self.routes:
            out[route.target] += route.nbytes
        return out

    def of(self, rank: int) -> RankPlan:
        """What ``rank`` has to do."""
        sends: dict[int, list[Link]] = defaultdict(list)
        receives: dict[int, list[Link]] = defaultdict(list)
        peers: list[set[int]] = [set() for _ in range(2 * self.num_ranks)]
        for route in self.routes:
            peers[route.source].add(route.target)
            peers[self.num_ranks + route.target].add(route.source)
            if route.source == rank:
                sends[route.target] += route.links
            if route.target == rank:
                receives[route.source] += route.links
        degree = max(len(peers[r]) + len(peers[self.num_ranks + r]) for r in range(self.num_ranks))
        return RankPlan(
            rank,
            self.num_ranks,
            self.local[rank],
            tuple((peer, tuple(links)) for peer, links in sorted(sends.items())),
            tuple((peer, tuple(links)) for peer, links in sorted(receives.items())),
            self.lower_bound_bytes[rank],
            degree,
        )

    def links_into(self, rank: int) -> Iterable[Link]:
        """All boxes written at ``rank``, local and received."""
        yield from self.local[rank]
        for route in self.routes:
            if route.target == rank:
                yield from route.links


def _without_gc(function: Callable[P, T]) -> Callable[P, T]:
    """Millions of small objects and no cycle among them: looking for one would take half of the time."""

    @wraps(function)
    def paused(*args: P.args, **kwargs: P.kwargs) -> T:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if enabled:
                gc.enable()

    return paused


@_without_gc
def make_plan(
    sources: Sequence[ShardMap], targets: Sequence[ShardMap], node_size: int = 8, allow_unused: bool = False
) -> Plan:
    """The transfers that fill every rank's target tensors: each byte a rank lacks comes once, nothing else moves.

    A box comes from the rank itself if it holds it, else from the least busy holder on its node, else from the least
    busy holder elsewhere.

    Args:
        sources: map of each rank's source tensors, ``[num_ranks]``. Ranks may share an object, which saves time.
        targets: map of each rank's target tensors, ``[num_ranks]``.
        node_size: ranks per node, numbered node by node.
        allow_unused: do not insist that every canonical tensor of the sources has a target.

    Raises:
        UserError: naming the canonical tensor that has no source, no target, or two shapes.
    """
    assert len(sources) == len(targets), "sources and targets must have one map per rank"
    source_of, source_maps = _groups(sources)
    target_of, target_maps = _groups(targets)
    _check_names(source_maps, target_maps, allow_unused)
    holders: dict[str, list[Holder]] = defaultdict(list)
    for group, shard_map in enumerate(source_maps):
        for piece in shard_map.pieces:
            holders[piece.name].append((group, piece))
    specs = {name: spec for shard_map in source_maps for name, spec in shard_map.specs.items()}
    bundles = [_bundles(shard_map, holders, specs) for shard_map in target_maps]
    needs = [Needs(shard_map, specs) for shard_map in target_maps]
    local: dict[tuple[int, int], tuple[Link, ...]] = {}
    bound: dict[tuple[int, int], int] = {}
    for pair in zip(source_of, target_of, strict=True):
        if pair not in local:
            local[pair] = tuple(x for b in bundles[pair[1]] if pair[0] in b.groups for x in links_of(b.cells, pair[0]))
            bound[pair] = needs[pair[1]].missing_bytes(source_maps[pair[0]])
    pairs = list(zip(source_of, target_of, strict=True))
    routes = Router(source_of, target_of, node_size).routes(bundles)
    return Plan(len(sources), node_size, tuple(local[p] for p in pairs), tuple(routes), tuple(bound[p] for p in pairs))


def _groups(maps: Sequence[ShardMap]) -> tuple[list[int], list[ShardMap]]:
    """(group of each rank, one map of each group): ranks with equal maps are one group."""
    by_id: dict[int, int] = {}
    by_value: dict[tuple[object, object], int] = {}
    distinct: list[ShardMap] = []
    for shard_map in maps:
        if id(shard_map) not in by_id:
            key = (shard_map.pieces, tuple(sorted(shard_map.specs.items(), key=lambda item: item[0])))
            if key not in by_value:
                by_value[key] = len(distinct)
                distinct.append(shard_map)
            by_id[id(shard_map)] = by_value[key]
    return [by_id[id(m)] for m in maps], distinct


def _check_names(sources: list[ShardMap], targets: list[ShardMap], allow_unused: bool) -> None:
    have = check_same_tensors(sources, "the source")
    want = check_same_tensors(targets, "the target")
    for name, shape in want.items():
        if name not in have:
            raise UserError(f"{name}, of shape {list(shape)} at the target, has no source")
        if have[name] != shape:
            raise UserError(f"{name} is {list(have[name])} at the source, but {list(shape)} at the target")
    if not allow_unused and (unused := [name for name in have if name not in want]):
        raise UserError(f"{unused[0]}, of shape {list(have[unused[0]])} at the source, has no target")


def _bundles(target: ShardMap, holders: dict[str, list[Holder]], specs: dict[str, TensorSpec]) -> list[Bundle]:
    out: dict[tuple[int, ...], Bundle] = {}
    seen: dict[tuple[str, Box], list[Cell]] = {}
    kinds: dict[tuple[str, str], Dtypes] = {}
    for piece in target.pieces:
        key = (piece.name, (piece.start, piece.shape))
        if key not in seen:
            seen[key] = cells_of(piece, holders[piece.name])
        ends = (specs[piece.name].dtype, target.specs[piece.name].dtype)
        dtypes = kinds.setdefault(ends, Dtypes(ends[0], wire_dtype(*ends), ends[1]))
        for box, who in seen[key]:
            sources = dict(reversed(who))  # a map that holds the box twice: its first piece
            groups = tuple(sorted(sources))
            out.setdefault(groups, Bundle(groups, [])).cells.append((piece, box, sources, dtypes))
    return list(out.values())
