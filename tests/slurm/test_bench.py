"""`hpc-rl bench slurm`: it is among the benchmarks, and says what it needs."""

from __future__ import annotations

import pytest

from benchmarks import benchmark_names, run_benchmark
from hpc_rl.errors import UserError


def test_it_is_there_and_needs_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "slurm" in benchmark_names() and "faults" not in benchmark_names()
    monkeypatch.setattr("tests.launch.cluster.PATH", "/nowhere")
    with pytest.raises(UserError, match="not installed: munged, .*apt-get install slurm-wlm"):
        run_benchmark("slurm", quick=True)
