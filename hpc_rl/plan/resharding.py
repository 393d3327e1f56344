"""Bytes of the weights' way from the trainer's shards into vLLM's, by the plan that a run would make."""

from __future__ import annotations

from typing import Any

from hpc_rl.parallel.layout import replica_of
from hpc_rl.plan.hardware import GB
from hpc_rl.plan.job import PlannedJob
from hpc_rl.plan.static import training_map
from hpc_rl.reshard.messages import share_bytes
from hpc_rl.reshard.plan import Plan, make_plan
from hpc_rl.tensors.vllm_map import vllm_shard_map


def reshard_plan(job: PlannedJob) -> Plan:
    """The transfers of every sync, from maps worked out without the engines."""
    dtype, tp, ranks = job.config.model.dtype, job.generation_tp, range(job.layout.world_size)
    sources = [training_map(job, job.model, r) for r in ranks]
    targets = [vllm_shard_map(job.model, tp, replica_of(r, tp, job.layout.tp)[1], dtype) for r in ranks]
    return make_plan(sources, targets, node_size=job.gpus_per_node)


def reshard_report(job: PlannedJob) -> dict[str, Any]:
    """Local bytes, bytes over links, the busiest link, and time at the links' speed where that is known.

    Raises: UserError if the bucket is too small for so many partners.
    """
    plan = reshard_plan(job)
    max_peers = plan.of(0).max_peers
    share_bytes(job.config.reshard.bucket_bytes, max_peers)
    near, far = _Links(job.layout.world_size), _Links(job.layout.world_size)
    nodes = _Links(job.nodes)
    for route in plan.routes:
        source, target = route.source // job.gpus_per_node, route.target // job.gpus_per_node
        if source == target:
            near.add(route.source, route.target, route.nbytes)
        else:
            far.add(route.source, route.target, route.nbytes)
            nodes.add(source, target, route.nbytes)
    local = [sum(link.nbytes for link in links) for links in _distinct(plan)]
    report = {
        "local_gb_per_rank": round(max(local, default=0) / GB, 3),
        "received_gb_per_rank": round(max(plan.received_bytes()) / GB, 3),
        "inside_nodes_gb": round(near.total / GB, 3),
        "between_nodes_gb": round(far.total / GB, 3),
        "busiest_gpu_inside_its_node": near.busiest("rank"),
        "busiest_gpu_between_nodes": far.busiest("rank"),
        "busiest_node": nodes.busiest("node"),
        "peers_of_a_rank_at_most": max_peers,
    }
    if job.gpu.link_gb_s and job.gpu.network_gb_s:
        seconds = max(near.peak / (job.gpu.link_gb_s * 1e9), far.peak / (job.gpu.network_gb_s * 1e9))
        report["seconds_at_link_speed"] = round(seconds, 3)
    return report


def _distinct(plan: Plan) -> list[tuple[Any, ...]]:
    """Local links of all ranks, equal ones once (ranks share the object)."""
    return list({id(links): links for links in plan.local}.values())


class _Links:
    """Bytes sent and received by each of some nodes or ranks."""

    def __init__(self, count: int) -> None:
        self.sent, self.received, self.total = [0] * count, [0] * count, 0

    def add(self, source: int, target: int, nbytes: int) -> None:
        self.sent[source] += nbytes
        self.received[target] += nbytes
        self.total += nbytes

    @property
    def peak(self) -> int:
        """Bytes of the busiest direction of the busiest link."""
        return max((*self.sent, *self.received), default=0)

    def busiest(self, what: str) -> dict[str, Any] | None:
        """Which one sends or receives most, and how much; None if nothing moves."""
        if not self.total:
            return None
        sends = max(self.sent) >= max(self.received)
        counts = self.sent if sends else self.received
        gb = round(max(counts) / GB, 3)
        return {what: counts.index(max(counts)), "sends_gb" if sends else "receives_gb": gb}
