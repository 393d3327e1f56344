"""Every algorithm by name: one dict of advantage estimator, policy loss, what they ask of the run, published values.

Estimators and losses are named here and defined in adapters.py, so that a configuration can be checked without torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpc_rl.config import Config, RolloutConfig
from hpc_rl.errors import UserError


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What a name stands for."""

    summary: str
    advantage: str  # of adapters.ADVANTAGES
    policy_loss: str  # of adapters.POLICY_LOSSES
    needs_critic: bool = False
    needs_groups: bool = False  # two or more samples per prompt
    needs_greedy: bool = False  # the score of a greedy response to each prompt, as `baseline_scores [B]`
    uses_gamma: bool = False
    clips: Literal["none", "ratio", "weight"] = "ratio"  # what clip_low and clip_high bound
    uses_clip_dual: bool = False
    overlong_share: float = 0.0  # of rollout.max_response_tokens: the default of overlong_buffer_tokens
    defaults: Mapping[str, Any] = field(default_factory=dict)  # its published values, below the user's


@dataclass(frozen=True, slots=True)
class Objective:
    """Training on given texts, without rollouts."""

    summary: str
    loss: str  # of supervised.LOSSES
    fields: tuple[str, ...]  # of each line of the data: its responses, as they follow each other in a batch
    role: Literal["actor", "critic"] = "actor"  # what is trained; a critic scores
    needs_reference: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_NO_KL = {"kl_placement": "none"}
_KL_LOSS = {"kl_placement": "loss", "kl_estimator": "k3"}

ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm(
        "PPO: critic, GAE, clipped ratio, KL in the reward", "gae", "ppo_clip",
        needs_critic=True, uses_gamma=True, uses_clip_dual=True,
    ),
    "grpo": Algorithm(
        "GRPO: outcome against its group, KL as loss", "grpo", "ppo_clip",
        needs_groups=True, uses_clip_dual=True, defaults={**_KL_LOSS, "aggregation": "seq-mean-token-mean"},
    ),
    "dr_grpo": Algorithm(
        "Dr.GRPO: no division by std or by length, no KL", "dr_grpo", "ppo_clip",
        needs_groups=True, uses_clip_dual=True, defaults={**_NO_KL, "aggregation": "seq-mean-token-sum-norm"},
    ),
    "rloo": Algorithm(
        "RLOO: outcome against the others of its group, KL in the reward", "rloo",
        "ppo_clip", needs_groups=True, uses_clip_dual=True, defaults={"aggregation": "seq-mean-token-sum"},
    ),
    "reinforce_plus_plus": Algorithm(
        "REINFORCE++: discounted return, whitened over the step", "reinforce_plus_plus", "ppo_clip",
        uses_gamma=True, uses_clip_dual=True,
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        "REINFORCE++ with the group mean as baseline", "reinforce_plus_plus_baseline", "ppo_clip",
        needs_groups=True, uses_clip_dual=True, defaults={"kl_placement": "loss", "kl_estimator": "k2"},
    ),
    "remax": Algorithm(
        "ReMax: return against the greedy response's reward", "remax", "ppo_clip",
        needs_greedy=True, uses_clip_dual=True,
    ),
    "opo": Algorithm(
        "OPO: length-weighted group baseline, no KL", "opo", "ppo_clip",
        needs_groups=True, uses_clip_dual=True, defaults=_NO_KL,
    ),
    "gpg": Algorithm(
        "GPG: group baseline, plain policy gradient, no KL", "gpg", "reinforce",
        needs_groups=True, clips="none", defaults=_NO_KL,
    ),
    "dapo": Algorithm(
        "DAPO: GRPO with clip-higher, token mean, dynamic sampling, the last fifth of the length limit costs reward, no KL",
        "grpo", "ppo_clip", needs_groups=True, uses_clip_dual=True, overlong_share=0.2,
        defaults={**_NO_KL, "clip_high": 0.28, "refill_rounds": 4},
    ),
    "gspo": Algorithm(
        "GSPO: GRPO's advantage, one ratio per sequence, no KL", "grpo", "gspo", needs_groups=True,
        defaults={**_NO_KL, "aggregation": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4},
    ),
    "cispo": Algorithm(
        "CISPO: GRPO's advantage, clipped ratio as a constant weight, no KL", "grpo", "cispo",
        needs_groups=True, clips="weight", defaults={**_NO_KL, "clip_low": 1.0, "clip_high": 0.28},
    ),
    "sapo": Algorithm(
        "SAPO: GRPO's advantage, soft gate in place of the clip, no KL", "grpo", "sapo",
        needs_groups=True, clips="none", defaults={**_NO_KL, "aggregation": "seq-mean-token-mean"},
    ),
    "reinforce": Algorithm(
        "REINFORCE: discounted return, no baseline", "reinforce", "reinforce",
        uses_gamma=True, clips="none",
    ),
}  # fmt: skip


