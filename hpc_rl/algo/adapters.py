"""Advantage estimators and policy losses behind one signature each, by the names that the registry uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from hpc_rl.algo import advantages as adv
from hpc_rl.algo import losses
from hpc_rl.algo.losses import PolicyInputs, TokenLoss
from hpc_rl.algo.masked import segment_count, whiten
from hpc_rl.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What an advantage estimator sees of the whole step."""

    rewards: Tensor  # [N] after KL and overlong penalty, zeros outside the mask
    mask: Tensor  # [N] bool
    cu_seqlens: Tensor  # int64 [B + 1]
    outcomes: Tensor  # [B] sum of the rewards of each response
    group_ids: Tensor  # int64 [B]
    values: Tensor | None = None  # [N], of the critic
    baselines: Tensor | None = None  # [B], score of the greedy response


AdvantageFn = Callable[[AdvantageInputs, AlgorithmConfig], tuple[Tensor, Tensor]]  # advantages, returns: [N]
PolicyLossFn = Callable[[PolicyInputs, AlgorithmConfig], TokenLoss]


def gae(x: AdvantageInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    assert x.values is not None, "GAE needs the critic's values"
    advantages, returns = adv.gae(x.rewards, x.values, x.mask, x.cu_seqlens, config.gamma, config.lam)
    return (whiten(advantages, x.mask) if config.whiten_advantages else advantages), returns


def group_level(estimator: Callable[[Tensor, Tensor], Tensor]) -> AdvantageFn:
    def advantage(x: AdvantageInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
        advantages = adv.to_tokens(estimator(x.outcomes, x.group_ids), x.mask, x.cu_seqlens)
        return advantages, advantages

    return advantage


def opo(x: AdvantageInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    lengths = segment_count(x.mask, x.cu_seqlens)
    advantages = adv.to_tokens(adv.opo(x.outcomes, lengths, x.group_ids), x.mask, x.cu_seqlens)
    return advantages, advantages


def reinforce_plus_plus(x: AdvantageInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    return adv.reinforce_plus_plus(x.rewards, x.mask, x.cu_seqlens, config.gamma)


def reinforce_plus_plus_baseline(x: AdvantageInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    advantages = adv.reinforce_plus_plus_baseline(x.outcomes, x.group_ids, x.mask, x.cu_seqlens)
    return advantages, advantages


def remax(x: AdvantageInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    assert x.baselines is not None, "ReMax needs baseline_scores"
    return adv.remax(x.rewards, x.baselines, x.mask, x.cu_seqlens)


def reinforce(x: AdvantageInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    returns = adv.discounted_returns(x.rewards, x.mask, x.cu_seqlens, config.gamma)
    return returns, returns


def ppo_loss(x: PolicyInputs, config: AlgorithmConfig) -> TokenLoss:
    return losses.ppo_clip(x, config.clip_low, config.clip_high, config.clip_dual)


def gspo_loss(x: PolicyInputs, config: AlgorithmConfig) -> TokenLoss:
    return losses.gspo(x, config.clip_low, config.clip_high)


def cispo_loss(x: PolicyInputs, config: AlgorithmConfig) -> TokenLoss:
    return losses.cispo(x, config.clip_low, config.clip_high)


def sapo_loss(x: PolicyInputs, config: AlgorithmConfig) -> TokenLoss:
    return losses.sapo(x, config.sapo_tau_positive, config.sapo_tau_negative)


def reinforce_loss(x: PolicyInputs, config: AlgorithmConfig) -> TokenLoss:
    return losses.reinforce(x)


ADVANTAGES: Mapping[str, AdvantageFn] = {
    "gae": gae,
    "grpo": group_level(adv.grpo),
    "dr_grpo": group_level(adv.dr_grpo),
    "rloo": group_level(adv.rloo),
    "gpg": group_level(adv.gpg),
    "opo": opo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "reinforce": reinforce,
}
POLICY_LOSSES: Mapping[str, PolicyLossFn] = {
    "ppo_clip": ppo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "reinforce": reinforce_loss,
}
