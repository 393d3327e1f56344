"""Runs the real `hpc-rl` command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def hpc_rl(
    *args: str | Path,
    cwd: Path,
    env: dict[str, str] | None = None,
    python_path: Path | None = None,
    timeout_s: float = 300,
) -> subprocess.CompletedProcess[str]:
    """``hpc-rl ARGS`` in ``cwd``, with ``python_path`` before everything else that can be imported."""
    paths = [str(python_path)] if python_path else []
    variables = {"PYTHONPATH": os.pathsep.join([*paths, str(ROOT)]), "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "hpc_rl.cli", *map(str, args)],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
