from __future__ import annotations

from typing import Any

import pytest

from hpc_rl.reward import functions
from hpc_rl.reward.functions import contains_answer, exact_match, last_number, length_penalty, numeric_match
from hpc_rl.reward.reasoning import factory


@pytest.mark.parametrize(
    ("response", "answer", "kwargs", "score"),
    [
        ("12", "12", {}, 1),
        (" 12\n", 12, {}, 1),
        ("12.", "12", {}, 0),
        ("112", "12", {}, 0),
        ("Yes", "yes", {}, 0),
        ("Yes", "yes", {"ignore_case": True}, 1),
        ("", "x", {}, 0),
    ],
)
def test_exact_match(response: str, answer: Any, kwargs: dict[str, Any], score: float) -> None:
    assert exact_match("q", response, {"answer": answer}, **kwargs) == score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("7 + 5 = 12", "12", 1),
        ("It is 12.", "12", 1),
        ("12, I think", "12", 1),
        ("112", "12", 0),
        ("12.5", "12", 0),
        ("0.12", "12", 0),
        ("1,12", "12", 0),
        ("x12", "12", 0),
        ("The answer: PARIS!", "Paris", 1),
        ("Parisian", "Paris", 0),
        ("f(x)=a+b", "a+b", 1),
    ],
)
def test_contains_answer(response: str, answer: str, score: float) -> None:
    assert contains_answer("q", response, {"answer": answer}) == score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 + 5 = 12", 12),
        ("-4", -4),
        ("costs $1,234.50 in all", 1234.5),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("12. Done.", 12),
        ("none", None),
        ("", None),
        ("3 - 5", 5),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_numeric_match() -> None:
    assert numeric_match("q", "so it is 12.0", {"answer": 12}) == 1
    assert numeric_match("q", "1,000", {"answer": "1000"}) == 1
    assert numeric_match("q", "13", {"answer": "12"}) == 0
    assert numeric_match("q", "no idea", {"answer": "12"}) == 0
    assert numeric_match("q", "3.1", {"answer": "3.14159"}, tolerance=0.05) == 1
    with pytest.raises(ValueError, match="'twelve' holds no number"):
        numeric_match("q", "12", {"answer": "twelve"})


def test_length_penalty() -> None:
    assert length_penalty("q", "x" * 200, {}) == 0
    assert length_penalty("q", "x" * 250, {}) == pytest.approx(-0.5)
    assert length_penalty("q", "x" * 5, {}, target=3, slope=1) == -2


def test_reasoning_gym_scores_with_its_own_verifiers() -> None:
    entry = factory().create_dataset("basic_arithmetic", size=1, seed=1)[0]
    fields = {"task": "basic_arithmetic", "entry": entry}
    right = entry["answer"]
    score = functions.reasoning_gym
    assert score("q", f" {right} ", fields) == 1
    assert score("q", f"thinking <answer>9999</answer> <answer>{right}</answer>", fields) == 1
    assert score("q", "<answer>9999</answer>", fields) < 0.5
    assert score("q", f"it is {right}", fields, extract="number") == 1
    assert score("q", right, fields, extract="tag") == 0, "no tag, no answer"
    assert score("q", f"<answer>{right}</answer>", fields, extract="all") < 1


def test_what_each_needs_is_declared() -> None:
    assert exact_match.required_fields == ("answer",)  # type: ignore[attr-defined]
    assert functions.reasoning_gym.required_fields == ("task", "entry")  # type: ignore[attr-defined]
    assert functions.reasoning_gym.required_packages == ("reasoning_gym",)  # type: ignore[attr-defined]
