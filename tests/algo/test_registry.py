"""The registry, its published values, and what `validate` refuses."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from hpc_rl.algo.adapters import ADVANTAGES, POLICY_LOSSES
from hpc_rl.algo.checks import validate
from hpc_rl.algo.ignored import OBJECTIVE_KEYS, RULES
from hpc_rl.algo.registry import ALGORITHMS, OBJECTIVES, algorithm, with_defaults
from hpc_rl.config import AlgorithmConfig, Config, ModelConfig, RolloutConfig
from hpc_rl.errors import UserError


def config_of(
    name: str, samples: int = 4, steps: int = 100, model: dict[str, Any] | None = None, **algo: Any
) -> Config:
    values = {"rollout": {"max_response_tokens": 32}, "algorithm": {"name": name, **algo}}
    return Config(
        steps=steps,
        model=ModelConfig(**(model or {})),
        rollout=RolloutConfig(samples_per_prompt=samples, max_response_tokens=32),
        algorithm=AlgorithmConfig(**with_defaults(values)["algorithm"]),
    )


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_published_values_are_valid(name: str) -> None:
    validate(config_of(name))


def test_every_algorithm_of_the_list_is_there() -> None:
    listed = "ppo grpo dr_grpo rloo reinforce_plus_plus reinforce_plus_plus_baseline remax opo gpg dapo gspo cispo sapo"
    assert set(listed.split()) <= set(ALGORITHMS)
    assert [n for n, a in ALGORITHMS.items() if a.needs_critic] == ["ppo"]
    assert [n for n, a in ALGORITHMS.items() if a.needs_greedy] == ["remax"]
    assert [n for n, a in ALGORITHMS.items() if "refill_rounds" in a.defaults] == ["dapo"]
    assert list(OBJECTIVES) == ["sft", "dpo", "ipo", "reward_model"]


def test_defaults_lie_below_the_users_values() -> None:
    values = {"steps": 3, "algorithm": {"name": "dapo", "clip_low": 0.1}}
    filled = with_defaults(values)
    assert filled == {
        "steps": 3,
        "algorithm": {
            "name": "dapo", "clip_low": 0.1, "clip_high": 0.28, "kl_placement": "none", "refill_rounds": 4,
            "overlong_buffer_tokens": 102,
        },
    }  # fmt: skip
    assert values["algorithm"] == {"name": "dapo", "clip_low": 0.1}
    assert with_defaults({"algorithm": {"name": "dapo", "clip_high": 0.3}})["algorithm"]["clip_high"] == 0.3
    assert with_defaults({"steps": 3}) == {"steps": 3} and with_defaults({"algorithm": None}) == {"algorithm": None}
    known = {field.name for field in dataclasses.fields(AlgorithmConfig)}
    assert all(set(a.defaults) <= known for a in (*ALGORITHMS.values(), *OBJECTIVES.values()))


def test_every_named_estimator_and_loss_is_defined_and_used() -> None:
    assert {a.advantage for a in ALGORITHMS.values()} == set(ADVANTAGES)
    assert {a.policy_loss for a in ALGORITHMS.values()} == set(POLICY_LOSSES)


@pytest.mark.parametrize(
    ("name", "hint"), [("grop", "did you mean grpo"), ("DR-GRPO", "dr_grpo"), ("zzz", "set one of ppo, grpo")]
)
def test_unknown_algorithm(name: str, hint: str) -> None:
    for call in (lambda: algorithm(name), lambda: with_defaults({"algorithm": {"name": name}})):
        with pytest.raises(UserError, match=hint):
            call()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (name, {"samples": 1}, "samples_per_prompt = 1.*compares.*2 or more")
    for name, algo in ALGORITHMS.items()
    if algo.needs_groups
]
REFUSED += [
    ("grpo", {"critic_warmup_steps": 5}, "critic_warmup_steps = 5.*no critic"),
    ("grpo", {"model": {"critic_path": "a/b"}}, "critic_path = a/b.*no critic"),
    ("ppo", {"critic_warmup_steps": 10, "steps": 10}, "critic_warmup_steps = 10.*steps = 10.*never learn"),
    ("grpo", {"gamma": 0.9}, "gamma = 0.9.*does not discount"),
    ("ppo", {"clip_low": 0.3, "clip_high": 0.2}, "clip_low = 0.3 is above clip_high = 0.2.*swap"),
    ("gspo", {"clip_low": 4e-4, "clip_high": 3e-4}, "clip_low = 0.0004 is above"),
    ("ppo", {"clip_low": 0.0, "clip_high": 0.0}, "no room"),
    ("ppo", {"clip_low": 1.2, "clip_high": 2.0}, "clip_low = 1.2.*fall to -0.2.*distance"),
    ("gspo", {"clip_dual": 3.0}, "clip_dual = 3.0.*no dual"),
    ("gpg", {"clip_dual": 3.0}, "no dual"),
    ("ppo", {"kl_target": 0.1, "kl_placement": "none"}, "kl_target = 0.1.*kl_placement = none"),
    ("ppo", {"kl_target": 0.1, "kl_coef": 0.0}, "kl_coef = 0"),
    ("ppo", {"kl_straight_through": True}, "kl_placement = reward has none"),
    ("dapo", {"model": {"reference_path": "r"}}, "reference_path = r.*kl_placement = none"),
    ("dapo", {"overlong_buffer_tokens": 33}, "overlong_buffer_tokens = 33.*max_response_tokens = 32"),
    (
        "grpo",
        {"correction": "icepop-token", "correction_low": 2.0},
        "correction_low = 2.0 is not below",
    ),
    ("grpo", {"reject": "seq-mean-k1", "reject_low": 3.0}, "reject_low = 3.0 is not below"),
    ("grpo", {"correction_normalize": True}, "correction = none"),
    (
        "grpo",
        {"reject": "seq-mean-k1", "reject_low": 1.1},
        "reject_low = 1.1 and reject_high = 2.0 leave out the ratio 1",
    ),
    (
        "grpo",
        {"reject": "token-k1", "reject_high": 0.9},
        "reject_low = 0.5 and reject_high = 0.9 leave out the ratio 1",
    ),
    (
        "grpo",
        {"correction": "icepop-token", "correction_low": 1.5},
        "correction_low = 1.5 and correction_high = 2.0 leave out the ratio 1.*set correction_low to 1 or less",
    ),
    ("dapo", {"correction": "icepop-sequence", "correction_high": 0.75}, "correction_high = 0.75 leave out"),
    (
        "ppo",
        {"kl_placement": "loss"},
        "kl_estimator = k1 as a loss.*gradient of 0.*k2 or k3, or kl_straight_through=true",
    ),
    ("grpo", {"kl_estimator": "k1"}, "kl_estimator = k1 as a loss"),
]
IGNORED: list[tuple[str, dict[str, Any], str]] = [
    (
        "gpg",
        {"clip_high": 0.5},
        "clip_high = 0.5 would be ignored, for algorithm.name = gpg clips no ratio: .*clip_high=0.2",
    ),
    ("sapo", {"clip_low": 0.9, "clip_high": 0.1}, "clip_low = 0.9 would be ignored"),
    ("reinforce", {"clip_low": 0.1}, "clip_low = 0.1 would be ignored"),
    (
        "grpo",
        {"lam": 0.9},
        "lam = 0.9 would be ignored, for algorithm.name = grpo has no critic: set algorithm.lam=0.95",
    ),
    ("dapo", {"value_clip": 0.3}, "value_clip = 0.3 would be ignored"),
    ("rloo", {"value_clip": None}, "value_clip = null would be ignored.*set algorithm.value_clip=0.2"),
    (
        "reinforce_plus_plus",
        {"whiten_advantages": False},
        "whiten_advantages = false.*set algorithm.whiten_advantages=true",
    ),
    ("grpo", {"whiten_advantages": False}, "whiten_advantages = false would be ignored"),
    ("grpo", {"sapo_tau_positive": 2.0}, "sapo_tau_positive = 2.0.*no soft gate"),
    ("ppo", {"sapo_tau_negative": 2.0}, "sapo_tau_negative = 2.0.*no soft gate"),
    ("ppo", {"beta": 0.2}, "beta = 0.2 would be ignored.*learns from no pairs"),
    ("grpo", {"label_smoothing": 0.1}, "label_smoothing = 0.1 would be ignored"),
    ("grpo", {"reward_center": 0.1}, "reward_center = 0.1 would be ignored"),
    ("dapo", {"kl_coef": 0.5}, "kl_coef = 0.5 would be ignored, for algorithm.kl_placement = none.*kl_coef=0.001"),
    ("dr_grpo", {"kl_estimator": "k3"}, "kl_estimator = k3 would be ignored"),
    ("ppo", {"kl_horizon": 5}, "kl_horizon = 5 would be ignored, for algorithm.kl_target = null"),
    ("grpo", {"overlong_penalty": 2.0}, "overlong_penalty = 2.0.*overlong_buffer_tokens = 0"),
    ("grpo", {"correction_high": 3.0}, "correction_high = 3.0 would be ignored, for algorithm.correction = none"),
    (
        "grpo",
        {"correction": "tis-token", "correction_low": 3.0},
        "correction_low = 3.0.*= tis-token has no lower bound",
    ),
    ("grpo", {"reject_high": 3.0}, "reject_high = 3.0 would be ignored, for algorithm.reject = none"),
    ("grpo", {"reject": "token-k3", "reject_low": 3.0}, "reject_low = 3.0.*reject = token-k3 has no lower bound"),
    ("dpo", {"clip_low": 0.1}, "clip_low = 0.1 would be ignored, for algorithm.name = dpo does not read it"),
    ("dpo", {"aggregation": "seq-mean-token-sum"}, "aggregation = seq-mean-token-sum would be ignored"),
    ("ipo", {"label_smoothing": 0.1}, "label_smoothing = 0.1 would be ignored"),
    ("sft", {"beta": 0.2}, "beta = 0.2 would be ignored"),
    ("sft", {"entropy_coef": 0.1}, "entropy_coef = 0.1 would be ignored"),
    ("reward_model", {"max_staleness": 2}, "max_staleness = 2 would be ignored"),
]
REFUSED += IGNORED


@pytest.mark.parametrize(("name", "values", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else "-")
def test_refused(name: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        validate(config_of(name, **values))
    assert "\n" not in str(raised.value)


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {"samples": 1}),
    ("remax", {"samples": 1}),
    ("reinforce_plus_plus", {"samples": 1, "gamma": 0.99}),
    ("cispo", {"clip_low": 10.0}),  # no lower bound, as published
    ("ppo", {"kl_target": 0.1, "clip_dual": 3.0, "critic_warmup_steps": 10}),
    ("ppo", {"kl_straight_through": True, "kl_placement": "loss"}),
    ("grpo", {"kl_straight_through": True, "reject": "token-k3", "reject_high": 0.1}),
    ("grpo", {"correction": "tis-token", "correction_high": 3.0, "correction_normalize": True}),
    ("grpo", {"correction": "icepop-token", "correction_low": 1.0, "reject": "seq-sum-k1", "reject_high": 1.0}),
    ("ppo", {"lam": 0.9, "value_clip": None, "whiten_advantages": False, "gamma": 0.9, "kl_coef": 0.1}),
    ("ppo", {"kl_target": 0.1, "kl_horizon": 5, "overlong_buffer_tokens": 3, "overlong_penalty": 2.0}),
    ("sapo", {"sapo_tau_positive": 2.0, "sapo_tau_negative": 2.0}),
    ("dpo", {"beta": 0.2, "label_smoothing": 0.1}),
    ("ipo", {"beta": 0.2}),
    ("sft", {"aggregation": "seq-mean-token-sum"}),
    ("reward_model", {"reward_center": 0.1}),
]


def test_every_key_has_a_rule_or_is_for_all() -> None:
    """A new key must say who reads it."""
    for_all = {
        "name", "aggregation", "entropy_coef", "epochs", "mini_batches", "micro_batch_tokens", "refill_rounds",
        "max_staleness", "overlong_buffer_tokens", "correction", "reject", "kl_placement",
    }  # fmt: skip
    of_their_own = {"kl_target", "kl_straight_through"}  # refused with a message that says more (checks.py)
    ruled = {key for rule in RULES for key in rule.keys}
    assert for_all | of_their_own | ruled == {field.name for field in dataclasses.fields(AlgorithmConfig)}
    assert not (for_all | of_their_own) & ruled and set(OBJECTIVE_KEYS) == set(OBJECTIVES)


@pytest.mark.parametrize(("name", "values"), ACCEPTED)
def test_accepted(name: str, values: dict[str, Any]) -> None:
    validate(config_of(name, **values))


def test_values_out_of_their_own_range_never_get_here() -> None:
    for values in (
        {"clip_low": -0.1},
        {"clip_dual": 0.9},
        {"kl_estimator": "k4"},
        {"correction": "tis"},
        {"nonsense": 1},
    ):
        with pytest.raises(ValidationError):
            AlgorithmConfig(**values)


def test_no_process_group_is_imported() -> None:
    """algo/ is pure: importing all of it loads no other part that talks to other ranks, nor any engine library."""
    code = (
        "import sys; import hpc_rl.algo.step, hpc_rl.algo.preference\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('megatron', 'vllm', 'deepspeed', 'mpi4py')"
        " or m.startswith(('hpc_rl.parallel', 'hpc_rl.train', 'hpc_rl.reshard', 'hpc_rl.rollout'))]\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
