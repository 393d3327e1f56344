"""The plan is a pure function of all ranks' maps: each element once, balanced, the same wherever it is computed."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.checkpoint_index import holdings
from hpc_rl.storage.manifest import to_prune
from hpc_rl.storage.plan import Box, Holding, Plan, holding, overlapping, plan, split, subtract
from hpc_rl.storage.shards import shard_files
from hpc_rl.tensors.shardmap import TensorSpec
from tests.storage.layouts import Layout, component


def counts(made: Plan, name: str) -> np.ndarray:
    """How often each element of a tensor is written."""
    out = np.zeros(made.specs[name].shape, dtype=int)
    for extents in made.ranks:
        for extent in extents:
            if extent.name == name:
                out[window(extent.start, extent.shape)] += 1
    return out


def window(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    def ordered(pairs: list[tuple[int, int]]) -> Box:
        return tuple(min(p) for p in pairs), tuple(abs(a - b) + 1 for a, b in pairs)

    return st.tuples(*(st.tuples(*(st.integers(0, n - 1),) * 2) for n in shape)).map(lambda p: ordered(list(p)))


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_overlapping_boxes_of_any_ranks_are_written_once(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    whole: Box = ((0,) * len(shape), shape)
    ranks = data.draw(st.lists(st.lists(boxes(shape), max_size=4), min_size=1, max_size=4))
    ranks[data.draw(st.integers(0, len(ranks) - 1))].append(whole)
    made = plan([Holding({"x": TensorSpec(shape, "float32")}, {"x": tuple(found)}) for found in ranks])
    assert (counts(made, "x") == 1).all()
    for found, extents in zip(ranks, made.ranks, strict=True):
        for extent in extents:
            covers = [inside(extent.start, extent.shape, box) for box in found]
            assert any(covers), "a rank writes what it holds in one box"


def inside(start: tuple[int, ...], shape: tuple[int, ...], box: Box) -> bool:
    return all(o <= s and s + n <= o + m for s, n, o, m in zip(start, shape, *box, strict=True))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_subtract_and_overlapping_agree_with_counting(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    expected = np.zeros(shape, dtype=int)
    expected[window(*a)] = 1
    both = expected.copy()
    both[window(*b)] += 1
    expected[window(*b)] = 0
    got = np.zeros(shape, dtype=int)
    for part in subtract(a, b):
        got[window(*part)] += 1
    assert (got == expected).all()
    assert overlapping([a, b]) == (both == 2).any()


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 50))
def test_split_keeps_row_major_order_and_the_limit(shape: tuple[int, ...], max_numel: int) -> None:
    order = np.arange(prod(shape)).reshape(shape)
    parts = split((0,) * len(shape), shape, max_numel)
    assert all(prod(part[1]) <= max_numel for part in parts)
    assert np.concatenate([order[window(*part)].ravel() for part in parts]).tolist() == list(range(prod(shape)))


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, dp=2), Layout(dp=8), Layout(tp=4, dp=3)], ids=str)
def test_every_element_of_a_model_is_written_once(layout: Layout) -> None:
    made = plan([holding({"actor": component(layout, rank)[0]}) for rank in range(layout.world_size)])
    for name in made.specs:
        assert (counts(made, name) == 1).all(), name


def test_what_no_rank_holds_is_named() -> None:
    held = Holding({"x": TensorSpec((4, 4), "float32")}, {"x": (((0, 0), (4, 3)),)})
    with pytest.raises(AssertionError, match="x: 4 of 16 elements are held by no rank"):
        plan([held])


def test_ranks_that_disagree_on_a_tensor_are_named() -> None:
    one, two = (Holding({"x": TensorSpec((n,), "float32")}, {"x": (((0,), (n,)),)}) for n in (3, 4))
    with pytest.raises(AssertionError, match=r"x is .*\(4,\).* on rank 1, but .*\(3,\)"):
        plan([one, two])


def test_512_ranks_share_a_70b_model_evenly() -> None:
    held = holdings()
    made = plan(held)
    assert made == plan(held), "the same on every rank"
    total = 70_553_706_496 * (2 + 12)
    loads = np.array([sum(extent.nbytes for extent in extents) for extents in made.ranks])
    assert loads.sum() == total
    stages = loads.reshape(8, 64)  # a pipeline stage can only be written by its own 64 ranks
    assert (stages.max(axis=1) / stages.mean(axis=1)).max() < 1.05
    assert max(Counter(extent.name for extent in extents).most_common(1)[0][1] for extents in made.ranks) < 100


def test_shard_files_of_nodes_and_their_directories() -> None:
    hosts = ["a", "a", "b", "b", "b"]
    assert [name for name, _ in shard_files(hosts, 0)] == [f"shards/rank_0000{rank}.h5" for rank in range(5)]
    assert [ranks for _, ranks in shard_files(hosts, 1)] == [(0, 1), (0, 1), (2, 3, 4), (2, 3, 4), (2, 3, 4)]
    assert [ranks for _, ranks in shard_files(hosts, 2)] == [(0,), (1,), (2, 3), (2, 3), (4,)]
    directories = Counter(name.rpartition("/")[0] for name, _ in shard_files([f"n{r // 8}" for r in range(1024)], 0))
    assert set(directories.values()) == {256}


@pytest.mark.parametrize(
    ("steps", "policy", "gone"),
    [
        ([1, 2, 3], (2, 0, None), [1]),
        ([10, 20, 30, 40], (1, 20, None), [10, 30]),
        ([1, 2, 3, 4], (1, 0, "reward"), [1, 3]),
        ([1, 2, 3, 4], (1, 0, "unknown"), [1, 2, 3]),
        ([5], (2, 0, None), []),
    ],
)
def test_the_policy_of_pruning(steps: list[int], policy: tuple[int, int, str | None], gone: list[int]) -> None:
    metrics = {step: {"reward": 1.0 if step == 2 else 0.5} for step in steps}
    assert to_prune(metrics, *policy) == gone


def test_a_metric_that_is_nan_is_never_the_best() -> None:
    metrics = {step: {"reward": value} for step, value in enumerate([float("nan"), 0.5, 0.9, 0.1, float("nan"), 0.2])}
    assert to_prune(metrics, 1, 0, "reward") == [0, 1, 3, 4]
