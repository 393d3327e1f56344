"""The FSDP2 training engine: parameters, gradients and optimizer states cut by rows over all ranks (ZeRO-3)."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hpc_rl.batch import Batch
from hpc_rl.config import Config, OptimizerConfig
from hpc_rl.engine import share
from hpc_rl.engine.colocate import HostCopy
from hpc_rl.engine.dense import DenseLM
from hpc_rl.engine.megatron_model import DTYPES
from hpc_rl.engine.optimizer_state import engine_state
from hpc_rl.engine.packed import Packed, pack
from hpc_rl.engine.protocol import LossFn
from hpc_rl.engine.sharded_adamw import ShardedAdamW
from hpc_rl.fault.phase import beat
from hpc_rl.parallel.state import ParallelState
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.shardmap import ShardMap, TensorSpec, row_piece


class FSDP2Engine:
    """One role on this job's ranks; see TrainEngine for the contract and `MegatronEngine` for the arguments.

    A rank holds float32 main weights of its rows (of a frozen model: the model's dtype); layers are gathered in the
    model's dtype when they compute, and gradients are summed in float32.
    """

    def __init__(
        self, role: str, spec: ModelSpec, config: Config, state: ParallelState, *, optimizer: OptimizerConfig | None,
        total_steps: int = 1,
    ) -> None:  # fmt: skip
        assert state.layout.dp == state.layout.world_size, "FSDP2 cuts over all ranks: tp = pp = 1"
        self.role, self.config, self.parallel = role, config, state
        self.spec = spec.with_role("critic" if role == "critic" else "actor")
        dtype = DTYPES[config.model.dtype]
        self.module = self._sharded_module(dtype, trained=optimizer is not None)
        self.module.temperature = config.rollout.temperature
        self._params = dict(self.module.named_parameters())
        self._local: dict[str, Tensor] = {n: _local(p) for n, p in self._params.items()}
        self._map = self._row_map(config.model.dtype)
        self.optimizer: ShardedAdamW | None = None
        self._host_copy: HostCopy | None = None
        if optimizer is not None:
            mains = self._local
            if dtype != torch.float32:
                self._local = {n: m.to(dtype) for n, m in mains.items()}
            casts = self._local if dtype != torch.float32 else {}
            self.optimizer = ShardedAdamW(self._params, mains, casts, optimizer, total_steps)

    def _sharded_module(self, dtype: torch.dtype, trained: bool) -> DenseLM:
        """Made without memory, cut, and only then given memory: no rank ever holds the whole model."""
        with torch.device("meta"):
            recompute = self.config.parallel.recompute == "full"
            module = DenseLM(self.spec, self.role, dtype, recompute).to(torch.float32 if trained else dtype)
        device = self.parallel.device.type
        mesh = init_device_mesh(device, (self.parallel.layout.world_size,))
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
                _local(p).zero_()
        return module

    def _row_map(self, dtype: str) -> ShardMap:
        """Rank r holds rows [r c, (r + 1) c) of each tensor, c = ceil(rows / ranks): fully_shard's cut."""
        pieces = []
        for name, p in self._params.items():
            rows, local = p.shape[0], self._local[name]
            each = -(-rows // self.parallel.layout.world_size)
            low = min(rows, each * self.parallel.rank)
            assert local.shape[0] == min(rows, low + each) - low, f"{name}: not cut as torch.chunk cuts"
            if local.numel():
                pieces.append(row_piece(name, tuple(p.shape), low, low + local.shape[0], name))
        specs = {n: TensorSpec(shape, dtype) for n, shape in self.spec.tensors().items()}
        assert {n: s.shape for n, s in specs.items()} == {n: tuple(p.shape) for n, p in self._params.items()}
        return ShardMap(specs, tuple(pieces))

    # ---- work -------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Outputs for the response tokens of ``batch``, 0 elsewhere: name -> float32 [N] on the CPU of every rank."""
        shares = self._shares(batch)
        with torch.no_grad():
            outputs = [self.module(packed)[:, : packed.num_tokens] for _, packed in self._micro_batches(batch, shares)]
        return share.whole(self.module.output_names, batch, shares, outputs, self.parallel)

    def train_batch(self, batch: Batch, loss_fn: LossFn, outputs: dict[str, Tensor] | None = None) -> dict[str, float]:
        """One optimizer step on ``batch``; see TrainEngine."""
        assert self.optimizer is not None, f"{self.role} is frozen"
        shares, names = self._shares(batch), self.module.output_names
        sums: list[dict[str, Tensor]] = []
        seen: list[Tensor] = []
        for p in self._params.values():
            p.grad = None
        for micro, packed in self._micro_batches(batch, shares):
            output = self.module(packed)
            seen.append(output[:, : packed.num_tokens].detach())
            by_name = dict(zip(names, output[:, : packed.num_tokens], strict=True))
            total, metrics = loss_fn(by_name, micro) if len(micro) else (output.sum() * 0.0, {})
            sums.append({"loss": total.detach(), **{k: v.detach() for k, v in metrics.items()}})
            total.backward()
        metrics_of_all = share.reduce(sums, self.parallel)
        gradients = {n: _gradient(p) for n, p in self._params.items()}
        norm = self.optimizer.gradient_norm(gradients)
        share.check_finite(
            self.role, metrics_of_all["loss"], norm, batch, shares, sums, gradients.items(), self.parallel
        )
        lr = self.optimizer.lr
        self.optimizer.step(norm)
        for p in self._params.values():
            p.grad = None
        if outputs is not None:
            outputs |= share.whole(names, batch, shares, seen, self.parallel)
        return {**metrics_of_all, "grad_norm": norm, "lr": lr}

    def _shares(self, batch: Batch) -> list[list[int]]:
        return share.micro_batch_shares(batch, self.parallel, self.config.algorithm.micro_batch_tokens)

    def _micro_batches(self, batch: Batch, shares: list[list[int]]) -> Iterator[tuple[Batch, Packed]]:
        device = self.parallel.device
        padded = device.type == "cpu" or self.config.model.dtype == "float32"  # the varlen kernel knows 16 bits only
        for indices in shares:
            beat()
            micro = batch.select(indices)
            yield micro.to(device), pack(micro, device, 1, padded)

    # ---- state ------------------------------------------------------------------------------------------------

    def shard_map(self) -> tuple[ShardMap, dict[str, Tensor]]:
        """This rank's parameters by canonical name, and the live local tensors."""
        return self._map, self._local

    def parameters_changed(self) -> None:
        """Call after parameters were written from outside: the optimizer's main weights follow."""
        if self.optimizer is not None:
            self.optimizer.reload_from_parameters()

    def state(self) -> tuple[ShardMap, dict[str, Tensor], dict[str, Any]]:
        """All that a resume needs; see `optimizer_state.engine_state`."""
        return engine_state(self)

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Takes the small values back, after the tensors of ``state()`` were filled in place."""
        assert self.optimizer is not None, f"{self.role} is frozen: it has no state"
        self.optimizer.load_state(values["optimizer"])

    def offload(self) -> None:
        """Frees the device memory of weights and optimizer states (GPU only)."""
        if self._host_copy is None:
            tensors = [*self._local.values(), *(_local(p) for p in self._params.values())]
            if self.optimizer is not None:
                tensors += [t for s in self.optimizer.shards() for t in (s.main, s.exp_avg, s.exp_avg_sq)]
            self._host_copy = HostCopy(tensors)
        self._host_copy.offload()

    def onload(self) -> None:
        """Everything is back where it was before `offload`."""
        if self._host_copy is not None:
            self._host_copy.onload()

    def close(self) -> None:
        """Frees the model; the engine is not usable afterwards."""
        del self.module, self._params, self._local, self.optimizer, self._host_copy
        gc.collect()


def _local(p: Any) -> Tensor:
    """This rank's rows of a sharded parameter: the storage itself."""
    local: Tensor = p.detach().to_local()
    return local


def _gradient(p: torch.nn.Parameter) -> Tensor:
    """This rank's rows of the summed gradient."""
    assert p.grad is not None, "every parameter takes part in every micro-batch"
    gradient: Tensor = p.grad.to_local()  # type: ignore[attr-defined]
    return gradient
