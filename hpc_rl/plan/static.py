"""Bytes that the training engines always hold: weights, gradients, optimizer states, as Megatron lays them out."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from hpc_rl.parallel.layout import Layout
from hpc_rl.plan.job import PlannedJob
from hpc_rl.tensors.canonical import ModelSpec
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


def static_bytes(job: PlannedJob, role: str, pp: int) -> Static:
    """What a rank of stage ``pp`` holds of ``role``.

    weights: model dtype. gradients: float32, whole on every DP rank. optimizer: exp_avg and exp_avg_sq in float32, and
    main weights in float32 unless the model is float32 itself; sharded over DP. The reference has weights only.
    """
    numels = stage_numels(job.roles[role], job.layout, pp)
    if role not in job.trained:
        return Static(sum(numels) * job.item_bytes, 0, 0)
    buffer = buffer_numel(numels, job.layout.dp)
    states = 8 if job.config.model.dtype == "float32" else 12
    return Static(buffer * job.item_bytes, buffer * 4, buffer // job.layout.dp * states)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
