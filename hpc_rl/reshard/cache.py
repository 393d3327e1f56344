"""Plans kept for the next time the same layouts meet: in memory, and on disk as one small JSON file per rank.

A file begins with a digest of what follows: a plan damaged on disk is made again, never followed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpc_rl.reshard.plan import PLANNER_VERSION, Dtypes, Link, RankPlan
from hpc_rl.tensors.shardmap import Piece, ShardMap

log = logging.getLogger(__name__)


def map_digest(shard_map: ShardMap) -> str:
    """A fingerprint of what a map says, equal for equal maps in any process."""
    specs = [(name, spec.shape, spec.dtype) for name, spec in sorted(shard_map.specs.items())]
    text = json.dumps([specs, [_piece(p) for p in shard_map.pieces], sorted(shard_map.padding.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def plan_key(digests: Iterable[str], node_size: int, allow_unused: bool = False) -> str:
    """The name of the plan between maps with these fingerprints, of this version of the planner."""
    text = json.dumps([PLANNER_VERSION, node_size, allow_unused, *digests])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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
                digest, _, text = self._path(key, rank).read_bytes().partition(b"\n")
            except OSError:
                return None
            if digest != _digest(text):
                return None  # damaged: the caller plans again and overwrites it
            plan = _from_json(json.loads(text))
            self._plans[key, rank] = plan
        return plan

    def put(self, key: str, plan: RankPlan) -> None:
        """Keeps a plan. A file is written whole or not at all; where it cannot be, a warning says so."""
        self._plans[key, plan.rank] = plan
        if self._directory is None:
            return
        text = json.dumps(_to_json(plan), separators=(",", ":")).encode()
        path = self._path(key, plan.rank)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(_digest(text) + b"\n" + text)
            partial.replace(path)
        except OSError as error:
            log.warning("the reshard plan cannot be kept in %s (%s): the next start plans again", path.parent, error)

    def _path(self, key: str, rank: int) -> Path:
        assert self._directory is not None
        return self._directory / key / f"rank_{rank:05d}.json"


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


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
