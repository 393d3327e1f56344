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
    judge = Judge(reward, config, step) if place == 0 else None
    samples = sampler.generate(assign(missing, replica, world_size() // gen_tp), judge)
    agree(judge.close() if judge else None)
    parts = gather_objects(samples_to_batch(samples, judge.scores_of(samples)) if judge else None)
    batches = [part for part in parts if part is not None]
    if kept:
        batches.append(samples_to_batch([s for s, _ in kept.values()], [score for _, score in kept.values()]))
    batch = sort_batch(Batch.concat(batches))
    assert len(batch) == len(requests), f"{len(requests)} samples were asked for, {len(batch)} are there"
    batch = batch.with_tokens(token_level_scores=_token_level_scores(batch))
    return batch, {"reward_errors": float(sum(gather_objects(reward.num_errors))), "reused_samples": float(len(kept))}


class Judge:
    """Scores each sample as it ends and appends it to the journal, while others are still being generated.

    A failing reward must not leave the other ranks of the replica alone in a collective: it is kept, generation goes
    on, and `close` returns it.
    """

    def __init__(self, reward: RewardFunction, config: Config, step: int) -> None:
        self._reward = reward
        self._writer = (
            RolloutWriter(config.run.dir, step, rank(), rollout_key(config)) if config.checkpoint.rollouts else None
        )
        self._scores: dict[tuple[int, int], float] = {}
        self._error: BaseException | None = None

    def __call__(self, sample: Sample) -> None:
        if self._error is not None:
            return
        try:
            (score,) = self._reward.score([sample])
            self._scores[sample.request.group_id, sample.request.sample_id] = score
            if self._writer is not None:
                self._writer.append(sample, score)
        except Exception as error:
            self._error = error

    def scores_of(self, samples: Sequence[Sample]) -> list[float]:
        """The scores, in the order of ``samples``."""
        return [self._scores[s.request.group_id, s.request.sample_id] for s in samples]

    def close(self) -> BaseException | None:
        """Ends the journal; returns the first error."""
        if self._writer is not None:
            self._writer.close()
        return self._error


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
