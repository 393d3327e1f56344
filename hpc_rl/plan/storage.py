"""Size and files of a checkpoint and of a step's rollouts."""

from __future__ import annotations

from typing import Any

from hpc_rl.plan.hardware import GB
from hpc_rl.plan.job import PlannedJob


def checkpoint_bytes(job: PlannedJob) -> int:
    """All tensors of a checkpoint: weights, main weights and moments of what is trained, each element once."""
    per_param = 12 if job.config.model.dtype == "float32" else 14
    return sum(spec.num_params for spec in job.trained.values()) * per_param


def checkpoint_report(job: PlannedJob) -> dict[str, Any]:
    """Bytes, files, and room on disk while the newest are kept and one is being written."""
    checkpoint, total, ranks = job.config.checkpoint, checkpoint_bytes(job), job.layout.world_size
    per_node = job.config.storage.files_per_node
    shards = min(per_node, job.gpus_per_node) * job.nodes if per_node else ranks
    saves = job.config.steps // checkpoint.every if checkpoint.every else 1
    kept = min(checkpoint.keep_last, max(1, saves)) + 1
    if checkpoint.keep_every and checkpoint.every:
        kept += job.config.steps // checkpoint.keep_every
    return {
        "checkpoint_gb": round(total / GB, 3),
        "shard_files": shards,
        "gb_per_shard_file": round(total / shards / GB, 3),
        "other_files": "index.h5, manifest.json",
        "on_disk_gb_at_most": round(kept * total / GB, 3),
        "host_gb_per_node_while_writing": round(total / ranks * job.gpus_per_node / GB, 3),
    }
