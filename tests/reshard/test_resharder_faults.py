"""The Resharder when something is wrong: planted faults, killed and failing ranks, what does not fit."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_rl.errors import RunError, UserError
from hpc_rl.reshard import connect as connect_module
from hpc_rl.reshard.connect import connect
from hpc_rl.reshard.plan import Plan, make_plan
from hpc_rl.tensors.shardmap import ShardMap
from tests.reshard.job import Job, failures
from tests.reshard.layouts import TRAINING, maps_of
from tests.reshard.ranks import run_ranks
from tests.tensors.models import empty_locals, spec_of


def planted(rank: int, fault: str) -> None:
    job = Job(rank, spec_of("qwen2"), TRAINING["PP2"], 2)
    resharder = job.resharder(verify="off")
    resharder.sync(1)
    resharder.verify()
    job.check()
    if fault == "wrong element":
        if rank == 5:
            job.target["model.layers.3.mlp.down_proj.weight"][100] += 1e-3
    elif fault == "wrong bias bit":
        if rank == 2:
            job.target["model.layers.0.self_attn.qkv_proj.bias"].view(torch.int32)[0] ^= 1
    elif fault == "missed tensor":
        old = job.target["model.layers.1.self_attn.o_proj.weight"].clone()
        job.change(1.0)
        resharder.sync(2)
        if rank == 6:
            job.target["model.layers.1.self_attn.o_proj.weight"].copy_(old)
    elif fault == "stale weights":
        old_target = {k: t.clone() for k, t in job.target.items()}
        job.change(0.5)
        resharder.sync(2)
        if rank == 3:
            for k, t in job.target.items():
                t.copy_(old_target[k])
    try:
        if fault == "stale version":
            resharder.sync(2 if rank != 4 else 1)
        resharder.verify()
    finally:
        dist.barrier()  # no rank waits for another, and the group still works


@pytest.mark.parametrize(
    ("fault", "where", "what"),
    [
        ("wrong element", "rank 5", "model.layers.3.mlp.down_proj.weight"),
        ("wrong bias bit", "rank 2", "model.layers.0.self_attn.q_proj.bias"),
        ("missed tensor", "rank 6", "model.layers.1.self_attn.o_proj.weight"),
        ("stale weights", "rank 3", "differs from"),
        ("stale version", "rank", "version"),
    ],
)
def test_planted_faults_stop_every_rank_by_name(fault: str, where: str, what: str, tmp_path: Path) -> None:
    messages = failures(run_ranks(8, tmp_path, planted, fault))
    assert len(set(messages)) == 1, "all ranks tell the same"
    assert where in messages[0] and what in messages[0]


def verification_at_each_sync(rank: int, mode: str) -> list[float]:
    job = Job(rank, spec_of("qwen2"), TRAINING["PP2"], 2)
    resharder = job.resharder(verify=mode)
    seconds = [resharder.sync(v)["seconds_verify"] for v in range(3)]
    resharder.invalidate()  # as after sleep level 2: all travels again, and what was proven once is not proven again
    return [*seconds, resharder.sync(3)["seconds_verify"]]


@pytest.mark.parametrize(("mode", "verified"), [("always", (1, 1, 1, 1)), ("first", (1, 0, 0, 0)), ("off", (0, 0, 0, 0))])
def test_verification_runs_when_asked(mode: str, verified: tuple[int, ...], tmp_path: Path) -> None:
    results = run_ranks(8, tmp_path, verification_at_each_sync, mode)
    assert failures(results) == [""] * 8
    assert all(tuple(int(s > 0) for s in seconds) == verified for seconds in results)


class DiesWhenRead(dict):
    """Source tensors of a rank that is killed in the middle of a sync."""

    armed = False

    def values(self):
        if self.armed:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().values()


def killed(rank: int, victim: int, when: str) -> float:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 8000} if when == "middle" else {}
    job = Job(rank, spec_of("qwen2", **sizes), TRAINING["PP4"], 1)
    job.source = DiesWhenRead(job.source)
    resharder = job.resharder(timeout_s=4.0, bucket_bytes=1 << 18)
    resharder.sync(1)
    if rank == victim and when == "middle":
        signal.setitimer(signal.ITIMER_REAL, 0.03)  # SIGALRM ends it, somewhere in some 0.5 s of messages
    else:
        job.source.armed = rank == victim
    begin = time.monotonic()
    try:
        resharder.sync(2)
    except RunError as error:
        assert resharder.version is None
        raise RunError(f"{time.monotonic() - begin:.1f} {error}") from None
    raise AssertionError("a sync without one of its ranks must not succeed")


@pytest.mark.parametrize("when", ["start", "middle"])
def test_a_killed_rank_makes_all_others_raise_in_time(when: str, tmp_path: Path) -> None:
    messages = failures(run_ranks(8, tmp_path, killed, 3, when))
    assert messages.pop(3) == ""
    for message in messages:
        seconds, _, text = message.partition(" ")
        assert float(seconds) < 10, message
        assert "rank 3" in text, message
        assert ".weight" in text or ".bias" in text, "the tensor that did not come is named"


def fails_in_the_middle(rank: int) -> None:
    job = Job(rank, spec_of("qwen2"), TRAINING["TP4"], 2)
    resharder = job.resharder(timeout_s=3.0)
    resharder.sync(1)
    if rank == 2:  # its storage is swapped for one of another size, as a broken off-load would
        job.source["decoder.layers.1.mlp.linear_fc2.weight"].data = torch.zeros(5)
    resharder.sync(2)


def test_an_error_on_one_rank_is_told_by_all(tmp_path: Path) -> None:
    messages = failures(run_ranks(8, tmp_path, fails_in_the_middle))
    assert all("rank 2" in m for m in messages) and all(messages)


def forgetful(*args: Any) -> Plan:
    """A plan without one of rank 3's local boxes."""
    plan = make_plan(*args)
    local = list(plan.local)
    local[3] = local[3][1:]
    return replace(plan, local=tuple(local))


