"""What to change in a configuration that does not fit: overrides to paste, each tried with the same memory model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from hpc_rl.config import Config
from hpc_rl.errors import UserError
from hpc_rl.plan.hardware import GB
from hpc_rl.plan.job import PlannedJob, plan_job
from hpc_rl.plan.memory import memory

Change = tuple[str, ...]  # overrides, or options of `plan`
MAX_NODES = 64  # tried
_SHARES = (80, 70, 60, 50, 45, 40, 35, 30, 25, 20, 15)  # of the GPU for vLLM, in percent
_NUM_SHARES = len(_SHARES)


def suggest(job: PlannedJob) -> list[dict[str, Any]]:
    """Changes that make ``job`` fit: of one key, else of several together; the smallest larger grid; else more nodes.

    Returns: rows of ``change`` (overrides and options to add) and the ``peak_gb`` that follows.
    """
    settings = list(_settings(job))
    found: dict[str, dict[str, Any]] = {}
    for change in settings:
        key = change.partition("=")[0]
        if key not in found and (row := _try(job, (change,))):
            found[key] = row
    together = list(_together(settings))
    rows = list(found.values()) or _first(_try(job, change) for change in together)
    rows += _first(_try(job, change) for change in _grids(job))
    return rows or _first(_thorough(job, [(), *together[-_NUM_SHARES - 1 :]]))


def _first(rows: Iterable[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """The first row that is one, or nothing."""
    return list(islice((row for row in rows if row), 1))


def apply(config: Config, change: Change) -> Config:
    """``config`` with ``section.key=value`` overrides whose values are numbers, booleans or words."""
    new: Any = config
    for override in change:
        key, _, text = override.partition("=")
        section, _, name = key.partition(".")
        old = getattr(getattr(new, section), name)
        kind = type(old) if old is not None else int
        value = text == "true" if kind is bool else kind(text)
        new = replace(new, **{section: replace(getattr(new, section), **{name: value})})
    assert isinstance(new, Config), "replace keeps the class"
    return new


def _try(job: PlannedJob, change: Change, nodes: int | None = None) -> dict[str, Any] | None:
    """The row of a change that fits, or None."""
    try:
        changed = plan_job(apply(job.config, change), job.gpu, nodes or job.nodes, job.gpus_per_node)
    except UserError:
        return None
    result = memory(changed)
    if not result.fits:
        return None
    words = [*change, *([f"--nodes {nodes}"] if nodes not in (None, job.nodes) else [])]
    return {"change": " ".join(words), "peak_gb": round(result.peak.nbytes / GB, 2)}


def _settings(job: PlannedJob) -> Iterator[str]:
    """Changes of one key that cost little first."""
    config = job.config
    if not job.has_rollouts:
        yield from _training_settings(job)
        return
    if config.rollout.sleep_level == 0:
        yield "rollout.sleep_level=2"
    if config.reshard.snapshot == "gpu":
        yield "reshard.snapshot=host"
    if not config.parallel.offload:
        yield "parallel.offload=true"
    yield from _training_settings(job)
    if config.rollout.kv_cache_bytes is not None:
        for part in (2, 4, 8):
            yield f"rollout.kv_cache_bytes={config.rollout.kv_cache_bytes // part}"
    for percent in _SHARES:
        if percent / 100 != config.rollout.gpu_memory_utilization:
            yield f"rollout.gpu_memory_utilization={percent / 100:g}"
    for tp in (2, 4, 8):
        if tp > job.generation_tp and job.gpus_per_node % tp == 0:
            yield f"rollout.tp={tp}"


def _training_settings(job: PlannedJob) -> Iterator[str]:
    """Those that concern training."""
    budget = job.config.algorithm.micro_batch_tokens
    while budget > job.longest:
        budget = max(job.longest, budget // 2)
        yield f"algorithm.micro_batch_tokens={budget}"
    if job.config.parallel.recompute == "none":
        yield "parallel.recompute=full"


def _together(settings: list[str]) -> Iterator[Change]:
    """One setting more each time, the last value of a key standing for it; each with every share of the GPU."""
    shares = [s for s in settings if s.startswith("rollout.gpu_memory_utilization")]
    order = list({s.partition("=")[0]: s for s in settings if s not in shares}.values())
    for count in range(1, len(order) + 1):
        yield tuple(order[:count])
        for share in shares:
            yield (*order[:count], share)


def _grids(job: PlannedJob) -> Iterator[Change]:
    """Larger training grids on the same GPUs, TP inside a node, smallest first."""
    layout, rollout = job.layout, job.config.rollout
    now = layout.tp * layout.pp
    grids = sorted(((tp, pp) for tp in (1, 2, 4, 8, 16) for pp in (1, 2, 4, 8, 16)), key=lambda g: (g[0] * g[1], g[1]))
    for tp, pp in grids:
        if tp * pp <= now or job.gpus_per_node % tp or layout.world_size % (tp * pp * layout.cp):
            continue
        change = [f"parallel.tp={tp}"] if tp != layout.tp else []
        change += [f"parallel.pp={pp}"] if pp != layout.pp else []
        if tp != layout.tp and rollout.tp is None and job.has_rollouts:  # what follows parallel.tp otherwise
            change.append(f"rollout.tp={job.generation_tp}")
        yield tuple(change)


def _thorough(job: PlannedJob, extras: list[Change]) -> Iterator[dict[str, Any] | None]:
    """Every grid with every one of ``extras``: on the nodes there are, then on twice as many, and so on."""
    nodes = job.nodes
    while nodes <= max(MAX_NODES, 2 * job.nodes):
        wider = replace(job, nodes=nodes, layout=replace(job.layout, world_size=nodes * job.gpus_per_node, dp=0))
        for grid in ((), *_grids(wider)):
            yield from (_try(job, (*grid, *extra), nodes) for extra in extras)
        nodes *= 2
