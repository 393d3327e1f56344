"""The FSDP2 training engine: parameters, gradients and optimizer states cut by rows over all ranks (as in ZeRO-3)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hpc_rl.config import Config, OptimizerConfig
from hpc_rl.engine.data_parallel import DataParallelEngine
from hpc_rl.engine.dense import DenseLM
from hpc_rl.engine.megatron_model import DTYPES
from hpc_rl.engine.sharded_adamw import ShardedAdamW
from hpc_rl.parallel.state import ParallelState
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.coverage import check_local_coverage
from hpc_rl.tensors.cut_map import row_shard_map
from hpc_rl.tensors.shardmap import ShardMap


class FSDP2Engine(DataParallelEngine):
    """See `MegatronEngine` for the arguments.

    A rank holds float32 main weights of its rows (of a frozen model: the model's dtype); layers are gathered in the
    model's dtype when they compute, and gradients are summed in float32.
    """

    def __init__(
        self, role: str, spec: ModelSpec, config: Config, state: ParallelState, *, optimizer: OptimizerConfig | None,
        total_steps: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(role, spec, config, state)
        dtype = DTYPES[config.model.dtype]
        self.module = self._sharded_module(dtype, trained=optimizer is not None)
        self._params = dict(self.module.named_parameters())
        mains = {n: local_rows(p) for n, p in self._params.items()}
        self._local = {n: m.to(dtype) for n, m in mains.items()}  # the same tensors where the dtype is the same
        self._map = row_shard_map(self.spec, state.rank, state.layout.world_size, config.model.dtype)
        check_local_coverage(self._map, {n: t.numel() for n, t in self._local.items()})
        self.optimizer = None
        if optimizer is not None:
            casts = self._local if dtype != torch.float32 else {}
            self.optimizer = ShardedAdamW(self._params, mains, casts, optimizer, total_steps)

    def _sharded_module(self, dtype: torch.dtype, trained: bool) -> DenseLM:
        """Made without memory, cut, and only then given memory: no rank ever holds the whole model."""
        with torch.device("meta"):
            recompute = self.config.parallel.recompute == "full"
            module = DenseLM(self.spec, self.role, dtype, recompute).to(torch.float32 if trained else dtype)
        module.temperature = self.config.rollout.temperature
        mesh = init_device_mesh(self.parallel.device.type, (self.parallel.layout.world_size,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for part in (*module.model.layers, module):
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # summed: the loss weights hold the denominator
                part.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
        module.to_empty(device=self.parallel.device)
        module.requires_grad_(trained)
        with torch.no_grad():
            for p in module.parameters():
                local_rows(p).zero_()
        return module

    def shard_map(self) -> tuple[ShardMap, dict[str, Tensor]]:
        """This rank's rows of every parameter, in the model's dtype."""
        return self._map, self._local

    def _kept(self) -> Iterable[Tensor]:
        yield from self._local.values()
        if isinstance(self.optimizer, ShardedAdamW):
            for s in self.optimizer.shards():
                yield from (s.main, s.exp_avg, s.exp_avg_sq)


def local_rows(p: Any) -> Tensor:
    """This rank's rows of a sharded tensor: the storage itself."""
    local: Tensor = p.detach().to_local()
    return local
