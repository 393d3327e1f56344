"""Plans kept for the next time the same layouts meet: in memory, and on disk as one small JSON file per rank."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpc_rl.reshard.plan import PLANNER_VERSION, Dtypes, Link, RankPlan
from hpc_rl.tensors.shardmap import Piece, ShardMap


def map_digest(shard_map: ShardMap) -> str:
    """A fingerprint of what a map says, equal for equal maps in any process."""
    specs = [(name, spec.shape, spec.dtype) for name, spec in sorted(shard_map.specs.items())]
    text = json.dumps([specs, [_piece(p) for p in shard_map.pieces], sorted(shard_map.padding.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def plan_key(digests: Iterable[str], node_size: int) -> str:
    """The name of the plan between maps with these fingerprints, of this version of the planner."""
    return hashlib.sha256(json.dumps([PLANNER_VERSION, node_size, *digests]).encode()).hexdigest()[:32]


class PlanCache:
    """Plans of one rank, by key.

    Args:
        directory: where they stay between runs; None: in memory only.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = Path(directory) if directory is not None else None
        self._plans: dict[tuple[str, int], RankPlan] = {}

    def get(self, key: str, rank: int) -> RankPlan | None:
        """The plan, or None if it is not there or cannot be read."""
        plan = self._plans.get((key, rank))
        if plan is None and self._directory is not None:
            try:
                plan = _from_json(json.loads(self._path(key, rank).read_text()))
            except (OSError, ValueError, TypeError, KeyError, IndexError):
                return None  # absent, or damaged: the caller plans again and overwrites it
            self._plans[key, rank] = plan
        return plan

    def put(self, key: str, plan: RankPlan) -> None:
        """Keeps a plan. A file is written whole or not at all."""
        self._plans[key, plan.rank] = plan
        if self._directory is not None:
            path = self._path(key, plan.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps(_to_json(plan), separators=(",", ":")))
            partial.replace(path)

    def _path(self, key: str, rank: int) -> Path:
        assert self._directory is not None
        return self._directory / key / f"rank_{rank:05d}.json"


def _piece(p: Piece) -> list[Any]:
    return [p.name, p.start, p.shape, p.local, p.offset, p.strides]


def _to_json(plan: RankPlan) -> dict[str, Any]:
    pieces: dict[Piece, int] = {}

    def links(some: Iterable[Link]) -> list[list[Any]]:
        return [
            [pieces.setdefault(x.source, len(pieces)), pieces.setdefault(x.target, len(pieces)), x.dtypes] for x in some
        ]

    out: dict[str, Any] = {
        "rank": plan.rank,
        "num_ranks": plan.num_ranks,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "max_peers": plan.max_peers,
        "local": links(plan.local),
        "sends": [[peer, links(some)] for peer, some in plan.sends],
        "receives": [[peer, links(some)] for peer, some in plan.receives],
    }
    return out | {"pieces": [_piece(p) for p in pieces]}


def _from_json(values: dict[str, Any]) -> RankPlan:
    pieces = [
        Piece(name, tuple(start), tuple(shape), local, offset, tuple(strides))
        for name, start, shape, local, offset, strides in values["pieces"]
    ]
    kinds: dict[tuple[str, ...], Dtypes] = {}

    def links(some: list[list[Any]]) -> tuple[Link, ...]:
        return tuple(Link(pieces[a], pieces[b], kinds.setdefault(tuple(d), Dtypes(*d))) for a, b, d in some)

    return RankPlan(
        values["rank"],
        values["num_ranks"],
        links(values["local"]),
        tuple((peer, links(some)) for peer, some in values["sends"]),
        tuple((peer, links(some)) for peer, some in values["receives"]),
        values["lower_bound_bytes"],
        values["max_peers"],
    )
