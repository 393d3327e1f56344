"""Properties of boxes, flat ranges and coverage, against brute force over single elements."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_rl.errors import UserError
from hpc_rl.tensors.coverage import check_local_coverage, check_same_tensors, covered_numel
from hpc_rl.tensors.shardmap import (
    Piece,
    ShardMap,
    TensorSpec,
    crop,
    flat_range,
    flat_ranges,
    intersect,
    merged,
    prefixed,
    row_piece,
    view,
    whole_piece,
)

QUICK = settings(max_examples=150, deadline=None)


@st.composite
def pieces(draw: st.DrawFn, dims: int | None = None, shape: tuple[int, ...] | None = None) -> Piece:
    """A box of a small tensor, lying in a padded local buffer with the dims in any order of strides."""
    whole = shape or draw(st.lists(st.integers(1, 6), min_size=dims or 1, max_size=dims or 3).map(tuple))
    start = tuple(draw(st.integers(0, n - 1)) for n in whole)
    size = tuple(draw(st.integers(1, n - s)) for n, s in zip(whole, start, strict=True))
    strides, step = [0] * len(size), 1
    for dim in draw(st.permutations(range(len(size)))):
        strides[dim] = step
        step *= size[dim] + draw(st.integers(0, 2))
    return Piece("t", start, size, "local", draw(st.integers(0, 5)), tuple(strides))


def elements(piece: Piece) -> dict[tuple[int, ...], int]:
    """Canonical index -> place in the local tensor."""
    return {
        tuple(s + i for s, i in zip(piece.start, index, strict=True)): piece.offset
        + sum(i * k for i, k in zip(index, piece.strides, strict=True))
        for index in np.ndindex(*piece.shape)
    }


@st.composite
def two_pieces(draw: st.DrawFn) -> tuple[Piece, Piece]:
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    return draw(pieces(shape=shape)), draw(pieces(shape=shape))


@QUICK
@given(two_pieces())
def test_intersect_is_the_common_elements_on_both_sides(pair: tuple[Piece, Piece]) -> None:
    a, b = (elements(p) for p in pair)
    both = intersect(*pair)
    common = set(a) & set(b)
    if both is None:
        assert not common
    else:
        assert elements(both[0]) == {k: a[k] for k in common}
        assert elements(both[1]) == {k: b[k] for k in common}


@QUICK
@given(pieces(), st.data())
def test_flat_range_is_the_elements_of_the_slice(piece: Piece, data: st.DataObject) -> None:
    end = max(elements(piece).values()) + 3
    low = data.draw(st.integers(0, end))
    high = data.draw(st.integers(low, end))
    base = data.draw(st.integers(0, 7))
    got: dict[tuple[int, ...], int] = {}
    parts = flat_range(piece, low, high, "flat", base)
    for part in parts:
        assert part.local == "flat"
        assert not set(elements(part)) & set(got), "an element came twice"
        got |= elements(part)
    assert got == {k: at - low + base for k, at in elements(piece).items() if low <= at < high}


@QUICK
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple), st.data())
def test_flat_range_of_a_dense_tensor_is_few_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    low = data.draw(st.integers(0, numel))
    high = data.draw(st.integers(low, numel))
    assert len(flat_range(whole_piece("t", shape, "w"), low, high, "flat", 0)) <= 2 * len(shape) - 1


def test_flat_range_of_a_scalar_and_outside() -> None:
    scalar = Piece("s", (), (), "w", 4, ())
    assert flat_range(scalar, 3, 6, "flat", 10) == [Piece("s", (), (), "flat", 11, ())]
    assert flat_range(scalar, 5, 6, "flat", 10) == []
    assert intersect(scalar, scalar) == (scalar, scalar)
    assert intersect(scalar, Piece("other", (), (), "w", 4, ())) is None


@QUICK
@given(pieces())
def test_is_contiguous_means_one_run_in_order(piece: Piece) -> None:
    places = list(elements(piece).values())
    assert piece.is_contiguous == (places == list(range(places[0], places[0] + len(places))))


@QUICK
@given(pieces())
def test_view_reads_and_writes_the_named_elements(piece: Piece) -> None:
    local = torch.arange(max(elements(piece).values()) + 2)
    expected = {k: float(v) for k, v in elements(piece).items()}
    for index in np.ndindex(*piece.shape):
        at = tuple(s + i for s, i in zip(piece.start, index, strict=True))
        assert view(piece, local)[index] == expected[at]
    view(piece, local).fill_(-1)
    assert int((local == -1).sum()) == piece.numel


@QUICK
@given(
    st.lists(st.tuples(pieces(dims=2, shape=(6, 6)).map(lambda p: (p.start, p.shape))).map(lambda x: x[0]), max_size=5)
)
def test_covered_numel_counts_the_union(boxes: list) -> None:
    grid = np.zeros((6, 6), dtype=bool)
    for (r, c), (h, w) in boxes:
        grid[r : r + h, c : c + w] = True
    assert covered_numel(boxes) == grid.sum()


@QUICK
@given(st.lists(pieces(shape=(5, 4)), min_size=1, max_size=4), st.integers(0, 3))
def test_local_coverage_finds_holes_and_double_writes(some: list[Piece], padding: int) -> None:
    numel = 60
    count = np.zeros(200, dtype=int)
    for p in some:
        for at in elements(p).values():
            count[at] += 1
    fits = count[numel:].sum() == 0 and count.max() == 1 and (count[:numel] == 0).sum() == padding
    shard_map = ShardMap({"t": TensorSpec((5, 4), "float32")}, tuple(some), {"local": padding})
    if fits:
        check_local_coverage(shard_map, {"local": numel})
    else:
        with pytest.raises(UserError, match="local"):
            check_local_coverage(shard_map, {"local": numel})


def test_local_coverage_accepts_a_full_tensor_and_names_what_is_wrong() -> None:
    gate, up = row_piece("gate", (4, 3), 0, 2, "fc1"), row_piece("up", (4, 3), 0, 2, "fc1", 2)
    specs = {"gate": TensorSpec((4, 3), "float32"), "up": TensorSpec((4, 3), "float32")}
    check_local_coverage(ShardMap(specs, (gate, up)), {"fc1": 12})
    check_local_coverage(ShardMap(specs, (gate,), {"fc1": 6}), {"fc1": 12})
    with pytest.raises(UserError, match=r"fc1 has 12 elements, of which gate fill 6 .*: 6 are left uncovered"):
        check_local_coverage(ShardMap(specs, (gate,)), {"fc1": 12})
    with pytest.raises(UserError, match="fc1 is written more than once in places by gate, up"):
        check_local_coverage(ShardMap(specs, (gate, row_piece("up", (4, 3), 0, 2, "fc1", 1))), {"fc1": 12})
    with pytest.raises(UserError, match="bias has 4 elements, of which no canonical tensor fill 0"):
        check_local_coverage(ShardMap(specs, (gate, up)), {"fc1": 12, "bias": 4})
    with pytest.raises(UserError, match="speaks of fc1"):
        check_local_coverage(ShardMap(specs, (gate, up)), {})
    with pytest.raises(UserError, match="fc1 has 9 elements, too few"):
        check_local_coverage(ShardMap(specs, (gate, up)), {"fc1": 9})


def test_maps_are_prefixed_merged_and_compared() -> None:
    first = ShardMap({"a": TensorSpec((4,), "float32")}, (whole_piece("a", (4,), "x"),), {"x": 1})
    both = merged([prefixed(first, "actor/", "A."), prefixed(first, "critic/", "C.")])
    assert set(both.specs) == {"actor/a", "critic/a"} and both.padding == {"A.x": 1, "C.x": 1}
    assert [(p.name, p.local) for p in both.pieces] == [("actor/a", "A.x"), ("critic/a", "C.x")]
    other = ShardMap({"a": TensorSpec((5,), "float32")}, (whole_piece("a", (5,), "x"),))
    with pytest.raises(UserError, match=r"a is .*4.* in one shard map and .*5"):
        merged([first, other])
    with pytest.raises(UserError, match=r"a is \[4\] on one rank and \[5\] on another, in the source"):
        check_same_tensors([first, other], "the source")


def test_flat_ranges_of_an_optimizer_hold_every_element_once() -> None:
    """Three ranks share a buffer of two parameters laid end to end, as megatron-core's distributed optimizer does."""
    specs = {"w": TensorSpec((5, 7), "bfloat16"), "b": TensorSpec((6,), "bfloat16")}
    whole = ShardMap(specs, (whole_piece("w", (5, 7), "w"), whole_piece("b", (6,), "b")))
    values = {"w": torch.arange(35.0).view(5, 7), "b": torch.arange(6.0) + 100}
    buffer = torch.cat([values["w"].view(-1), values["b"]])
    seen = {name: torch.full(v.shape, -1.0) for name, v in values.items()}
    for low, high in ((0, 13), (13, 37), (37, 41)):
        ranges = {}
        for name, begin, size in (("w", 0, 35), ("b", 35, 6)):
            lo, hi = max(low, begin), min(high, begin + size)
            if lo < hi:
                ranges[name] = (lo - begin, hi - begin, "flat", lo - low)
        shard = flat_ranges(whole, ranges, "exp_avg/", "float32")
        assert all(spec.dtype == "float32" for spec in shard.specs.values())
        for p in shard.pieces:
            box = tuple(slice(s, s + n) for s, n in zip(p.start, p.shape, strict=True))
            target = seen[p.name.removeprefix("exp_avg/")][box]
            assert bool((target == -1).all())
            target.copy_(view(p, buffer[low:high].clone()))
    for name, v in values.items():
        assert torch.equal(seen[name], v)


def test_crop_of_the_whole_is_the_piece() -> None:
    piece = row_piece("a", (6, 4), 2, 5, "x", 1)
    assert crop(piece, piece.start, piece.shape) == piece
