"""From what each rank holds and wants to a Resharder: gathers maps, plans or finds the plan, proves it, binds it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hpc_rl.config import ReshardConfig
from hpc_rl.errors import UserError
from hpc_rl.reshard.bounds import coverage_errors
from hpc_rl.reshard.cache import PlanCache, map_digest, plan_key
from hpc_rl.reshard.execute import Resharder, misfit
from hpc_rl.reshard.plan import RankPlan, make_plan
from hpc_rl.tensors.coverage import check_local_coverage
from hpc_rl.tensors.shardmap import ShardMap

Held = tuple[ShardMap, Mapping[str, Tensor]]


def connect(
    source: Held,
    target: Held,
    *,
    config: ReshardConfig | None = None,
    cache: PlanCache | None = None,
    group: dist.ProcessGroup | None = None,
    node_size: int = 8,
    timeout_s: float = 1800.0,
    frozen: Collection[str] = (),
    allow_unused: bool = False,
    name: str = "reshard",
) -> Resharder:
    """A Resharder from ``source`` to ``target``. All ranks of ``group`` call it alike; no weight moves yet.

    Args:
        source, target: (map, local tensors) of this rank, as ``shard_map()`` of an engine returns them.
        config: bucket size, verification, snapshot; None: the defaults.
        cache: where plans are kept.
        group: None: the default group, or this process alone if there is none.
        node_size, timeout_s: ranks per node, and the longest wait for one.
        frozen: canonical names of tensors that never change after the first sync.
        allow_unused: source tensors need not have a target.
        name: told apart from other resharders in the job's store.

    Raises:
        UserError: on all ranks, naming the tensor that is uncovered, covered twice, unknown, or of another shape.
    """
    values = config or ReshardConfig()
    plan = plan_for(source[0], target, cache or PlanCache(), group, node_size, allow_unused)
    raise_on_all(misfit(plan, source[1], target[1]), group)
    return Resharder(
        plan,
        source[1],
        target[1],
        group=group,
        bucket_bytes=values.bucket_bytes,
        timeout_s=timeout_s,
        verify=values.verify,
        snapshot=values.snapshot,
        frozen=frozen,
        name=name,
    )


def plan_for(
    source: ShardMap,
    target: Held,
    cache: PlanCache,
    group: dist.ProcessGroup | None = None,
    node_size: int = 8,
    allow_unused: bool = False,
) -> RankPlan:
    """This rank's part of the plan between the maps of all ranks: from ``cache``, else planned and kept there."""
    alone = not dist.is_initialized()
    rank = 0 if alone else dist.get_rank(group)
    error = _coverage_error(target, rank)
    facts = all_gather((map_digest(source), map_digest(target[0]), error), group, alone)
    if errors := [e for _, _, e in facts if e]:
        raise UserError(errors[0])
    key = plan_key([x for s, t, _ in facts for x in (s, t)], node_size, allow_unused)
    plan = cache.get(key, rank)
    if not all(all_gather(plan is not None, group, alone)):
        sources = _gather_distinct(source, [s for s, _, _ in facts], rank, group, alone)
        targets = _gather_distinct(target[0], [t for _, t, _ in facts], rank, group, alone)
        whole = make_plan(sources, targets, node_size, allow_unused)
        raise_on_all(next(iter(coverage_errors(whole, targets, [rank])), ""), group)
        plan = whole.of(rank)
        cache.put(key, plan)
    assert plan is not None, "every rank has a plan"
    return plan


def _coverage_error(target: Held, rank: int) -> str:
    try:
        check_local_coverage(target[0], {name: t.numel() for name, t in target[1].items()})
    except UserError as error:
        return f"rank {rank}: {error}"
    return ""


def _gather_distinct(
    mine: ShardMap, digests: list[str], rank: int, group: dist.ProcessGroup | None, alone: bool
) -> list[ShardMap]:
    # Ranks that hold the same get one object, and only one of them sends it.
    owner = digests.index(digests[rank]) == rank
    gathered = all_gather(mine if owner else None, group, alone)
    maps = {digest: shard_map for digest, shard_map in zip(digests, gathered, strict=True) if shard_map is not None}
    return [maps[d] for d in digests]


def raise_on_all(error: str, group: dist.ProcessGroup | None) -> None:
    """Raises UserError on every rank if any rank brings an error; the lowest such rank's is told."""
    if errors := [e for e in all_gather(error, group, not dist.is_initialized()) if e]:
        raise UserError(errors[0])


def all_gather(value: Any, group: dist.ProcessGroup | None, alone: bool) -> list[Any]:
    """Every rank's ``value``, in rank order; only this one's if it is ``alone``."""
    if alone:
        return [value]
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group=group)
    return out
