"""Built-in reward functions, and the shape of one's own: ``function(prompt, response, fields, **kwargs) -> float``.

``prompt`` and ``response`` are texts (without special tokens in the response), ``fields`` all other values of the
prompt's line in its file, ``kwargs`` those of ``reward.kwargs``. A function may name what it needs with `requires`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

Function = TypeVar("Function", bound=Callable[..., float])

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def requires(*fields: str, packages: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Marks what a reward function needs, so that a lack is told before a run starts and not in its first step.

    Args:
        fields: names that each line of the prompt files must have.
        packages: modules that must be installed.
    """

    def mark(function: Function) -> Function:
        function.required_fields = fields  # type: ignore[attr-defined]
        function.required_packages = packages  # type: ignore[attr-defined]
        return function

    return mark


@requires("answer")
def exact_match(prompt: str, response: str, fields: Mapping[str, Any], ignore_case: bool = False) -> float:
    """1 if the response is the answer, spaces around both aside; else 0."""
    given, right = response.strip(), str(fields["answer"]).strip()
    return float(given.casefold() == right.casefold() if ignore_case else given == right)


@requires("answer")
def contains_answer(prompt: str, response: str, fields: Mapping[str, Any], ignore_case: bool = True) -> float:
    """1 if the answer is in the response as a word of its own (12 is not in 112 or 12.5); else 0."""
    right = re.escape(str(fields["answer"]).strip())
    pattern = rf"(?<![\w])(?<![\d][.,]){right}(?![\w])(?![.,]\d)"
    return float(re.search(pattern, response, re.IGNORECASE if ignore_case else 0) is not None)


@requires("answer")
def numeric_match(prompt: str, response: str, fields: Mapping[str, Any], tolerance: float = 1e-6) -> float:
    """1 if the last number in the response equals the answer to a relative ``tolerance``; else 0.

    1,234.5 and 1e3 are numbers; a response without one scores 0.

    Raises:
        ValueError: the answer itself holds no number.
    """
    right = last_number(str(fields["answer"]))
    if right is None:
        raise ValueError(f"answer {fields['answer']!r} holds no number: numeric_match needs one")
    given = last_number(response)
    return float(given is not None and abs(given - right) <= tolerance * max(1.0, abs(right)))


def length_penalty(
    prompt: str, response: str, fields: Mapping[str, Any], target: int = 200, slope: float = 0.01
) -> float:
    """0 up to ``target`` characters, then minus ``slope`` for each one more."""
    return -slope * max(0, len(response) - target)


@requires("task", "entry", packages=("reasoning_gym",))
def reasoning_gym(
    prompt: str,
    response: str,
    fields: Mapping[str, Any],
    extract: Literal["auto", "tag", "number", "all"] = "auto",
) -> float:
    """The score, 0 to 1, of reasoning-gym's own verifier.

    ``fields["task"]`` is the name of its data set and ``fields["entry"]`` the entry that the prompt was made from
    (question, answer, metadata). ``extract`` says what of the response is the answer: what stands in the last
    ``<answer>`` tag (``tag``), the last number (``number``), all of it (``all``), or the tag if there is one and
    otherwise all (``auto``).
    """
    from hpc_rl.reward.reasoning import factory

    answer: str | None = response.strip()
    tags = _ANSWER_TAG.findall(response)
    if extract == "tag" or (extract == "auto" and tags):
        answer = tags[-1].strip() if tags else None
    elif extract == "number":
        numbers = _NUMBER.findall(response)
        answer = numbers[-1].replace(",", "") if numbers else None
    return float(factory().get_score_answer_fn(fields["task"])(answer, fields["entry"]))


def last_number(text: str) -> float | None:
    """The last number in a text; None if there is none."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
