"""Token losses of the policy and the critic, and the weights that turn them into one loss.

Every function is pure and works on one micro-batch of whole sequences: [N] arrays in, loss of each token out, zeros
outside the mask. The loss of a mini-batch is sum(loss_weights * token_loss): the weights hold the global denominator,
so that the sums of micro-batches and ranks just add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_rl.algo.masked import LOG_RATIO_MAX, keep, keep_log_probs, segment_count, segment_mean, spread

SEQUENCE_LOG_RATIO_MAX = 10.0

TokenLoss = tuple[Tensor, Mapping[str, Tensor]]  # loss [N], and metrics [N] to be averaged over response tokens


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """What a policy loss sees of one micro-batch, [N] each."""

    log_probs: Tensor  # with gradient
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor  # bool
    cu_seqlens: Tensor  # int64 [B + 1]

    def current(self) -> Tensor:
        """Log-probs of the policy, zeros outside the mask."""
        return keep_log_probs(self.log_probs, self.mask)

    def log_ratio(self) -> Tensor:
        """log(policy / old policy) of each token, not clamped, zeros outside the mask."""
        return self.current() - keep_log_probs(self.old_log_probs, self.mask)

    def clamped_log_ratio(self) -> Tensor:
        """`log_ratio` within +-20, so that its exponential is finite; no gradient beyond."""
        return self.log_ratio().clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)

    def clean_advantages(self) -> Tensor:
        return keep(self.advantages, self.mask)


def loss_weights(
    mode: str,
    mask: Tensor,
    cu_seqlens: Tensor,
    max_response_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight of each token's loss, for sequences that are the whole mini-batch (all ranks, all micro-batches).

    token-mean: 1 / T. seq-mean-token-sum: 1 / S. seq-mean-token-mean: 1 / (S t_b). seq-mean-token-sum-norm:
    1 / (S max_response_tokens). T: masked tokens of the mini-batch, S: its sequences that have any (those without
    are not counted), t_b: masked tokens of the sequence.

    Args:
        mode: as algorithm.aggregation.
        mask: [N] bool, of the whole mini-batch.
        cu_seqlens: int64 [B + 1].
        max_response_tokens: constant of seq-mean-token-sum-norm.
    Returns: [N], zeros outside the mask; all zeros if the mask is.
    Source: arXiv 2503.14476 (token-mean), 2402.03300 (seq-mean-token-mean), 2503.20783 (constant norm).
    """
    counts = segment_count(mask, cu_seqlens)
    num_sequences = (counts > 0).sum().clamp(min=1).to(torch.float64)
    if mode == "token-mean":
        per_sequence = torch.ones_like(counts) / counts.sum().clamp(min=1).to(torch.float64)
    elif mode == "seq-mean-token-sum":
        per_sequence = torch.ones_like(counts) / num_sequences
    elif mode == "seq-mean-token-mean":
        per_sequence = 1.0 / (num_sequences * counts.clamp(min=1))
    else:
        assert mode == "seq-mean-token-sum-norm", f"unknown aggregation {mode!r}"
        assert max_response_tokens, "seq-mean-token-sum-norm needs max_response_tokens"
        per_sequence = torch.ones_like(counts) / (num_sequences * max_response_tokens)
    return keep(spread(per_sequence, cu_seqlens), mask).to(dtype)


def ppo_clip(inputs: PolicyInputs, clip_low: float, clip_high: float, clip_dual: float | None = None) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); with clip_dual = c at most -A c where A < 0.

    r = exp(log_ratio clamped to +-20). Source: arXiv 1707.06347, eq. 7; dual clip: 1912.09729;
    clip_high > clip_low: 2503.14476.

    Metrics: ratio; clip_frac, where the clipped loss is the larger; dual_clip_frac.
    """
    advantages = inputs.clean_advantages()
    ratio = inputs.clamped_log_ratio().exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    metrics = {"ratio": ratio, "clip_frac": clipped > unclipped}
    if clip_dual is not None:
        bound = -advantages * clip_dual
        metrics["dual_clip_frac"] = (loss > bound) & (advantages < 0)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, metrics


def gspo(inputs: PolicyInputs, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's clipped loss with one ratio per sequence, s = exp(mean token log-ratio).

    Each token carries the value s and the gradient of its own log-prob (GSPO-token), which for one advantage per
    sequence and seq-mean-token-mean is GSPO's. The log of s is bounded by 10. Source: arXiv 2507.18071.
    """
    advantages, current = inputs.clean_advantages(), inputs.current()
    sequence = segment_mean(inputs.log_ratio().detach(), inputs.mask, inputs.cu_seqlens)
    log_ratio = current - current.detach() + keep(spread(sequence, inputs.cu_seqlens), inputs.mask)
    ratio = log_ratio.clamp(max=SEQUENCE_LOG_RATIO_MAX).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(unclipped, clipped), {"ratio": ratio, "clip_frac": clipped > unclipped}


def cispo(inputs: PolicyInputs, clip_low: float, clip_high: float) -> TokenLoss:
    """-clip(r, 1 - clip_low, 1 + clip_high) A log_prob, the clipped ratio a constant: every token keeps its gradient.

    Source: arXiv 2506.13585 (clip_low >= 1: no lower bound, as there).
    """
    ratio = inputs.clamped_log_ratio().detach().exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -bounded * inputs.clean_advantages() * inputs.current(), {"ratio": ratio, "clip_frac": bounded != ratio}


def sapo(inputs: PolicyInputs, tau_positive: float, tau_negative: float) -> TokenLoss:
    """-A g(r), g(r) = sigmoid(tau (r - 1)) 4 / tau: a soft gate in place of the clip; tau by the sign of A.

    Source: arXiv 2511.20347.
    """
    advantages = inputs.clean_advantages()
    ratio = inputs.clamped_log_ratio().exp()
    tau = torch.where(advantages > 0, torch.full_like(ratio, tau_positive), tau_negative)
    return -advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau, {"ratio": ratio}


def reinforce(inputs: PolicyInputs) -> TokenLoss:
    """-A log_prob, without a ratio. Source: Williams 1992; GPG: arXiv 2504.02546."""
    ratio = inputs.clamped_log_ratio().detach().exp()
    return -inputs.clean_advantages() * inputs.current(), {"ratio": ratio}


def value_mse(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> TokenLoss:
    """0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2); without a clip, 0.5 (v - R)^2.

    Args: values (with gradient), old_values, returns: [N]. clip: c; None: off.
    Returns: loss [N]; value_clip_frac, where the clipped error is the larger.
    """
    values, old_values, returns = keep(values, mask), keep(old_values, mask), keep(returns, mask)
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error, {"value_clip_frac": torch.zeros_like(mask)}
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(error, clipped), {"value_clip_frac": clipped > error}