OBJECTIVES: dict[str, Objective] = {
    "sft": Objective("SFT: the likelihood of given responses", "sft", ("response",), defaults=_NO_KL),
    "dpo": Objective(
        "DPO: chosen above rejected, against a reference", "dpo", ("chosen", "rejected"),
        needs_reference=True, defaults=_NO_KL,
    ),
    "ipo": Objective(
        "IPO: as DPO, with a squared loss on token means", "ipo", ("chosen", "rejected"),
        needs_reference=True, defaults=_NO_KL,
    ),
    "reward_model": Objective(
        "Bradley-Terry reward model", "reward_model", ("chosen", "rejected"), role="critic", defaults=_NO_KL,
    ),
}  # fmt: skip


def algorithm(name: str) -> Algorithm:
    """The reinforcement-learning algorithm called ``name``. Raises UserError with the names that exist."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if name in OBJECTIVES:
        raise UserError(f"algorithm.name = {name} has no rollouts, which are needed here: set one of {_or(ALGORITHMS)}")
    raise _unknown(name)


def objective(name: str) -> Objective | None:
    """The objective called ``name``; None if it is an algorithm with rollouts. Raises UserError if it is neither."""
    if name not in ALGORITHMS and name not in OBJECTIVES:
        raise _unknown(name)
    return OBJECTIVES.get(name)


def needs_old_log_probs(config: Config, trains_actor: bool = True) -> bool:
    """Whether the trainer must score the rollouts before it learns from them.

    With one optimizer step per RL step the policy that learns is still the one that sampled: its own log-probs, taken
    in the training pass, are the old ones, and a whole forward pass is saved. A penalty in the reward, a correction or
    a rejection must know them before. A step that trains no actor (``trains_actor``; the critic's warm-up) has no such
    pass, so that mismatch and KL can be measured in no other way.
    """
    algo = config.algorithm
    several = algo.epochs * algo.mini_batches > 1
    return (
        not trains_actor
        or several
        or algo.kl_placement == "reward"
        or algo.correction != "none"
        or algo.reject != "none"
    )


def _unknown(name: str) -> UserError:
    names = [*ALGORITHMS, *OBJECTIVES]
    close = difflib.get_close_matches(name.lower().replace("-", "_"), names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return UserError(f"algorithm.name = {name} is not known: {hint}set one of {_or(names)}")


def _or(names: Iterable[str]) -> str:
    return ", ".join(names)


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration with the algorithm's published ones filled in below those that are given.

    Args: values: nested, as read from YAML and key=value, before they become a `Config`.
    Raises: UserError for an unknown algorithm.
    """
    given = values.get("algorithm") or {}
    if not isinstance(given.get("name"), str):
        return dict(values)
    chosen = objective(given["name"]) or algorithm(given["name"])
    return {**values, "algorithm": {**chosen.defaults, **_derived(chosen, values), **given}}


def _derived(chosen: Algorithm | Objective, values: Mapping[str, Any]) -> dict[str, Any]:
    """Published values that are a share of another one: DAPO's buffer is 4096 of 20480 tokens (arXiv 2503.14476, 4.1)."""
    limit = (values.get("rollout") or {}).get("max_response_tokens", RolloutConfig().max_response_tokens)
    share = chosen.overlong_share if isinstance(chosen, Algorithm) else 0.0
    return {"overlong_buffer_tokens": int(share * limit)} if share and isinstance(limit, int) else {}
