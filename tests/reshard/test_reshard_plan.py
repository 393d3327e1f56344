"""Plans: each byte once, nothing else, from the nearest and least busy holder; and errors that name the tensor."""

import resource
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_rl.errors import UserError
from hpc_rl.parallel.layout import Layout
from hpc_rl.reshard.bounds import Needs, coverage_errors, plan_summary
from hpc_rl.reshard.cells import cells_of
from hpc_rl.reshard.plan import Plan, Route, make_plan
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.megatron_map import megatron_shard_map
from hpc_rl.tensors.shardmap import Piece, ShardMap, TensorSpec, flat_ranges, row_piece, whole_piece
from hpc_rl.tensors.vllm_map import vllm_shard_map
from tests.reshard.layouts import TRAINING, maps_of, pairs, simulate
from tests.tensors.models import empty_locals, fill, local_numels, random_tensors, spec_of

SHAPE = (6, 5)


@st.composite
def boxes(draw: st.DrawFn) -> Piece:
    start = tuple(draw(st.integers(0, n - 1)) for n in SHAPE)
    shape = tuple(draw(st.integers(1, n - s)) for n, s in zip(SHAPE, start, strict=True))
    return Piece("t", start, shape, "local", 0, (shape[1], 1))


def mask(start: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    out = np.zeros(SHAPE, dtype=int)
    out[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))] = 1
    return out


@settings(max_examples=300, deadline=None)
@given(boxes(), st.lists(boxes(), max_size=5))
def test_cells_are_disjoint_and_know_all_their_holders(target: Piece, some: list[Piece]) -> None:
    holders = list(enumerate(some))
    held = sum((mask(p.start, p.shape) for p in some), np.zeros(SHAPE, dtype=int))
    wanted = mask(target.start, target.shape)
    if ((held == 0) & (wanted == 1)).any():
        with pytest.raises(UserError, match="t: the target local needs the box"):
            cells_of(target, holders)
        return
    total = np.zeros(SHAPE, dtype=int)
    for box, who in cells_of(target, holders):
        total += mask(*box)
        for number, piece in holders:
            whole = (mask(piece.start, piece.shape) >= mask(*box)).all()
            assert whole == (number in [n for n, _ in who])
    assert (total == wanted).all()


@settings(max_examples=200, deadline=None)
@given(st.lists(boxes(), max_size=4), st.lists(boxes(), min_size=1, max_size=4))
def test_lower_bound_counts_elements_the_rank_lacks(held: list[Piece], wanted: list[Piece]) -> None:
    specs = {"t": TensorSpec(SHAPE, "float32")}
    has = sum((mask(p.start, p.shape) for p in held), np.zeros(SHAPE, dtype=int)) > 0
    needs = sum((mask(p.start, p.shape) for p in wanted), np.zeros(SHAPE, dtype=int)) > 0
    bound = Needs(ShardMap({"t": TensorSpec(SHAPE, "bfloat16")}, tuple(wanted)), specs)
    assert bound.missing_bytes(ShardMap(specs, tuple(held))) == 2 * (needs & ~has).sum()


@pytest.mark.parametrize(("kind", "name", "gen_tp"), pairs())
def test_every_pair_is_bitwise_and_receives_the_lower_bound(kind: str, name: str, gen_tp: int) -> None:
    spec = spec_of(kind)
    sources, targets = maps_of(spec, TRAINING[name], gen_tp)
    plan = make_plan(sources, targets, node_size=4)
    assert plan.received_bytes() == list(plan.lower_bound_bytes)
    assert coverage_errors(plan, targets) == []
    whole = random_tensors(spec)
    held, got, expected = ([empty_locals(m) for m in maps] for maps in (sources, targets, targets))
    for r in range(8):
        fill(sources[r], held[r], whole)
        fill(targets[r], expected[r], whole)
    simulate(plan, held, got)
    for r in range(8):
        for local in expected[r]:
            assert torch.equal(got[r][local].view(torch.int32), expected[r][local].view(torch.int32)), (r, local)


def test_equal_layouts_move_nothing() -> None:
    spec = spec_of("qwen2")
    for name, gen_tp in (("TP1", 1), ("TP2", 2), ("TP2DP2", 2)):
        plan = make_plan(*maps_of(spec, TRAINING[name], gen_tp))
        assert not plan.routes and sum(plan.lower_bound_bytes) == 0, name
    # Vocabularies of published models, whose padding must not shift the borders.
    for vocab_size, tp in ((128256, 8), (151936, 8), (152064, 8), (49152, 4), (250, 4)):
        plan = make_plan(*maps_of(spec_of("qwen2", vocab_size=vocab_size, num_attention_heads=8, hidden_size=8,
                                          intermediate_size=8, num_key_value_heads=8), Layout(8, tp=tp), tp))  # fmt: skip
        assert not plan.routes, (vocab_size, tp)
    # Four query groups on two ranks: Megatron's fused order differs from vLLM's, but only within each rank.
    plan = make_plan(*maps_of(spec_of("qwen3"), TRAINING["TP2"], 2))
    assert not plan.routes


