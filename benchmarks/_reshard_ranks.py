"""What one process of the reshard benchmark does. Kept free of the command line, so that processes start quickly."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_rl.parallel.layout import Layout, replica_of
from hpc_rl.reshard.execute import Resharder
from hpc_rl.reshard.plan import RankPlan, make_plan
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.megatron_map import megatron_shard_map
from hpc_rl.tensors.shardmap import ShardMap
from hpc_rl.tensors.vllm_map import vllm_shard_map

M200: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
}  # fmt: skip
B1: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 32768,
}  # fmt: skip


def on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(rank, num_ranks, port, *args)`` in so many processes, forked from a server that has imported torch."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks._reshard_ranks"])
    with context.Pool(num_ranks) as pool:
        calls = [pool.apply_async(function, (r, num_ranks, port, *args)) for r in range(num_ranks)]
        return [call.get(timeout=600) for call in calls]


def tensors_of(shard_map: ShardMap, device: str, fill: bool) -> dict[str, Tensor]:
    """bf16 local tensors of a map, filled with small random bits or with zeros."""
    sizes = dict(shard_map.padding)
    for p in shard_map.pieces:
        sizes[p.local] = sizes.get(p.local, 0) + p.numel
    out = {k: torch.zeros(n, dtype=torch.bfloat16, device=device) for k, n in sizes.items()}
    if fill:
        for t in out.values():
            t.view(torch.int16).random_(0, 16000)
    return out


def _held(
    spec: ModelSpec, layout: Layout, gen_tp: int, rank: int, device: str
) -> tuple[RankPlan, dict[str, Tensor], dict[str, Tensor]]:
    sources = [megatron_shard_map(spec, layout, r) for r in range(layout.world_size)]
    targets = [vllm_shard_map(spec, gen_tp, replica_of(r, gen_tp, layout.tp)[1]) for r in range(layout.world_size)]
    plan = make_plan(sources, targets).of(rank)
    return plan, tensors_of(sources[rank], device, True), tensors_of(targets[rank], device, False)


def _bare(plan: RankPlan, device: str) -> Callable[[], None]:
    """One batched send/recv of as many bytes, one tensor per pair: no packing, no small messages."""
    sizes = [{peer: sum(x.nbytes for x in links) for peer, links in pairs} for pairs in (plan.sends, plan.receives)]
    buffers = [{p: torch.zeros(n, dtype=torch.uint8, device=device) for p, n in some.items()} for some in sizes]

    def go() -> None:
        ops = [dist.P2POp(dist.isend, t, p) for p, t in buffers[0].items()]
        ops += [dist.P2POp(dist.irecv, t, p) for p, t in buffers[1].items()]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        if device != "cpu":
            torch.cuda.synchronize()

    return go


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    begin = time.perf_counter()
    result = action()
    return time.perf_counter() - begin, result


def gloo_rank(rank: int, num_ranks: int, port: int, repeats: int) -> dict[str, Any]:
    """Full syncs and bare transfers in turn, then a sync after 1% of the values changed."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    layout = Layout(num_ranks, tp=2, pp=2)
    plan, sources, targets = _held(ModelSpec.from_hf_config(M200), layout, 4, rank, "cpu")
    resharder = Resharder(plan, sources, targets, verify="off", timeout_s=120, name="full")
    bare = _bare(plan, "cpu")
    out: dict[str, Any] = {"sync": [], "bare": [], "bound": plan.lower_bound_bytes}
    resharder.sync(0)
    bare()
    for version in range(1, repeats + 1):
        seconds, metrics = _timed(partial(resharder.sync, version))
        out["sync"].append(seconds)
        out["bare"].append(_timed(bare)[0])
    out["received"] = metrics["bytes_received"]
    resharder = Resharder(plan, sources, targets, verify="off", snapshot="gpu", timeout_s=120, name="delta")
    resharder.sync(0)
    for version in (1, 2):  # the first one also makes its views and staging space
        for t in sources.values():
            index = torch.randint(0, t.numel(), (t.numel() // 100,))
            t.view(torch.int16)[index] ^= 1
        out["delta_seconds"], metrics = _timed(partial(resharder.sync, version))
    out["sparse"] = metrics["bytes_received"]
    out["verify_seconds"] = resharder.verify()
    dist.barrier()
    dist.destroy_process_group()
    return out


def _gpu_median(action: Callable[[], Any], repeats: int = 15) -> float:
    times = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


def in_process() -> dict[str, Any]:
    """1.41 B parameters copied from Megatron's into vLLM's tensors on one GPU; the ceiling is one copy as large."""
    spec = ModelSpec.from_hf_config(B1)
    plan, sources, targets = _held(spec, Layout(1), 1, 0, "cuda")
    resharder = Resharder(plan, sources, targets, verify="off")
    nbytes = sum(x.nbytes for x in plan.local)
    a, b = (torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    ceiling = _gpu_median(lambda: b.copy_(a))
    versions = iter(range(1 << 30))
    sync = _gpu_median(lambda: resharder.sync(next(versions)))
    resharder.verify()
    rows = [("one copy of as many bytes", ceiling), ("full sync", sync), ("verification", resharder.verify())]
    return {"bytes": nbytes, "ceiling": ceiling, "sync": sync, "rows": rows}


def _step(resharder: Resharder, versions: Any, touched: dict[str, Tensor], metrics: dict[str, Any]) -> None:
    for t in touched.values():  # about 1% of the values change between two syncs
        t.view(torch.int16)[::100] ^= 1
    metrics.update(resharder.sync(next(versions)))


def nccl_rank(rank: int, num_ranks: int, port: int) -> list[dict[str, Any]]:
    """Pairs of layouts over NCCL, each beside a bare transfer of the same bytes."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    spec = ModelSpec.from_hf_config(B1)
    out = []
    pairs = {
        "TP2 -> gen TP1": (Layout(num_ranks, tp=2), 1),
        "PP2 -> gen TP1": (Layout(num_ranks, pp=2), 1),
        "PP2 -> gen TP2": (Layout(num_ranks, pp=2), 2),
    }
    for what, (layout, gen_tp) in pairs.items():
        plan, sources, targets = _held(spec, layout, gen_tp, rank, "cuda")
        bare = _gpu_median(_bare(plan, "cuda"))
        for snapshot in ("none", "gpu"):
            resharder = Resharder(plan, sources, targets, verify="first", snapshot=snapshot, name=what + snapshot)
            versions = iter(range(1 << 30))
            metrics: dict[str, Any] = {}
            touched = sources if snapshot == "gpu" else {}
            seconds = _gpu_median(partial(_step, resharder, versions, touched, metrics))
            label = what if snapshot == "none" else what + ", 1% changed"
            bound = plan.lower_bound_bytes
            out.append(
                {"what": label, "sync": seconds, "bare": bare, "received": metrics["bytes_received"], "bound": bound}
            )
    dist.barrier()
    dist.destroy_process_group()
    return out
