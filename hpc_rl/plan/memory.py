"""Memory per GPU in each phase of a step, from what every part of the job holds then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpc_rl.plan.activations import cut_of, forward_bytes, stage_of, training_bytes
from hpc_rl.plan.generation import Generation, generation_memory
from hpc_rl.plan.hardware import GB
from hpc_rl.plan.job import PlannedJob
from hpc_rl.plan.schedule import micro_batch_count
from hpc_rl.plan.static import passing_bytes, static_bytes

CONTEXT_BYTES = 0.7 * GB  # CUDA context and libraries
NCCL_BYTES = 1.0 * GB  # communicators of all groups
FRAGMENTATION = 0.04  # of the GPU: what the allocator holds beyond what is used

Parts = dict[str, float]


@dataclass(frozen=True, slots=True)
class Phase:
    """The most that a GPU holds in one phase: bytes by part, on the pipeline stage where that is largest."""

    name: str
    stage: int
    parts: Parts

    @property
    def nbytes(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Memory:
    """All phases of a job. ``limit_bytes``: None where the GPU's memory is not known."""

    phases: tuple[Phase, ...]
    generation: Generation
    limit_bytes: float | None
    shortage: str | None  # of the KV cache

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.nbytes)

    @property
    def fits(self) -> bool:
        return self.shortage is None and (self.limit_bytes is None or self.peak.nbytes <= self.limit_bytes)


def memory(job: PlannedJob) -> Memory:
    """Memory per GPU of ``job``: the worst stage of each phase, in the order in which a step runs."""
    generation = generation_memory(job)
    builders: dict[str, Callable[[PlannedJob, Generation, int], Parts]] = {}
    if job.has_rollouts:
        builders |= {"start": _start, "generation": _generation}
    if job.scored:
        builders["scoring"] = _scoring
    for role in job.trained:
        builders[f"{role} update"] = lambda job, generation, stage, role=role: _update(job, generation, stage, role)  # type: ignore[misc]
    if job.has_rollouts:
        builders["reshard"] = _reshard
    phases = []
    for name, build in builders.items():
        of_stages = [Phase(name, stage, _present(build(job, generation, stage))) for stage in range(job.layout.pp)]
        phases.append(max(of_stages, key=lambda phase: phase.nbytes))
    limit = None if job.gpu.memory_gb is None else job.gpu.memory_gb * GB * (1 - (0 if job.on_cpu else FRAGMENTATION))
    return Memory(tuple(phases), generation, limit, _shortage(job, generation))


def _present(parts: Parts) -> Parts:
    return {name: nbytes for name, nbytes in parts.items() if nbytes > 0}


def _shortage(job: PlannedJob, generation: Generation) -> str | None:
    if not job.has_rollouts or generation.kv_tokens >= job.longest or (job.gpu.memory_gb is None and not job.on_cpu):
        return None
    return (
        f"the KV cache holds {generation.kv_tokens} tokens, less than one sequence of {job.longest} "
        "(data.max_prompt_tokens + rollout.max_response_tokens): raise rollout.gpu_memory_utilization, "
        "rollout.kv_cache_bytes or rollout.tp"
    )


def _always(job: PlannedJob) -> Parts:
    if job.on_cpu:
        return {}
    return {"CUDA, NCCL": CONTEXT_BYTES + (NCCL_BYTES if job.layout.world_size > 1 else 0.0)}


def _trainers(job: PlannedJob, stage: int) -> Parts:
    parts: Parts = {}
    for role in job.roles:
        held = static_bytes(job, role, stage)
        parts[f"{role} weights"] = held.weights
        if held.gradients:
            parts[f"{role} gradients"] = held.gradients
            parts[f"{role} optimizer"] = held.optimizer
    return parts


