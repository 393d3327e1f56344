"""The Megatron-core training engine: one model, this rank's share of every batch, results whole on every rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from hpc_rl.batch import Batch
from hpc_rl.config import Config, OptimizerConfig
from hpc_rl.engine import share
from hpc_rl.engine.colocate import HostCopy
from hpc_rl.engine.megatron_model import PackedGPT, transformer_config
from hpc_rl.engine.megatron_optim import DistributedAdamW
from hpc_rl.engine.optimizer_state import engine_state
from hpc_rl.engine.packed import Packed, pack
from hpc_rl.engine.protocol import LossFn
from hpc_rl.fault.phase import beat
from hpc_rl.parallel.megatron_cpu import cuda_as_cpu
from hpc_rl.parallel.state import ParallelState
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.megatron_map import megatron_shard_map, padded_vocab_size
from hpc_rl.tensors.shardmap import ShardMap


class MegatronEngine:
    """One role ("actor", "critic" or "reference") on this job's ranks; see TrainEngine for the contract.

    ``optimizer`` None freezes the model. ``total_steps`` counts optimizer steps of the whole run, for the schedule.
    """

    def __init__(
        self,
        role: str,
        spec: ModelSpec,
        config: Config,
        state: ParallelState,
        *,
        optimizer: OptimizerConfig | None,
        total_steps: int = 1,
    ) -> None:
        self.role, self.config, self.parallel = role, config, state
        self.spec = spec = spec.with_role("critic" if role == "critic" else "actor")
        layout = state.layout
        self.padded_vocab_size = padded_vocab_size(spec.vocab_size, layout.tp)
        self._map = megatron_shard_map(spec, layout, state.rank, self.padded_vocab_size, config.model.dtype)
        with cuda_as_cpu():
            megatron_config = transformer_config(spec, config, state)
            self.module = PackedGPT(megatron_config, spec, role, state, vocab_size=self.padded_vocab_size)
            if state.device.type == "cuda":
                self.module.cuda(state.device)
            self.module.temperature = config.rollout.temperature
            self.optimizer: DistributedAdamW | None = None
            self._host_copy: HostCopy | None = None
            self._model: torch.nn.Module = self.module
            if optimizer is None:
                self.module.requires_grad_(False).eval()
            else:
                megatron_config.finalize_model_grads_func = _finalize_gradients
                self._model = DistributedDataParallel(
                    megatron_config,
                    DistributedDataParallelConfig(
                        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
                    ),
                    self.module,
                )
                self.optimizer = DistributedAdamW(self._model, optimizer, megatron_config.params_dtype, total_steps)

    # ---- work -------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Outputs for the response tokens of ``batch``, 0 elsewhere: name -> float32 [N] on the CPU of every rank."""
        shares = self._shares(batch)

        def step(it: Iterator[tuple[Batch, Packed]], model: Any) -> tuple[Tensor, Callable[..., Tensor]]:
            _, packed = next(it)
            return model(packed), lambda output, non_loss_data=True: output[:, : packed.num_tokens]

        with torch.no_grad(), cuda_as_cpu():
            outputs = self._schedule(step, batch, shares, forward_only=True)
        return share.whole(self.module.output_names, batch, shares, outputs, self.parallel)

    def train_batch(self, batch: Batch, loss_fn: LossFn, outputs: dict[str, Tensor] | None = None) -> dict[str, float]:
        """One optimizer step on ``batch``; see TrainEngine."""
        assert self.optimizer is not None, f"{self.role} is frozen"
        assert isinstance(self._model, DistributedDataParallel)
        shares, sums = self._shares(batch), []
        names, seen = self.module.output_names, []

        def step(it: Iterator[tuple[Batch, Packed]], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            micro, packed = next(it)

            def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                if outputs is not None:
                    seen.append(output[:, : packed.num_tokens].detach())
                by_name = dict(zip(names, output[:, : packed.num_tokens], strict=True))
                total, metrics = loss_fn(by_name, micro) if len(micro) else (output.sum() * 0.0, {})
                sums.append({"loss": total.detach(), **{k: v.detach() for k, v in metrics.items()}})
                return total, torch.ones((), dtype=torch.int, device=output.device), {}

            return model(packed), loss

        with cuda_as_cpu():
            self._model.zero_grad_buffer()
            self.optimizer.optimizer.zero_grad()
            self._schedule(step, batch, shares, forward_only=False)
            metrics = share.reduce(sums, self.parallel)
            norm = self.optimizer.gradient_norm()
            share.check_finite(self.role, metrics["loss"], norm, batch, shares, sums, self._gradients(), self.parallel)
            lr = self.optimizer.lr
            self.optimizer.step(norm)
        if outputs is not None:
            outputs |= share.whole(names, batch, shares, seen, self.parallel)
        return {**metrics, "grad_norm": norm, "lr": lr}

    def _shares(self, batch: Batch) -> list[list[int]]:
        return share.micro_batch_shares(batch, self.parallel, self.config.algorithm.micro_batch_tokens)

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Of every parameter that has one on this rank."""
        for name, p in self.module.named_parameters():
            if getattr(p, "main_grad", None) is not None:
                yield name, p.main_grad

    def _schedule(self, step: Any, batch: Batch, shares: Sequence[Sequence[int]], *, forward_only: bool) -> list[Any]:
        p = self.parallel
        multiple_of = p.layout.tp if self.module.config.sequence_parallel else 1
        padded = p.device.type == "cpu" or self.config.model.dtype == "float32"  # the varlen kernel knows 16 bits only

        def feed() -> Iterator[tuple[Batch, Packed]]:
            for indices in shares:
                beat()
                micro = batch.select(indices)
                yield micro.to(p.device), pack(micro, p.device, multiple_of, padded)

        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=feed(),
            model=self._model,
            num_microbatches=len(shares),
            seq_length=1,  # lengths vary: the pipeline sends shapes along
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    # ---- state ------------------------------------------------------------------------------------------------

    def shard_map(self) -> tuple[ShardMap, dict[str, Tensor]]:
        """This rank's parameters by canonical name, and the live local tensors."""
        return self._map, {name: p.data for name, p in self.module.named_parameters()}

    def parameters_changed(self) -> None:
        """Call after parameters were written from outside: the optimizer's main weights follow."""
        if self.optimizer is not None:
            with cuda_as_cpu():
                self.optimizer.reload_from_parameters()

    def state(self) -> tuple[ShardMap, dict[str, Tensor], dict[str, Any]]:
        """All that a resume needs; see `optimizer_state.engine_state`."""
        return engine_state(self)

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Takes the small values back, after the tensors of ``state()`` were filled in place."""
        assert self.optimizer is not None, f"{self.role} is frozen: it has no state"
        self.optimizer.load_state(values["optimizer"])

    def offload(self) -> None:
        """Frees the device memory of weights, gradients and optimizer states (GPU only)."""
        if self._host_copy is None:
            tensors = [p.data for p in self.module.parameters()]
            if self.optimizer is not None:
                assert isinstance(self._model, DistributedDataParallel)
                tensors += [b.grad_data for b in self._model.buffers]
                tensors += [t for s in self.optimizer.shards() for t in (s.main, s.exp_avg, s.exp_avg_sq)]
            self._host_copy = HostCopy(tensors)
        self._host_copy.offload()

    def onload(self) -> None:
        """Everything is back where it was before `offload`."""
        if self._host_copy is not None:
            self._host_copy.onload()

    def close(self) -> None:
        """Frees the model; the engine is not usable afterwards."""
        del self._model, self.module, self.optimizer, self._host_copy
        gc.collect()  # Megatron's buffers and hooks hold each other in cycles


def _finalize_gradients(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction without its division by the token count: the loss weights hold the denominator."""
    finalize_model_grads(model, None, **kwargs)
