"""Lustre: new files of the checkpoint directory are striped over many storage targets."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

logger = logging.getLogger(__name__)


def file_system(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that ``path`` lies on (``lustre``, ``ext4``, ...), from a text like /proc/mounts."""
    best = ("", "unknown")
    for line in (mounts if mounts is not None else Path("/proc/mounts").read_text()).splitlines():
        _, where, kind, *_ = line.split(" ")
        where = where.replace("\\040", " ")  # a blank, as the kernel writes it
        if Path(where) in [path, *path.parents] and len(where) >= len(best[0]):
            best = (where, kind)
    return best[1]


def setstripe_command(path: Path, stripe_count: int, stripe_bytes: int) -> list[str]:
    """The command that sets what files made in directory ``path`` from now on get. ``stripe_count`` -1: all targets."""
    return ["lfs", "setstripe", "-c", str(stripe_count), "-S", str(-(-stripe_bytes // 65536) * 65536), str(path)]


def stripe(path: Path, stripe_count: int, stripe_bytes: int) -> bool:
    """Stripes a directory on Lustre where ``lfs`` exists. Returns whether it did; a failure is a warning only."""
    if file_system(path.resolve()) != "lustre" or shutil.which("lfs") is None:
        return False
    command = setstripe_command(path, stripe_count, stripe_bytes)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        logger.warning("%s failed, so checkpoints are not striped: %s", " ".join(command), result.stderr.strip())
    return result.returncode == 0
