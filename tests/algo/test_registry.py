"""The registry, its published values, and what `validate` refuses."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from hpc_rl.algo.adapters import ADVANTAGES, POLICY_LOSSES
from hpc_rl.algo.checks import validate
from hpc_rl.algo.registry import ALGORITHMS, OBJECTIVES, algorithm, with_defaults
from hpc_rl.config import AlgorithmConfig, Config, ModelConfig, RolloutConfig
from hpc_rl.errors import UserError


def config_of(
    name: str, samples: int = 4, steps: int = 100, model: dict[str, Any] | None = None, **algo: Any
) -> Config:
    return Config(
        steps=steps,
        model=ModelConfig(**(model or {})),
        rollout=RolloutConfig(samples_per_prompt=samples, max_response_tokens=32),
        algorithm=AlgorithmConfig(**with_defaults({"algorithm": {"name": name, **algo}})["algorithm"]),
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
]


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
    ("grpo", {"kl_straight_through": True, "reject": "token-k3", "reject_low": 3.0}),
    ("grpo", {"correction": "tis-token", "correction_low": 3.0, "correction_normalize": True}),
]


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
