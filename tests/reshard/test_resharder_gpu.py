"""The Resharder on GPUs: copies within one, NCCL between two (bits, deltas, a planted fault, a killed rank)."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks._reshard_ranks import on_ranks
from hpc_rl.errors import RunError
from hpc_rl.parallel.layout import Layout
from hpc_rl.reshard.execute import Resharder
from hpc_rl.reshard.plan import make_plan
from tests.reshard.layouts import maps_of
from tests.tensors.models import empty_locals, fill, random_tensors, spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4000}


class GpuJob:
    """One rank's tensors on its GPU."""

    def __init__(self, rank: int, layout: Layout, gen_tp: int, dtypes: tuple[str, str], **kw: Any) -> None:
        sources, targets = maps_of(spec_of("qwen2", **SIZES), layout, gen_tp, dtypes)
        self.source_map, self.target_map = sources[rank], targets[rank]
        device = torch.device("cuda", rank)
        self.source, self.target = (
            {k: t.to(device) for k, t in empty_locals(m, getattr(torch, d)).items()}
            for m, d in zip((self.source_map, self.target_map), dtypes, strict=True)
        )
        whole = random_tensors(spec_of("qwen2", **SIZES))
        self.whole = {k: v.to(device, torch.bfloat16).float() for k, v in whole.items()}
        fill(self.source_map, self.source, self.whole)
        options = {"verify": "always", "bucket_bytes": 1 << 20, "timeout_s": 20.0} | kw
        self.resharder = Resharder(make_plan(sources, targets).of(rank), self.source, self.target, **options)

    def change(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for value in self.whole.values():
            flat = value.view(-1)
            index = torch.randperm(flat.numel(), generator=generator)[: flat.numel() // 100]
            flat[index.to(flat.device)] += 1
            value.copy_(value.to(torch.bfloat16))
        fill(self.source_map, self.source, self.whole)

    def check(self) -> None:
        expected = {k: torch.full_like(t, float("nan")) for k, t in self.target.items()}
        fill(self.target_map, expected, self.whole)
        for local, value in expected.items():
            assert torch.equal(value.nan_to_num(7), self.target[local].nan_to_num(7)), local


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16")], ids=str)
def test_copies_within_a_gpu_survive_offload(dtypes: tuple[str, str]) -> None:
    job = GpuJob(0, Layout(1), 1, dtypes)
    job.resharder.sync(0)
    job.check()
    job.change(1)
    kept = {k: (t.untyped_storage(), t.cpu(), t.untyped_storage().nbytes()) for k, t in job.source.items()}
    for storage, _, _ in kept.values():
        storage.resize_(0)
    blocker = torch.zeros(1 << 20, device="cuda")  # so that memory comes back elsewhere
    for name, (storage, host, nbytes) in kept.items():
        storage.resize_(nbytes)
        job.source[name].copy_(host)
    job.resharder.sync(1)
    job.check()
    job.target["model.norm.weight"][3] += blocker[0] + 1
    with pytest.raises(RunError, match=r"model\.norm\.weight"):
        job.resharder.verify()


def start(rank: int, num_ranks: int, port: int) -> None:
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=num_ranks, device_id=device)


def everything(rank: int, num_ranks: int, port: int) -> list[tuple[int, int, int]]:
    start(rank, num_ranks, port)
    out = []
    for layout, gen_tp in ((Layout(2, tp=2), 1), (Layout(2, pp=2), 1), (Layout(2, pp=2), 2)):
        for snapshot, dtypes in (("gpu", ("bfloat16", "bfloat16")), ("host", ("float32", "bfloat16"))):
            job = GpuJob(rank, layout, gen_tp, dtypes, snapshot=snapshot, name=f"{layout} {gen_tp} {snapshot}")
            full = job.resharder.sync(0)
            job.check()
            job.change(1)
            delta = job.resharder.sync(1)
            job.check()
            out.append((full["bytes_received"], full["bytes_lower_bound"], delta["bytes_received"]))
    if rank == 1:
        job.target["model.layers.2.mlp.down_proj.weight"][5] += 1
    with pytest.raises(RunError, match=r"rank 1: .*model\.layers\.2\.mlp\.down_proj\.weight"):
        job.resharder.verify()
    dist.barrier()
    dist.destroy_process_group()
    return out


@two_gpus
def test_nccl_is_bitwise_at_the_lower_bound_and_sends_deltas() -> None:
    for rank in on_ranks(2, everything):
        for received, bound, delta in rank:
            assert received == bound > 0 and 0 < delta < 0.06 * bound


def loses_a_peer(rank: int, num_ranks: int, port: int, report: str) -> None:
    start(rank, num_ranks, port)
    job = GpuJob(rank, Layout(2, pp=2), 1, ("bfloat16", "bfloat16"), timeout_s=5.0, verify="off")
    job.resharder.sync(0)
    if rank == 1:
        job.resharder._agreement.meet("1, dense", "version")  # it came to the sync, and dies in it
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        job.resharder.sync(1)
        text = "the sync succeeded without a rank"
    except RunError as error:
        text = f"{time.monotonic() - begin:.1f} {error}"
    with open(report, "w") as file:
        file.write(text)
    os._exit(0)  # NCCL cannot be taken down in order with a dead peer


@two_gpus
def test_nccl_with_a_killed_rank_raises_in_time(tmp_path: Any) -> None:
    context = torch.multiprocessing.get_context("spawn")
    report = tmp_path / "report"
    ranks = [context.Process(target=loses_a_peer, args=(r, 2, 29751, str(report))) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(90)
        assert not process.is_alive()
    seconds, _, text = report.read_text().partition(" ")
    assert float(seconds) < 15 and "rank 1" in text and "model." in text, (seconds, text)
