"""The learning rate over the optimizer steps of a run: Megatron's scheduler, for any engine's optimizer."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from hpc_rl.config import OptimizerConfig


def learning_rate_schedule(optimizer: Any, config: OptimizerConfig, total_steps: int) -> OptimizerParamScheduler:
    """Sets ``lr`` and ``weight_decay`` of the optimizer's groups, now and at each ``step(1)``.

    Groups with ``wd_mult`` 0 get no weight decay. Warm-up is linear from 0; ``total_steps`` ends the decay where
    ``decay_steps`` is null.
    """
    decay_steps = config.decay_steps or max(1, total_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if config.warmup_steps else config.lr,
        max_lr=config.lr,
        min_lr=config.lr if config.decay == "constant" else config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(decay_steps, config.warmup_steps + 1),
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
