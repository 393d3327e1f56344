"""The run directory: an earlier run in it is set aside, what a new one starts with is written, a checkpoint is found.

A run directory holds ``config.yaml``, ``metrics.jsonl``, ``checkpoints/``, ``rollouts/``, ``logs/`` and ``model/`` (the
model's config.json and tokenizer, without weights). Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_rl.config import Config
from hpc_rl.config_check import read_hf_config_file
from hpc_rl.config_load import dump_config
from hpc_rl.data.tokenizer import tokenizer_path
from hpc_rl.errors import UserError
from hpc_rl.tensors.canonical import ModelSpec

RESULTS = ("metrics.jsonl", "checkpoints", "rollouts")  # any of them: a run was here
OTHERS = ("model", "failure.json", "slices.json")
_CHECKPOINT = re.compile(r"checkpoint_(\d+)_complete")


def set_aside(config: Config, *, keep_logs: bool = False) -> str | None:
    """Moves an earlier run in ``run.dir`` to ``run.dir/previous-N``, so that nothing of it mixes with the new one.

    Nothing is moved when that run is to go on: with ``resume=auto``, or from one of its own checkpoints. Call it on one
    rank, before anything is written; a second call finds nothing to move.

    Args:
        config: of the run that starts.
        keep_logs: a launcher writes to ``logs/`` already, so only what the run itself kept there is moved.

    Returns: a line for the user, or None if nothing was there.
    """
    run_dir = Path(config.run.dir)
    if config.resume == "auto" or is_inside(config.resume, run_dir / "checkpoints"):
        return None
    if not any(_holds_something(run_dir / name) for name in RESULTS):
        return None
    moved = [run_dir / name for name in (*RESULTS, *OTHERS, "logs/tensorboard" if keep_logs else "logs")]
    target = _next_previous(run_dir)
    target.mkdir()
    for path in moved:
        if path.exists():
            (target / path.relative_to(run_dir)).parent.mkdir(exist_ok=True)
            os.rename(path, target / path.relative_to(run_dir))
    if (run_dir / "config.yaml").exists():  # a copy: it may be what the new run is started from
        shutil.copyfile(run_dir / "config.yaml", target / "config.yaml")
    return f"Set aside: the run that was in {run_dir} is now in {target} (resume=auto would have gone on with it)"


def is_inside(resume: str, directory: Path) -> bool:
    """Whether ``resume`` names something in ``directory``."""
    return resume not in ("none", "auto") and directory.resolve() in Path(resume).resolve().parents


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


def _next_previous(run_dir: Path) -> Path:
    taken = [int(path.name.removeprefix("previous-")) for path in run_dir.glob("previous-*") if path.name[9:].isdigit()]
    return run_dir / f"previous-{max(taken, default=0) + 1}"


def write_start(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Writes what a run starts with: ``config.yaml``, ``logs/``, and ``model/`` with config.json and the tokenizer.

    A critic of another model has its config.json in ``model/critic/``.
    """
    from hpc_rl.tensors.hf_export import copy_tokenizer  # imports torch

    run_dir = Path(config.run.dir)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(dump_config(config))
    model = run_dir / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(dict(hf_config), indent=2) + "\n")
    if config.model.critic_path not in (None, config.model.path):
        critic_config = read_hf_config_file("model.critic_path", str(config.model.critic_path))
        (model / "critic").mkdir(exist_ok=True)
        (model / "critic" / "config.json").write_text(json.dumps(critic_config, indent=2) + "\n")
    _, tokenizer = tokenizer_path(config)
    if Path(tokenizer).resolve() != model.resolve():
        copy_tokenizer(tokenizer, model)


def model_line(config: Config, hf_config: Mapping[str, Any], world_size: int, device: str) -> str:
    """Model, ranks and layout, device and run directory, on one line."""
    spec, p = ModelSpec.from_hf_config(hf_config), config.parallel
    dp = world_size // (p.tp * p.pp * p.cp)
    engine = "" if p.engine == "megatron" else f"{p.engine}, "
    layout = f"{world_size} rank{'s' if world_size > 1 else ''}: {engine}tp {p.tp}, pp {p.pp}, dp {dp}"
    return " | ".join(
        (
            f"Model: {spec.model_type} {human_count(spec.num_params)} parameters",
            layout,
            f"generation tp {config.rollout.tp or p.tp}",
            f"device {device}",
            f"run directory {config.run.dir}",
        )
    )


def human_count(number: int) -> str:
    """``0.4 M``, ``135 M``, ``1.5 B``."""
    value, unit = (number / 1e9, "B") if number >= 1e9 else (number / 1e6, "M")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"


def resume_line(config: Config, found: Path | None) -> str | None:
    """What ``resume`` led to, for the user; None for a run that was to start fresh."""
    if config.resume == "none":
        return None
    if found is None:
        return f"Resume: {config.run.dir} holds no checkpoint yet, so the run starts at step 1"
    here = Path.cwd()
    return f"Resume: going on from {found.relative_to(here) if found.is_relative_to(here) else found}"


def find_run_checkpoint(path: str | Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the newest of a run directory or of its ``checkpoints/``.

    Raises: UserError if there is none.
    """
    path = Path(path)
    if (path / "manifest.json").is_file():
        return path
    if not path.is_dir():
        raise UserError(f"{path}: no such directory (seen from {Path.cwd()}): give a run directory or a checkpoint")
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = {int(match[1]): entry for entry in root.iterdir() if (match := _CHECKPOINT.fullmatch(entry.name))}
    if not found:
        raise UserError(f"{path}: holds no checkpoint_STEP_complete: give a run directory or a checkpoint")
    return found[max(found)]


def say(line: str | None) -> None:
    """A line for the user, of rank 0."""
    if line is not None:
        print(line, flush=True)
