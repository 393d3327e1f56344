"""Advantage estimators: pure functions of rewards, one per algorithm, without a process group.

Two kinds. Token level: arrays [N] of whole sequences -> [N]. Group level: ``outcomes [B]`` (the summed reward of each
response) and ``group_ids [B]`` (samples of one prompt share one) -> [B], which `to_tokens` lays on the response tokens.

A group of one has nothing to be compared with. All group estimators then use mean 0 and standard deviation 1, so that
its advantage is its raw outcome (as in REINFORCE); `validate` refuses configurations that have no other groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_rl.algo.masked import keep, segment_count, spread, suffix_sums, whiten
from hpc_rl.batch import cumulative

STD_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Of each sequence's group, [B] each. A group of one has mean 0 and std 1."""

    size: Tensor  # float
    mean: Tensor
    std: Tensor  # divided by size - 1
    uniform: Tensor  # bool: two or more samples, all with one outcome


def group_index(group_ids: Tensor) -> tuple[Tensor, int]:
    """Any ids [B] -> (int64 [B] in 0 .. G - 1, G)."""
    groups, index = torch.unique(group_ids, return_inverse=True)
    return index, groups.numel()


def group_sum(values: Tensor, group_ids: Tensor) -> Tensor:
    """Sum over each sequence's group, on each of its sequences: [B] -> [B]."""
    index, num_groups = group_index(group_ids)
    return values.new_zeros(num_groups).index_add(0, index, values)[index]


def group_statistics(outcomes: Tensor, group_ids: Tensor) -> GroupStatistics:
    """Size, mean and standard deviation of the outcomes [B] in each sequence's group [B]."""
    index, num_groups = group_index(group_ids)
    size = group_sum(torch.ones_like(outcomes), group_ids)
    alone = size == 1
    mean = group_sum(outcomes, group_ids) / size
    variance = group_sum((outcomes - mean).square(), group_ids) / (size - 1).clamp(min=1)
    member = outcomes.new_zeros(num_groups).scatter(0, index, outcomes)[index]  # any one of the group will do
    uniform = (group_sum((outcomes != member).to(outcomes.dtype), group_ids) == 0) & ~alone
    return GroupStatistics(size, mean.masked_fill(alone, 0.0), variance.sqrt().masked_fill(alone, 1.0), uniform)


def to_tokens(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``values [B]`` on every response token of each sequence, zeros elsewhere: [N]."""
    return keep(spread(values, cu_seqlens), mask)


def _on_responses(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Offsets of the sequences once only their masked tokens are kept: int64 [B + 1] on the CPU."""
    return cumulative(segment_count(mask, cu_seqlens).cpu())


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t.

    Tokens outside the mask are skipped: the next value and the running sum carry over holes, as between the turns of
    a dialogue. After the last response token the value is 0, also for a response cut by the length limit.

    Args:
        rewards, values: [N] float.
        mask: [N] bool, response tokens.
        cu_seqlens: int64 [B + 1].
        gamma, lam: discount per token, GAE lambda.
    Returns: advantages (not whitened) and returns = advantages + values; [N], zeros outside the mask.
    Source: arXiv 1506.02438, eq. 16.
    """
    offsets = _on_responses(mask, cu_seqlens)
    state_values = values[mask]
    last = torch.zeros_like(mask[mask])
    last[offsets[1:][offsets.diff() > 0] - 1] = True
    next_values = torch.where(last, torch.zeros_like(state_values), state_values.roll(-1))
    advantages = suffix_sums(rewards[mask] + gamma * next_values - state_values, offsets, gamma * lam)
    zeros = torch.zeros_like(values)
    return zeros.masked_scatter(mask, advantages), zeros.masked_scatter(mask, advantages + state_values)


def discounted_returns(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_{t+1} over response tokens (others skipped): [N], zeros outside the mask."""
    returns = suffix_sums(rewards[mask], _on_responses(mask, cu_seqlens), gamma)
    return torch.zeros_like(rewards).masked_scatter(mask, returns)


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Discounted returns, whitened over all response tokens of the step. Source: arXiv 2501.03262.

    Returns: advantages, and the returns before whitening; [N].
    """
    returns = discounted_returns(rewards, mask, cu_seqlens, gamma)
    return whiten(returns, mask), returns


def remax(rewards: Tensor, baselines: Tensor, mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Undiscounted return less the reward of the greedy response to the same prompt. Source: arXiv 2310.10505.

    Args: baselines: [B], score of the greedy response.
    Returns: advantages, and the returns without the baseline; [N].
    """
    returns = discounted_returns(rewards, mask, cu_seqlens, 1.0)
    return keep(returns - spread(baselines, cu_seqlens), mask), returns


def grpo(outcomes: Tensor, group_ids: Tensor) -> Tensor:
    """(outcome - group mean) / (group std + 1e-6), 0 in a group of equal outcomes: [B].

    Source: arXiv 2402.03300, section 4.1.2 (outcome supervision).
    """
    group = group_statistics(outcomes, group_ids)
    return dr_grpo(outcomes, group_ids) / (group.std + STD_EPS)


def dr_grpo(outcomes: Tensor, group_ids: Tensor) -> Tensor:
    """outcome - group mean, not divided by the std, which favours easy and hard prompts: [B].

    Exactly 0 in a group of equal outcomes. Source: arXiv 2503.20783, section 3.2.
    """
    group = group_statistics(outcomes, group_ids)
    return torch.where(group.uniform, torch.zeros_like(outcomes), outcomes - group.mean)


def reinforce_plus_plus_baseline(outcomes: Tensor, group_ids: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """outcome - group mean on each response token, whitened over all of them: [N]. Source: arXiv 2501.03262v3."""
    return whiten(to_tokens(dr_grpo(outcomes, group_ids), mask, cu_seqlens), mask)


def rloo(outcomes: Tensor, group_ids: Tensor) -> Tensor:
    """outcome - mean of the other outcomes of its group: [B]. Source: arXiv 2402.14740."""
    group = group_statistics(outcomes, group_ids)
    return dr_grpo(outcomes, group_ids) * group.size / (group.size - 1).clamp(min=1)


def opo(outcomes: Tensor, response_lengths: Tensor, group_ids: Tensor) -> Tensor:
    """outcome - length-weighted group mean, the baseline of least variance: [B]. Source: arXiv 2505.23585.

    Args: response_lengths: [B], response tokens. If all responses of a group are empty, its baseline is 0.
    """
    group = group_statistics(outcomes, group_ids)
    lengths = response_lengths.to(outcomes.dtype)
    baseline = group_sum(lengths * outcomes, group_ids) / group_sum(lengths, group_ids).clamp(min=1)
    baseline = torch.where(group.size == 1, torch.zeros_like(outcomes), baseline)
    return torch.where(group.uniform, torch.zeros_like(outcomes), outcomes - baseline)


def gpg(outcomes: Tensor, group_ids: Tensor) -> Tensor:
    """alpha (outcome - group mean), alpha = B / (B - samples of groups with equal outcomes): [B].

    alpha makes up for the samples that carry no gradient. Source: arXiv 2504.02546. verl counts samples
    with an outcome other than 0 instead, which depends on where the rewards' zero lies; the paper's count is used here.
    """
    carrying = (~group_statistics(outcomes, group_ids).uniform).sum().clamp(min=1).to(outcomes.dtype)
    return dr_grpo(outcomes, group_ids) * (outcomes.numel() / carrying)