def test_a_finer_training_cut_sends_only_what_its_generation_shard_lacks() -> None:
    """Micro data-parallel groups: a rank keeps its own part, 1 / train tp, of the 1 / gen tp that it needs."""
    spec = spec_of("llama_tied")
    for train_tp, gen_tp in ((2, 1), (4, 1), (4, 2)):
        sources, targets = maps_of(spec, Layout(8, tp=train_tp), gen_tp)
        plan = make_plan(sources, targets)
        for rank in range(8):
            layers = [p for p in targets[rank].pieces if ".layers." in p.name and len(p.shape) == 2]
            kept = sum(link.nbytes for link in plan.local[rank] if ".layers." in link.name and len(link.source.shape) == 2)
            assert kept == sum(4 * p.numel for p in layers) * gen_tp // train_tp, (train_tp, gen_tp, rank)


def test_flat_ranges_of_a_distributed_optimizer_reach_any_layout() -> None:
    spec = spec_of("qwen3_moe")
    source_layout, target_layout = Layout(4, tp=2), Layout(4, pp=2, ep=2)
    sources = []
    for r in range(4):  # dp 2: each rank keeps an uneven share of its parameters laid end to end
        shard_map = megatron_shard_map(spec, source_layout, r)
        sizes = local_numels(shard_map)
        total, at, ranges = sum(sizes.values()), 0, {}
        low, high = ((0, total // 3 + 1), (total // 3 + 1, total))[source_layout.coords(r).dp]
        for local, numel in sizes.items():
            lo, hi = max(low, at), min(high, at + numel)
            if lo < hi:
                ranges[local] = (lo - at, hi - at, "flat", lo - low)
            at += numel
        sources.append(flat_ranges(shard_map, ranges, "", "float32"))
    targets = [megatron_shard_map(spec, target_layout, r, dtype="float32") for r in range(4)]
    plan = make_plan(sources, targets)
    assert plan.received_bytes() == list(plan.lower_bound_bytes) and coverage_errors(plan, targets) == []
    whole = random_tensors(spec)
    size = {"flat": 1 + max(p.offset + p.numel for m in sources for p in m.pieces)}
    held = [{k: torch.full((n,), float("nan")) for k, n in size.items()} for _ in range(4)]
    got, expected = [empty_locals(m) for m in targets], [empty_locals(m) for m in targets]
    for r in range(4):
        fill(sources[r], held[r], whole)
        fill(targets[r], expected[r], whole)
    simulate(plan, held, got)
    for r in range(4):
        assert all(torch.equal(got[r][k].nan_to_num(9), expected[r][k].nan_to_num(9)) for k in expected[r])


def test_sources_are_near_and_equally_busy() -> None:
    """Two nodes of 4: every rank finds what it lacks on its own node, and no rank sends more than its share."""
    spec = spec_of("llama", hidden_size=512, intermediate_size=1024, vocab_size=2048)
    layout = Layout(8, pp=4)  # rank = dp + 2 * pp: stages lie two to a node
    plan = make_plan(*maps_of(spec, layout, 1), node_size=8)
    one_node = plan_summary(plan)
    assert one_node["bytes_between_nodes"] == 0
    assert one_node["busiest_sender_bytes"] < 1.6 * one_node["mean_sender_bytes"]
    spread = Layout(8, tp=4)  # node 0 holds all four shards, and so does node 1
    plan = make_plan(*maps_of(spec, spread, 1), node_size=4)
    two_nodes = plan_summary(plan)
    assert two_nodes["bytes_between_nodes"] == 0 and two_nodes["bytes_within_nodes"] > 0
    sent = [sum(r.nbytes for r in plan.routes if r.source == rank) for rank in range(8)]
    assert max(sent) < 1.02 * min(sent)


def test_a_single_receiver_draws_on_all_holders() -> None:
    specs = {f"t{i}": TensorSpec((1024, 1024), "bfloat16") for i in range(8)}
    full = ShardMap(specs, tuple(whole_piece(n, (1024, 1024), n) for n in specs))
    nothing = ShardMap({}, ())
    plan = make_plan([full, full, full, full, nothing], [nothing] * 4 + [full], node_size=8)
    assert sorted((r.source, r.nbytes) for r in plan.routes)[::2] == [(i, 2 << 20) for i in range(4)]


def test_a_smaller_dtype_travels() -> None:
    spec = spec_of("llama")
    wide = make_plan(*maps_of(spec, TRAINING["PP4"], 1, ("float32", "float32")))
    for dtypes in (("float32", "bfloat16"), ("bfloat16", "float32")):
        narrow = make_plan(*maps_of(spec, TRAINING["PP4"], 1, dtypes))
        assert narrow.received_bytes() == [n // 2 for n in wide.received_bytes()] == list(narrow.lower_bound_bytes)
        assert {link.dtypes for r in narrow.routes for link in r.links} == {(dtypes[0], "bfloat16", dtypes[1])}


def tiny(rows: int = 4, name: str = "w", low: int = 0, high: int | None = None) -> ShardMap:
    return ShardMap({name: TensorSpec((rows, 2), "float32")}, (row_piece(name, (rows, 2), low, high or rows, "x"),))


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([tiny(name="v")], [tiny()], r"w, of shape \[4, 2\] at the target, has no source"),
        ([tiny(5)], [tiny()], r"w is \[5, 2\] at the source, but \[4, 2\] at the target"),
        (
            [tiny(high=3)],
            [tiny()],
            r"w: the target x needs the box of shape \[4, 2\].* 8 elements the sources hold only 6",
        ),
        ([tiny(4), tiny(5)], [tiny(), tiny()], r"w is \[4, 2\] on one rank and \[5, 2\] on another, in the source"),
        ([tiny()], [ShardMap({}, ())], r"w, of shape \[4, 2\] at the source, has no target"),
    ],
)
def test_what_cannot_be_planned_is_named(sources: list, targets: list, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(sources, targets)


def test_unused_sources_may_be_allowed() -> None:
    assert make_plan([tiny()], [ShardMap({}, ())], allow_unused=True).routes == ()


def test_coverage_proof_finds_a_missed_a_doubled_and_a_stray_box() -> None:
    sources, targets = maps_of(spec_of("llama"), TRAINING["PP4"], 1)
    plan = make_plan(sources, targets)
    assert coverage_errors(plan, targets) == []
    route = next(r for r in plan.routes if r.target == 3)

    def replaced(links: tuple) -> Plan:
        routes = tuple(Route(r.source, r.target, links, r.nbytes) if r is route else r for r in plan.routes)
        return Plan(plan.num_ranks, plan.node_size, plan.local, routes, plan.lower_bound_bytes)

    name = route.links[0].name
    missed = coverage_errors(replaced(route.links[1:]), targets)
    assert len(missed) == 1 and name in missed[0] and "rank 3" in missed[0] and " 0 elements written" in missed[0]
    doubled = coverage_errors(replaced((*route.links, route.links[0])), targets)
    assert len(doubled) == 1 and name in doubled[0]
    stray = route.links[0]._replace(target=whole_piece("other", (2,), "nowhere"))
    assert "no place for it" in coverage_errors(replaced((*route.links, stray)), targets)[0]


LARGE = {
    "70B": (
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        Layout(512, tp=8, pp=8),
    ),
    "405B": (
        {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
        Layout(1024, tp=8, pp=16),
    ),
}


@pytest.mark.parametrize("size", LARGE)
def test_large_models_are_planned_in_seconds(size: str) -> None:
    changes, layout = LARGE[size]
    values = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, **changes}
    spec = ModelSpec.from_hf_config(values)
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    sources = [megatron_shard_map(spec, layout, r) for r in range(layout.world_size)]
    targets = [vllm_shard_map(spec, 8, r % 8) for r in range(layout.world_size)]
    plan = make_plan(sources, targets)
    assert time.process_time() - begin < 10
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2e9
    assert plan.received_bytes() == list(plan.lower_bound_bytes)
    assert coverage_errors(plan, targets, range(0, layout.world_size, 101)) == []
    total = plan_summary(plan)
    assert total["bytes_total"] + total["bytes_local"] == layout.world_size // 8 * 2 * sum(
        p.numel for r in range(8) for p in targets[r].pieces
    )
    assert total["busiest_sender_bytes"] < 1.2 * total["mean_sender_bytes"]


def test_planning_needs_neither_torch_nor_processes() -> None:
    modules = ["parallel.layout", "tensors.megatron_map", "tensors.vllm_map", "tensors.coverage", "reshard.plan"]
    imports = "; ".join(f"import hpc_rl.{m}" for m in [*modules, "reshard.bounds", "reshard.messages", "reshard.cache"])
    subprocess.run([sys.executable, "-c", f"{imports}; import sys; sys.exit('torch' in sys.modules)"], check=True)
