"""Runs that die by SIGKILL in a given phase, on a given rank, and the run that goes on from what they left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpc_rl.config import Config
from hpc_rl.parallel.collectives import rank
from hpc_rl.rollout import collect
from hpc_rl.train import RLTrainer

PHASES = ("generation", "score", "critic", "actor", "reshard", "save")


def run_to_end(config: Config) -> dict[str, Any]:
    """Trains what is left of the run; final weights and the step it began after."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = RLTrainer(config)
    began_after = trainer.steps_done
    trainer.train()
    weights = {k: v.clone().numpy() for k, v in trainer.job.actor.shard_map()[1].items()}
    trainer.close()
    return {"began_after": began_after, "weights": weights}


def run_and_die(config: Config, phase: str, step: int, victim: int) -> None:
    """Trains until ``victim`` is in ``phase`` of ``step``, where it is killed."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = RLTrainer(config)
    job = trainer.job

    def deadly(work: Callable[..., Any], calls: int = 1) -> Callable[..., Any]:
        """``work``, whose process dies at the calls'th call in that step."""
        seen = 0

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            if trainer.steps_done in (step - 1, step) and rank() == victim:
                seen += 1
                if seen == calls:
                    os.kill(os.getpid(), signal.SIGKILL)
            return work(*args, **kwargs)

        return call

    assert job.critic is not None
    if phase == "generation":  # in the middle of the step's samples
        collect.Judge.__call__ = deadly(collect.Judge.__call__, 9 + 16 * (step - 1))  # type: ignore[method-assign]
    elif phase == "score":
        job.actor.forward = deadly(job.actor.forward)  # type: ignore[method-assign]
    elif phase == "critic":
        job.critic.train_batch = deadly(job.critic.train_batch)  # type: ignore[method-assign]
    elif phase == "actor":
        job.actor.train_batch = deadly(job.actor.train_batch, 2)  # type: ignore[method-assign]
    elif phase == "reshard":
        job.resharder.sync = deadly(job.resharder.sync, 2)  # type: ignore[method-assign]
    else:  # the save is in flight: the call after it has begun
        job.checkpointer.poll = deadly(job.checkpointer.poll)  # type: ignore[method-assign]
    trainer.train()


def rollouts(run_dir: str | Path) -> dict[tuple[int, int, int], tuple[list[int], float]]:
    """(step, prompt, sample) -> (ids of the whole sequence, score), of all journals of a run."""
    found: dict[tuple[int, int, int], tuple[list[int], float]] = {}
    for path in sorted(Path(run_dir).glob("rollouts/step_*/rank_*.h5")):
        with h5py.File(path, "r") as file:
            begin, step = 0, int(path.parent.name[5:])
            for row in np.asarray(file["sequences"]):
                ids = np.asarray(file["input_ids"][begin : int(row["token_end"])]).tolist()
                found[step, int(row["prompt_ids"]), int(row["sample_ids"])] = (ids, float(row["scores"]))
                begin = int(row["token_end"])
    return found


def stop_by_signal(config: Config, number: int, victim: int) -> tuple[str | None, int]:
    """One rank is told to stop in its first step; (signal that all ranks agreed on, steps done)."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = RLTrainer(config)
    if rank() == victim:
        os.kill(os.getpid(), number)
    trainer.train()
    result = (trainer.stopped_by.name if trainer.stopped_by else None, trainer.steps_done)
    trainer.close()
    return result
