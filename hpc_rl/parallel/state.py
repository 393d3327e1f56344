"""This rank's place in the job. The only importer of megatron's parallel_state."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from hpc_rl.config import Config
from hpc_rl.parallel.layout import Layout
from hpc_rl.parallel.megatron_cpu import cuda_as_cpu, install_rng_tracker


@dataclass(frozen=True, slots=True)
class ParallelState:
    """Rank coordinates and groups of an initialised job."""

    layout: Layout
    rank: int
    device: torch.device
    tp_rank: int
    pp_rank: int
    dp_rank: int
    tp_group: dist.ProcessGroup
    node_size: int = 8  # ranks on a node

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.layout.pp - 1

    @property
    def owns_outputs(self) -> bool:
        """True on the one rank of each DP replica whose model outputs are counted."""
        return self.is_last_stage and self.tp_rank == 0


def initialize(config: Config, device: torch.device, node_size: int = 8) -> ParallelState:
    """Joins the job (env:// rendezvous, RANK etc. already set) and builds Megatron's groups.

    Every rank calls it once, before any model is built. Raises UserError if the world does not fit the config.
    """
    timeout = datetime.timedelta(seconds=config.launch.timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    p = config.parallel
    layout = Layout(dist.get_world_size(), tp=p.tp, pp=p.pp, cp=p.cp, ep=p.ep)
    if not mpu.model_parallel_is_initialized():
        with cuda_as_cpu():
            mpu.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                distributed_timeout_minutes=max(1, round(config.launch.timeout_s / 60)),
                create_gloo_process_groups=False,
            )
        install_rng_tracker(config.seed)
    return ParallelState(
        layout=layout,
        rank=dist.get_rank(),
        device=device,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        dp_rank=mpu.get_data_parallel_rank(),
        tp_group=mpu.get_tensor_model_parallel_group(),
        node_size=node_size,
    )


def leave_model_parallel() -> None:
    """Gives up the layout but not the job, so that `initialize` can take another one."""
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()


def destroy() -> None:
    """Leaves the job. Safe to call twice."""
    leave_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
