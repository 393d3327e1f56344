"""Every algorithm by name: one dict of advantage estimator, policy loss and what they ask of the run."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hpc_rl.algo import advantages as adv
from hpc_rl.algo import losses
from hpc_rl.algo.losses import PolicyInputs, TokenLoss
from hpc_rl.algo.masked import segment_count, whiten
from hpc_rl.config import AlgorithmConfig, Config
from hpc_rl.errors import UserError


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


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What a name stands for."""

    summary: str
    advantage: AdvantageFn
    policy_loss: PolicyLossFn
    needs_critic: bool = False
    needs_groups: bool = False  # two or more samples per prompt
    needs_greedy: bool = False  # the score of a greedy response to each prompt, as `baseline_scores [B]`
    refills_equal_groups: bool = False  # dynamic sampling: groups with one outcome are drawn again
    uses_gamma: bool = False
    uses_clip: bool = True
    uses_clip_dual: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)  # its published values, below the user's


def _gae(x: AdvantageInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    assert x.values is not None, "GAE needs the critic's values"
    advantages, returns = adv.gae(x.rewards, x.values, x.mask, x.cu_seqlens, config.gamma, config.lam)
    return (whiten(advantages, x.mask) if config.whiten_advantages else advantages), returns


def _group_level(estimator: Callable[[Tensor, Tensor], Tensor]) -> AdvantageFn:
    def advantage(x: AdvantageInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
        advantages = adv.to_tokens(estimator(x.outcomes, x.group_ids), x.mask, x.cu_seqlens)
        return advantages, advantages

    return advantage


def _opo(x: AdvantageInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    lengths = segment_count(x.mask, x.cu_seqlens)
    advantages = adv.to_tokens(adv.opo(x.outcomes, lengths, x.group_ids), x.mask, x.cu_seqlens)
    return advantages, advantages


def _reinforce_plus_plus(x: AdvantageInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    return adv.reinforce_plus_plus(x.rewards, x.mask, x.cu_seqlens, config.gamma)


def _reinforce_plus_plus_baseline(x: AdvantageInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    advantages = adv.reinforce_plus_plus_baseline(x.outcomes, x.group_ids, x.mask, x.cu_seqlens)
    return advantages, advantages


def _remax(x: AdvantageInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    assert x.baselines is not None, "ReMax needs baseline_scores"
    return adv.remax(x.rewards, x.baselines, x.mask, x.cu_seqlens)


def _reinforce(x: AdvantageInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    returns = adv.discounted_returns(x.rewards, x.mask, x.cu_seqlens, config.gamma)
    return returns, returns


def _ppo_loss(x: PolicyInputs, config: AlgorithmConfig) -> TokenLoss:
    return losses.ppo_clip(x, config.clip_low, config.clip_high, config.clip_dual)


def _gspo_loss(x: PolicyInputs, config: AlgorithmConfig) -> TokenLoss:
    return losses.gspo(x, config.clip_low, config.clip_high)


def _cispo_loss(x: PolicyInputs, config: AlgorithmConfig) -> TokenLoss:
    return losses.cispo(x, config.clip_low, config.clip_high)


def _sapo_loss(x: PolicyInputs, config: AlgorithmConfig) -> TokenLoss:
    return losses.sapo(x, config.sapo_tau_positive, config.sapo_tau_negative)


def _reinforce_loss(x: PolicyInputs, config: AlgorithmConfig) -> TokenLoss:
    return losses.reinforce(x)


_NO_KL = {"kl_placement": "none"}
_KL_LOSS = {"kl_placement": "loss", "kl_estimator": "k3"}
_grpo = _group_level(adv.grpo)

ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm(
        "PPO: critic, GAE, clipped ratio, KL in the reward", _gae, _ppo_loss,
        needs_critic=True, uses_gamma=True, uses_clip_dual=True,
    ),
    "grpo": Algorithm(
        "GRPO: outcome against its group, KL as loss", _grpo, _ppo_loss,
        needs_groups=True, uses_clip_dual=True, defaults={**_KL_LOSS, "aggregation": "seq-mean-token-mean"},
    ),
    "dr_grpo": Algorithm(
        "Dr.GRPO: no division by std or by length, no KL", _group_level(adv.dr_grpo), _ppo_loss,
        needs_groups=True, uses_clip_dual=True, defaults={**_NO_KL, "aggregation": "seq-mean-token-sum-norm"},
    ),
    "rloo": Algorithm(
        "RLOO: outcome against the others of its group, KL in the reward", _group_level(adv.rloo), _ppo_loss,
        needs_groups=True, uses_clip_dual=True, defaults={"aggregation": "seq-mean-token-sum"},
    ),
    "reinforce_plus_plus": Algorithm(
        "REINFORCE++: discounted return, whitened over the step", _reinforce_plus_plus, _ppo_loss,
        uses_gamma=True, uses_clip_dual=True,
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        "REINFORCE++ with the group mean as baseline", _reinforce_plus_plus_baseline, _ppo_loss,
        needs_groups=True, uses_clip_dual=True, defaults={"kl_placement": "loss", "kl_estimator": "k2"},
    ),
    "remax": Algorithm(
        "ReMax: return against the greedy response's reward", _remax, _ppo_loss,
        needs_greedy=True, uses_clip_dual=True,
    ),
    "opo": Algorithm(
        "OPO: length-weighted group baseline, no KL", _opo, _ppo_loss,
        needs_groups=True, uses_clip_dual=True, defaults=_NO_KL,
    ),
    "gpg": Algorithm(
        "GPG: group baseline, plain policy gradient, no KL", _group_level(adv.gpg), _reinforce_loss,
        needs_groups=True, uses_clip=False, defaults=_NO_KL,
    ),
    "dapo": Algorithm(
        "DAPO: GRPO with clip-higher, token mean, dynamic sampling, overlong shaping, no KL", _grpo, _ppo_loss,
        needs_groups=True, refills_equal_groups=True, uses_clip_dual=True, defaults={**_NO_KL, "clip_high": 0.28},
    ),
    "gspo": Algorithm(
        "GSPO: GRPO's advantage, one ratio per sequence, no KL", _grpo, _gspo_loss, needs_groups=True,
        defaults={**_NO_KL, "aggregation": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4},
    ),
    "cispo": Algorithm(
        "CISPO: GRPO's advantage, clipped ratio as a constant weight, no KL", _grpo, _cispo_loss,
        needs_groups=True, defaults={**_NO_KL, "clip_low": 1.0, "clip_high": 0.28},
    ),
    "sapo": Algorithm(
        "SAPO: GRPO's advantage, soft gate in place of the clip, no KL", _grpo, _sapo_loss,
        needs_groups=True, uses_clip=False, defaults={**_NO_KL, "aggregation": "seq-mean-token-mean"},
    ),
    "reinforce": Algorithm(
        "REINFORCE: discounted return, no baseline", _reinforce, _reinforce_loss, uses_gamma=True, uses_clip=False,
    ),
}  # fmt: skip


def algorithm(name: str) -> Algorithm:
    """The algorithm called ``name``. Raises UserError with the names that exist."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    close = difflib.get_close_matches(name.lower().replace("-", "_"), ALGORITHMS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UserError(f"algorithm.name={name} is not known: {hint}set one of {', '.join(ALGORITHMS)}")


def needs_reference(config: Config) -> bool:
    """Whether the run needs log-probs of a reference policy."""
    return config.algorithm.kl_placement != "none" and config.algorithm.kl_coef > 0


def validate(config: Config) -> None:
    """Refuses combinations of algorithm values that make no sense. Raises UserError."""
    algorithm(config.algorithm.name)
