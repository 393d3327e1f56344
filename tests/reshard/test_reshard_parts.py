"""The parts of the executor: messages, sparse deltas, digests, the plan cache, the ranks' agreement."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from hpc_rl.errors import RunError, UserError
from hpc_rl.reshard import agreement as agreement_module
from hpc_rl.reshard.agreement import Agreement
from hpc_rl.reshard.cache import PlanCache, map_digest, plan_key
from hpc_rl.reshard.digest import differing, digests
from hpc_rl.reshard.incremental import DENSE, Snapshot, changes, decode, delta_bytes, encode, masked
from hpc_rl.reshard.messages import aligned, cut_for, local_copies, rounds_of, share_bytes, split, total_bytes
from hpc_rl.reshard.plan import PLANNER_VERSION, Link, make_plan
from hpc_rl.reshard.slots import make_rounds
from hpc_rl.tensors.shardmap import Piece, ShardMap, TensorSpec, view, whole_piece
from tests.reshard.layouts import TRAINING, maps_of
from tests.tensors.models import empty_locals, spec_of


@pytest.mark.parametrize("share", [1024, 4096, 1 << 20])
@pytest.mark.parametrize(("device", "delta"), [("cpu", False), ("cuda", False), ("cpu", True)])
def test_messages_hold_every_element_once_within_the_share(share: int, device: str, delta: bool) -> None:
    cut = cut_for(device, delta, share)
    plan = make_plan(*maps_of(spec_of("qwen3_moe"), TRAINING["TP2EP2ETP1"], 4, ("float32", "bfloat16")))
    for peer, links in plan.of(0).receives:
        rounds = rounds_of(links, cut)
        assert all(total_bytes(r) <= share for r in rounds)
        parts = [x for r in rounds for m in r for x in m.links]
        assert sum(x.nbytes for x in parts) == sum(x.nbytes for x in links)
        assert sum(m.nbytes for r in rounds for m in r) == sum(x.nbytes for x in links)
        # The other end cuts the same way: it sees the same links from its own part of the plan.
        theirs = dict(plan.of(peer).sends)[0]
        assert rounds_of(theirs, cut) == rounds


def test_a_message_has_one_dtype() -> None:
    specs = {f"t{i}": TensorSpec((6,), "float32" if i % 2 else "bfloat16") for i in range(6)}
    full = ShardMap(specs, tuple(whole_piece(name, (6,), name) for name in specs))
    plan = make_plan([full, ShardMap({}, ())], [ShardMap({}, ()), full])
    (_, links), (messages,) = plan.of(1).receives[0], rounds_of(plan.of(1).receives[0][1], cut_for("cuda", False, 1024))
    assert len(links) == 6 and [len(m.links) for m in messages] == [3, 3]
    assert all(len({x.dtypes for x in m.links}) == 1 for m in messages)


@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 16, 1 << 20])
@pytest.mark.parametrize(("device", "delta"), [("cpu", False), ("cuda", False), ("cpu", True)])
def test_a_round_is_staged_within_one_bucket_on_every_rank(bucket_bytes: int, device: str, delta: bool) -> None:
    for name, gen_tp in (("TP2PP2DP2", 4), ("TP8", 2), ("PP4", 1)):
        sources, targets = maps_of(spec_of("qwen2"), TRAINING[name], gen_tp, ("float32", "bfloat16"))
        plan = make_plan(sources, targets)
        for rank in range(8):
            part = plan.of(rank)
            cut = cut_for(device, delta, share_bytes(bucket_bytes, part.max_peers))
            held, wanted = empty_locals(sources[rank]), empty_locals(targets[rank], torch.bfloat16)
            rounds = make_rounds(part.sends, part.receives, cut, held, wanted)
            assert all(r.staging_bytes <= bucket_bytes for r in rounds)
            assert sum(s.message.nbytes for r in rounds for s in r.receives) == part.lower_bound_bytes


def test_split_cuts_along_several_dims_and_loses_nothing() -> None:
    piece = Piece("t", (0, 4, 0), (1, 3, 10), "x", 7, (1000, 100, 2))
    link = Link(piece, piece, make_plan(*maps_of(spec_of("llama"), TRAINING["TP1"], 1)).local[0][0].dtypes)
    for limit in (4, 12, 40, 80, 119, 120):
        parts = split(link, limit)
        assert max(p.nbytes for p in parts) <= limit
        seen = torch.zeros(3, 10)
        local = torch.arange(2000)
        for p in parts:
            (_, r, c), (_, h, w) = p.source.start, p.source.shape
            seen[r - 4 : r - 4 + h, c : c + w] += 1
            assert torch.equal(view(p.source, local), view(piece, local)[:, r - 4 : r - 4 + h, c : c + w])
        assert bool((seen == 1).all())


def test_too_small_a_bucket_is_refused() -> None:
    assert share_bytes(1 << 20, 4) == 1 << 18
    with pytest.raises(UserError, match=r"bucket_bytes = 4096 is too small for 7 partners.*set it to 7168 or more"):
        share_bytes(4096, 7)


def test_local_copies_are_merged_where_runs_follow_each_other() -> None:
    plan = make_plan(*maps_of(spec_of("llama"), TRAINING["TP1"], 1))
    copies = local_copies(plan.local[0])
    fused = [c for c in copies if "linear_fc1" in c.source]
    assert len(fused) == 4, "gate and up lie alike in Megatron and vLLM: one copy a layer"
    assert all(len(c.shape) == 1 for c in copies)
    assert sum(torch.Size(c.shape).numel() for c in copies) == sum(x.source.numel for x in plan.local[0])
    strided = local_copies(make_plan(*maps_of(spec_of("llama"), TRAINING["TP4"], 2)).local[0])
    assert any(len(c.shape) == 2 for c in strided)


DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 200_000), st.floats(0, 0.3), st.integers(0, 2**31))
def test_a_delta_restores_the_bits_exactly(dtype: torch.dtype, numel: int, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    new = old.clone()
    touched = torch.rand(numel, generator=generator) < share
    new[touched] = torch.randn(int(touched.sum()), generator=generator, dtype=torch.float64).to(dtype)
    new[: numel // 7 : 97] = float("nan")
    new[1::1009] = -0.0
    index = changes(new, old)
    count, delta = encode(new, index)
    if count == DENSE:
        assert delta is None and 2 * delta_bytes(index.numel(), numel, new.element_size()) > new.nbytes
        return
    assert count == index.numel()
    got = old.clone()
    if count:
        assert delta is not None and 2 * delta.numel() <= new.nbytes
        decode(delta, count, got)
    assert torch.equal(got.view(torch.uint8), new.view(torch.uint8))


def test_a_percent_of_bf16_changes_costs_two_percent() -> None:
    old = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    new = old.clone()
    new[torch.randperm(1_000_000)[:10_000]] += 1
    _, delta = encode(new, changes(new, old))
    assert delta is not None and delta.numel() < 0.0205 * new.nbytes


def test_snapshot_and_masks_pack_like_the_message() -> None:
    pieces = [Piece("a", (0, 0), (2, 3), "x", 1, (4, 1)), Piece("b", (0,), (4,), "y", 0, (1,))]
    sources = {"x": torch.randn(12), "y": torch.randn(4)}
    snapshot = Snapshot("gpu")
    snapshot.take(sources, {"x": torch.bfloat16, "y": torch.bfloat16})
    expected = torch.cat([view(p, sources[p.local]).reshape(-1) for p in pieces]).to(torch.bfloat16)
    assert torch.equal(snapshot.flat(pieces, torch.device("cpu")), expected) and snapshot.nbytes == 32
    masks = {"x": torch.zeros(12, dtype=torch.bool), "y": torch.ones(4, dtype=torch.bool)}
    masks["x"][6] = True
    index = masked(masks, pieces)
    assert index is not None and index.tolist() == [4, 6, 7, 8, 9]
    assert masked({"x": masks["x"]}, pieces) is None


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 3000), st.data())
def test_a_digest_sees_any_one_changed_element(dtype: torch.dtype, numel: int, data: st.DataObject) -> None:
    value = torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=torch.float64).to(dtype)
    other = value.clone()
    at, bit = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    raw = other.view(torch.uint8)
    raw[at * dtype.itemsize + bit // 8] ^= 1 << (bit % 8)
    assert not torch.equal(digests([value], dtype), digests([other], dtype))
    assert differing([(value, value.clone(), dtype), (value, other, dtype)]) == [1] and differing([]) == []


def test_digests_speak_of_values_not_of_memory() -> None:
    value = torch.randn(700, 900)
    wide = torch.zeros(900, 1000)
    wide[:, :700] = value.T
    assert torch.equal(digests([value], torch.float32), digests([wide[:, :700].T], torch.float32))
    assert torch.equal(digests([value], torch.bfloat16), digests([value.to(torch.bfloat16)], torch.bfloat16))
    shifted = torch.cat([value[1:], value[:1]])
    assert not torch.equal(digests([value], torch.float32), digests([shifted], torch.float32))
    signs = value.clone().view(-1)
    signs[1:600_000:2] *= -1  # top bits of many words: what a plain weighted sum would miss
    assert not torch.equal(digests([value], torch.float32), digests([signs.view(700, 900)], torch.float32))
    for numel in (1000, 1 << 20):  # within a chunk of the digest, and two chunks changing places
        halves = torch.randn(2, numel // 2)
        assert not torch.equal(digests([halves], torch.float32), digests([halves.flip(0)], torch.float32))


def test_cache_gives_back_the_plan_from_memory_and_disk(tmp_path: Path) -> None:
    sources, targets = maps_of(spec_of("qwen3_moe"), TRAINING["TP2PP2DP2"], 2)
    plan = make_plan(sources, targets).of(5)
    key = plan_key([map_digest(m) for m in (*sources, *targets)], 8)
    PlanCache(tmp_path).put(key, plan)
    cache = PlanCache(tmp_path)
    again = cache.get(key, 5)
    assert again == plan and cache.get(key, 5) is again
    assert cache.get(key, 4) is None and cache.get("0" * 32, 5) is None
    file = tmp_path / key / "rank_00005.json"
    whole = file.read_bytes()
    rng = random.Random(0)
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged if rng.random() < 0.8 else whole[: rng.randrange(len(whole))])
        assert PlanCache(tmp_path).get(key, 5) is None, "a damaged file is planned anew"
    # A box less, in a file that is valid JSON.
    values = json.loads(whole.partition(b"\n")[2])
    values["local"].pop()
    file.write_bytes(whole.partition(b"\n")[0] + b"\n" + json.dumps(values, separators=(",", ":")).encode())
    assert PlanCache(tmp_path).get(key, 5) is None


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "plans").write_text("a file")
    cache = PlanCache(tmp_path / "plans")
    plan = make_plan(*maps_of(spec_of("llama"), TRAINING["TP2"], 2)).of(0)
    cache.put("0" * 32, plan)
    assert "cannot be kept" in caplog.text
    assert cache.get("0" * 32, 0) is plan


def test_plan_keys_tell_layouts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("llama")
    keys = {
        plan_key([map_digest(m) for maps in maps_of(spec, TRAINING[name], tp) for m in maps], 8)
        for name in ("TP1", "TP2", "PP2", "TP2PP2", "TP2DP2")
        for tp in (1, 2)
    }
    assert len(keys) == 10 - 2, "TP2 and TP2DP2 hold the same shards"
    other = maps_of(spec, TRAINING["TP1"], 1, ("float32", "bfloat16"))
    digests = [map_digest(m) for m in (*other[0], *other[1])]
    keys = {plan_key(digests, 8), plan_key(digests, 4), plan_key(digests, 8, allow_unused=True)}
    monkeypatch.setattr("hpc_rl.reshard.cache.PLANNER_VERSION", PLANNER_VERSION + 1)
    assert len(keys | {plan_key(digests, 8)}) == 4
    assert map_digest(other[1][0]) != map_digest(maps_of(spec, TRAINING["TP1"], 1)[1][0])


def _agreement(store: HashStore, rank: int, num_ranks: int) -> Agreement:
    agreement_module._made.clear()  # the ranks of this test share a process, and so its count
    return Agreement(store, "test", rank, num_ranks, timeout_s=1.0)


def meet(values: list[str], late: tuple[int, ...] = (), failing: dict[int, str] | None = None) -> list[str]:
    """Each rank's outcome of two meetings: "" or the error's message."""
    store = HashStore()
    start = threading.Barrier(len(values))
    agreements = [_agreement(store, r, len(values)) for r in range(len(values))]

    def rank(r: int) -> str:
        agreement = agreements[r]
        start.wait()
        try:
            agreement.meet("same", "thing")
            if failing and r in failing:
                agreement.fail_next(failing[r])
            if r not in late:
                agreement.meet(values[r], "version")
        except RunError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(rank, range(len(values))))


def test_ranks_meet() -> None:
    assert meet(["7"] * 6) == [""] * 6
    Agreement(None, "alone", 0, 1, 1.0).meet("7", "version")


def test_a_stale_version_fails_every_rank() -> None:
    outcome = meet(["7", "7", "6", "7"])
    assert len(set(outcome)) == 1 and "version" in outcome[0] and "6" in outcome[0] and "7" in outcome[0]


def test_a_late_rank_is_named_by_all_others() -> None:
    outcome = meet(["7"] * 4, late=(2,))
    assert outcome.pop(2) == "" and set(outcome) == {"ranks [2] did not finish within 1 s"}


def test_the_first_error_is_everyones() -> None:
    outcome = meet(["7"] * 4, failing={1: "rank 1: model.norm.weight is broken"})
    assert set(outcome) == {"rank 1: model.norm.weight is broken"}


def test_meetings_leave_little_behind() -> None:
    store = HashStore()
    agreements = [_agreement(store, r, 2) for r in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for version in range(20):
            list(pool.map(lambda a, v=version: a.meet(str(v), "version"), agreements))
    assert store.num_keys() < 16


def test_a_second_meeting_point_of_a_name_is_another() -> None:
    store = HashStore()
    first, second = _agreement(store, 0, 2), Agreement(store, "test", 0, 2, 0.3)
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(first.meet, "1", "version")
        _agreement(store, 1, 2).meet("1", "version")
        met.result()
    with pytest.raises(RunError, match=r"ranks \[1\] did not finish"):
        second.meet("1", "version")


def test_alignment() -> None:
    assert [aligned(n) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
