"""The sampler and the trainer disagree about log-probs: how much, and what to do about it.

The log-ratio is old_log_probs - rollout_log_probs, trainer over sampler, of the weights that sampled. Importance
weights multiply the policy loss of a token and leave its denominator; rejection takes tokens out of the loss's mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_rl.algo.masked import (
    LOG_RATIO_MAX,
    keep,
    keep_log_probs,
    masked_mean,
    segment_count,
    segment_max,
    segment_mean,
    segment_sum,
    spread,
)

QUANTILES = (0.05, 0.5, 0.95)


def mismatch(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log(trainer / sampler) at each token: [N], not clamped, zeros outside the mask."""
    return keep_log_probs(old_log_probs, mask) - keep_log_probs(rollout_log_probs, mask)


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    method: str,
    low: float = 0.0,
    high: float = 2.0,
    normalize: bool = False,
) -> Tensor:
    """Weights of the policy loss that correct for the sampler: [N], zeros outside the mask, without gradient.

    Level token: exp(log-ratio); sequence: exp(its sum over the sequence), on each of its tokens; either exponent
    clamped to +-20. tis: min(w, high). icepop: w where low <= w <= high, else 0.

    Args:
        log_ratio: [N] from `mismatch`. mask: [N] bool. cu_seqlens: int64 [B + 1].
        method: tis-token, tis-sequence, icepop-token or icepop-sequence.
        low, high: bounds of the weight.
        normalize: divide by the mean weight over all tokens, or all sequences that have any (as the level).
    Source: TIS: F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025;
        IcePop: Ling team, "Small leak can sink a great ship", 2025.
    """
    kind, level = method.split("-")
    assert kind in ("tis", "icepop") and level in ("token", "sequence"), f"unknown correction {method!r}"
    exponent = keep(log_ratio, mask)
    if level == "sequence":
        exponent = spread(segment_sum(exponent, cu_seqlens), cu_seqlens)
    weights = exponent.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    in_bounds = (weights >= low) & (weights <= high)
    weights = keep(weights.clamp(max=high) if kind == "tis" else keep(weights, in_bounds), mask)
    if normalize:
        mean = masked_mean(weights, mask) if level == "token" else _sequence_mean(weights, mask, cu_seqlens)
        weights = torch.where(mean > 1e-8, weights / mean.clamp(min=1e-8), weights)
    return weights.detach()


def _sequence_mean(weights: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    return masked_mean(segment_mean(weights, mask, cu_seqlens), segment_count(mask, cu_seqlens) > 0)


def acceptance_mask(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, rule: str, low: float, high: float) -> Tensor:
    """The part of ``mask [N]`` that stays in the policy loss.

    rule = level-divergence. Divergences of a token: k1 = log-ratio, compared with [log low, log high]; k2 = k1^2 / 2
    and k3 = exp(k1) - 1 - k1, compared with ``high`` alone. Levels: token, or seq-sum, seq-mean (for k1 the geometric
    mean of the ratio), seq-max of the sequence, which then stays or goes whole. Bounds are inclusive and speak of
    trainer / sampler, as the weights do (verl's of sampler / trainer: its [a, b] is [1/b, 1/a] here).

    Returns: [N] bool.
    """
    level, divergence = rule.rsplit("-", 1)
    k1 = keep(log_ratio, mask)
    token = {"k1": lambda: k1, "k2": lambda: 0.5 * k1.square(), "k3": lambda: torch.expm1(k1) - k1}[divergence]()
    if level == "seq-sum":
        token = spread(segment_sum(token, cu_seqlens), cu_seqlens)
    elif level == "seq-mean":
        token = spread(segment_mean(token, mask, cu_seqlens), cu_seqlens)
    elif level == "seq-max":
        token = spread(segment_max(token, cu_seqlens), cu_seqlens)
    else:
        assert level == "token", f"unknown rejection rule {rule!r}"
    if divergence == "k1":
        bounds = torch.tensor([low, high], dtype=torch.float64).log()
        return mask & (token >= bounds[0]) & (token <= bounds[1])
    return mask & (token <= high)


def mismatch_metrics(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor) -> dict[str, float]:
    """How far trainer and sampler are apart over the batch handed in (global), all 0 (ESS 1) without response tokens.

    kl: mean of sampler - trainer log-prob, an estimate of KL(sampler || trainer) in nats per token; k3: its
    never-negative form; abs_mean, abs_max: of |log-ratio|; seq_pNN: quantiles over sequences of the mean |log-ratio|,
    which show the tail that a mean hides; ess: effective sample size of the token ratios, as a fraction.
    """
    count = segment_count(mask, cu_seqlens)
    if not mask.any():
        names = ("kl", "k3", "abs_mean", "abs_max", *_quantile_names(), "ess")
        return {f"mismatch/{name}": float(name == "ess") for name in names}
    ratio = keep(log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp(), mask)
    per_sequence = segment_mean(log_ratio.abs(), mask, cu_seqlens)[count > 0]
    levels = torch.tensor(QUANTILES, dtype=per_sequence.dtype)
    values = {
        "kl": masked_mean(-log_ratio, mask),
        "k3": masked_mean(torch.expm1(log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)) - log_ratio, mask),
        "abs_mean": masked_mean(log_ratio.abs(), mask),
        "abs_max": keep(log_ratio.abs(), mask).max(),
        **dict(zip(_quantile_names(), torch.quantile(per_sequence, levels), strict=True)),
        "ess": ratio.sum().square() / (ratio.square().sum() * mask.sum()),
    }
    return {f"mismatch/{name}": float(value) for name, value in values.items()}


def _quantile_names() -> list[str]:
    return [f"seq_p{round(100 * q):02d}" for q in QUANTILES]
