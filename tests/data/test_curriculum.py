"""Prompts left out by what their group scored, and the cursor that resumes in the midst of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpc_rl.config import DataConfig
from hpc_rl.data.curriculum import Curriculum
from hpc_rl.data.prompts import PromptSet, PromptStream
from tests.data.test_prompts import load, texts


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> PromptSet:
    return PromptSet(texts(*"abcdef"), load(tmp_path_factory.mktemp("tokenizer")))


def curriculum_of(prompts: PromptSet, **data: Any) -> Curriculum:
    return Curriculum(PromptStream(prompts, 3, True, 2), DataConfig(**data))


def ids(drawn: Any) -> list[int]:
    return [prompt.prompt_id for prompt in drawn]


def test_without_bounds_it_is_the_stream(prompts: PromptSet) -> None:
    curriculum, stream = curriculum_of(prompts), PromptStream(prompts, 3, True, 2)
    for count in (4, 1, 7, 6):
        drawn = curriculum.draw(count)
        assert ids(drawn) == ids(stream.draw(count))
        curriculum.learn(ids(drawn), [0.0] * count)
    assert curriculum.num_left_out == 0


def test_too_easy_and_too_hard_are_left_out_for_so_many_epochs(prompts: PromptSet) -> None:
    curriculum = curriculum_of(prompts, reward_min=0.1, reward_max=0.9, reward_memory_epochs=2)
    first = ids(curriculum.draw(6))
    scores = dict(zip(first, [0.0, 0.1, 0.5, 0.9, 1.0, 0.5], strict=True))  # the bounds themselves stay in
    curriculum.learn(first, list(scores.values()))
    stay = {i for i, score in scores.items() if 0.1 <= score <= 0.9}
    assert curriculum.num_left_out == 2
    for _ in range(2):
        assert set(ids(curriculum.draw(4))) == stay
    assert set(ids(curriculum.draw(6))) == set(first), "after two epochs they are tried again"
    curriculum.learn(first, [0.5] * 6)
    assert curriculum.num_left_out == 0


def test_if_all_are_left_out_all_come_again(prompts: PromptSet) -> None:
    curriculum = curriculum_of(prompts, reward_max=0.5, reward_memory_epochs=1000)
    first = ids(curriculum.draw(6))
    curriculum.learn(first, [1.0] * 6)
    assert len(curriculum.draw(9)) == 9


def test_state_resumes_exactly(prompts: PromptSet) -> None:
    def advance(stream: PromptStream, curriculum: Curriculum, steps: int) -> list[int]:
        seen: list[int] = []
        for _ in range(steps):
            drawn = ids(curriculum.draw(3))
            curriculum.learn(drawn, [i % 5 / 4 for i in drawn])
            seen += drawn
        return seen

    data = DataConfig(reward_min=0.2, reward_max=0.8, reward_memory_epochs=1)
    stream = PromptStream(prompts, 3, True, 2)
    curriculum = Curriculum(stream, data)
    advance(stream, curriculum, 3)
    state = json.loads(json.dumps([stream.state(), curriculum.state()]))
    expected = advance(stream, curriculum, 6)
    other = PromptStream(prompts, 3, True, 2)
    resumed = Curriculum(other, data)
    other.load_state(state[0])
    resumed.load_state(state[1])
    assert advance(other, resumed, 6) == expected
    assert state[1]["back_at"], "nothing was left out: the test shows nothing"
