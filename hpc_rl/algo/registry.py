"""Every algorithm by name: one dict of advantage estimator, policy loss, what they ask of the run, published values."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpc_rl.algo import adapters
from hpc_rl.algo import advantages as adv
from hpc_rl.algo.adapters import AdvantageFn, PolicyLossFn
from hpc_rl.config import Config
from hpc_rl.errors import UserError


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
    clips: Literal["none", "ratio", "weight"] = "ratio"  # what clip_low and clip_high bound
    uses_clip_dual: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)  # its published values, below the user's


_NO_KL = {"kl_placement": "none"}
_KL_LOSS = {"kl_placement": "loss", "kl_estimator": "k3"}
_GRPO = adapters.group_level(adv.grpo)

ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm(
        "PPO: critic, GAE, clipped ratio, KL in the reward", adapters.gae, adapters.ppo_loss,
        needs_critic=True, uses_gamma=True, uses_clip_dual=True,
    ),
    "grpo": Algorithm(
        "GRPO: outcome against its group, KL as loss", _GRPO, adapters.ppo_loss,
        needs_groups=True, uses_clip_dual=True, defaults={**_KL_LOSS, "aggregation": "seq-mean-token-mean"},
    ),
    "dr_grpo": Algorithm(
        "Dr.GRPO: no division by std or by length, no KL", adapters.group_level(adv.dr_grpo), adapters.ppo_loss,
        needs_groups=True, uses_clip_dual=True, defaults={**_NO_KL, "aggregation": "seq-mean-token-sum-norm"},
    ),
    "rloo": Algorithm(
        "RLOO: outcome against the others of its group, KL in the reward", adapters.group_level(adv.rloo),
        adapters.ppo_loss, needs_groups=True, uses_clip_dual=True, defaults={"aggregation": "seq-mean-token-sum"},
    ),
    "reinforce_plus_plus": Algorithm(
        "REINFORCE++: discounted return, whitened over the step", adapters.reinforce_plus_plus, adapters.ppo_loss,
        uses_gamma=True, uses_clip_dual=True,
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        "REINFORCE++ with the group mean as baseline", adapters.reinforce_plus_plus_baseline, adapters.ppo_loss,
        needs_groups=True, uses_clip_dual=True, defaults={"kl_placement": "loss", "kl_estimator": "k2"},
    ),
    "remax": Algorithm(
        "ReMax: return against the greedy response's reward", adapters.remax, adapters.ppo_loss,
        needs_greedy=True, uses_clip_dual=True,
    ),
    "opo": Algorithm(
        "OPO: length-weighted group baseline, no KL", adapters.opo, adapters.ppo_loss,
        needs_groups=True, uses_clip_dual=True, defaults=_NO_KL,
    ),
    "gpg": Algorithm(
        "GPG: group baseline, plain policy gradient, no KL", adapters.group_level(adv.gpg), adapters.reinforce_loss,
        needs_groups=True, clips="none", defaults=_NO_KL,
    ),
    "dapo": Algorithm(
        "DAPO: GRPO with clip-higher, token mean, dynamic sampling, overlong shaping, no KL", _GRPO, adapters.ppo_loss,
        needs_groups=True, refills_equal_groups=True, uses_clip_dual=True, defaults={**_NO_KL, "clip_high": 0.28},
    ),
    "gspo": Algorithm(
        "GSPO: GRPO's advantage, one ratio per sequence, no KL", _GRPO, adapters.gspo_loss, needs_groups=True,
        defaults={**_NO_KL, "aggregation": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4},
    ),
    "cispo": Algorithm(
        "CISPO: GRPO's advantage, clipped ratio as a constant weight, no KL", _GRPO, adapters.cispo_loss,
        needs_groups=True, clips="weight", defaults={**_NO_KL, "clip_low": 1.0, "clip_high": 0.28},
    ),
    "sapo": Algorithm(
        "SAPO: GRPO's advantage, soft gate in place of the clip, no KL", _GRPO, adapters.sapo_loss,
        needs_groups=True, clips="none", defaults={**_NO_KL, "aggregation": "seq-mean-token-mean"},
    ),
    "reinforce": Algorithm(
        "REINFORCE: discounted return, no baseline", adapters.reinforce, adapters.reinforce_loss,
        uses_gamma=True, clips="none",
    ),
}  # fmt: skip


def algorithm(name: str) -> Algorithm:
    """The algorithm called ``name``. Raises UserError with the names that exist."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    close = difflib.get_close_matches(name.lower().replace("-", "_"), ALGORITHMS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UserError(f"algorithm.name = {name} is not known: {hint}set one of {', '.join(ALGORITHMS)}")


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration with the algorithm's published ones filled in below those that are given.

    Args: values: nested, as read from YAML and key=value, before they become a `Config`.
    Raises: UserError for an unknown algorithm.
    """
    given = values.get("algorithm") or {}
    if "name" not in given:
        return dict(values)
    return {**values, "algorithm": {**algorithm(str(given["name"])).defaults, **given}}


def validate(config: Config) -> None:
    """Checks the algorithm section against itself and the rest.

    Raises: UserError naming the value, the rule and the fix: the first of all that is wrong.
    """
    algo = algorithm(config.algorithm.name)
    for check in _CHECKS:
        check(config, algo)


def _samples(config: Config, algo: Algorithm) -> None:
    name, samples = config.algorithm.name, config.rollout.samples_per_prompt
    if algo.needs_groups and samples < 2:
        raise UserError(
            f"rollout.samples_per_prompt = {samples}, but algorithm.name = {name} compares the samples of a prompt: "
            "set it to 2 or more"
        )


def _critic(config: Config, algo: Algorithm) -> None:
    name, warmup = config.algorithm.name, config.algorithm.critic_warmup_steps
    if not algo.needs_critic and config.model.critic_path is not None:
        raise UserError(
            f"model.critic_path = {config.model.critic_path}, but algorithm.name = {name} has no critic: unset it"
        )
    if not algo.needs_critic and warmup:
        raise UserError(
            f"algorithm.critic_warmup_steps = {warmup}, but algorithm.name = {name} has no critic: set it to 0"
        )
    if warmup >= config.steps:
        raise UserError(
            f"algorithm.critic_warmup_steps = {warmup}, but steps = {config.steps}: the actor would never learn; "
            "set it below steps"
        )


def _discount(config: Config, algo: Algorithm) -> None:
    name, gamma = config.algorithm.name, config.algorithm.gamma
    if not algo.uses_gamma and gamma != 1.0:
        raise UserError(f"algorithm.gamma = {gamma}, but algorithm.name = {name} does not discount: set it to 1")


def _clip(config: Config, algo: Algorithm) -> None:
    a = config.algorithm
    if algo.clips == "none":
        return
    if a.clip_low == 0 and a.clip_high == 0:
        raise UserError("algorithm.clip_low = 0 and clip_high = 0 leave the ratio no room: raise one of them")
    if algo.clips == "ratio" and a.clip_low > a.clip_high:
        raise UserError(
            f"algorithm.clip_low = {a.clip_low} is above clip_high = {a.clip_high}, but the upper side must leave at "
            "least as much room: swap them"
        )
    if algo.clips == "ratio" and a.clip_low >= 1:
        raise UserError(
            f"algorithm.clip_low = {a.clip_low} lets the ratio fall to {1 - a.clip_low:g}, but a ratio is above 0: set "
            "it below 1 (it is a distance from 1, not a bound)"
        )


def _clip_dual(config: Config, algo: Algorithm) -> None:
    name, bound = config.algorithm.name, config.algorithm.clip_dual
    if bound is not None and not algo.uses_clip_dual:
        raise UserError(f"algorithm.clip_dual = {bound}, but algorithm.name = {name} has no dual clip: set it to null")


def _kl(config: Config, algo: Algorithm) -> None:
    a = config.algorithm
    if a.kl_target is not None and a.kl_placement == "none":
        raise UserError(
            f"algorithm.kl_target = {a.kl_target}, but kl_placement = none: set kl_placement to reward or loss"
        )
    if a.kl_target is not None and a.kl_coef == 0:
        raise UserError(
            f"algorithm.kl_target = {a.kl_target}, but kl_coef = 0, which a factor cannot move: set kl_coef above 0"
        )
    if a.kl_straight_through and a.kl_placement != "loss":
        raise UserError(
            f"algorithm.kl_straight_through = true changes a gradient, but kl_placement = {a.kl_placement} has none: "
            "set kl_placement to loss"
        )
    if config.model.reference_path is not None and a.kl_placement == "none":
        raise UserError(
            f"model.reference_path = {config.model.reference_path}, but kl_placement = none does not use a reference: "
            "unset it, or set kl_placement to reward or loss"
        )


def _lengths(config: Config, algo: Algorithm) -> None:
    buffer, limit = config.algorithm.overlong_buffer_tokens, config.rollout.max_response_tokens
    if buffer > limit:
        raise UserError(
            f"algorithm.overlong_buffer_tokens = {buffer} is above rollout.max_response_tokens = {limit}: "
            "set it to a part of it"
        )


def _mismatch(config: Config, algo: Algorithm) -> None:
    a = config.algorithm
    if a.correction.startswith("icepop") and a.correction_low >= a.correction_high:
        raise UserError(
            f"algorithm.correction_low = {a.correction_low} is not below correction_high = {a.correction_high}: "
            "swap them"
        )
    if a.reject.endswith("k1") and a.reject_low >= a.reject_high:
        raise UserError(f"algorithm.reject_low = {a.reject_low} is not below reject_high = {a.reject_high}: swap them")
    if a.correction == "none" and a.correction_normalize:
        raise UserError(
            "algorithm.correction_normalize = true, but correction = none has no weights: set correction or unset it"
        )


_CHECKS: tuple[Callable[[Config, Algorithm], None], ...] = (
    _samples, _critic, _discount, _clip, _clip_dual, _kl, _lengths, _mismatch,
)  # fmt: skip
