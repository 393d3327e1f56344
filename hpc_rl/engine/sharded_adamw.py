"""AdamW over the local shards of parameters that are cut over all ranks: each element is on one rank only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hpc_rl.config import OptimizerConfig
from hpc_rl.engine.optimizer_state import Shard
from hpc_rl.engine.schedule import learning_rate_schedule
from hpc_rl.parallel.collectives import merge


class ShardedAdamW:
    """The verbs of `DistributedAdamW` for an engine whose gradients arrive sharded, in float32.

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
            [g for g in groups if g["params"]], lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps,
            fused=any(m.is_cuda for m in mains.values()),
        )  # fmt: skip
        for main in mains.values():  # torch makes the states at the first step: now, a checkpoint can be read into them
            step = torch.zeros((), dtype=torch.float32, device=main.device if main.is_cuda else "cpu")
            moments = {"exp_avg": torch.zeros_like(main), "exp_avg_sq": torch.zeros_like(main)}
            self.adamw.state[main] = {"step": step, **moments}
        self.schedule = learning_rate_schedule(self.adamw, config, total_steps)

    @property
    def lr(self) -> float:
        return max((g["lr"] for g in self.adamw.param_groups), default=0.0)

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return int(self.schedule.num_steps)

    def gradient_norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Global L2 norm of the summed gradients, before clipping; the same on every rank. Takes them over."""
        total = torch.zeros((), device=next(iter(self.mains.values())).device)
        for name, main in self.mains.items():
            main.grad = gradients[name]
            total += main.grad.square().sum()
        return math.sqrt(float(merge(total)))

    @torch.no_grad()
    def step(self, norm: float) -> None:
        """Clips by ``norm`` and updates this rank's shards."""
        if self.clip_grad > 0 and norm > self.clip_grad:
            torch._foreach_mul_([m.grad for m in self.mains.values() if m.grad is not None], self.clip_grad / (norm + 1e-6))
        self.adamw.step()
        self.adamw.zero_grad()
        for name, cast in self.casts.items():
            cast.copy_(self.mains[name])
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
        steps = int(state["num_steps"])
        for s in self.adamw.state.values():
            s["step"].fill_(steps)
        self.schedule.num_steps = 0
        self.schedule.step(steps)
