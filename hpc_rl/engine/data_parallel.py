"""What the engines with data parallelism alone have in common: everything but how they cut the model."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from hpc_rl.batch import Batch
from hpc_rl.config import Config
from hpc_rl.engine import share
from hpc_rl.engine.colocate import HostCopy
from hpc_rl.engine.dense import DenseLM
from hpc_rl.engine.optimizer_state import Shard, engine_state
from hpc_rl.engine.packed import Packed, pack
from hpc_rl.engine.protocol import LossFn
from hpc_rl.fault.phase import beat
from hpc_rl.parallel.state import ParallelState
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.shardmap import ShardMap


class CutOptimizer(Protocol):
    """AdamW, cut over all ranks; gradients are summed over them."""

    @property
    def lr(self) -> float: ...
    def zero_grad(self) -> None: ...
    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Adds the gradients of a micro-batch; after the last one of a step the sums are where they belong."""

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        """This rank's parts of the sums, by name."""

    def gradient_norm(self) -> float:
        """Global L2 norm of the sums, before clipping; the same on every rank; NaN or infinite where one of them is."""

    def step(self, norm: float) -> None:
        """Clips by ``norm`` and updates main weights and model weights."""

    def reload_from_parameters(self) -> None:
        """Main weights := model weights, after those were loaded from elsewhere."""

    def shards(self) -> Iterator[Shard]: ...
    def state(self) -> dict[str, int]: ...
    def load_state(self, state: Mapping[str, int]) -> None: ...


class DataParallelEngine(ABC):
    """One role on this job's ranks, each a data-parallel replica; see TrainEngine for the contract.

    A subclass makes ``module`` (what computes) and ``optimizer`` (None: frozen), and says where parameters lie.
    """

    module: torch.nn.Module
    optimizer: CutOptimizer | None

    def __init__(self, role: str, spec: ModelSpec, config: Config, state: ParallelState) -> None:
        assert state.layout.dp == state.layout.world_size, "cut over all ranks: tp = pp = 1"
        self.role, self.config, self.parallel = role, config, state
        self.spec = spec.with_role("critic" if role == "critic" else "actor")
        self._host_copy: HostCopy | None = None

    @abstractmethod
    def shard_map(self) -> tuple[ShardMap, dict[str, Tensor]]:
        """This rank's parameters by canonical name, and the live local tensors."""

    @abstractmethod
    def _kept(self) -> Iterable[Tensor]:
        """All that is on the device between steps."""

    @property
    def _model(self) -> DenseLM:
        assert isinstance(self.module, DenseLM)
        return self.module

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Outputs for the response tokens of ``batch``, 0 elsewhere: name -> float32 [N] on the CPU of every rank."""
        shares = self._shares(batch)
        with torch.no_grad():
            outputs = [self.module(packed)[:, : packed.num_tokens] for _, packed in self._micro_batches(batch, shares)]
        return share.whole(self._model.output_names, batch, shares, outputs, self.parallel)

    def train_batch(self, batch: Batch, loss_fn: LossFn, outputs: dict[str, Tensor] | None = None) -> dict[str, float]:
        """One optimizer step on ``batch``; see TrainEngine."""
        optimizer, names = self.optimizer, self._model.output_names
        assert optimizer is not None, f"{self.role} is frozen"
        shares = self._shares(batch)
        sums: list[dict[str, Tensor]] = []
        seen: list[Tensor] = []
        optimizer.zero_grad()
        for micro, packed in self._micro_batches(batch, shares):
            output = self.module(packed)
            if outputs is not None:
                seen.append(output[:, : packed.num_tokens].detach())
            by_name = dict(zip(names, output[:, : packed.num_tokens], strict=True))
            total, metrics = loss_fn(by_name, micro) if len(micro) else (output.sum() * 0.0, {})
            sums.append({"loss": total.detach(), **{k: v.detach() for k, v in metrics.items()}})
            optimizer.backward(total, is_last=len(sums) == len(shares))
        reduced = share.reduce(sums, self.parallel)
        norm = optimizer.gradient_norm()
        share.check_finite(
            self.role, reduced["loss"], norm, batch, shares, sums, optimizer.gradients(), self.parallel
        )  # fmt: skip
        lr = optimizer.lr
        optimizer.step(norm)
        if outputs is not None:
            outputs |= share.whole(names, batch, shares, seen, self.parallel)
        return {**reduced, "grad_norm": norm, "lr": lr}

    def _shares(self, batch: Batch) -> list[list[int]]:
        return share.micro_batch_shares(batch, self.parallel, self.config.algorithm.micro_batch_tokens)

    def _micro_batches(self, batch: Batch, shares: list[list[int]]) -> Iterator[tuple[Batch, Packed]]:
        device = self.parallel.device
        padded = device.type == "cpu" or self.config.model.dtype == "float32"  # the varlen kernel knows 16 bits only
        for indices in shares:
            beat()
            micro = batch.select(indices)
            yield micro.to(device), pack(micro, device, 1, padded)

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
            self._host_copy = HostCopy(self._kept())
        self._host_copy.offload()

    def onload(self) -> None:
        """Everything is back where it was before `offload`."""
        if self._host_copy is not None:
            self._host_copy.onload()

    def close(self) -> None:
        """Frees the model; the engine is not usable afterwards."""
        del self.module, self.optimizer, self._host_copy
        gc.collect()