def cannot_connect(rank: int, fault: str) -> None:
    job = Job(rank, spec_of("qwen2"), TRAINING["TP2"], 2)
    source_map, target_map = job.source_map, job.target_map
    lost = "model.layers.2.mlp.down_proj.weight"
    if fault == "uncovered" and rank == 6:
        target_map = ShardMap(
            target_map.specs, tuple(p for p in target_map.pieces if p.name != lost), target_map.padding
        )
    if fault == "twice" and rank == 1:
        target_map = ShardMap(target_map.specs, (*target_map.pieces, target_map.pieces[5]), target_map.padding)
    if fault == "no source":
        source_map = ShardMap(
            {k: v for k, v in source_map.specs.items() if k != lost},
            tuple(p for p in source_map.pieces if p.name != lost),
        )
    if fault == "shape":
        other = maps_of(spec_of("qwen2", intermediate_size=64), TRAINING["TP2"], 2)[0][rank]
        source_map, job.source = other, empty_locals(other)
    if fault == "planner" and rank == 3:
        connect_module.make_plan = forgetful
    if fault == "tensor" and rank == 4:
        job.source["decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(5)
    try:
        connect((source_map, job.source), (target_map, job.target), timeout_s=20)
    finally:
        assert all(t.isnan().all() for t in job.target.values()), "no byte may move"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("uncovered", "rank 6: model.layers.2.mlp.down_proj.weight has 768 elements.*768 are left uncovered"),
        ("twice", "rank 1: .*written more than once"),
        ("no source", r"model.layers.2.mlp.down_proj.weight, of shape \[32, 48\] at the target, has no source"),
        ("planner", r"rank 3: model.*: 0 elements written into \d+"),
        ("tensor", r"rank 4: model.layers.1.mlp.down_proj.weight .* does not fit the source tensor decoder"),
        ("shape", r"mlp.gate_proj.weight is \[64, 32\] at the source, but \[48, 32\] at the target"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks_before_a_byte_moves(
    fault: str, message: str, tmp_path: Path
) -> None:
    results = run_ranks(8, tmp_path, cannot_connect, fault)
    assert len(set(failures(results))) == 1
    assert isinstance(results[0], UserError)
    with pytest.raises(UserError, match=message):
        raise results[0]
