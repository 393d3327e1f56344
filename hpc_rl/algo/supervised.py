"""Losses of the objectives without rollouts, as the engines take them. The formulas are in preference.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hpc_rl.algo import preference
from hpc_rl.algo.losses import loss_weights
from hpc_rl.algo.masked import keep, segment_sum
from hpc_rl.algo.registry import objective
from hpc_rl.batch import Batch
from hpc_rl.config import AlgorithmConfig, Config
from hpc_rl.engine.protocol import LossFn
from hpc_rl.errors import UserError

PairLoss = tuple[Tensor, Mapping[str, Tensor]]  # loss [P], and metrics [P] to be averaged over pairs


def with_weights(batch: Batch, config: Config) -> Batch:
    """The batch with what each token or pair counts in its loss.

    ``loss_weights`` [N]: as ``algorithm.aggregation`` says, over the learned tokens; ``value_loss_weights`` [N]: 1 over
    their number, for metrics. ``pair_weights`` [B]: 1 over the number of pairs, where there are pairs.
    """
    mask, limit = batch["response_mask"], config.rollout.max_response_tokens
    if "pair_ids" in batch:
        batch = batch.with_sequences(pair_weights=torch.full((len(batch),), 2.0 / len(batch)))
    return batch.with_tokens(
        loss_weights=loss_weights(config.algorithm.aggregation, mask, batch.cu_seqlens, limit),
        value_loss_weights=loss_weights("token-mean", mask, batch.cu_seqlens),
    )


def supervised_loss(config: Config) -> LossFn:
    """The loss of ``algorithm.name``; metrics are sums that add over micro-batches and ranks.

    Raises: UserError for an algorithm with rollouts.
    """
    goal = objective(config.algorithm.name)
    if goal is None:
        raise UserError(f"algorithm.name = {config.algorithm.name} learns from rollouts: use RLTrainer")
    return LOSSES[goal.loss](config.algorithm)


def sft_loss(config: AlgorithmConfig) -> LossFn:
    """Negative log-likelihood of the response tokens. Metric: nll, its mean over them."""

    def loss_fn(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        nll = preference.sft(outputs["log_probs"], batch["response_mask"])
        metrics = {"nll": (batch["value_loss_weights"] * nll.detach()).sum()}
        if "entropy" in outputs:
            entropy = keep(outputs["entropy"].detach(), batch["response_mask"])
            metrics["entropy"] = (batch["value_loss_weights"] * entropy).sum()
        return (batch["loss_weights"] * nll).sum(), metrics

    return loss_fn


def dpo_loss(config: AlgorithmConfig) -> LossFn:
    """Sigmoid DPO. Metrics as means over pairs: reward_chosen, reward_rejected, margin, accuracy."""

    def pairs(outputs: Mapping[str, Tensor], batch: Batch) -> PairLoss:
        ratios = _log_ratios(outputs, batch, average=False)
        loss = preference.dpo(*ratios, config.beta, config.label_smoothing)
        return loss, preference.pair_metrics(*ratios, config.beta)

    return _over_pairs(pairs)


def ipo_loss(config: AlgorithmConfig) -> LossFn:
    """IPO, on token means. Metrics as those of DPO."""

    def pairs(outputs: Mapping[str, Tensor], batch: Batch) -> PairLoss:
        ratios = _log_ratios(outputs, batch, average=True)
        return preference.ipo(*ratios, config.beta), preference.pair_metrics(*ratios, config.beta)

    return _over_pairs(pairs)


def reward_model_loss(config: AlgorithmConfig) -> LossFn:
    """Bradley-Terry on the score of each whole sequence. Metrics as those of DPO."""

    def pairs(outputs: Mapping[str, Tensor], batch: Batch) -> PairLoss:
        scores = segment_sum(keep(outputs["values"], batch["response_mask"]), batch.cu_seqlens)
        chosen, rejected = scores[0::2], scores[1::2]
        loss = preference.reward_model(chosen, rejected, center=config.reward_center)
        return loss, preference.pair_metrics(chosen, rejected)

    return _over_pairs(pairs)


LOSSES: Mapping[str, Callable[[AlgorithmConfig], LossFn]] = {
    "sft": sft_loss,
    "dpo": dpo_loss,
    "ipo": ipo_loss,
    "reward_model": reward_model_loss,
}


def _log_ratios(outputs: Mapping[str, Tensor], batch: Batch, average: bool) -> tuple[Tensor, Tensor]:
    return preference.log_ratio_margins(
        outputs["log_probs"], batch["ref_log_probs"], batch["response_mask"], batch.cu_seqlens, average
    )


def _over_pairs(pairs: Callable[[Mapping[str, Tensor], Batch], PairLoss]) -> LossFn:
    def loss_fn(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss, per_pair = pairs(outputs, batch)
        weights = batch["pair_weights"][0::2].to(loss.device, non_blocking=True)
        return (weights * loss).sum(), {name: (weights * value).sum() for name, value in per_pair.items()}

    return loss_fn
