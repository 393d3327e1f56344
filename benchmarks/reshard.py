"""`hpc-rl bench reshard`: bytes against the lower bound, planning at scale, seconds against the copy or link ceiling.

On the CPU the transfers run over 8 gloo processes; on a machine with GPUs also in process, and over NCCL if it has two.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch

from benchmarks import bar
from benchmarks._reshard_ranks import gloo_rank, in_process, nccl_rank, on_ranks
from hpc_rl.parallel.layout import Layout, replica_of
from hpc_rl.reshard.bounds import coverage_errors, plan_summary
from hpc_rl.reshard.plan import Plan, make_plan
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.megatron_map import megatron_shard_map
from hpc_rl.tensors.shardmap import ShardMap
from hpc_rl.tensors.vllm_map import vllm_shard_map

TRAINING = {
    "TP1": Layout(8),
    "TP2": Layout(8, tp=2),
    "TP4": Layout(8, tp=4),
    "PP2": Layout(8, pp=2),
    "PP4": Layout(8, pp=4),
    "TP2PP2": Layout(8, tp=2, pp=2, cp=2),
    "TP2DP2": Layout(8, tp=2, cp=2, dp=2),
    "TP2PP2DP2": Layout(8, tp=2, pp=2, dp=2),
    "EP2": Layout(8, ep=2),
}
LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}
SMALL: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 32,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}  # fmt: skip
LARGE: dict[str, tuple[dict[str, Any], Layout]] = {
    "Llama 70B": (
        LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        Layout(512, tp=8, pp=8),
    ),
    "Llama 405B": (
        LLAMA | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
        Layout(1024, tp=8, pp=16),
    ),
    "Qwen3 235B-A22B": (
        {
            "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
            "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
        },
        Layout(512, tp=4, pp=8, ep=8, etp=1),
    ),
}  # fmt: skip


def run(quick: bool = False) -> dict[str, Any]:
    """All measurements; with ``quick`` fewer repeats and only the smallest of the large plans."""
    table: list[dict[str, Any]] = []
    ratio, errors = every_pair(table)
    plans = plan_large({"Llama 70B"} if quick else set(LARGE), table)
    errors += sum(p[1] for p in plans.values())
    fraction, sparse = over_gloo(7 if quick else 15, table)
    bars = [
        bar("bytes_over_lower_bound", ratio, "ratio", 1.0, "lower"),
        bar("incremental_bytes_fraction_at_1pct", sparse, "fraction", 0.06, "lower"),
        bar("plan_70b_512_ranks_seconds", plans["Llama 70B"][0], "s", 10.0, "lower"),
        bar("gloo_bandwidth_fraction", fraction, "fraction", 0.6, "higher"),
        bar("coverage_errors", errors, "boxes", 0, "lower"),
    ]
    if torch.cuda.is_available():
        seconds = on_gpu(table)
        bars.append(bar("in_process_sync_1_41b_ms", 1e3 * seconds, "ms", 3.0, "lower"))
        if torch.cuda.device_count() > 1:
            over_nccl(table)
    return {"bars": bars, "table": table}


def maps_of(spec: ModelSpec, layout: Layout, gen_tp: int) -> tuple[list[ShardMap], list[ShardMap]]:
    """(source, target) maps of every rank."""
    ranks = range(layout.world_size)
    return [megatron_shard_map(spec, layout, r) for r in ranks], [
        vllm_shard_map(spec, gen_tp, replica_of(r, gen_tp, layout.tp)[1]) for r in ranks
    ]


def every_pair(table: list[dict[str, Any]]) -> tuple[float, int]:
    """(largest ratio of received to least bytes of any rank, coverage errors) over all pairs of layouts at 8 ranks."""
    spec = ModelSpec.from_hf_config(SMALL)
    worst, errors = 1.0, 0
    for name, layout in TRAINING.items():
        for gen_tp in (1, 2, 4):
            sources, targets = maps_of(spec, layout, gen_tp)
            plan = make_plan(sources, targets, node_size=4)
            for got, least in zip(plan.received_bytes(), plan.lower_bound_bytes, strict=True):
                worst = max(worst, got / least if least else 1.0 + got)
            errors += len(coverage_errors(plan, targets))
            moved = sum(plan.received_bytes()), sum(plan.lower_bound_bytes)
            table.append(row(f"{name} -> gen TP{gen_tp}", *moved))
    return worst, errors


def plan_large(names: set[str], table: list[dict[str, Any]]) -> dict[str, tuple[float, int]]:
    """name -> (seconds of maps and plan, coverage errors of a sample of ranks), to generation at TP 8."""
    out = {}
    for name, (config, layout) in LARGE.items():
        if name not in names:
            continue
        before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        sources, targets = maps_of(ModelSpec.from_hf_config(config), layout, 8)
        plan = make_plan(sources, targets)
        seconds = time.perf_counter() - begin
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        out[name] = seconds, len(coverage_errors(plan, targets, range(0, layout.world_size, 64)))
        table.append(_large_row(name, layout, plan, seconds, memory))
    return out


def _large_row(name: str, layout: Layout, plan: Plan, seconds: float, memory_mb: float) -> dict[str, Any]:
    total = plan_summary(plan)
    source, target = total["busiest_pair"]
    note = (
        f"{layout.world_size} ranks TP{layout.tp} PP{layout.pp} EP{layout.ep} -> gen TP8, {memory_mb:.0f} MB; "
        f"{total['bytes_between_nodes'] / 1e9:.0f} GB between nodes; busiest sender {total['busiest_sender_bytes'] / 1e9:.1f} GB, "
        f"mean {total['mean_sender_bytes'] / 1e9:.1f}; busiest pair {source} -> {target} {total['busiest_pair_bytes'] / 1e9:.1f} GB"
    )
    return row(f"plan {name}", total["bytes_total"], total["bytes_lower_bound"], seconds, note=note)


def row(
    what: str, received: int | None = None, bound: int | None = None, seconds: float | None = None, note: str = ""
) -> dict[str, Any]:
    """One line of the table: GB received by all ranks, the least they must receive, seconds."""
    return {
        "what": what,
        "GB": None if received is None else round(received / 1e9, 4),
        "bound GB": None if bound is None else round(bound / 1e9, 4),
        "s": None if seconds is None else round(seconds, 5),
        "note": note,
    }


def over_gloo(repeats: int, table: list[dict[str, Any]]) -> tuple[float, float]:
    """(bandwidth as a fraction of bare send/recv, bytes of a 1% delta over a full sync): 200 M bf16, 8 processes."""
    results = on_ranks(8, gloo_rank, repeats)
    sync, bare = ([max(r[key][i] for r in results) for i in range(repeats)] for key in ("sync", "bare"))
    received, sparse = (sum(r[key] for r in results) for key in ("received", "sparse"))
    ratio = min(bare) / min(sync)  # best of each, run in turn: what else runs on the machine slows both
    bound = sum(r["bound"] for r in results)
    for what, seconds in (("gloo: full sync", sync), ("gloo: bare batched send/recv", bare)):
        rate = received / min(seconds) / 1e9
        note = f"{rate:.2f} GB/s; 8 processes, 200 M bf16, TP2PP2DP2 -> gen TP4"
        table.append(row(what, received, bound, min(seconds), note))
    table.append(row("gloo: sync, 1% changed", sparse, None, max(r["delta_seconds"] for r in results)))
    table.append(row("gloo: verification", None, None, max(r["verify_seconds"] for r in results)))
    return ratio, sparse / received


def on_gpu(table: list[dict[str, Any]]) -> float:
    """Seconds of a full sync of 1.41 B bf16 parameters within one GPU."""
    result = in_process()
    for what, seconds in result["rows"]:
        rate, share = 2 * result["bytes"] / seconds / 1e9, result["ceiling"] / seconds
        table.append(
            row(
                f"one GPU: {what}", None, None, seconds, f"{rate:.0f} GB/s read and written, {share:.2f} of the ceiling"
            )
        )
    return float(result["sync"])


def over_nccl(table: list[dict[str, Any]]) -> None:
    """Two GPUs, 1.41 B bf16: seconds of each pair beside one large send/recv of the same bytes; GB per GPU."""
    for rows in zip(*on_ranks(2, nccl_rank), strict=True):
        seconds, bare = max(r["sync"] for r in rows), max(r["bare"] for r in rows)
        received = max(r["received"] for r in rows)
        bound = max(r["bound"] for r in rows)
        note = f"{received / seconds / 1e9:.0f} GB/s, {bare / seconds:.2f} of bare send/recv of a full sync's bytes"
        table.append(row(f"NCCL: {rows[0]['what']}", received, bound, seconds, note))
