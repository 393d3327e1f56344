"""Statistics over the masked tokens of a token-flat batch. What lies outside the mask, NaN included, never enters."""

from __future__ import annotations

import torch
from torch import Tensor

# A log-prob of -inf (a token that the model rules out) counts as this, so that differences of two stay finite.
LOG_PROB_MIN = -1e4
LOG_RATIO_MAX = 20.0  # exp(20) = 5e8: beyond, a ratio is constant and has no gradient
WHITEN_EPS = 1e-8


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """``values [N]`` with zeros outside ``mask [N]``, whatever was there; its gradient is zero there too."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def keep_log_probs(log_probs: Tensor, mask: Tensor) -> Tensor:
    """``log_probs [N]``, zeros outside ``mask``, finite where -inf (see LOG_PROB_MIN; no gradient there)."""
    return keep(log_probs, mask).clamp(min=LOG_PROB_MIN)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """sum of ``values [N]`` where ``mask [N]``: a scalar."""
    return keep(values, mask).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values [N]`` where ``mask [N]``, over the tokens handed in; 0 if the mask is empty."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over the masked tokens, divided by n - 1 (or n); 0 with fewer than two of them."""
    count = mask.sum()
    squares = masked_sum((values - masked_mean(values, mask)).square(), mask)
    return squares / (count - 1 if unbiased else count).clamp(min=1)


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(values - mean) / sqrt(var + 1e-8) over the masked tokens of the whole batch; zeros elsewhere.

    A single token, or none, has no spread: the result is 0, not an error.

    Args:
        values: [N] float.
        mask: [N] bool.
        shift_mean: False adds the mean back.
    Returns: [N].
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + WHITEN_EPS)
    return keep(whitened if shift_mean else whitened + mean, mask)


def offsets_on(cu_seqlens: Tensor, device: torch.device) -> Tensor:
    """``cu_seqlens`` (kept on the CPU) where the tokens are."""
    return cu_seqlens.to(device, non_blocking=True)


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum over each sequence: ``values [N]`` -> [B]; 0 for an empty one. Differentiable, the same bits every time."""
    return torch.segment_reduce(values, "sum", offsets=offsets_on(cu_seqlens, values.device), initial=0.0)


def segment_max(values: Tensor, cu_seqlens: Tensor, initial: float = 0.0) -> Tensor:
    """Largest of each sequence and ``initial``: ``values [N]`` -> [B]."""
    return torch.segment_reduce(values, "max", offsets=offsets_on(cu_seqlens, values.device), initial=initial)


def segment_count(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int64 [B]: masked tokens of each sequence."""
    return segment_sum(mask.to(torch.float64), cu_seqlens).to(torch.int64)


def segment_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean over the masked tokens of each sequence: [B]; 0 for a sequence without any."""
    count = segment_count(mask, cu_seqlens).clamp(min=1).to(values.dtype)
    return segment_sum(keep(values, mask), cu_seqlens) / count


def spread(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Each sequence's value on all of its tokens: ``values [B]`` -> [N]."""
    lengths = offsets_on(cu_seqlens.diff(), values.device)
    return values.repeat_interleave(lengths, output_size=int(cu_seqlens[-1]))


def suffix_sums(values: Tensor, cu_seqlens: Tensor, decay: float) -> Tensor:
    """y[i] = sum over j >= i of the same sequence of decay^(j - i) values[j], in log2(longest) passes.

    By doubling: with window w, y_2w[i] = y_w[i] + decay^w y_w[i + w]; no loop over tokens.

    Args:
        values: [N] float.
        cu_seqlens: int64 [B + 1].
        decay: factor per step to the right.
    Returns: [N].
    """
    if values.numel() == 0:
        return values
    lengths = cu_seqlens.diff()
    end = offsets_on(cu_seqlens[1:].repeat_interleave(lengths), values.device)
    index = torch.arange(values.numel(), device=values.device)
    longest, window = int(lengths.max()), 1
    while window < longest:
        later = torch.nn.functional.pad(values[window:], (0, window))
        values = values + decay**window * keep(later, index + window < end)
        window *= 2
    return values
