"""Which rank holds what, and where it sits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_rl.parallel.layout import replica_of
from hpc_rl.plan.job import PlannedJob
from hpc_rl.plan.static import stage_numels
from launch.spec import check_placement

MAX_ROWS = 32  # of the printed table; above that it has one row per stage


def layout_report(job: PlannedJob) -> dict[str, Any]:
    """Axes, and for each rank its node, GPU, coordinates, layers and generation replica."""
    layout = job.layout
    axes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "dp": layout.dp}
    return {
        "world_size": layout.world_size,
        "nodes": job.nodes,
        "gpus_per_node": job.gpus_per_node,
        "training": axes,
        "generation": {"tp": job.generation_tp, "replicas": job.num_replicas} if job.has_rollouts else None,
        "ranks": [_rank_row(job, rank) for rank in range(layout.world_size)],
    }


def _rank_row(job: PlannedJob, rank: int) -> dict[str, Any]:
    at = job.layout.coords(rank)
    row: dict[str, Any] = {"rank": rank, "node": rank // job.gpus_per_node, "gpu": rank % job.gpus_per_node}
    row |= {"tp": at.tp, "pp": at.pp, "dp": at.dp, "holds": stage_words(job, at.pp)}
    if job.has_rollouts:
        row["replica"], row["generation_tp"] = replica_of(rank, job.generation_tp, job.layout.tp)
    return row


def stage_words(job: PlannedJob, pp: int) -> str:
    """What a stage holds: ``embedding, layers 0-19``."""
    layers = job.layout.layers_of(pp, job.model.num_layers)[0]
    head = "output" if "actor" in job.trained else "value head"
    words = ["embedding"] if pp == 0 else []
    words.append(f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}")
    return ", ".join(words + ([f"norm, {head}"] if pp == job.layout.pp - 1 else []))


def table_rows(job: PlannedJob) -> list[dict[str, Any]]:
    """One row per TP group, or per stage where there are many groups."""
    layout = job.layout
    groups = layout.groups("tp") if layout.pp * layout.dp <= MAX_ROWS else layout.groups("tp", "dp")
    rows = []
    for ranks in groups:
        first, last = layout.coords(ranks[0]), layout.coords(ranks[-1])
        nodes = sorted({rank // job.gpus_per_node for rank in ranks})
        row = {
            "ranks": _span(ranks),
            "nodes": _span(nodes),
            "pp": first.pp,
            "dp": _span([first.dp, last.dp]),
            "tp": _span([first.tp, last.tp]),
            "holds": stage_words(job, first.pp),
            "M params": round(sum(stage_numels(next(iter(job.trained.values())), layout, first.pp)) / 1e6, 1),
        }
        if job.has_rollouts:
            row["vLLM replicas"] = _span([ranks[0] // job.generation_tp, ranks[-1] // job.generation_tp])
        rows.append(row)
    return rows


def placement_warnings(job: PlannedJob) -> list[str]:
    """Groups that cross nodes and should not. Raises UserError where the launchers refuse: training TP across nodes."""
    out = check_placement(job.config.parallel, job.nodes, job.gpus_per_node)
    if job.has_rollouts and job.nodes > 1 and job.gpus_per_node % job.generation_tp:
        out.append(
            f"rollout.tp = {job.generation_tp} does not divide the {job.gpus_per_node} GPUs of a node: vLLM's replicas "
            "cross nodes, and every token waits for the network"
        )
    stage = job.layout.world_size // job.layout.pp
    if job.nodes > 1 and job.layout.pp > 1 and stage % job.gpus_per_node:
        out.append(
            f"a pipeline stage has {stage} ranks, no multiple of the {job.gpus_per_node} GPUs of a node: stages share "
            "nodes, so one slow node holds up two of them"
        )
    return out


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]}-{numbers[-1]}"
