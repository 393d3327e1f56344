"""Keys that would be read by nobody: a value that someone set, and that changes nothing, is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_rl.algo.registry import Algorithm, Objective, objective
from hpc_rl.config import AlgorithmConfig, Config
from hpc_rl.errors import UserError


@dataclass(frozen=True, slots=True)
class Rule:
    """``keys`` of the algorithm section count only if ``used``; else the value of ``cause`` is why they do not."""

    keys: tuple[str, ...]
    used: Callable[[AlgorithmConfig, Algorithm], bool]
    cause: str
    reason: str


RULES = (
    Rule(("gamma",), lambda a, algo: algo.uses_gamma, "name", "does not discount"),
    Rule(("lam", "value_clip", "critic_warmup_steps"), lambda a, algo: algo.needs_critic, "name", "has no critic"),
    Rule(("whiten_advantages",), lambda a, algo: algo.advantage == "gae", "name", "has a whitening of its own or none"),
    Rule(("clip_low", "clip_high"), lambda a, algo: algo.clips != "none", "name", "clips no ratio"),
    Rule(("clip_dual",), lambda a, algo: algo.uses_clip_dual, "name", "has no dual clip"),
    Rule(
        ("sapo_tau_positive", "sapo_tau_negative"), lambda a, algo: algo.policy_loss == "sapo", "name", "has no soft gate"
    ),
    Rule(("beta", "label_smoothing", "reward_center"), lambda a, algo: False, "name", "learns from no pairs"),
    Rule(("kl_coef", "kl_estimator"), lambda a, algo: a.kl_placement != "none", "kl_placement", "has no KL penalty"),
    Rule(("kl_horizon",), lambda a, algo: a.kl_target is not None, "kl_target", "leaves the coefficient as it is"),
    Rule(
        ("overlong_penalty",), lambda a, algo: a.overlong_buffer_tokens > 0, "overlong_buffer_tokens",
        "leaves no length that costs",
    ),
    Rule(("correction_high", "correction_normalize"), lambda a, algo: a.correction != "none", "correction", "has no weights"),
    Rule(("correction_low",), lambda a, algo: a.correction.startswith("icepop"), "correction", "has no lower bound"),
    Rule(("reject_high",), lambda a, algo: a.reject != "none", "reject", "leaves nothing out"),
    Rule(("reject_low",), lambda a, algo: a.reject.endswith("k1"), "reject", "has no lower bound"),
)  # fmt: skip

# Of the objectives without rollouts; all have `name` and `micro_batch_tokens`.
OBJECTIVE_KEYS: Mapping[str, tuple[str, ...]] = {
    "sft": ("aggregation",),
    "dpo": ("beta", "label_smoothing"),
    "ipo": ("beta",),
    "reward_model": ("reward_center",),
}


def refuse_ignored(config: Config, algo: Algorithm) -> None:
    """Raises UserError for a key that is not at its default and that the algorithm, as configured, does not read."""
    a = config.algorithm
    for rule in RULES:
        if not rule.used(a, algo):
            for key in rule.keys:
                _refuse(a, key, algo, f"algorithm.{rule.cause} = {_text(getattr(a, rule.cause))} {rule.reason}")


def refuse_ignored_objective(config: Config) -> None:
    """As `refuse_ignored`, of training without rollouts."""
    a = config.algorithm
    goal = objective(a.name)
    assert goal is not None, f"{a.name} learns from rollouts"
    for key in _DEFAULTS:
        if key not in ("name", "micro_batch_tokens", *OBJECTIVE_KEYS[a.name]):
            _refuse(a, key, goal, f"algorithm.name = {a.name} does not read it")


def _refuse(a: AlgorithmConfig, key: str, chosen: Algorithm | Objective, reason: str) -> None:
    value, default = getattr(a, key), chosen.defaults.get(key, _DEFAULTS[key])
    if value != default:
        raise UserError(
            f"algorithm.{key} = {_text(value)} would be ignored, for {reason}: set algorithm.{key}={_text(default)}"
        )


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_DEFAULTS: Mapping[str, Any] = dataclasses.asdict(AlgorithmConfig())  # type: ignore[call-overload]  # a dataclass of pydantic
