"""What the training loop calls: advantages of a step, its mini-batches, and the loss functions of actor and critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hpc_rl.algo.adapters import ADVANTAGES, POLICY_LOSSES, AdvantageInputs
from hpc_rl.algo.correction import acceptance_mask, importance_weights, mismatch, mismatch_metrics
from hpc_rl.algo.kl import kl_estimate
from hpc_rl.algo.losses import PolicyInputs, loss_weights, value_mse
from hpc_rl.algo.masked import keep, masked_mean, masked_var, segment_count, segment_sum, spread
from hpc_rl.algo.registry import algorithm, needs_old_log_probs
from hpc_rl.algo.shaping import informative, last_response_token, overlong_penalty
from hpc_rl.batch import Batch
from hpc_rl.config import Config
from hpc_rl.engine.protocol import LossFn
from hpc_rl.errors import NotFiniteError, UserError


def prepare(batch: Batch, config: Config, kl_coef: float) -> tuple[Batch, dict[str, float]]:
    """Rewards after the penalties, advantages and returns of one step.

    Works in float64, so that the order of the sequences does not show in the float32 results.

    Args:
        batch: the whole step (the same on every rank): response_mask, token_level_scores, rollout_log_probs,
            group_ids, scores [B]; old_log_probs [N] if `needs_old_log_probs`; as the algorithm asks, ref_log_probs,
            values [N], baseline_scores [B].
        config: the run's.
        kl_coef: the current coefficient.
    Returns: the batch with token_level_rewards, advantages, returns [N] (zeros outside the mask; dtype of
        token_level_scores), and with a correction or rejection configured correction_weights, loss_mask [N]; metrics.
    Raises: UserError if an array that the algorithm needs is missing, NotFiniteError if a reward is not finite.
    """
    _check(batch, config, kl_coef)
    mask, cu_seqlens = batch["response_mask"], batch.cu_seqlens
    rewards, metrics = _rewards(batch, config, kl_coef)
    has_response = segment_count(mask, cu_seqlens) > 0
    # An empty response has no token to carry its score, yet it is a sample of its group.
    outcomes = segment_sum(rewards, cu_seqlens) + keep(batch["scores"].double(), ~has_response)
    inputs = AdvantageInputs(
        rewards=rewards, mask=mask, cu_seqlens=cu_seqlens, outcomes=outcomes, group_ids=batch["group_ids"],
        values=keep(batch["values"].double(), mask) if "values" in batch else None,
        baselines=batch["baseline_scores"].double() if "baseline_scores" in batch else None,
    )  # fmt: skip
    advantages, returns = ADVANTAGES[algorithm(config.algorithm.name).advantage](inputs, config.algorithm)
    dtype = batch["token_level_scores"].dtype
    prepared = batch.with_tokens(
        token_level_rewards=rewards.to(dtype), advantages=advantages.to(dtype), returns=returns.to(dtype)
    )
    metrics |= _statistics(prepared, has_response)
    if "old_log_probs" not in batch:
        assert not needs_old_log_probs(config), "the batch has no old_log_probs, which this configuration needs"
        return prepared, metrics
    prepared, correction_metrics = _correct(prepared, config)
    return prepared, metrics | correction_metrics


def sampled_metrics(batch: Batch, log_probs: Tensor, config: Config) -> dict[str, float]:
    """What `prepare` would have said of the sampling policy, had it known its log-probs: mismatch and ``kl``.

    Args:
        batch: a mini-batch that held the whole step. log_probs: [N], of the training pass.
    """
    mask = batch["response_mask"]
    scored = batch.with_tokens(old_log_probs=log_probs)
    return _correct(scored, config)[1] | _kl_metric(scored, mask, config)


def _check(batch: Batch, config: Config, kl_coef: float) -> None:
    algo, name = algorithm(config.algorithm.name), config.algorithm.name
    if algo.needs_critic and "values" not in batch:
        raise UserError(f"algorithm.name = {name} needs a critic's values, but the batch has none: add a critic")
    if algo.needs_greedy and "baseline_scores" not in batch:
        raise UserError(
            f"algorithm.name = {name} needs baseline_scores of greedy responses, but the batch has none: draw them"
        )
    if config.algorithm.kl_placement != "none" and kl_coef > 0 and "ref_log_probs" not in batch:
        raise UserError(
            f"algorithm.kl_placement = {config.algorithm.kl_placement} needs ref_log_probs, but the batch has none: "
            "add a reference policy or set kl_placement to none"
        )
    sums = segment_sum(keep(batch["token_level_scores"], batch["response_mask"]).double(), batch.cu_seqlens)
    both = batch["scores"].double() + sums
    if not both.isfinite().all():
        row = int((~both.isfinite()).nonzero()[0])
        raise NotFiniteError(f"the reward of sequence {row} is {float(both[row])}, but a reward must be finite")


def _rewards(batch: Batch, config: Config, kl_coef: float) -> tuple[Tensor, dict[str, float]]:
    """Scores less the penalties for length and KL: float64 [N], zeros outside the mask."""
    mask, algo = batch["response_mask"], config.algorithm
    rewards, metrics = keep(batch["token_level_scores"].double(), mask), {"kl": 0.0}
    if algo.overlong_buffer_tokens:
        lengths, limit = segment_count(mask, batch.cu_seqlens), config.rollout.max_response_tokens
        penalty = overlong_penalty(lengths, limit, algo.overlong_buffer_tokens, algo.overlong_penalty)
        rewards = rewards + keep(spread(penalty, batch.cu_seqlens), last_response_token(mask, batch.cu_seqlens))
        metrics["overlong_penalty_mean"] = float(penalty.sum()) / max(len(batch), 1)
    if "ref_log_probs" in batch and "old_log_probs" in batch:
        log_probs, ref_log_probs = batch["old_log_probs"].double(), batch["ref_log_probs"].double()
        kl = kl_estimate(log_probs, ref_log_probs, mask, algo.kl_estimator)
        metrics["kl"] = float(masked_mean(kl, mask))
        if algo.kl_placement == "reward":
            rewards = rewards - kl_coef * kl
    return rewards, metrics


def _kl(batch: Batch, mask: Tensor, config: Config) -> Tensor:
    log_probs, ref_log_probs = batch["old_log_probs"].double(), batch["ref_log_probs"].double()
    return kl_estimate(log_probs, ref_log_probs, mask, config.algorithm.kl_estimator)


def _kl_metric(batch: Batch, mask: Tensor, config: Config) -> dict[str, float]:
    return {"kl": float(masked_mean(_kl(batch, mask, config), mask))} if "ref_log_probs" in batch else {}


def _statistics(batch: Batch, has_response: Tensor) -> dict[str, float]:
    """Means over the step's response tokens or sequences; 0 where there are none."""
    mask, scores = batch["response_mask"], batch["scores"].double()
    everyone = torch.ones_like(has_response)
    lengths = segment_count(mask, batch.cu_seqlens).double()
    values = {
        "reward_mean": masked_mean(scores, everyone),
        "reward_std": masked_var(scores, everyone).sqrt(),
        "response_tokens_mean": masked_mean(lengths, everyone),
        "empty_frac": masked_mean((~has_response).double(), everyone),
        "informative_frac": masked_mean(informative(scores, batch["group_ids"]).double(), everyone),
    }
    for name in ("advantages", "returns", "token_level_rewards"):
        values[f"{name}_mean"] = masked_mean(batch[name].double(), mask)
        values[f"{name}_std"] = masked_var(batch[name].double(), mask).sqrt()
    if "finished" in batch:
        values["truncated_frac"] = masked_mean((~batch["finished"]).double(), everyone)
    if "values" in batch:
        error = batch["returns"].double() - batch["values"].double()
        spread_of_returns = masked_var(batch["returns"].double(), mask).clamp(min=1e-12)
        values["values_mean"] = masked_mean(batch["values"].double(), mask)
        values["explained_variance"] = 1.0 - masked_var(error, mask) / spread_of_returns
    return {name: float(value) for name, value in values.items()}


