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
    return subprocess.run(
        [sys.executable, "-m", "hpc_rl.cli", *map(str, args)],
        cwd=cwd,
        env={**python_env(python_path), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def python_env(python_path: Path | None = None) -> dict[str, str]:
    """This process's environment, for a child that imports this checkout."""
    paths = [str(python_path)] if python_path else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)]), "OMP_NUM_THREADS": "1"}
