"""What ranks do in whole runs: train, lose the lock on the way, say where they went on."""

from __future__ import annotations

import io
import os
import random
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_rl import rng
from hpc_rl.config import Config
from hpc_rl.errors import RunError, UserError
from hpc_rl.supervised import SupervisedTrainer


def train_without_lock(config: Config, lost_in: int) -> tuple[str, int]:
    """Trains; in step ``lost_in`` rank 0 loses the lock. (error, steps done) of this rank."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = SupervisedTrainer(config)
    original = trainer.step

    def unlucky(step: int) -> dict[str, float]:
        if step == lost_in and os.environ["RANK"] == "0":
            (Path(config.run.dir) / "lock").unlink()
        return original(step)

    trainer.step = unlucky  # type: ignore[method-assign]
    try:
        trainer.train()
    except RunError as error:
        trainer.close()
        return str(error), trainer.steps_done
    return "", trainer.steps_done


def resume(config: Config) -> tuple[str, int, list[float]]:
    """(what this rank printed at its start, step that it begins after, its weights)."""
    os.environ["HPC_RL_LOCAL"] = "1"
    printed = io.StringIO()
    with redirect_stdout(printed):
        trainer = SupervisedTrainer(config)
    began_after, weights = trainer.steps_done, weights_of(trainer)
    trainer.close()
    return printed.getvalue(), began_after, weights


def generators(config: Config, draws: int) -> dict[str, bytes]:
    """This rank's generators at the end of a run whose every step draws ``draws`` numbers of each."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = SupervisedTrainer(config)
    original = trainer.step

    def drawing(step: int) -> dict[str, float]:
        metrics = original(step)
        for _ in range(draws):
            torch.rand(()), np.random.rand(), random.random()
        return metrics

    trainer.step = drawing  # type: ignore[method-assign]
    trainer.train()
    trainer.close()
    return {name: state.tobytes() for name, state in rng.capture().items()}


def refusal(config: Config) -> str:
    """Why the run does not start."""
    os.environ["HPC_RL_LOCAL"] = "1"
    try:
        SupervisedTrainer(config)
    except UserError as error:
        return str(error)
    return ""


def overlapping_saves(config: Config) -> list[list[float]]:
    """The weights after each step of a run that saves at every step, with a copy that is late."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = SupervisedTrainer(config)
    seen: list[list[float]] = []
    original = trainer.step

    def noted(step: int) -> dict[str, float]:
        metrics = original(step)
        seen.append(weights_of(trainer))
        return metrics

    trainer.step = noted  # type: ignore[method-assign]
    trainer.train()
    trainer.close()
    return seen


def weights_of(trainer: Any) -> list[float]:
    tensors = trainer.job.model.shard_map()[1]
    return [float(tensors[name].double().sum()) for name in sorted(tensors)]
