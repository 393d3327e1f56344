"""Rewards and samples before the advantages: the price of overlong responses, and groups that teach nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_rl.algo.advantages import group_statistics
from hpc_rl.algo.masked import suffix_sums


def overlong_penalty(lengths: Tensor, max_response_tokens: int, buffer_tokens: int, penalty: float) -> Tensor:
    """Penalty of long responses: 0 up to the buffer, then linearly down to -penalty at the limit: [B], <= 0.

    -penalty clip((length - (max_response_tokens - buffer_tokens)) / buffer_tokens, 0, 1).

    Args:
        lengths: [B], response tokens.
        buffer_tokens: the last tokens before the limit; 0: no penalty.
    Returns: float64 [B].
    Source: arXiv 2503.14476, eq. 13.
    """
    if buffer_tokens == 0:
        return torch.zeros(lengths.shape, dtype=torch.float64)
    over = (lengths.double() - (max_response_tokens - buffer_tokens)) / buffer_tokens
    return -penalty * over.clamp(0.0, 1.0)


def last_response_token(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """bool [N]: the last masked token of each sequence that has one."""
    remaining = suffix_sums(mask.double(), cu_seqlens, 1.0)
    return mask & (remaining == 1)


def informative(scores: Tensor, group_ids: Tensor) -> Tensor:
    """bool [B]: the sequence's group has two outcomes or more; with one outcome every advantage of a group is zero.

    DAPO's dynamic sampling draws the others again. A group of one is never informative. Source: arXiv 2503.14476.
    """
    group = group_statistics(scores.double(), group_ids)
    return ~group.uniform & (group.size > 1)
