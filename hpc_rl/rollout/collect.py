"""One step's rollouts: share out the requests, generate, reward, journal, and put the whole batch on every rank."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hpc_rl.batch import Batch
from hpc_rl.config import Config
from hpc_rl.parallel.collectives import agree, gather_objects, rank, world_size
from hpc_rl.parallel.layout import replica_of
from hpc_rl.reward.score import RewardFunction
from hpc_rl.rollout.protocol import Prompt, Request, RolloutEngine, Sample
from hpc_rl.rollout.sampler import assign, request_seed, samples_to_batch, sort_batch
from hpc_rl.storage.rollout_reader import Record, finished_samples
from hpc_rl.storage.rollouts import RolloutWriter


def collect(
    sampler: RolloutEngine, reward: RewardFunction, prompts: Sequence[Prompt], config: Config, step: int
) -> tuple[Batch, dict[str, float]]:
    """The step's rollouts with their scores.

    Samples that an earlier, killed try of this step left in the journal are taken from there; a restart draws only
    what is missing, and the batch is the same.

    Returns: the whole batch, equal on every rank, sorted by (group, sample); metrics of generation.
    Raises: RunError on every rank if any rank's reward fails by policy.
    """
    requests = step_requests(prompts, config.rollout.samples_per_prompt, config.seed, step)
    kept = _kept(requests, config, step) if config.checkpoint.rollouts else {}
    missing = [r for r in requests if (r.group_id, r.sample_id) not in kept]
    gen_tp = config.rollout.tp or config.parallel.tp
    replica, place = replica_of(rank(), gen_tp)
    samples = sampler.generate(assign(missing, replica, world_size() // gen_tp))
    scores: list[float] = []
    error: BaseException | None = None
    if place == 0:
        try:
            scores = reward.score(samples)
            if config.checkpoint.rollouts:
                with RolloutWriter(config.run.dir, step, rank(), rollout_key(config)) as writer:
                    for sample, score in zip(samples, scores, strict=True):
                        writer.append(sample, score)
        except Exception as caught:  # the other ranks wait in `agree` to hear of it
            error = caught
    agree(error)
    parts = gather_objects(samples_to_batch(samples, scores) if place == 0 else None)
    batches = [part for part in parts if part is not None]
    if kept:
        batches.append(samples_to_batch([s for s, _ in kept.values()], [score for _, score in kept.values()]))
    batch = sort_batch(Batch.concat(batches))
    assert len(batch) == len(requests), f"{len(requests)} samples were asked for, {len(batch)} are there"
    batch = batch.with_tokens(token_level_scores=_token_level_scores(batch))
    return batch, {"reward_errors": float(sum(gather_objects(reward.num_errors))), "reused_samples": float(len(kept))}


def step_requests(prompts: Sequence[Prompt], samples_per_prompt: int, run_seed: int, step: int) -> list[Request]:
    """Every sample of the step, the same on every rank: prompt by prompt, each with its own seed.

    A prompt that occurs again in the step (at the border of two epochs) goes on counting its samples, so that no two
    of them share a seed.
    """
    requests: list[Request] = []
    seen: Counter[int] = Counter()
    for group_id, prompt in enumerate(prompts):
        first = seen[prompt.prompt_id] * samples_per_prompt
        seen[prompt.prompt_id] += 1
        for sample_id in range(first, first + samples_per_prompt):
            seed = request_seed(run_seed, step, prompt.prompt_id, sample_id)
            requests.append(Request(prompt, group_id, sample_id, seed))
    return requests


def rollout_key(config: Config) -> str:
    """What a step's rollouts depend on, beside the step: a digest of the run's settings."""
    parts = (config.seed, config.model, config.parallel, config.data, config.rollout, config.reward)
    learning = (config.algorithm, config.actor, config.critic)
    return hashlib.blake2b(repr((parts, learning)).encode(), digest_size=16).hexdigest()


def _kept(requests: Sequence[Request], config: Config, step: int) -> dict[tuple[int, int], tuple[Sample, float]]:
    """Whole, scored samples of this very step in the journals, the same on every rank; none of other weights."""
    found: Mapping[tuple[int, int], Record] = {}
    if rank() == 0 and (Path(config.run.dir) / "rollouts").is_dir():
        found = finished_samples(config.run.dir, step, rollout_key(config))
    found = gather_objects(found)[0]
    kept = {}
    for request in requests:
        record = found.get((request.prompt.prompt_id, request.sample_id))
        sample = record.sample(request) if record is not None else None
        if record is not None and sample is not None and sample.version == step - 1 and record.score == record.score:
            kept[request.group_id, request.sample_id] = (sample, record.score)
    return kept


def _token_level_scores(batch: Batch) -> Tensor:
    """float32 [N]: each sequence's score at its last token, if that is a response token; 0 elsewhere."""
    last = batch.cu_seqlens[1:] - 1
    has_response = batch["response_mask"][last]
    scores = torch.zeros(batch.num_tokens)
    scores[last[has_response]] = batch["scores"][has_response]
    return scores
