"""Losses of training without rollouts: supervised fine-tuning, preference pairs (DPO, IPO), reward models.

Pairs are neighbours in a batch: sequence 2p is the chosen response of pair p, 2p + 1 the rejected one. Pair losses are
[P] and, like token losses, are weighted with the global denominator (1 / pairs of the mini-batch) and added.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hpc_rl.algo.masked import keep_log_probs, segment_count, segment_sum


def sft(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Negative log-likelihood of each target token: [N], zeros outside the mask.

    Args: log_probs: [N] with gradient, of the token itself. mask: bool [N], tokens to learn.
    """
    return -keep_log_probs(log_probs, mask)


def sequence_log_probs(log_probs: Tensor, mask: Tensor, cu_seqlens: Tensor, average: bool = False) -> Tensor:
    """Log-prob of each response, its sum over masked tokens (or mean; 0 for an empty one): [B]."""
    total = segment_sum(keep_log_probs(log_probs, mask), cu_seqlens)
    return total / segment_count(mask, cu_seqlens).clamp(min=1).to(total.dtype) if average else total


def log_ratio_margins(
    log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, cu_seqlens: Tensor, average: bool = False
) -> tuple[Tensor, Tensor]:
    """log(policy / reference) of the chosen and of the rejected responses: two [P]; ``average``: token means (IPO)."""
    assert (cu_seqlens.numel() - 1) % 2 == 0, "pairs need an even number of sequences"
    policy = sequence_log_probs(log_probs, mask, cu_seqlens, average)
    reference = sequence_log_probs(ref_log_probs, mask, cu_seqlens, average)
    ratio = policy - reference.detach()
    return ratio[0::2], ratio[1::2]


def dpo(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(beta (chosen - rejected)) - e log sigmoid(-beta (chosen - rejected)): [P].

    Args:
        chosen, rejected: [P], log(policy / reference) summed over tokens, from `log_ratio_margins`.
        beta: strength of the pull to the reference.
        label_smoothing: e, the share of labels that may be wrong (conservative DPO).
    Source: arXiv 2305.18290, eq. 7.
    """
    logits = beta * (chosen - rejected)
    return -(1.0 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def ipo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """(chosen - rejected - 1 / (2 beta))^2: [P]; both sides are means over tokens, so that length does not count.

    Source: arXiv 2310.12036, eq. 17.
    """
    return (chosen - rejected - 1.0 / (2.0 * beta)).square()


def reward_model(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, center: float = 0.0) -> Tensor:
    """Bradley-Terry: -log sigmoid(chosen - rejected - margin) + center (chosen + rejected)^2: [P].

    Args:
        chosen, rejected: [P], the model's rewards, with gradient.
        margin: [P], by how much the chosen one should win; None: 0.
        center: pulls the rewards' mean to 0.
    Source: arXiv 2203.02155, eq. 1; margin: 2307.09288, eq. 2; center: 2312.09244.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return -logsigmoid(difference) + center * (chosen + rejected).square()


def pair_metrics(chosen: Tensor, rejected: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
    """Per pair [P], to be averaged: scaled rewards of both sides, their margin, accuracy (a tie is wrong).

    Args: scale: beta for DPO, where the implicit reward is beta log(policy / reference); 1 for a reward model.
    """
    chosen, rejected = scale * chosen.detach(), scale * rejected.detach()
    return {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "margin": chosen - rejected,
        "accuracy": (chosen > rejected).to(torch.float32),
    }
