"""Seeds, shares of replicas, and batches out of samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.batch import Batch
from hpc_rl.rollout.protocol import Prompt, Request, Sample
from hpc_rl.rollout.sampler import assign, request_seed, samples_to_batch, sort_batch


def sample(group: int, index: int, prompt: tuple[int, ...], response: tuple[int, ...], finished: bool = True) -> Sample:
    request = Request(Prompt(40 + group, prompt, ""), group, index, 7)
    log_probs = tuple(-float(k + 1) for k in range(len(response)))
    return Sample(request, response, log_probs, finished, 5, "".join(map(chr, response)), 0.5)


SAMPLES = [
    sample(1, 1, (7, 8), (65, 66, 67)),
    sample(0, 0, (5,), (68,), finished=False),
    sample(1, 0, (7, 8), ()),  # stopped before its first token
    sample(0, 1, (5,), (70, 71)),
]


def test_seeds_are_stable_numbers() -> None:
    # Fixed for ever: another value would change every rollout of a resumed run.
    assert request_seed(0, 0, 0, 0) == 5809880761037817570
    assert request_seed(1, 2, 3, 4) == 7597657864365363701


@given(st.lists(st.tuples(*[st.integers(0, 2**40)] * 4), unique=True, min_size=2, max_size=20))
def test_seeds_differ_and_fit_63_bits(keys: list[tuple[int, int, int, int]]) -> None:
    seeds = [request_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)  # torch's CPU generator takes 32 bits


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_are_even_and_complete(count: int, replicas: int) -> None:
    requests = [Request(Prompt(i // 4, (1,), ""), i // 4, i % 4, i) for i in range(count)]
    shares = [assign(requests, replica, replicas) for replica in range(replicas)]
    assert [r for share in shares for r in share] == requests
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_batch_lines_up_tokens_masks_and_log_probs() -> None:
    batch = samples_to_batch(SAMPLES, scores=[1.0, 2.0, 3.0, 4.0])
    assert batch["input_ids"].tolist() == [5, 68, 5, 70, 71, 7, 8, 7, 8, 65, 66, 67]
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 7, 12]
    assert batch["position_ids"].tolist() == [0, 1, 0, 1, 2, 0, 1, 0, 1, 2, 3, 4]
    assert batch["response_mask"].int().tolist() == [0, 1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert batch["rollout_log_probs"].tolist() == [0, -1, 0, -1, -2, 0, 0, 0, 0, -1, -2, -3]
    assert batch["prompt_ids"].tolist() == [40, 40, 41, 41]
    assert batch["group_ids"].tolist() == [0, 0, 1, 1]
    assert batch["sample_ids"].tolist() == [0, 1, 0, 1]
    assert batch["finished"].tolist() == [False, True, True, True]
    assert batch["versions"].tolist() == [5, 5, 5, 5]
    assert batch["scores"].tolist() == [2.0, 4.0, 3.0, 1.0]
    assert "scores" not in samples_to_batch(SAMPLES)


def test_batches_of_replicas_sort_into_the_same_batch() -> None:
    whole = samples_to_batch(SAMPLES)
    parts = sort_batch(Batch.concat([samples_to_batch(SAMPLES[:2]), samples_to_batch(SAMPLES[2:])]))
    assert torch.equal(parts.cu_seqlens, whole.cu_seqlens)
    for name in (*whole.tokens, *whole.sequences):
        assert torch.equal(parts[name], whole[name])
        assert parts[name].dtype == whole[name].dtype


def test_no_samples_make_an_empty_batch() -> None:
    batch = samples_to_batch([])
    assert len(batch) == 0
    assert batch.num_tokens == 0
    assert len(sort_batch(batch)) == 0


def test_scores_must_fit() -> None:
    with pytest.raises(AssertionError, match="1 scores for 4 samples"):
        samples_to_batch(SAMPLES, [1.0])
