"""Measurements behind `hpc-rl bench NAME`: each module has ``run(quick) -> {"bars": [...], "table": [...]}``."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from hpc_rl.errors import UserError


def benchmark_names() -> list[str]:
    """Every module here with a ``run``."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def run_benchmark(name: str, *, quick: bool) -> dict[str, Any]:
    """Runs one benchmark. Each bar is {name, value, unit, goal, better}, measured in this run.

    Raises: UserError for an unknown name.
    """
    if name not in benchmark_names():
        raise UserError(f"there is no benchmark {name!r}: use one of {', '.join(benchmark_names())}")
    report: dict[str, Any] = importlib.import_module(f"benchmarks.{name}").run(quick=quick)
    return report


def bar(name: str, value: float, unit: str, goal: float, better: str) -> dict[str, Any]:
    """One figure that an issue asks for. ``better``: higher or lower."""
    assert better in ("higher", "lower"), better
    return {"name": name, "value": value, "unit": unit, "goal": goal, "better": better}
