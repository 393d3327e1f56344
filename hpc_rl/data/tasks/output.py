"""Output that is either there as a whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def replace_directory(source: Path, target: Path) -> None:
    """Moves ``source`` to ``target`` in one rename; an older ``target`` is set aside first, then removed.

    Args:
        source: a complete directory on the same filesystem as ``target``.
        target: its final name. A reader sees the old directory, none for an instant, or the new one.
    """
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        os.rename(target, old)
    os.rename(source, target)
    shutil.rmtree(old, ignore_errors=True)
