"""The DeepSpeed engine, ZeRO-1 and ZeRO-2: weights whole on every rank, optimizer states (and gradients) cut over all."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hpc_rl.config import Config, OptimizerConfig
from hpc_rl.engine.data_parallel import DataParallelEngine
from hpc_rl.engine.dense import DenseLM
from hpc_rl.engine.megatron_model import DTYPES
from hpc_rl.engine.optimizer_state import Shard, no_moments, set_steps
from hpc_rl.engine.schedule import learning_rate_schedule
from hpc_rl.parallel.state import ParallelState
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.cut_map import whole_shard_map
from hpc_rl.tensors.shardmap import ShardMap

BUCKET_ELEMENTS = 100_000_000  # of gradients reduced, or weights gathered, at once


class ZeroAdamW:
    """A `CutOptimizer`: DeepSpeed's engine around a model and torch's AdamW."""

    def __init__(
        self, module: torch.nn.Module, stage: int, dtype: torch.dtype, config: OptimizerConfig, total_steps: int,
        num_ranks: int,
    ) -> None:  # fmt: skip
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        import deepspeed

        # Its all-reduce through shared memory (CPU) would be compiled at the first start, and knows one node only.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        params = list(module.parameters())
        groups = [
            {"params": [p for p in params if (p.dim() > 1) == decays], "wd_mult": float(decays)}
            for decays in (True, False)
        ]
        adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
        settings = _settings(stage, dtype, config.clip_grad, sum(p.numel() for p in params))
        self.engine, self.zero, _, _ = deepspeed.initialize(
            model=module, optimizer=adamw, dist_init_required=False, config=settings
        )
        for flat in self.zero.single_partition_of_fp32_groups:
            adamw.state[flat] = no_moments(flat)
        self.module, self.adamw, self.num_ranks = module, adamw, num_ranks
        self.schedule = learning_rate_schedule(adamw, config, total_steps)

    @property
    def lr(self) -> float:
        return max(float(g["lr"]) for g in self.adamw.param_groups)

    def zero_grad(self) -> None:
        """DeepSpeed's step leaves none behind."""

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Adds the gradients of a micro-batch; the last one of a step sends the sums to their ranks."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(loss * self.num_ranks)  # it averages over them; the loss weights hold the denominator

    def gradient_norm(self) -> float:
        """Global L2 norm of the summed gradients, before clipping; NaN where one is not finite."""
        norm = float(self.zero.scaled_global_norm())
        return norm if norm >= 0 else float("nan")  # DeepSpeed says -1

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parts, by name."""
        names = {id(p): n for n, p in self.module.named_parameters()}
        for index, params in enumerate(self.zero.params_in_partition):
            for p, gradient in zip(params, self.zero.averaged_gradients[index], strict=False):
                yield names[id(p)], gradient

    def step(self, norm: float) -> None:
        """Clips, updates this rank's parts and gathers the weights."""
        self.engine.step()
        self.schedule.step(1)

    def reload_from_parameters(self) -> None:
        """Main weights := model weights, after those were loaded from elsewhere."""
        self.zero.refresh_fp32_params()

    def shards(self) -> Iterator[Shard]:
        """This rank's part of the parameters that lie, whole or in part, in its cut of the flat groups."""
        for p in self.module.parameters():
            part: Any = p._hp_mapping  # type: ignore[attr-defined]
            if part is None:
                continue
            flat = self.zero.single_partition_of_fp32_groups[part.param_group_index]
            here, there, state = part.lp_fragment_address, part.hp_fragment_address, self.adamw.state[flat]
            main, *moments = (
                t.detach().narrow(0, there.start, there.numel) for t in (flat, state["exp_avg"], state["exp_avg_sq"])
            )
            yield Shard(p, here.start, here.start + here.numel, main, *moments)

    def tensors(self) -> Iterator[Tensor]:
        """All that it keeps on the device between steps."""
        for flat in self.zero.single_partition_of_fp32_groups:
            yield from (flat, self.adamw.state[flat]["exp_avg"], self.adamw.state[flat]["exp_avg_sq"])

    def state(self) -> dict[str, int]:
        """Small values of a resume; the tensors are in ``shards()``."""
        return {"num_steps": int(self.schedule.num_steps)}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Takes ``state()`` back: the step count that bias correction and the schedule read."""
        set_steps(self.adamw.state.values(), self.schedule, int(state["num_steps"]))
        if self.zero.dtype == torch.float32:
            self.reload_from_parameters()  # main weights of a float32 model are a copy, and no part of the state


def _settings(stage: int, dtype: torch.dtype, clip_grad: float, num_params: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # counted in calls of backward: micro-batches are ours
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip_grad,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": min(num_params, BUCKET_ELEMENTS),
            "allgather_bucket_size": min(num_params, BUCKET_ELEMENTS),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


class ZeroEngine(DataParallelEngine):
    """See `MegatronEngine` for the arguments."""

    def __init__(
        self, role: str, spec: ModelSpec, config: Config, state: ParallelState, *, optimizer: OptimizerConfig | None,
        total_steps: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(role, spec, config, state)
        dtype = DTYPES[config.model.dtype]
        with torch.device(state.device):
            module = DenseLM(self.spec, role, dtype, config.parallel.recompute == "full").to(dtype)
        module.temperature = config.rollout.temperature
        module.requires_grad_(optimizer is not None)
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
        self._map = whole_shard_map(self.spec, config.model.dtype)
        self.module = module
        self.optimizer = None
        if optimizer is not None:
            stage = int(config.parallel.engine.removeprefix("zero"))
            self.optimizer = ZeroAdamW(module, stage, dtype, optimizer, total_steps, state.layout.dp)

    def shard_map(self) -> tuple[ShardMap, dict[str, Tensor]]:
        """All parameters, on every rank."""
        return self._map, {name: p.data for name, p in self.module.named_parameters()}

    def _kept(self) -> Iterable[Tensor]:
        yield from (p.data for p in self.module.parameters())
        if isinstance(self.optimizer, ZeroAdamW):
            yield from self.optimizer.tensors()

    def close(self) -> None:
        """Frees the model; the engine is not usable afterwards."""
        if isinstance(self.optimizer, ZeroAdamW):
            self.optimizer.engine.destroy()
        super().close()
