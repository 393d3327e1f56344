"""`hpc-rl plan`: the whole plan as plain data, and the same as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_rl.config_load import load_config
from hpc_rl.plan.changes import suggest
from hpc_rl.plan.choose import Choice, job_of
from hpc_rl.plan.estimate import estimate
from hpc_rl.plan.fit import fit, notes
from hpc_rl.plan.hardware import GB, find_gpu
from hpc_rl.plan.job import PlannedJob
from hpc_rl.plan.memory import FRAGMENTATION, Memory, Phase, host_bytes_per_node, memory
from hpc_rl.plan.placement import layout_report, placement_warnings, table_rows
from hpc_rl.plan.resharding import reshard_report
from hpc_rl.plan.schedule import schedule_report, schedule_warnings
from hpc_rl.plan.storage import checkpoint_report

Report = dict[str, Any]


def plan(
    path: Path, overrides: Sequence[str] = (), *, nodes: int | None = None, gpus_per_node: int | None = None,
    gpu: str | None = None, gpu_memory_gb: float | None = None,
) -> tuple[PlannedJob, Report]:  # fmt: skip
    """The plan of a configuration, without a GPU.

    Args:
        path, overrides: as `hpc-rl train` takes them.
        nodes, gpus_per_node: None: ``launch.nodes`` (or 1) and ``launch.nproc``.
        gpu: name in the table of hardware.py; None: h100, or host memory with ``launch.device=cpu``.
        gpu_memory_gb: instead of the table's.

    Returns: the job and its report, whose keys hold plain values. ``gb``: 2^30 bytes.

    Raises:
        UserError: a configuration that a run would refuse.
    """
    config = load_config(path, overrides)
    device = find_gpu(gpu, gpu_memory_gb, config.launch.device)
    fitted = fit(config)
    nodes = config.launch.nodes or 1 if nodes is None else nodes
    gpus_per_node = config.launch.nproc if gpus_per_node is None else gpus_per_node
    job, rows = job_of(fitted, device, nodes, gpus_per_node)
    report = report_of(job)
    report["warnings"] = notes(config, fitted) + report["warnings"]
    if rows:
        report["chosen"], report["alternatives"] = rows[0].row(), [row.row() for row in _distinct(rows)[:MAX_ROWS]]
    return job, report


MAX_ROWS = 6


def _distinct(rows: Sequence[Choice]) -> list[Choice]:
    """The best of each grid of training."""
    grids = {(row.config.parallel.tp, row.config.parallel.pp): row for row in reversed(rows)}
    return [row for row in rows[1:] if grids[row.config.parallel.tp, row.config.parallel.pp] is row]


def report_of(job: PlannedJob) -> Report:
    """The report of a job."""
    warnings = [
        f"{key} is not there: planned with the sizes of the published {name}" for key, name in job.assumed.items()
    ]
    warnings += placement_warnings(job) + schedule_warnings(job)
    result, reshard = memory(job), reshard_report(job) if job.has_rollouts else None
    limit = result.limit_bytes
    report: Report = {
        "fits": result.fits,
        "reason": _reason(job, result),
        "peak_gb": _gb(result.peak.nbytes),
        "limit_gb": None if limit is None else _gb(limit),
        "gpu": job.gpu.name,
        "gpu_memory_gb": job.gpu.memory_gb,
        "model_params": {role: spec.num_params for role, spec in job.roles.items()},
        "changes": [] if result.fits else suggest(job),
        "warnings": warnings + _generation_warnings(job, result),
        "phases": {phase.name: _phase(phase) for phase in result.phases},
        "host_gb_per_node": {name: _gb(nbytes) for name, nbytes in host_bytes_per_node(job).items()},
        "generation": _generation(job, result) if job.has_rollouts else None,
        "micro_batches": schedule_report(job),
        "reshard": reshard,
        "checkpoint": checkpoint_report(job),
        "layout": layout_report(job),
    }
    seconds = estimate(job, result.generation, (reshard or {}).get("seconds_at_link_speed", 0.0))
    if seconds is not None:
        report["estimated_seconds"] = seconds
    return report


def tables(job: PlannedJob, report: Mapping[str, Any]) -> Report:
    """The report as `metrics.tables.render` prints it best: rows in place of nested values."""
    out: Report = {name: report[name] for name in ("fits", "reason", "peak_gb", "limit_gb", "gpu")}
    if "chosen" in report:
        out["chosen"] = "{engine}: {change}".format(**report["chosen"])
        out["other layouts that fit"] = report["alternatives"]
    for number, warning in enumerate(report["warnings"], 1):
        out[f"warning {number}"] = warning
    if report["changes"]:
        out["any of these makes it fit"] = report["changes"]
    out[f"memory per {_place(job)} (GB)"] = _memory_rows(report["phases"])
    out["layout"] = table_rows(job)
    for name in ("generation", "micro_batches", "reshard", "checkpoint", "host_gb_per_node"):
        if report[name]:
            out[name.replace("_", " ")] = report[name]
    if "estimated_seconds" in report:
        out["estimated seconds (rooflines, longest sequences; not measured)"] = report["estimated_seconds"]
    return out


def _memory_rows(phases: Mapping[str, Any]) -> list[Report]:
    """A row per part, a column per phase, and a row of sums."""
    names = dict.fromkeys(part for phase in phases.values() for part in phase["parts_gb"])
    rows = [
        {"": name, **{phase: _short(values["parts_gb"].get(name)) for phase, values in phases.items()}}
        for name in names
    ]
    return [*rows, {"": "total", **{phase: _short(values["total_gb"]) for phase, values in phases.items()}}]


def _short(gb: float | None) -> str:
    return "" if gb is None else f"{gb:.1f}" if gb >= 0.1 else f"{gb:.2g}"


def _place(job: PlannedJob) -> str:
    return "rank" if job.on_cpu else "GPU"


def _phase(phase: Phase) -> Report:
    parts = {name: _gb(nbytes) for name, nbytes in phase.parts.items()}
    return {"total_gb": _gb(phase.nbytes), "pipeline_stage": phase.stage, "parts_gb": parts}


def _reason(job: PlannedJob, result: Memory) -> str:
    """Why it fits, or what is missing where."""
    peak = result.peak
    largest = sorted(peak.parts.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {_short(nbytes / GB)}" for name, nbytes in largest)
    where = f" on pipeline stage {peak.stage}" if job.layout.pp > 1 else ""
    need = f"{peak.name} takes {_short(peak.nbytes / GB)} GB per {_place(job)}{where} ({parts}, ...)"
    if result.limit_bytes is None:
        return result.shortage or f"{need}; no limit was given: add --gpu or --gpu-memory-gb"
    limit = result.limit_bytes / GB
    of = f"{limit:.1f} GB"
    if not job.on_cpu:
        of += f" ({job.gpu.memory_gb:g} less {FRAGMENTATION:.0%} for the allocator)"
    if peak.nbytes > result.limit_bytes:
        return f"{need}, {(peak.nbytes - result.limit_bytes) / GB:.1f} GB more than {of}"
    return result.shortage or f"{need}, the most of all phases, {limit - peak.nbytes / GB:.1f} GB less than {of}"


def _generation(job: PlannedJob, result: Memory) -> Report:
    held = result.generation
    per_replica = -(-job.generated_sequences // job.num_replicas)
    return {
        "tp": job.generation_tp,
        "replicas": job.num_replicas,
        "sequences_per_replica": per_replica,
        "kv_cache_gb_per_gpu": _gb(held.kv_cache),
        "kv_tokens_per_replica": held.kv_tokens,
        "longest_sequences_at_once": min(held.kv_tokens // job.longest, job.config.rollout.max_num_seqs, per_replica),
    }


def _generation_warnings(job: PlannedJob, result: Memory) -> list[str]:
    if not job.has_rollouts:
        return []
    per_replica = -(-job.generated_sequences // job.num_replicas)
    wanted, held = min(per_replica, job.config.rollout.max_num_seqs), result.generation.kv_tokens // job.longest
    if result.shortage or held >= wanted:
        return []
    return [
        f"the KV cache of a replica holds {held} sequences of full length, and {wanted} are to run at once: vLLM will "
        "preempt some of them: raise rollout.gpu_memory_utilization or rollout.tp, or lower rollout.max_num_seqs"
    ]


def _gb(nbytes: float) -> float:
    return round(nbytes / GB, 3)