def _staging(job: PlannedJob, stage: int) -> Parts:
    """Buckets (kept between syncs) and the snapshot of the last sent weights."""
    if not job.has_rollouts:
        return {}
    weights = static_bytes(job, "actor", stage).weights
    parts: Parts = {}
    if job.layout.world_size > 1:
        parts["reshard buckets"] = 2.0 * min(job.config.reshard.bucket_bytes, 2 * weights)
    if job.config.reshard.snapshot == "gpu":
        parts["reshard snapshot"] = weights
    return parts


def _awake(generation: Generation) -> Parts:
    return {
        "vLLM weights": generation.weights,
        "KV cache": generation.kv_cache,
        "vLLM work": generation.activations,
        "vLLM graphs": generation.residue,
    }


def _asleep(job: PlannedJob, generation: Generation) -> Parts:
    if job.on_cpu or job.config.rollout.sleep_level == 0:
        awake = _awake(generation)
        return {name: nbytes for name, nbytes in awake.items() if name != "vLLM work"}
    return {"vLLM asleep": generation.residue}


def _start(job: PlannedJob, generation: Generation, stage: int) -> Parts:
    """vLLM starts beside the trainers, not off-loaded yet, and insists on its share being free; then the first sync."""
    awake = _awake(generation) | _staging(job, stage)
    unused = generation.requested - sum(awake.values())
    return _always(job) | _trainers(job, stage) | awake | {"vLLM must find free": unused}


def _generation(job: PlannedJob, generation: Generation, stage: int) -> Parts:
    trainers = {} if job.config.parallel.offload and not job.on_cpu else _trainers(job, stage)
    return _always(job) | trainers | _staging(job, stage) | _awake(generation)


def _training(job: PlannedJob, generation: Generation, stage: int) -> Parts:
    return _always(job) | _trainers(job, stage) | _staging(job, stage) | _asleep(job, generation)


def _scoring(job: PlannedJob, generation: Generation, stage: int) -> Parts:
    tokens, cut = job.micro_batch_tokens(job.num_sequences), cut_of(job)
    forward = max(forward_bytes(spec, cut, stage_of(job, spec, stage), tokens) for spec in job.scored.values())
    passing = max(passing_bytes(job, spec, trains=False) for spec in job.scored.values())
    return _training(job, generation, stage) | {"activations": forward, "gathered weights": passing}


def _update(job: PlannedJob, generation: Generation, stage: int, role: str) -> Parts:
    spec, tokens = job.trained[role], job.micro_batch_tokens(job.mini_batch_sequences)
    in_flight = min(micro_batch_count(job), job.layout.pp - stage)  # 1F1B
    saved, beside = training_bytes(spec, cut_of(job), stage_of(job, spec, stage), tokens, in_flight)
    passing = passing_bytes(job, spec, trains=True)
    return _training(job, generation, stage) | {"activations": saved, "temporaries": beside, "gathered weights": passing}


def _reshard(job: PlannedJob, generation: Generation, stage: int) -> Parts:
    asleep = _asleep(job, generation)
    awake = {"vLLM weights": float(generation.weights)} if "vLLM asleep" in asleep else {}
    return _always(job) | _trainers(job, stage) | _staging(job, stage) | asleep | awake


def host_bytes_per_node(job: PlannedJob) -> Parts:
    """Host memory that a node's ranks take beside their programs, in bytes by part (largest stage, for all ranks)."""
    stages, ranks = range(job.layout.pp), min(job.gpus_per_node, job.layout.world_size)
    static = max(sum(_trainers(job, stage).values()) for stage in stages)
    parts: Parts = {}
    if job.config.parallel.offload and job.has_rollouts and not job.on_cpu:
        parts["off-loaded training state"] = static * ranks
    if job.config.rollout.sleep_level == 1 and job.has_rollouts and not job.on_cpu:
        parts["vLLM weights asleep"] = float(generation_memory(job).weights * ranks)
    if job.config.reshard.snapshot == "host" and job.has_rollouts:
        parts["reshard snapshot"] = float(max(static_bytes(job, "actor", s).weights for s in stages) * ranks)
    return parts