def _correct(batch: Batch, config: Config) -> tuple[Batch, dict[str, float]]:
    """Mismatch metrics, and the weights and the mask that the configuration asks for."""
    algo, mask, cu_seqlens = config.algorithm, batch["response_mask"], batch.cu_seqlens
    log_ratio = mismatch(batch["old_log_probs"].double(), batch["rollout_log_probs"].double(), mask)
    metrics = mismatch_metrics(log_ratio, mask, cu_seqlens)
    if algo.correction != "none":
        bounds = (algo.correction_low, algo.correction_high)
        weights = importance_weights(log_ratio, mask, cu_seqlens, algo.correction, *bounds, algo.correction_normalize)
        batch = batch.with_tokens(correction_weights=weights.to(batch["advantages"].dtype))
        metrics["correction_weight_mean"] = float(masked_mean(weights, mask))
    if algo.reject != "none":
        accepted = acceptance_mask(log_ratio, mask, cu_seqlens, algo.reject, algo.reject_low, algo.reject_high)
        batch = batch.with_tokens(loss_mask=accepted)
        metrics["rejected_frac"] = float(masked_mean((~accepted).double(), mask))
    return batch, metrics


def mini_batches(batch: Batch, config: Config, generator: torch.Generator) -> Iterator[Batch]:
    """algorithm.epochs passes over ``batch`` in new random order, each in algorithm.mini_batches parts.

    Parts differ by at most one sequence; there are never more of them than sequences.

    Args:
        batch: from `prepare`.
        generator: CPU, in the same state on every rank.
    Yields: whole sequences with ``loss_weights`` (algorithm.aggregation, over loss_mask if there is one) and
        ``value_loss_weights`` (1 / response tokens: value loss and metrics), [N], for that mini-batch's global counts.
    """
    num_parts = min(config.algorithm.mini_batches, len(batch))
    for _ in range(config.algorithm.epochs if len(batch) else 0):
        order = torch.randperm(len(batch), generator=generator)
        for indices in torch.tensor_split(order, num_parts):
            yield _with_weights(batch.select(indices), config)


