from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rl.config import RewardConfig
from hpc_rl.errors import RunError
from hpc_rl.reward.functions import exact_match
from hpc_rl.reward.score import RewardFunction
from hpc_rl.rollout.protocol import Prompt, Request, Sample
from tests.config.refusal import refused

MODULE = """
import asyncio
CONSTANT = 3
class Judge:
    @staticmethod
    def score(prompt, response, fields): return 2.0
def plain(prompt, response, fields, bonus=0.0): return len(response) + bonus
def two(prompt, response): return 0.0
async def later(prompt, response, fields): return 0.0
"""


@pytest.fixture
def my_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's module on the path."""
    (tmp_path / "my_rewards_for_test.py").write_text(MODULE)
    (tmp_path / "my_broken_for_test.py").write_text("import not_a_package_at_all\n")
    (tmp_path / "my_raising_for_test.py").write_text("raise KeyError('no\\nkey')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def sample(response: str, answer: Any = "2", prompt_id: int = 5, sample_id: int = 3) -> Sample:
    prompt = Prompt(prompt_id, (1, 2), "1+1=", {"answer": answer})
    return Sample(Request(prompt, 0, sample_id, 9), (1,), (-0.1,), True, 1, response, 0.5)


def reward_of(name: str, **config: Any) -> RewardFunction:
    return RewardFunction.from_config(RewardConfig(function=name, **config))


def test_scores_in_order() -> None:
    reward = reward_of("hpc_rl.reward.functions:exact_match")
    assert reward.function is exact_match
    assert reward.required_fields == ("answer",)
    assert reward.score([sample("2"), sample("3"), sample(" 2 ")]) == [1.0, 0.0, 1.0]
    assert reward.score([]) == []


def test_a_users_function_gets_all_that_is_promised(my_rewards: Path) -> None:
    assert reward_of("my_rewards_for_test:plain", kwargs={"bonus": 0.5}).score([sample("abc")]) == [3.5]
    assert reward_of("my_rewards_for_test:Judge.score").score([sample("abc")]) == [2.0]
    seen: list[Any] = []
    RewardFunction(lambda *args, **kwargs: seen.append((args, kwargs)) or 1.0, {"a": 1}).score([sample("r")])
    assert seen == [(("1+1=", "r", {"answer": "2"}), {"a": 1})]


@pytest.mark.parametrize(
    ("name", "kwargs", "rule", "fix"),
    [
        ("exact_match", {}, "must be module:function", "hpc_rl.reward.functions:exact_match"),
        (":f", {}, "must be module:function", "for example"),
        ("m:", {}, "must be module:function", "for example"),
        ("no_such_module:f", {}, "there is no module no_such_module", "PYTHONPATH"),
        ("my_rewards_for_test.sub:f", {}, "there is no module my_rewards_for_test.sub", "PYTHONPATH"),
        ("my_broken_for_test:f", {}, "needs not_a_package_at_all", "pip install it"),
        ("my_raising_for_test:f", {}, "raises KeyError: 'no\\nkey'", "correct it"),
        ("my_rewards_for_test:nope", {}, "has no nope", "it has plain, two, later"),
        ("my_rewards_for_test:CONSTANT", {}, "is a int, but must be a function", "name a function"),
        ("my_rewards_for_test:later", {}, "is async", "plain function"),
        (
            "my_rewards_for_test:two",
            {},
            "takes (prompt, response), but is called as (prompt, response, fields)",
            "correct",
        ),
        ("my_rewards_for_test:plain", {"bonsu": 1}, "fields, bonsu=1) (got an unexpected keyword", "reward.kwargs"),
    ],
)
def test_functions_that_cannot_be_used(
    my_rewards: Path, name: str, kwargs: dict[str, Any], rule: str, fix: str
) -> None:
    with refused(f"reward.function = {name}", rule, fix):
        reward_of(name, kwargs=kwargs)


def test_missing_package_of_a_function(my_rewards: Path) -> None:
    (my_rewards / "my_needy_for_test.py").write_text(
        "from hpc_rl.reward.functions import requires\n"
        "@requires(packages=('no_such_judge',))\n"
        "def judge(prompt, response, fields): return 0.0\n"
    )
    with refused("my_needy_for_test:judge", "needs no_such_judge", "pip install no-such-judge"):
        reward_of("my_needy_for_test:judge")


def explode(prompt: str, response: str, fields: Any) -> float:
    raise KeyError("x\ny")


FAILURES = [
    (explode, "KeyError: 'x\\ny'"),
    (lambda *_: None, "TypeError: the result is None"),
    (lambda *_: "1.0", "the result is '1.0' (str), but must be a number"),
    (lambda *_: 1j, "must be a number"),
    (lambda *_: float("nan"), "ValueError: the result is nan, but must be finite"),
    (lambda *_: np.float32("inf"), "the result is inf, but must be finite"),
    (lambda *_: torch.ones(2), "Error: "),
    (lambda *_: exit(3), "SystemExit: 3"),
]


@pytest.mark.parametrize(("function", "reason"), FAILURES)
def test_a_failure_names_the_sample_and_stops(function: Any, reason: str) -> None:
    with pytest.raises(RunError) as caught:
        RewardFunction(function).score([sample("r" * 200)])
    message = str(caught.value)
    assert "\n" not in message
    for part in ("prompt_id 5", "sample_id 3", f"'{'r' * 80}...'", reason, "reward.on_error=score"):
        assert part in message


@pytest.mark.parametrize(("function", "reason"), FAILURES)
def test_a_failure_scores_as_given_and_is_counted(function: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    def sometimes(prompt: str, response: str, fields: Any) -> Any:
        return 1.0 if response == "good" else function(prompt, response, fields)

    reward = RewardFunction(sometimes, on_error="score", error_score=-0.5)
    with caplog.at_level(logging.WARNING):
        assert reward.score([sample("good"), *[sample("bad")] * 5, sample("good")]) == [1.0, *[-0.5] * 5, 1.0]
    assert reward.num_errors == 5
    assert len(caplog.records) == 3, "the rest is only counted"
    assert reason in caplog.text


@pytest.mark.parametrize("value", [1, 1.0, True, np.float64(1), np.bool_(True), np.int32(1), torch.tensor(1.0)])
def test_any_number_is_a_score(value: Any) -> None:
    [score] = RewardFunction(lambda *_: value).score([sample("r")])
    assert type(score) is float
    assert score == 1.0


def test_on_error_comes_from_the_configuration() -> None:
    reward = reward_of("hpc_rl.reward.functions:numeric_match", on_error="score", error_score=-2.0)
    assert reward.score([sample("2", answer="two")]) == [-2.0]
    with pytest.raises(RunError, match="'two' holds no number"):
        reward_of("hpc_rl.reward.functions:numeric_match").score([sample("2", answer="two")])


def test_an_interrupt_is_not_a_score() -> None:
    def interrupted(*_: Any) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RewardFunction(interrupted, on_error="score").score([sample("r")])
