"""Megatron's distributed AdamW behind four verbs: gradient norm, step, state by parameter, learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from hpc_rl.config import OptimizerConfig
from hpc_rl.engine.kernels import fused_step
from hpc_rl.engine.optimizer_state import Shard, no_moments, set_steps
from hpc_rl.engine.schedule import learning_rate_schedule
from hpc_rl.parallel.megatron_cpu import cuda_as_cpu


class DistributedAdamW:
    """AdamW with states sharded over DP. Weight decay spares norms and biases (parameters of one dim)."""

    def __init__(
        self, model: DistributedDataParallel, config: OptimizerConfig, dtype: torch.dtype, total_steps: int
    ) -> None:
        self.optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
                clip_grad=config.clip_grad,
                overlap_param_gather=False,
            ),
            [model],
            use_gloo_process_groups=False,
        )
        self.clip_grad = config.clip_grad
        (self._sharded,) = self.optimizer.chained_optimizers
        self._create_states()
        # Built before the first step: it is what takes the weight decay off the groups that should have none.
        self.schedule = learning_rate_schedule(self.optimizer, config, total_steps)

    def _create_states(self) -> None:
        inner = self._sharded.optimizer
        for group in inner.param_groups:
            for p in group["params"]:
                inner.state[p] = no_moments(p)

    @property
    def lr(self) -> float:
        return max((g["lr"] for g in self.optimizer.param_groups), default=0.0)

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return int(self.schedule.num_steps)

    def gradient_norm(self) -> float:
        """Global L2 norm of the summed gradients, before clipping; the same on every rank. Takes the gradients over."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def step(self, norm: float) -> None:
        """Clips by ``norm``, updates this rank's shards and gathers the parameters over DP."""
        if torch.cuda.is_available():
            self._fused_step(norm)
        else:
            with cuda_as_cpu():
                if self.clip_grad > 0:
                    clip_grad_by_total_norm_fp32(self._sharded.get_parameters(), self.clip_grad, norm)
                self.optimizer.step_with_ready_grads()
        self.schedule.step(1)

    def _fused_step(self, norm: float) -> None:
        """Clip, AdamW and the cast to the model's dtype in one pass over memory, where torch and Megatron take four."""
        opt, step = self._sharded, self.num_steps + 1
        scale = min(1.0, self.clip_grad / (norm + 1e-6)) if self.clip_grad > 0 else 1.0
        casts = {
            id(main): shard
            for mains, shards in zip(opt.shard_fp32_from_float16_groups, opt.shard_float16_groups, strict=True)
            for main, shard in zip(mains, shards, strict=True)
        }
        with torch.no_grad():
            fused_step(opt.optimizer, casts, scale, step)
            for chunk in opt.model_chunks:
                chunk.start_param_sync()

    def reload_from_parameters(self) -> None:
        """Main weights := model weights, after those were loaded from elsewhere."""
        self.optimizer.reload_model_params()

    def shards(self) -> Iterator[Shard]:
        """This rank's shards, in Megatron's order."""
        opt = self._sharded
        pairs = [
            (opt.model_fp32_groups, opt.shard_fp32_groups),
            (opt.model_float16_groups, opt.shard_fp32_from_float16_groups),
        ]
        for model_groups, main_groups in pairs:
            for params, mains in zip(model_groups, main_groups, strict=True):
                for param, main in zip(params, mains, strict=True):
                    r = opt._get_model_param_range_map(param)["param"]
                    s = opt.optimizer.state[main]
                    yield Shard(param, r.start, r.end, main.detach(), s["exp_avg"], s["exp_avg_sq"])

    def state(self) -> dict[str, int]:
        """Small values of a resume; the tensors are in ``shards()``."""
        return {"num_steps": self.num_steps}

    def load_state(self, state: dict[str, int]) -> None:
        """Takes ``state()`` back: the step count that bias correction and the schedule read."""
        set_steps(self._sharded.optimizer.state.values(), self.schedule, int(state["num_steps"]))
