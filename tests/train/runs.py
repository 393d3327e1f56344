"""Whole training runs on forked ranks, and what is read off them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from hpc_rl.build import build
from hpc_rl.config import Config
from hpc_rl.config_load import load_config
from hpc_rl.parallel.collectives import gather_objects
from hpc_rl.rollout.collect import collect
from hpc_rl.train import RLTrainer

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def quickstart(**overrides: Any) -> Config:
    """The quickstart, smaller, in a directory of its own."""
    values = {
        "run.dir": tempfile.mkdtemp(prefix="run"),
        "data.prompts_per_step": 16,
        "algorithm.mini_batches": 2,
        "launch.device": "cpu",
        **{k.replace("__", "."): v for k, v in overrides.items()},
    }
    return load_config(QUICKSTART, [f"{k}={v}" for k, v in values.items()])


def train(config: Config, steps: int) -> list[dict[str, float]]:
    """Metrics of each step."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = RLTrainer(config)
    metrics = [trainer.step(i + 1) for i in range(steps)]
    trainer.close()
    return metrics


def mismatch(config: Config) -> list[float]:
    """max |log-prob of vLLM - log-prob of the trainer| over one step's samples, before and after an update."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = RLTrainer(config)
    worst = [_mismatch_now(trainer, 7)]
    trainer.step(1)
    worst.append(_mismatch_now(trainer, 8))
    trainer.close()
    return worst


def _mismatch_now(trainer: RLTrainer, step: int) -> float:
    job = trainer.job
    batch, _ = collect(job.sampler, job.reward, job.prompts.next_step(), trainer.config, step)
    trained = job.actor.forward(batch)["log_probs"]
    mask = batch["response_mask"]
    assert int(mask.sum()) > 40, "the samples are empty"
    return float((trained - batch["rollout_log_probs"])[mask].abs().max())


def stale(config: Config) -> float:
    """As `mismatch`, but the sampler misses one update: what the comparison says when the weights are old."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = RLTrainer(config)
    sync, trainer._sync_weights = trainer._sync_weights, dict  # type: ignore[method-assign,assignment]
    trainer.step(1)
    trainer._sync_weights = sync  # type: ignore[method-assign]
    worst = _mismatch_now(trainer, 2)
    trainer.close()
    return worst


def same_batch_everywhere(config: Config) -> bool:
    """Every rank holds the same whole batch, bit by bit."""
    os.environ["HPC_RL_LOCAL"] = "1"
    job = build(config)
    job.resharder.sync(0)
    job.sampler.set_version(0)
    batch, _ = collect(job.sampler, job.reward, job.prompts.next_step(), config, 1)
    everywhere = gather_objects({**batch.tokens, **batch.sequences})
    same = all(torch.equal(other[k], v) for other in everywhere for k, v in everywhere[0].items())
    job.close()
    return same
