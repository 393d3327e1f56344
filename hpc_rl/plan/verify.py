"""Holds the plan against Megatron-core itself: the true model of chosen ranks, at full size, on the meta device.

No weight is allocated and no rank is started: a fake process group stands for the job, so that one process takes the
place of one rank after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hpc_rl.errors import UserError
from hpc_rl.parallel.layout import Layout
from hpc_rl.plan.job import PlannedJob
from hpc_rl.plan.static import stage_numels
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.coverage import check_local_coverage
from hpc_rl.tensors.megatron_map import megatron_shard_map
from hpc_rl.tensors.shardmap import ShardMap

META = torch.device("meta")


def chosen_ranks(layout: Layout) -> list[int]:
    """The first and the last TP rank of the first, a middle and the last pipeline stage."""
    stages = sorted({0, layout.pp // 2, layout.pp - 1})
    return sorted({layout.rank(pp=pp, tp=tp) for pp in stages for tp in (0, layout.tp - 1)})


def verify_meta(job: PlannedJob, ranks: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Builds each role's Megatron model of ``ranks`` and compares it with the plan.

    Args:
        job: the plan.
        ranks: global ranks; None: `chosen_ranks`.
    Returns:
        A row for each rank and role: ``rank``, ``role``, ``tensors``, ``params`` (elements that the rank holds).
    Raises:
        UserError: a parameter that the plan lacks, holds in another shape or size, or covers in part.
    """
    rows = []
    for rank in chosen_ranks(job.layout) if ranks is None else ranks:
        with _as_rank(job, rank) as state:
            for role, spec in job.roles.items():
                parameters = _build(job, spec, role, state)
                _compare(job, spec, rank, role, parameters)
                params = sum(p.numel() for p in parameters.values())
                rows.append({"rank": rank, "role": role, "tensors": len(parameters), "params": params})
    return rows


@contextmanager
def _as_rank(job: PlannedJob, rank: int) -> Iterator[Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hpc_rl.parallel import state

    if dist.is_initialized():
        raise UserError("--verify-meta takes the place of ranks, but this process is one of a job: run it by itself")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.layout.world_size)
    try:
        yield state.initialize(job.config, META)
    finally:
        state.destroy()


def _build(job: PlannedJob, spec: ModelSpec, role: str, state: Any) -> dict[str, torch.nn.Parameter]:
    if job.config.parallel.engine != "megatron":
        return _build_whole(spec, role)
    from hpc_rl.engine.megatron_model import PackedGPT, transformer_config
    from hpc_rl.parallel.megatron_cpu import cuda_as_cpu
    from hpc_rl.tensors.megatron_map import padded_vocab_size

    vocab = padded_vocab_size(spec.vocab_size, job.layout.tp)
    with cuda_as_cpu(), META:
        model = PackedGPT(transformer_config(spec, job.config, state), spec, role, state, vocab_size=vocab)
    return dict(model.named_parameters())


def _build_whole(spec: ModelSpec, role: str) -> dict[str, torch.nn.Parameter]:
    """The model that FSDP2 and DeepSpeed cut."""
    from hpc_rl.engine.dense import DenseLM

    with META:
        return dict(DenseLM(spec, role, torch.bfloat16).named_parameters())


def _compare(
    job: PlannedJob, spec: ModelSpec, rank: int, role: str, parameters: Mapping[str, torch.nn.Parameter]
) -> None:
    """Raises UserError where the model differs from the shard map, or from the sizes that memory is planned with."""
    if job.config.parallel.engine != "megatron":
        _compare_whole(spec, rank, role, parameters)
        return
    shard_map = megatron_shard_map(spec, job.layout, rank)
    where = f"rank {rank}, {role}: the plan differs from Megatron-core's model: "
    numels = {name: p.numel() for name, p in parameters.items()}
    try:
        check_local_coverage(shard_map, numels)
    except UserError as error:
        raise UserError(where + str(error)) from None
    for name, wanted in _row_strides(shard_map).items():
        if parameters[name].dim() == 2 and parameters[name].shape[1] not in wanted:
            raise UserError(f"{where}{name} is {list(parameters[name].shape)}, but its rows are planned {wanted} long")
    planned = stage_numels(spec, job.layout, job.layout.coords(rank).pp)
    if sorted(planned) != sorted(numels.values()):
        raise UserError(f"{where}it holds {sum(numels.values())} elements, planned are {sum(planned)}")


def _compare_whole(spec: ModelSpec, rank: int, role: str, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    planned = {name: tuple(shape) for name, shape in spec.tensors().items()}
    for name in sorted(shapes.keys() | planned.keys()):
        if shapes.get(name) != planned.get(name):
            raise UserError(
                f"rank {rank}, {role}: the plan differs from the engine's model: {name} is {shapes.get(name)}, planned is "
                f"{planned.get(name)}"
            )


def _row_strides(shard_map: ShardMap) -> dict[str, set[int]]:
    """Local matrix -> elements from one row to the next."""
    strides: dict[str, set[int]] = {}
    for piece in shard_map.pieces:
        if len(piece.shape) == 2:
            strides.setdefault(piece.local, set()).add(piece.strides[0])
    return strides
