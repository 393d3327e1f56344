"""Bytes that the training engines always hold: weights, gradients, optimizer states, as each engine lays them out."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hpc_rl.parallel.layout import Layout
from hpc_rl.plan.job import PlannedJob
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.cut_map import row_shard_map, whole_shard_map
from hpc_rl.tensors.megatron_map import megatron_shard_map
from hpc_rl.tensors.shardmap import ShardMap

_PARAM_ALIGNMENT = 64  # elements: where a parameter begins in Megatron's gradient buffer
_BUCKET_ALIGNMENT = 128  # elements, and a multiple of dp: where the buffer ends


@dataclass(frozen=True, slots=True)
class Static:
    """Bytes of one model on one rank."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def local_numels(shard_map: ShardMap) -> Counter[str]:
    """Local tensor -> number of its elements, padding counted."""
    numels: Counter[str] = Counter(shard_map.padding)
    for piece in shard_map.pieces:
        numels[piece.local] += piece.numel
    return numels


@lru_cache(maxsize=1024)
def stage_numels(spec: ModelSpec, layout: Layout, pp: int) -> tuple[int, ...]:
    """Elements of each parameter that a rank of stage ``pp`` holds (the same on all of its TP ranks)."""
    return tuple(local_numels(megatron_shard_map(spec, layout, layout.rank(pp=pp))).values())


def buffer_numel(numels: tuple[int, ...], dp: int) -> int:
    """Elements of Megatron's contiguous gradient buffer (one bucket), its padding counted."""
    used = sum(_round_up(n, _PARAM_ALIGNMENT) for n in numels)
    return _round_up(used, math.lcm(dp, _BUCKET_ALIGNMENT))


def training_map(job: PlannedJob, spec: ModelSpec, rank: int) -> ShardMap:
    """What ``rank`` holds of a model's weights, by the engine that trains it."""
    engine, dtype = job.config.parallel.engine, job.config.model.dtype
    if engine == "megatron":
        return megatron_shard_map(spec, job.layout, rank, dtype=dtype)
    if engine == "fsdp2":
        return row_shard_map(spec, rank, job.layout.world_size, dtype)
    return whole_shard_map(spec, dtype)


def static_bytes(job: PlannedJob, role: str, pp: int) -> Static:
    """What a rank of stage ``pp`` holds of ``role``.

    weights: model dtype. gradients: float32, whole on every DP rank. optimizer: exp_avg and exp_avg_sq in float32, and
    main weights in float32 unless the model is float32 itself; sharded over DP. The reference has weights only.

    FSDP2 and DeepSpeed: `_cut_bytes`.
    """
    if job.config.parallel.engine != "megatron":
        return _cut_bytes(job, role)
    numels = stage_numels(job.roles[role], job.layout, pp)
    if role not in job.trained:
        return Static(sum(numels) * job.item_bytes, 0, 0)
    buffer = buffer_numel(numels, job.layout.dp)
    states = 8 if job.config.model.dtype == "float32" else 12
    return Static(buffer * job.item_bytes, buffer * 4, buffer // job.layout.dp * states)


def _cut_bytes(job: PlannedJob, role: str) -> Static:
    """FSDP2: all of it cut by rows. ZeRO: weights whole, states (zero2: gradients too) cut, main weights a copy always."""
    spec, ranks, engine = job.roles[role], job.layout.world_size, job.config.parallel.engine
    most = sum(p.numel for p in training_map(job, spec, 0).pieces)  # rank 0 has the most rows
    if role not in job.trained:
        return Static(most * job.item_bytes, 0, 0)
    if engine == "fsdp2":
        return Static(most * job.item_bytes, most * 4, most * (8 if job.config.model.dtype == "float32" else 12))
    share = -(-most // ranks)
    return Static(most * job.item_bytes, (share if engine == "zero2" else most) * 4, share * 12)


def passing_bytes(job: PlannedJob, spec: ModelSpec, trains: bool) -> float:
    """Alive for a moment in a pass of FSDP2: two layers and the rest gathered; gradients on their way to their ranks."""
    if job.config.parallel.engine != "fsdp2" or job.layout.world_size == 1:
        return 0.0
    layer = sum(prod(shape) for shape in spec.layer_tensors(0).values())
    rest = spec.num_params - layer * spec.num_layers
    gathered = job.item_bytes * (2 * layer + rest)
    return float(gathered + (max(layer, rest) * (job.item_bytes + 4) if trains else 0))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
