"""One step's rollouts: assign requests to replicas, generate, reward, journal, and make the whole batch on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hpc_rl.batch import Batch
from hpc_rl.config import Config
from hpc_rl.parallel.collectives import agree, gather_objects, rank
from hpc_rl.reward.score import RewardFunction
from hpc_rl.rollout.protocol import Prompt, Request, Sample
from hpc_rl.rollout.sampler import assign, request_seed, samples_to_batch
from hpc_rl.storage.rollouts import RolloutWriter, finished_samples


def step_requests(prompts: Sequence[Prompt], samples_per_prompt: int, run_seed: int, step: int) -> list[Request]:
    """Every sample of the step, the same on every rank: prompt by prompt, each with its own seed."""
    return [
        Request(prompt, group, sample, request_seed(run_seed, step, prompt.prompt_id, sample))
        for group, prompt in enumerate(prompts)
        for sample in range(samples_per_prompt)
    ]


def collect(
    sampler: Any, reward: RewardFunction, prompts: Sequence[Prompt], config: Config, step: int
) -> tuple[Batch, dict[str, float]]:
    """The step's rollouts with scores.

    Samples that an earlier, killed try of this step left in the journal are taken from there.

    Returns: the whole batch, the same on every rank, sorted by (group, sample); and metrics of generation.
    Raises: RunError on every rank if any rank's reward fails by policy.
    """
    requests = step_requests(prompts, config.rollout.samples_per_prompt, config.seed, step)
    run_dir = Path(config.run.dir)
    kept = finished_samples(run_dir, step) if config.checkpoint.rollouts else {}
    missing = [r for r in requests if (r.group_id, r.sample_id) not in kept]
    mine = assign(missing, sampler.replica, sampler.num_replicas)
    scored: list[tuple[Sample, float]] = []
    error: BaseException | None = None
    writer = RolloutWriter(run_dir, step, rank()) if config.checkpoint.rollouts and sampler.is_leader else None
    samples = sampler.generate(mine)
    if sampler.is_leader:
        try:
            scores = reward.score(samples)
            scored = list(zip(samples, scores, strict=True))
            for sample, score in scored if writer is not None else ():
                assert writer is not None
                writer.append(sample, score)
        except Exception as e:  # told to all ranks below, which wait there
            error = e
        finally:
            if writer is not None:
                writer.close()
    agree(error)
    scored += _kept_samples(kept, requests) if rank() == 0 else []
    batch = Batch.concat(gather_objects(samples_to_batch([s for s, _ in scored], [x for _, x in scored])))
    order = sorted(range(len(batch)), key=lambda i: (int(batch["group_ids"][i]), int(batch["sample_ids"][i])))
    batch = batch.select(order)
    return batch, {
        "response_length_mean": float(batch["response_mask"].sum()) / max(1, len(batch)),
        "truncated_fraction": 1.0 - float(batch["finished"].float().mean()),
        "reward_errors": float(sum(gather_objects(reward.num_errors))),
        "reused_samples": float(len(requests) - len(missing)),
    }
