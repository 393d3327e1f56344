"""``parallel: auto``: the layout that fits and is estimated fastest, found by trying all of them on the memory model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpc_rl.config import Config
from hpc_rl.errors import UserError
from hpc_rl.plan.changes import Change, apply
from hpc_rl.plan.estimate import estimate
from hpc_rl.plan.fit import fit
from hpc_rl.plan.hardware import GB, Gpu
from hpc_rl.plan.job import PlannedJob, plan_job
from hpc_rl.plan.memory import memory

SIZES = (1, 2, 4, 8, 16, 32, 64)
SAME = 1.02  # times the fastest: an estimate knows no better


@dataclass(frozen=True)
class Choice:
    """A layout that fits. ``step_s``: estimated seconds of a step without its reshard, None where rates are unknown."""

    change: Change  # overrides to add
    config: Config
    peak_gb: float
    step_s: float | None
    dp: int

    @property
    def engine(self) -> str:
        """What spreads the model, in words."""
        p = self.config.parallel
        if p.tp * p.pp * p.cp * p.ep == 1:
            return "data parallel, optimizer states sharded (ZeRO-1)" if self.dp > 1 else "one GPU"
        return f"Megatron TP{p.tp} PP{p.pp} DP{self.dp}" + (", optimizer states sharded over DP" if self.dp > 1 else "")

    def row(self) -> dict[str, object]:
        """For a table."""
        step = None if self.step_s is None else round(self.step_s, 2)
        return {
            "change": " ".join(self.change), "engine": self.engine, "peak_gb": round(self.peak_gb, 1), "step_seconds": step,
        }  # fmt: skip


def choices(config: Config, gpu: Gpu, nodes: int, gpus_per_node: int) -> list[Choice]:
    """All layouts that fit, best first: by estimated seconds of a step; of those as good as the fastest, the least cut.

    tp, pp, recompute, offload and, unless the config sets it, rollout.tp are tried; cp and ep stay as given.

    Raises:
        UserError: nothing fits, with the reason of the nearest miss; or a config that no layout can make right.
    """
    base = apply(config, ("parallel.auto=false",))
    found, nearest, error = [], None, None
    for change in _candidates(base, nodes, gpus_per_node):
        try:
            job = plan_job(apply(base, change), gpu, nodes, gpus_per_node)
        except UserError as wrong:
            error = error or wrong  # of the least cut layout
            continue
        result = memory(job)
        if result.fits:
            seconds = estimate(job, result.generation, 0.0)
            step_s = None if seconds is None else float(seconds["step"])
            found.append(Choice(change, job.config, result.peak.nbytes / GB, step_s, job.layout.dp))
        elif nearest is None or result.peak.nbytes < nearest[0]:
            nearest = (result.peak.nbytes, change)
    if found:
        fastest = min(choice.step_s or 0.0 for choice in found)
        return sorted(found, key=lambda choice: _rank(choice, fastest))
    if nearest is None:
        assert error is not None, "one candidate there always is"
        raise error
    raise UserError(
        f"parallel = auto: no layout fits on {nodes} x {gpus_per_node} {gpu.name}; the nearest, {' '.join(nearest[1])}, "
        f"takes {nearest[0] / GB:.1f} GB of {gpu.memory_gb} GB: take more nodes (hpc-rl plan --nodes N)"
    )


def chosen(config: Config, gpu: Gpu, nodes: int, gpus_per_node: int) -> Config:
    """``config`` as `fit` leaves it, with ``parallel.auto`` the best of `choices`. Raises UserError."""
    config = fit(config)
    return choices(config, gpu, nodes, gpus_per_node)[0].config if config.parallel.auto else config


def _rank(choice: Choice, fastest: float) -> tuple[float, int, int, int, int, float]:
    p = choice.config.parallel
    slow = (p.recompute == "full") + p.offload
    step_s = max(choice.step_s or 0.0, SAME * fastest)
    return (step_s, p.tp * p.pp, p.pp, choice.config.rollout.tp or 1, slow, choice.peak_gb)


def _candidates(config: Config, nodes: int, gpus_per_node: int) -> Iterator[Change]:
    """The least cut and least slowed first."""
    world = nodes * gpus_per_node
    grids = [
        (tp, pp) for tp in SIZES for pp in SIZES if gpus_per_node % tp == 0 and world % (tp * pp * config.parallel.cp) == 0
    ]
    for tp, pp in sorted(grids, key=lambda g: (g[0] * g[1], g[1])):
        for generation_tp in [config.rollout.tp] if config.rollout.tp else [n for n in SIZES if gpus_per_node % n == 0]:
            for offload in ("false", "true"):
                for recompute in ("none", "full"):
                    yield (
                        f"parallel.tp={tp}", f"parallel.pp={pp}", f"rollout.tp={generation_tp}",
                        f"parallel.offload={offload}", f"parallel.recompute={recompute}",
                    )  # fmt: skip


def job_of(config: Config, gpu: Gpu, nodes: int, gpus_per_node: int) -> tuple[PlannedJob, list[Choice]]:
    """The planned job, and with ``parallel.auto`` what else would do, best first."""
    if not config.parallel.auto:
        return plan_job(config, gpu, nodes, gpus_per_node), []
    rows = choices(config, gpu, nodes, gpus_per_node)
    return plan_job(rows[0].config, gpu, nodes, gpus_per_node), rows
