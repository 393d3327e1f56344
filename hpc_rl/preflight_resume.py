"""The checkpoint to resume: is it there, whole by its sizes, and of this model? Reads no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_rl.algo.registry import algorithm, objective
from hpc_rl.config import Config
from hpc_rl.data.tokenizer import tokenizer_path
from hpc_rl.errors import UserError
from hpc_rl.tensors.canonical import EMBEDDING


def check_resume(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that is missing, cut short, or of another vocabulary or width than the model.

    Args:
        config: the configuration; ``resume=auto`` looks at the newest whole checkpoint, if there is any.
        hf_config: of the actor.

    Raises:
        UserError: one line with the value, the rule and the fix.
    """
    path = checkpoint_to_resume(config)
    if path is None:
        return
    from hpc_rl.storage import access, manifest  # h5py: only a run that resumes needs it

    stored = access.load_index(path, manifest.read(path)).specs
    embedding = stored.get(f"actor/param/{EMBEDDING}")
    expected = (hf_config["vocab_size"], hf_config["hidden_size"])
    if embedding is not None and tuple(embedding.shape) != expected:
        raise UserError(
            f"resume = {path}: its {EMBEDDING} is {list(embedding.shape)}, but the model has [vocab_size, hidden_size] "
            f"= {list(expected)}: resume with the model that it was saved from, or start with resume=none"
        )


def check_tokenizer(config: Config) -> None:
    """Refuses a checkpoint that was saved with another tokenizer: its tokens would mean other texts. Raises UserError."""
    path = checkpoint_to_resume(config)
    if path is None:
        return
    from hpc_rl.storage import identity, manifest

    digest = identity.tokenizer_digest(tokenizer_path(config)[1])
    identity.check_identity(manifest.read(path).extra, path, tokenizer=digest)


def check_trained(config: Config) -> None:
    """Refuses a checkpoint without what this run trains: another role, or optimizer states of another model.dtype.

    Raises:
        UserError: one line with the value, the rule and the fix.
    """
    path = checkpoint_to_resume(config)
    if path is None:
        return
    from hpc_rl.storage import access, manifest

    stored, goal = access.load_index(path, manifest.read(path)).specs, objective(config.algorithm.name)
    start = "start a new run with model.path at its weights (hpc-rl export)"
    roles = ["actor"] if goal is None else [goal.role]
    if goal is None and algorithm(config.algorithm.name).needs_critic:
        roles.append("critic")
    for role in roles:
        if not any(name.startswith(f"{role}/param/") for name in stored):
            raise UserError(
                f"resume = {path}: holds no {role}, which algorithm.name = {config.algorithm.name} trains: set the "
                f"algorithm.name that it was saved with, or {start}"
            )
        # Only with 16-bit weights are there float32 ones beside them.
        dtype = "bfloat16" if any(name.startswith(f"{role}/main/") for name in stored) else "float32"
        if dtype != config.model.dtype:
            raise UserError(
                f"resume = {path}: saved with model.dtype = {dtype}, but this run has {config.model.dtype}: set "
                f"model.dtype={dtype}, or {start}"
            )


def checkpoint_to_resume(config: Config) -> Path | None:
    """The checkpoint that ``resume`` names, whole by its sizes; None for a fresh start. Raises UserError."""
    if config.resume == "none":
        return None
    from hpc_rl.storage import manifest

    if config.resume == "auto":
        for _, path in reversed(manifest.complete(Path(config.run.dir) / "checkpoints")):
            try:
                manifest.check(path)
            except manifest.DamagedCheckpoint:
                continue  # the run says so when it skips it
            return path
        return None
    path = Path(config.resume)
    if not path.is_dir():
        raise UserError(
            f"resume = {config.resume}: no such directory (seen from {Path.cwd()}), but must be none, auto or a "
            "checkpoint directory: correct it, or use resume=auto"
        )
    if not (path / "manifest.json").is_file():
        raise UserError(
            f"resume = {config.resume}: has no manifest.json, so it is no whole checkpoint: give a "
            "checkpoint_STEP_complete directory, or use resume=auto"
        )
    manifest.check(path)
    return path
