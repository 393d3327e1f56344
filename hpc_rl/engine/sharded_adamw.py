"""AdamW over the local shards of parameters that are cut over all ranks: each element is on one rank only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_rl.config import OptimizerConfig
from hpc_rl.engine.kernels import fused_step
from hpc_rl.engine.optimizer_state import Shard, no_moments, set_steps
from hpc_rl.engine.schedule import learning_rate_schedule
from hpc_rl.parallel.collectives import merge


class ShardedAdamW:
    """A `CutOptimizer` for parameters whose gradients arrive as float32 DTensors, cut as they are.

    Args:
        params: name -> the whole parameter, whose dims decide on weight decay (norms and biases are spared).
        mains: name -> this rank's part, float32, contiguous; updated in place.
        casts: name -> the same part in the model's dtype, written after each step; empty where that is float32.
    """

    def __init__(
        self, params: Mapping[str, torch.nn.Parameter], mains: Mapping[str, Tensor], casts: Mapping[str, Tensor],
        config: OptimizerConfig, total_steps: int,
    ) -> None:  # fmt: skip
        self.params, self.mains, self.casts, self.clip_grad = params, mains, casts, config.clip_grad
        groups = [
            {"params": [m for n, m in mains.items() if (params[n].dim() > 1) == decays], "wd_mult": float(decays)}
            for decays in (True, False)
        ]
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps
        )  # fmt: skip
        for main in mains.values():
            self.adamw.state[main] = no_moments(main)
        self.schedule = learning_rate_schedule(self.adamw, config, total_steps)

    @property
    def lr(self) -> float:
        return max((g["lr"] for g in self.adamw.param_groups), default=0.0)

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return int(self.schedule.num_steps)

    def zero_grad(self) -> None:
        for p in self.params.values():
            p.grad = None

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Adds the gradients of a micro-batch, already summed over the ranks."""
        loss.backward()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's rows of every gradient."""
        for name, p in self.params.items():
            assert isinstance(p.grad, DTensor), "every parameter takes part in every micro-batch"
            yield name, p.grad.to_local()

    def gradient_norm(self) -> float:
        """Global L2 norm of the summed gradients, before clipping; the same on every rank."""
        squares = [gradient.square().sum() for _, gradient in self.gradients()]
        return math.sqrt(float(merge(torch.stack(squares).sum())))

    @torch.no_grad()
    def step(self, norm: float) -> None:
        """Clips by ``norm`` and updates this rank's shards."""
        scale = min(1.0, self.clip_grad / (norm + 1e-6)) if self.clip_grad > 0 else 1.0
        for name, gradient in self.gradients():
            self.mains[name].grad = gradient
        if torch.cuda.is_available():
            outs = {id(self.mains[name]): cast for name, cast in self.casts.items()}
            fused_step(self.adamw, outs, scale, self.num_steps + 1)
        else:
            for _, gradient in self.gradients():  # the same tensors
                gradient.mul_(scale)
            self.adamw.step()
            for name, cast in self.casts.items():
                cast.copy_(self.mains[name])
        self.adamw.zero_grad()
        self.zero_grad()
        self.schedule.step(1)

    @torch.no_grad()
    def reload_from_parameters(self) -> None:
        """Main weights := model weights, after those were loaded from elsewhere."""
        for name, cast in self.casts.items():
            self.mains[name].copy_(cast)

    def shards(self) -> Iterator[Shard]:
        """This rank's part of every parameter."""
        for name, main in self.mains.items():
            s = self.adamw.state[main]
            yield Shard(self.params[name], 0, main.numel(), main, s["exp_avg"], s["exp_avg_sq"])

    def state(self) -> dict[str, int]:
        """Small values of a resume; the tensors are in ``shards()``."""
        return {"num_steps": self.num_steps}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Takes ``state()`` back: the step count that bias correction and the schedule read."""
        set_steps(self.adamw.state.values(), self.schedule, int(state["num_steps"]))
