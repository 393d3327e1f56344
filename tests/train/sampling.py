"""Runs whose sampling is not one plain round: greedy baselines, refilled groups, left-out prompts, stale weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from hpc_rl.batch import Batch
from hpc_rl.config import Config
from hpc_rl.parallel.collectives import gather_objects
from hpc_rl.rollout.collect import collect_step
from hpc_rl.rollout.protocol import Request
from hpc_rl.train import RLTrainer


def write_prompts(path: Path, count: int) -> Path:
    """The first ``count`` additions with one-digit tails: epochs pass quickly."""
    lines = [{"prompt_id": i, "text": f"{11 + i}+{20 + 3 * i}=", "answer": str(31 + 4 * i)} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run_steps(config: Config, last: int) -> dict[str, Any]:
    """Trains up to step ``last``: metrics and prompts of each step, final weights, prompt cursor."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = RLTrainer(config)
    batches: list[Batch] = []
    score = trainer._score

    def keep(batch: Batch) -> Batch:
        batches.append(batch)
        return score(batch)

    trainer._score = keep  # type: ignore[method-assign]
    trainer.train(last - trainer.steps_done)
    cursor = trainer.job.prompts.state() | trainer.curriculum.state()
    weights = {name: tensor.clone() for name, tensor in trainer.job.actor.shard_map()[1].items()}
    trainer.close()
    return {"batches": batches, "cursor": cursor, "weights": weights}


def collected(config: Config) -> dict[str, Any]:
    """The first step's rollouts, twice: drawn, and as a run sees them that was killed after them."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = RLTrainer(config)
    job, out = trainer.job, []
    start = job.prompts.state()
    for lost in (None, "rank_00000.h5"):  # the second time one rank's journal is gone
        if lost is not None and job.parallel.rank == 0:
            (Path(config.run.dir) / "rollouts" / "step_000001" / lost).unlink()
        for _ in range(1 if lost is None else 2):
            job.prompts.load_state(start)
            gather_objects(None)  # all wait for the file to be gone
            out.append(collect_step(job.sampler, job.reward, trainer.curriculum, config, 1))
    prompts = {p.prompt_id: p for p in job.prompts._set}
    ids = sorted(set(out[0][0]["prompt_ids"].tolist()))
    greedy = job.sampler.generate([Request(prompts[i], 0, 0, 5) for i in ids], temperature=0)
    trainer.close()
    scores = dict(zip(ids, job.reward.score(greedy), strict=True))
    return {"batches": [b for b, _ in out], "metrics": [m for _, m in out], "greedy": scores}


def step_without_a_sync(config: Config) -> dict[str, float]:
    """Two steps between which the sampler keeps its weights; the second one's metrics."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = RLTrainer(config)
    sync, trainer._sync_weights = trainer._sync_weights, dict  # type: ignore[method-assign,assignment]
    trainer.step(1)
    try:
        return trainer.step(2)
    finally:
        trainer._sync_weights = sync  # type: ignore[method-assign]
        trainer.close()


def same(a: Batch, b: Batch) -> bool:
    """Equal bit by bit, all arrays."""
    arrays = {**a.tokens, **a.sequences}
    others = {**b.tokens, **b.sequences}
    return arrays.keys() == others.keys() and all(torch.equal(others[k], v) for k, v in arrays.items())
