"""The Resharder over real gloo ranks: every layout pair, deltas, verification, plans found again, export."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_rl.config import ReshardConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.parallel.layout import Layout
from hpc_rl.reshard import connect as connect_module
from hpc_rl.reshard.cache import PlanCache
from hpc_rl.reshard.connect import connect
from hpc_rl.reshard.export import export_from_ranks
from hpc_rl.tensors.hf import load_into, open_hf
from tests.reshard.job import Job, failures
from tests.reshard.layouts import TRAINING, pairs
from tests.reshard.ranks import run_ranks
from tests.tensors.models import CONFIGS, empty_locals, fill, random_tensors, spec_of


def every_pair(rank: int) -> list[tuple[int, int]]:
    out = []
    for kind, name, gen_tp in pairs():
        if kind != ("qwen3_moe" if TRAINING[name].ep > 1 else "qwen2"):
            continue  # the other models go through the same plans in one process
        job = Job(rank, spec_of(kind), TRAINING[name], gen_tp)
        resharder = job.resharder(verify="always", name=f"{kind} {name} {gen_tp}")
        metrics = resharder.sync(1)
        job.check()
        assert resharder.version == 1
        out.append((metrics["bytes_received"], metrics["bytes_lower_bound"]))
    return out


def test_every_pair_over_gloo_is_bitwise_at_the_lower_bound(tmp_path: Path) -> None:
    results = run_ranks(8, tmp_path, every_pair)
    assert failures(results) == [""] * 8
    assert all(received == bound for rank in results for received, bound in rank)
    assert sum(received for rank in results for received, _ in rank) > 0


def deltas(rank: int, snapshot: str, dtypes: tuple[str, str]) -> list[dict[str, Any]]:
    spec = spec_of("qwen2", hidden_size=64, intermediate_size=128, vocab_size=1000)
    job = Job(rank, spec, TRAINING["TP2PP2DP2"], 4, dtypes)
    job.whole = {k: v.to(torch.bfloat16).float() for k, v in job.whole.items()}  # nothing is lost on the wire
    fill(job.source_map, job.source, job.whole)
    resharder = job.resharder(verify="always", snapshot=snapshot, bucket_bytes=1 << 18)
    out = [resharder.sync(0)]
    job.check()
    for version, share in enumerate((0.01, 0.0, 0.3, 0.02), start=1):
        job.change(share, seed=version)
        job.whole = {k: v.to(torch.bfloat16).float() for k, v in job.whole.items()}
        fill(job.source_map, job.source, job.whole)
        out.append(resharder.sync(version))
        job.check()
    for target in job.target.values():
        target.fill_(3)  # sleep level 2 loses the weights
    resharder.invalidate()
    out.append(resharder.sync(9))
    expected = {k: torch.full_like(t, 3) for k, t in job.target.items()}
    fill(job.target_map, expected, job.whole)
    assert all(torch.equal(expected[k], t) for k, t in job.target.items())
    return out


@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")], ids=str
)
def test_only_changes_travel(dtypes: tuple[str, str], tmp_path: Path) -> None:
    results = run_ranks(8, tmp_path, deltas, "gpu" if dtypes[0] == "bfloat16" else "host", dtypes)
    assert failures(results) == [""] * 8
    full, percent, nothing, third, two_percent, again = (
        sum(metrics[i]["bytes_received"] for metrics in results) for i in range(6)
    )
    assert full == sum(metrics[0]["bytes_lower_bound"] for metrics in results) == again
    assert 0 < percent <= 0.06 * full and percent < two_percent <= 0.1 * full
    assert nothing == 0
    assert third == full, "a delta of 30% is no smaller than half: the dense message goes"
    assert sum(m[1]["messages_sparse"] for m in results) > 0 and sum(m[2]["messages_skipped"] for m in results) > 0


def masked_and_frozen(rank: int) -> list[dict[str, Any]]:
    job = Job(rank, spec_of("qwen2"), TRAINING["PP4"], 1)
    trained = tuple(n for n in job.spec.tensors() if ".mlp." in n)
    frozen = [n for n in job.spec.tensors() if n not in trained]
    resharder = job.resharder(verify="always", frozen=frozen)
    out = [resharder.sync(0)]
    before = {k: t.clone() for k, t in job.source.items()}
    job.change(0.02, only=trained)
    out.append(resharder.sync(1))
    job.check()
    before = {k: t.clone() for k, t in job.source.items()}
    job.change(0.01, only=trained, seed=5)
    masks = {k: t.view(torch.int32) != before[k].view(torch.int32) for k, t in job.source.items()}
    out.append(resharder.sync(2, changed=masks))
    job.check()
    job.change(0.01, only=("model.layers.0.mlp.up_proj.weight",), seed=6)
    fc1 = "decoder.layers.0.mlp.linear_fc1.weight"
    out.append(resharder.sync(3, changed={k: torch.zeros_like(m) for k, m in masks.items() if k != fc1}))
    job.check()
    return out


def test_frozen_tensors_stay_and_masks_replace_the_snapshot(tmp_path: Path) -> None:
    results = run_ranks(8, tmp_path, masked_and_frozen)
    assert failures(results) == [""] * 8
    full, thawed, masked, one = (sum(m[i]["bytes_received"] for m in results) for i in range(4))
    spec = spec_of("qwen2")
    share = sum(torch.Size(s).numel() for n, s in spec.tensors().items() if ".mlp." in n) / spec.num_params
    assert abs(thawed / full - share) < 0.02
    assert 0 < masked <= 0.06 * thawed
    assert one == thawed * 2 // 3, "fc1 (two thirds of an MLP) has no mask and travels whole, the rest not at all"


def connected(rank: int, folder: str) -> list[float]:
    job = Job(rank, spec_of("qwen3_moe"), TRAINING["TP2EP2ETP1"], 4)
    times = []
    cache = PlanCache(folder)
    for number in range(2):
        begin = time.perf_counter()
        held, wanted = (job.source_map, job.source), (job.target_map, job.target)
        resharder = connect(held, wanted, config=ReshardConfig(verify="always"), cache=cache, name=f"c{number}")
        times.append(time.perf_counter() - begin)
        connect_module.make_plan = None  # the second time it is not to be planned
        resharder.sync(number)
        job.check()
    assert PlanCache(folder).get(next(iter(cache._plans))[0], rank) == resharder.plan
    begin = time.perf_counter()
    cache.get(next(iter(cache._plans))[0], rank)
    return [*times, time.perf_counter() - begin]


def test_connect_plans_once_and_finds_the_plan_again(tmp_path: Path) -> None:
    results = run_ranks(8, tmp_path, connected, str(tmp_path / "plans"))
    assert failures(results) == [""] * 8
    assert len(list((tmp_path / "plans").glob("*/rank_*.json"))) == 8
    assert all(times[2] < 1e-3 for times in results), "a cached plan costs under a millisecond"


def exported(rank: int, folder: Path) -> None:
    job = Job(rank, spec_of("qwen3_moe"), TRAINING["TP2EP2ETP1"], 1)
    config = CONFIGS["qwen3_moe"]
    export_from_ranks(
        folder / "hf", job.spec, (job.source_map, job.source), config, "float32", max_file_bytes=30_000, timeout_s=20
    )
    source = open_hf(folder / "hf")
    again = empty_locals(job.source_map)
    load_into(job.source_map, again, source)
    assert all(torch.equal(t.nan_to_num(0.0), again[k]) for k, t in job.source.items())
    dist.barrier()
    with pytest.raises(UserError, match="exists: choose another"):
        export_from_ranks(folder / "hf", job.spec, (job.source_map, job.source), config, "float32")


def test_ranks_export_together_and_load_back_bitwise(tmp_path: Path) -> None:
    assert failures(run_ranks(8, tmp_path, exported, tmp_path)) == [""] * 8
    source = open_hf(tmp_path / "hf")
    whole = random_tensors(source.spec())
    for name, value in whole.items():
        assert torch.equal(source.read(name, (0,) * value.dim(), tuple(value.shape)), value)


def test_one_process_alone_copies_and_casts() -> None:
    job = Job(0, spec_of("qwen2"), Layout(1), 1, ("float32", "bfloat16"))
    resharder = connect(
        (job.source_map, job.source), (job.target_map, job.target), config=ReshardConfig(verify="always")
    )
    metrics = resharder.sync(3)
    job.check()
    assert metrics["bytes_received"] == 0 and metrics["bytes_local"] == 2 * sum(p.numel for p in job.target_map.pieces)
    job.target["model.norm.weight"][7] += 1
    with pytest.raises(RunError, match=r"rank 0: verification: model.norm.weight in model.norm.weight differs"):
        resharder.verify()
    assert resharder.version is None


def test_views_follow_a_swapped_storage() -> None:
    job = Job(0, spec_of("llama"), Layout(1), 1)
    resharder = job.resharder()
    resharder.sync(0)
    job.change(1.0)
    for tensor in (*job.source.values(), *job.target.values()):
        tensor.data = tensor.data.clone()  # off-loaded and brought back elsewhere
    resharder.sync(1)
    job.check()
    resharder.forget_views()
    job.change(1.0, seed=2)
    resharder.sync(2)
    job.check()
