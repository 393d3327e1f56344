"""Which groups a step keeps, what they scored, and how old the weights are that sampled them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpc_rl.batch import Batch
from hpc_rl.config import AlgorithmConfig, Config, RewardConfig
from hpc_rl.errors import RunError
from hpc_rl.rollout.collect import _kept, choose_groups, group_means, num_informative, rollout_key, staleness
from hpc_rl.rollout.protocol import Prompt, Request, Sample
from hpc_rl.rollout.sampler import samples_to_batch, sort_batch
from hpc_rl.storage.rollouts import RolloutWriter, finished_samples

SCORES = {0: [1.0, 1.0], 1: [0.0, 1.0], 2: [0.0, 0.0], 3: [0.5, 0.0], 4: [1.0, 0.0]}


def batch_of(versions: list[int] | None = None) -> Batch:
    """Groups 0 .. 4 of two samples; the prompt of group g is 10 + g, its responses have g + 1 tokens."""
    samples, scores = [], []
    for group, values in SCORES.items():
        prompt = Prompt(10 + group, (1, 2), "p")
        for sample, score in enumerate(values):
            version = versions[2 * group + sample] if versions else 4
            request = Request(prompt, group, sample, 0)
            response = (7,) * (group + 1)
            samples.append(Sample(request, response, (0.0,) * len(response), True, version, "", 0.0))
            scores.append(score)
    return samples_to_batch(samples, scores)


def test_groups_that_teach_come_first_and_keep_their_order() -> None:
    batch = batch_of()
    assert num_informative(batch) == 3
    assert choose_groups(batch, 2)["prompt_ids"].tolist() == [11, 11, 13, 13]
    kept = choose_groups(batch, 4)  # three teach, and the first of the others
    assert kept["prompt_ids"].tolist() == [10, 10, 11, 11, 13, 13, 14, 14]
    assert kept["group_ids"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert kept["scores"].tolist() == [1.0, 1.0, 0.0, 1.0, 0.5, 0.0, 1.0, 0.0]
    assert kept.lengths.tolist() == [3, 3, 4, 4, 6, 6, 7, 7]
    everything = choose_groups(batch, 5)
    assert everything["group_ids"].equal(batch["group_ids"]) and everything["input_ids"].equal(batch["input_ids"])


def test_means_of_groups() -> None:
    assert group_means(batch_of()) == ([10, 11, 12, 13, 14], [1.0, 0.5, 0.0, 0.25, 0.5])


def test_sort_keeps_greedy_samples_in_the_order_of_groups() -> None:
    prompts = [Prompt(i, (1,), "p") for i in range(9)]
    samples = [Sample(Request(p, i, -1, 0), (7,), (0.0,), True, 0, "", 0.0) for i, p in enumerate(prompts)]
    parts = [samples_to_batch(samples[4:]), samples_to_batch(samples[:4])]
    assert sort_batch(Batch.concat(parts))["prompt_ids"].tolist() == list(range(9))


def test_steps_behind_are_counted_per_token_and_bounded() -> None:
    config = Config(algorithm=AlgorithmConfig(max_staleness=2))
    assert staleness(batch_of(), config, 5) == {"off_policy_steps_mean": 0.0, "off_policy_steps_max": 0.0}
    versions = [4] * 8 + [2, 4]  # one response of 5 tokens is two steps behind; 30 tokens in all
    found = staleness(batch_of(versions), config, 5)
    assert found["off_policy_steps_max"] == 2
    assert found["off_policy_steps_mean"] == pytest.approx(5 * 2 / 30)
    with pytest.raises(RunError, match=r"prompt_id 14 .* version 1, 3 steps behind .* step 5.*max_staleness = 2"):
        staleness(batch_of([4] * 8 + [1, 4]), config, 5)
    with pytest.raises(RunError, match="max_staleness = 0"):
        staleness(batch_of(versions), Config(), 5)


def test_staleness_of_empty_responses() -> None:
    request = Request(Prompt(1, (1, 2), "p"), 0, 0, 0)
    batch = samples_to_batch([Sample(request, (), (), True, 3, "", 0.0)], [0.0])
    assert staleness(batch, Config(), 4) == {"off_policy_steps_mean": 0.0, "off_policy_steps_max": 0.0}
    assert torch.equal(batch["versions"], torch.tensor([3]))


def test_samples_scored_by_other_code_are_not_taken_from_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_reward.py").write_text("def score(prompt, response, fields): return 0.0\n")
    config = Config(reward=RewardConfig(function="my_reward:score"))
    before = rollout_key(config)
    assert rollout_key(config) == before
    (tmp_path / "my_reward.py").write_text("def score(prompt, response, fields): return 1.0\n")
    assert rollout_key(config) != before


def test_the_journal_gives_only_scored_samples_of_these_weights(tmp_path: Path) -> None:
    requests = [Request(Prompt(i, (1, 2), "p"), i, 0, 5) for i in range(3)]
    samples = [Sample(request, (7,), (-0.5,), True, 4, "", 0.0) for request in requests]
    with RolloutWriter(tmp_path, 5, 0) as writer:
        writer.append(samples[0], score=1.0)
        writer.append(samples[1])  # killed before its score was there
        writer.append(replace(samples[2], version=3), score=1.0)
    assert _kept(requests, finished_samples(tmp_path, 5), version=4) == {(0, 0): (samples[0], 1.0)}
