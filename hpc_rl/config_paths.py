"""Which file a path in a configuration means.

Relative paths of inputs mean the current directory first. One that a *file* gives and that is not there is looked for
beside that file, then in each directory above it up to the root of its repository (the first that holds ``.git``,
``pyproject.toml`` or ``setup.py``), and made absolute: a checked-in config runs from anywhere. Overrides and paths of
outputs mean the current directory only. ``~`` and ``$NAME`` are expanded in all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_rl.errors import UserError

INPUT_PATHS = (
    "model.path",
    "model.tokenizer",
    "model.critic_path",
    "model.reference_path",
    "data.prompts",
    "data.eval_prompts",
)
OUTPUT_PATHS = ("run.dir", "resume")
_ROOT_MARKS = (".git", "pyproject.toml", "setup.py")


def map_paths(value: Any, change: Callable[[str], str]) -> Any:
    """A path, or each of a list of paths, changed; any other value as it is (the type check refuses it later)."""
    if isinstance(value, list):
        return [map_paths(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def expand(key: str, text: str) -> str:
    """``~`` and ``$NAME`` expanded. Raises UserError for a variable that is not set."""
    expanded = os.path.expanduser(os.path.expandvars(text))
    unset = re.search(r"\$\{?(\w+)", expanded)
    if unset:
        raise UserError(
            f"{key} = {text!r}: the environment variable {unset[1]} is not set: export it, or write the path"
        )
    return expanded


def find_input(text: str, config_dir: Path) -> str:
    """The path of an input that a config file in ``config_dir`` gives: as it is if found from here or nowhere."""
    if os.path.isabs(text) or os.path.exists(text):
        return text
    for directory in [config_dir.resolve(), *config_dir.resolve().parents]:
        if (directory / text).exists():
            return str(directory / text)
        if any((directory / mark).exists() for mark in _ROOT_MARKS):
            break
    return text
