"""Rules of the algorithm's configuration: combinations that make no sense are refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable

from hpc_rl.algo.ignored import refuse_ignored, refuse_ignored_objective
from hpc_rl.algo.registry import Algorithm, algorithm, objective
from hpc_rl.config import Config
from hpc_rl.errors import UserError


def validate(config: Config) -> None:
    """Checks the algorithm section against itself and the rest.

    Raises: UserError naming the value, the rule and the fix: the first of all that is wrong.
    """
    _evaluation(config)
    if objective(config.algorithm.name) is not None:
        for rule in _OBJECTIVE_CHECKS:
            rule(config)
        return
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
    if warmup >= config.steps:
        raise UserError(
            f"algorithm.critic_warmup_steps = {warmup}, but steps = {config.steps}: the actor would never learn; "
            "set it below steps"
        )


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
    if a.kl_placement == "loss" and a.kl_estimator == "k1" and not a.kl_straight_through:
        raise UserError(
            "algorithm.kl_estimator = k1 as a loss (kl_placement = loss) has a gradient of 0 on average: set "
            "kl_estimator to k2 or k3, or kl_straight_through=true"
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
    for setting, low, high, bounded in (
        ("correction", a.correction_low, a.correction_high, a.correction.startswith("icepop")),
        ("reject", a.reject_low, a.reject_high, a.reject.endswith("k1")),
    ):
        if bounded and low >= high:
            raise UserError(f"algorithm.{setting}_low = {low} is not below {setting}_high = {high}: swap them")
        if bounded and not low <= 1 <= high:
            raise UserError(
                f"algorithm.{setting}_low = {low} and {setting}_high = {high} leave out the ratio 1, that of a sampler "
                f"which agrees with the trainer, so that nothing would be learned ({setting} = "
                f"{getattr(a, setting)}): set {setting}_low to 1 or less and {setting}_high to 1 or more"
            )


def _sampling(config: Config, algo: Algorithm) -> None:
    samples, data = config.rollout.samples_per_prompt, config.data
    for key, value, off in (
        ("algorithm.refill_rounds", config.algorithm.refill_rounds, 0),
        ("data.oversample", data.oversample, 1),
    ):
        if value > off and samples < 2:
            raise UserError(
                f"{key} = {value} looks for groups whose scores differ, but rollout.samples_per_prompt = {samples}: "
                f"raise it, or set {key}={off}"
            )
    if data.reward_min is not None and data.reward_max is not None and data.reward_min > data.reward_max:
        raise UserError(
            f"data.reward_min = {data.reward_min} is above data.reward_max = {data.reward_max}, so every prompt would "
            "be left out: swap them"
        )


def _objective_keys(config: Config) -> None:
    a, name = config.algorithm, config.algorithm.name
    for key, value, right in (
        ("algorithm.epochs", a.epochs, 1),
        ("algorithm.mini_batches", a.mini_batches, 1),
        ("algorithm.refill_rounds", a.refill_rounds, 0),
        ("data.oversample", config.data.oversample, 1),
        ("data.reward_min", config.data.reward_min, None),
        ("data.reward_max", config.data.reward_max, None),
    ):
        if value != right:
            text = "null" if right is None else right
            raise UserError(f"{key} = {value} is for rollouts, but algorithm.name = {name} has none: set {key}={text}")
    if a.kl_placement != "none":
        raise UserError(
            f"algorithm.kl_placement = {a.kl_placement}, but algorithm.name = {name} has no KL penalty: set "
            "algorithm.kl_placement=none"
        )
    if config.rollout.temperature != 1 and name != "reward_model":
        raise UserError(
            f"rollout.temperature = {config.rollout.temperature} would change the log-probs that algorithm.name = "
            f"{name} learns: set rollout.temperature=1"
        )


def _objective_models(config: Config) -> None:
    name, model, goal = config.algorithm.name, config.model, objective(config.algorithm.name)
    assert goal is not None
    if model.reference_path is not None and not goal.needs_reference:
        raise UserError(
            f"model.reference_path = {model.reference_path}, but algorithm.name = {name} has no reference: unset it"
        )
    if model.critic_path is not None and goal.role != "critic":
        raise UserError(f"model.critic_path = {model.critic_path}, but algorithm.name = {name} has no critic: unset it")


def _evaluation(config: Config) -> None:
    values = config.eval
    if values.every and not config.data.eval_prompts:
        raise UserError(
            f"eval.every = {values.every} needs held-out prompts, but data.eval_prompts is null: set it, or set "
            "eval.every=0"
        )
    if values.samples_per_prompt > 1 and values.temperature == 0:
        raise UserError(
            f"eval.samples_per_prompt = {values.samples_per_prompt}, but eval.temperature = 0 makes them all alike: "
            "set eval.temperature above 0, or eval.samples_per_prompt=1"
        )


_CHECKS: tuple[Callable[[Config, Algorithm], None], ...] = (
    _samples, _critic, _clip, _kl, _lengths, _mismatch, _sampling, refuse_ignored,
)  # fmt: skip
_OBJECTIVE_CHECKS: tuple[Callable[[Config], None], ...] = (_objective_keys, _objective_models, refuse_ignored_objective)
