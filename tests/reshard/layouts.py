"""The layout pairs of the reshard tests at 8 ranks, and plans done in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpc_rl.parallel.layout import Layout, replica_of
from hpc_rl.reshard.plan import Link, Plan
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.megatron_map import megatron_shard_map
from hpc_rl.tensors.shardmap import ShardMap, view
from hpc_rl.tensors.vllm_map import vllm_shard_map

TRAINING = {
    "TP1": Layout(8),
    "TP2": Layout(8, tp=2),
    "TP4": Layout(8, tp=4),
    "PP2": Layout(8, pp=2),
    "PP4": Layout(8, pp=4),
    "TP2PP2": Layout(8, tp=2, pp=2, cp=2),
    "TP2DP2": Layout(8, tp=2, cp=2, dp=2),
    "TP2PP2DP2": Layout(8, tp=2, pp=2, dp=2),
    "EP2": Layout(8, ep=2),
    "TP2EP2ETP1": Layout(8, tp=2, ep=2, etp=1),
    "TP8": Layout(8, tp=8),
    "PP2VPP2": Layout(8, pp=2, vpp=2),
}
GENERATION = (1, 2, 4)
KINDS = ("llama_tied", "qwen2", "qwen3", "qwen3_moe")


def pairs() -> list[tuple[str, str, int]]:
    """(model, training layout, generation tp) that make sense together."""
    return [
        (kind, name, gen_tp)
        for kind in KINDS
        for name in TRAINING
        for gen_tp in GENERATION
        if kind == "qwen3_moe" or TRAINING[name].ep == 1
    ]


def maps_of(
    spec: ModelSpec, layout: Layout, gen_tp: int, dtypes: tuple[str, str] = ("float32", "float32")
) -> tuple[list[ShardMap], list[ShardMap]]:
    """(source, target) maps of all ranks."""
    ranks = range(layout.world_size)
    return (
        [megatron_shard_map(spec, layout, r, dtype=dtypes[0]) for r in ranks],
        [vllm_shard_map(spec, gen_tp, replica_of(r, gen_tp, layout.tp)[1], dtype=dtypes[1]) for r in ranks],
    )


def simulate(
    plan: Plan, sources: Sequence[dict[str, torch.Tensor]], targets: Sequence[dict[str, torch.Tensor]]
) -> None:
    """Does a plan for all ranks in this process."""

    def copy(links: Sequence[Link], source: int, target: int) -> None:
        for link in links:
            view(link.target, targets[target][link.target.local]).copy_(
                view(link.source, sources[source][link.source.local])
            )

    for rank, links in enumerate(plan.local):
        copy(links, rank, rank)
    for route in plan.routes:
        copy(route.links, route.source, route.target)
