from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_rl.data.packing import micro_batches, partition

many_lengths = st.lists(st.integers(1, 50), max_size=60)


def tokens(lengths: Sequence[int], indices: Sequence[int]) -> int:
    return sum(lengths[i] for i in indices)


@given(many_lengths, st.integers(1, 9))
def test_partition_gives_every_sequence_to_one_rank(lengths: list[int], num_ranks: int) -> None:
    ranks = partition(lengths, num_ranks)
    assert len(ranks) == num_ranks
    assert sorted(i for indices in ranks for i in indices) == list(range(len(lengths)))
    assert all(indices == sorted(indices) for indices in ranks)
    assert partition(lengths, num_ranks) == ranks


@given(many_lengths, st.integers(1, 9))
def test_no_rank_has_more_than_its_share_and_one_sequence(lengths: list[int], num_ranks: int) -> None:
    loads = [tokens(lengths, indices) for indices in partition(lengths, num_ranks)]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    if len(lengths) >= num_ranks:
        assert min(loads) > 0


@settings(max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(2, 3))
def test_largest_load_is_within_the_bound_of_the_best(lengths: list[int], num_ranks: int) -> None:
    best = min(
        max(tokens(lengths, [i for i, r in enumerate(ranks) if r == rank]) for rank in range(num_ranks))
        for ranks in product(range(num_ranks), repeat=len(lengths))
    )
    largest = max(tokens(lengths, indices) for indices in partition(lengths, num_ranks))
    assert largest <= (4 / 3 - 1 / (3 * num_ranks)) * best


def test_partition_by_hand() -> None:
    assert partition([5, 1, 4, 2], 2) == [[0, 1], [2, 3]]
    assert partition([3], 3) == [[0], [], []]
    assert partition([], 2) == [[], []]
    assert partition([0, 0], 2) == [[0], [1]], "by count where tokens say nothing"


@given(many_lengths, st.integers(1, 6), st.integers(1, 120))
def test_micro_batches_hold_all_within_the_budget_in_equal_number(
    lengths: list[int], num_ranks: int, token_budget: int
) -> None:
    ranks = partition(lengths, num_ranks)
    packed = micro_batches(lengths, ranks, token_budget)
    assert len({len(batches) for batches in packed}) == 1, "ranks would wait for each other for ever"
    for indices, batches in zip(ranks, packed, strict=True):
        assert sorted(i for batch in batches for i in batch) == indices
        assert all(batch == sorted(batch) for batch in batches)
        for batch in batches:
            assert tokens(lengths, batch) <= token_budget or len(batch) == 1


@given(many_lengths, st.integers(1, 6), st.integers(1, 120))
def test_a_micro_batch_is_empty_only_for_lack_of_sequences(lengths: list[int], num_ranks: int, budget: int) -> None:
    ranks = partition(lengths, num_ranks)
    for indices, batches in zip(ranks, micro_batches(lengths, ranks, budget), strict=True):
        assert sum(1 for batch in batches if batch) == min(len(indices), len(batches))
        assert batches == sorted(batches, key=lambda batch: (not batch, batch)), "empty ones last"


def test_micro_batches_by_hand() -> None:
    lengths = [6, 5, 4, 3, 2, 20]
    assert micro_batches(lengths, [[0, 1, 2, 3, 4]], 10) == [[[0, 2], [1, 3, 4]]]
    assert micro_batches(lengths, [[0, 5]], 10) == [[[0], [5]]], "longer than the budget: alone"
    assert micro_batches(lengths, [[4], [0, 1, 2]], 6) == [[[4], [], []], [[0], [1], [2]]]
    assert micro_batches(lengths, [[2, 3, 4], [0, 1]], 9) == [[[2], [3, 4]], [[0], [1]]], "split, not padded"
    assert micro_batches([], [[], []], 9) == [[], []]


@pytest.mark.parametrize("num_ranks", [1, 64])
def test_packing_is_tight(num_ranks: int) -> None:
    lengths = [1 + (i * 7919) % 997 for i in range(4000)]
    packed = micro_batches(lengths, partition(lengths, num_ranks), 4096)
    assert len(packed[0]) * num_ranks * 4096 < 1.15 * sum(lengths), "one in eight micro-batches would be air"


def test_a_hundred_thousand_sequences_take_seconds() -> None:
    lengths = [1 + (i * 7919) % 4093 for i in range(100_000)]
    start = time.process_time()
    packed = micro_batches(lengths, partition(lengths, 64), 8192)
    assert time.process_time() - start < 5
    assert sum(len(batch) for batches in packed for batch in batches) == 100_000