def _with_weights(part: Batch, config: Config) -> Batch:
    mask, dtype = part["response_mask"], part["advantages"].dtype
    policy_mask = part.tokens.get("loss_mask", mask)
    limit = config.rollout.max_response_tokens
    return part.with_tokens(
        loss_weights=loss_weights(config.algorithm.aggregation, policy_mask, part.cu_seqlens, limit, dtype),
        value_loss_weights=loss_weights("token-mean", mask, part.cu_seqlens, dtype=dtype),
    )


def policy_loss(config: Config, kl_coef: float) -> LossFn:
    """The actor's loss: policy loss - entropy_coef entropy + kl_coef KL (kl_placement loss), all with ``loss_weights``.

    Metrics are sums that add over micro-batches and ranks: loss/policy, loss/kl, loss/entropy as they enter the loss;
    entropy, kl_loss, approx_kl (mean old - new log-prob, clamped), ratio, clip_frac, ... as means over response tokens.
    """
    algo, token_loss = config.algorithm, POLICY_LOSSES[algorithm(config.algorithm.name).policy_loss]

    def loss_fn(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        mask, weights, mean = batch["response_mask"], batch["loss_weights"], batch["value_loss_weights"]
        log_probs = outputs["log_probs"]
        old_log_probs = batch["old_log_probs"] if "old_log_probs" in batch else log_probs.detach()
        inputs = PolicyInputs(log_probs, old_log_probs, batch["advantages"], mask, batch.cu_seqlens)
        loss, per_token = token_loss(inputs, algo)
        if "correction_weights" in batch:
            loss = loss * batch["correction_weights"]
        terms = {"policy": loss}
        per_token = {**per_token, "approx_kl": -inputs.clamped_log_ratio()}
        if "entropy" in outputs:
            per_token["entropy"] = keep(outputs["entropy"], mask)
            if algo.entropy_coef:
                terms["entropy"] = -algo.entropy_coef * per_token["entropy"]
        if algo.kl_placement == "loss" and kl_coef > 0:
            reference = batch["ref_log_probs"]
            kl = kl_estimate(log_probs, reference, mask, algo.kl_estimator, algo.kl_straight_through)
            terms["kl"], per_token["kl_loss"] = kl_coef * kl, kl
        sums = {f"loss/{name}": (weights * term).sum() for name, term in terms.items()}
        metrics = {name: (mean * value.detach()).sum() for name, value in per_token.items()}
        return torch.stack(list(sums.values())).sum(), {k: v.detach() for k, v in sums.items()} | metrics

    return loss_fn


def value_loss(config: Config) -> LossFn:
    """The critic's loss, token mean over the response tokens. Metrics: loss/value, value_clip_frac."""

    def loss_fn(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        mean = batch["value_loss_weights"]
        loss, per_token = value_mse(
            outputs["values"], batch["values"], batch["returns"], batch["response_mask"], config.algorithm.value_clip
        )
        total = (mean * loss).sum()
        metrics = {name: (mean * value.detach()).sum() for name, value in per_token.items()}
        return total, {"loss/value": total.detach(), **metrics}

    return loss_fn
