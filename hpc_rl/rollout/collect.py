"""One step's rollouts: share out the requests, generate, reward, journal, and put the whole batch on every rank."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from hpc_rl.algo.advantages import group_sum
from hpc_rl.algo.registry import algorithm
from hpc_rl.algo.shaping import informative
from hpc_rl.batch import Batch
from hpc_rl.config import Config
from hpc_rl.data.curriculum import Curriculum
from hpc_rl.errors import RunError
from hpc_rl.fault.phase import phase
from hpc_rl.parallel.collectives import agree, gather_objects, rank, world_size
from hpc_rl.parallel.layout import replica_of
from hpc_rl.reward.score import RewardFunction, code_digest
from hpc_rl.rollout.protocol import Prompt, Request, RolloutEngine, Sample
from hpc_rl.rollout.sampler import assign, request_seed, samples_to_batch, sort_batch
from hpc_rl.storage.rollout_reader import Record, finished_samples
from hpc_rl.storage.rollouts import RolloutWriter

logger = logging.getLogger(__name__)
GREEDY = -1  # sample_id of the greedy response to a prompt, which is a baseline and no part of the batch


def collect_step(
    sampler: RolloutEngine, reward: RewardFunction, curriculum: Curriculum, config: Config, step: int
) -> tuple[Batch, dict[str, float]]:
    """The step's rollouts: new prompts until enough groups teach something, or the rounds are spent.

    With ``data.oversample`` and ``algorithm.refill_rounds`` at rest, one round of ``data.prompts_per_step`` prompts.
    Otherwise the first groups whose scores differ are kept; if there are too few, others, as they came, fill the step.

    Returns, Raises: as `collect`.
    """
    wanted, oversample = config.data.prompts_per_step, config.data.oversample
    with Collector(sampler, reward, config, step) as collector:
        batch, rounds = collector.collect(curriculum.draw(ceil(wanted * oversample))), 1
        while rounds <= config.algorithm.refill_rounds and (missing := wanted - num_informative(batch)) > 0:
            more = collector.collect(curriculum.draw(ceil(missing * oversample)))
            batch, rounds = Batch.concat([batch, more]), rounds + 1
        metrics = collector.metrics()
    curriculum.learn(*group_means(batch))
    if config.algorithm.refill_rounds or oversample > 1:
        drawn, found = int(batch["group_ids"].max()) + 1, num_informative(batch)
        batch = choose_groups(batch, wanted)
        metrics |= {"sampling/rounds": float(rounds), "sampling/prompts_drawn": float(drawn)}
        metrics |= {"sampling/informative_frac": found / drawn, "sampling/unfilled": float(max(0, wanted - found))}
    if config.data.reward_min is not None or config.data.reward_max is not None:
        metrics["sampling/prompts_left_out"] = float(curriculum.num_left_out)
    return batch, metrics | staleness(batch, config, step)


def collect(
    sampler: RolloutEngine, reward: RewardFunction, prompts: Sequence[Prompt], config: Config, step: int
) -> tuple[Batch, dict[str, float]]:
    """Rollouts of given prompts, with their scores.

    Samples that an earlier, killed try of this step left in the journal are taken from there; a restart draws only
    what is missing, and the batch is the same.

    Returns: the whole batch, equal on every rank, sorted by (group, sample); metrics of generation.
    Raises: RunError on every rank if any rank's reward fails by policy.
    """
    with Collector(sampler, reward, config, step) as collector:
        return collector.collect(prompts), collector.metrics()


class Collector:
    """Draws the samples of one step, in one round or several. Every rank makes the same calls."""

    def __init__(self, sampler: RolloutEngine, reward: RewardFunction, config: Config, step: int) -> None:
        gen_tp = config.rollout.tp or config.parallel.tp
        self._replica, place = replica_of(rank(), gen_tp, config.parallel.tp)
        self._num_replicas = world_size() // gen_tp
        self._sampler, self._reward, self._config, self._step = sampler, reward, config, step
        self._needs_greedy = algorithm(config.algorithm.name).needs_greedy
        self._prompts: list[Prompt] = []
        self._num_reused = 0
        self._journal = _journal(config, step) if config.checkpoint.rollouts else {}
        keeps = (lambda: RolloutWriter(config.run.dir, step, rank(), rollout_key(config))) if config.checkpoint.rollouts else None
        self._judge = Judge(reward, keeps, config.checkpoint.on_error) if place == 0 else None

    def __enter__(self) -> Collector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._judge is not None:
            self._judge.close()

    def collect(self, prompts: Sequence[Prompt]) -> Batch:
        """All samples of one more round; groups are numbered on from the round before."""
        first, num_samples = len(self._prompts), self._config.rollout.samples_per_prompt
        self._prompts += prompts
        requests = step_requests(self._prompts, num_samples, self._config.seed, self._step)[first * num_samples :]
        batch = self._draw(requests, None)
        if self._needs_greedy:
            greedy = [Request(p, first + i, GREEDY, 0) for i, p in enumerate(prompts)]
            scores = self._draw(greedy, 0.0)["scores"]
            batch = batch.with_sequences(baseline_scores=scores[batch["group_ids"] - first])
        return batch.with_tokens(token_level_scores=_token_level_scores(batch))

    def metrics(self) -> dict[str, float]:
        """Of all rounds."""
        errors = float(sum(gather_objects(self._reward.num_errors)))
        return {"reward_errors": errors, "reused_samples": float(self._num_reused)}

    def _draw(self, requests: Sequence[Request], temperature: float | None) -> Batch:
        """The samples that answer ``requests``, from the journal or drawn now, scored, on every rank."""
        kept = _kept(requests, self._journal, self._step - 1)
        missing = [r for r in requests if (r.group_id, r.sample_id) not in kept]
        share = assign(missing, self._replica, self._num_replicas)
        judge = self._judge
        samples = self._sampler.generate(share, judge, temperature=temperature)
        agree(judge.error if judge else None)
        parts = gather_objects(samples_to_batch(samples, judge.scores_of(samples)) if judge else None)
        batches = [part for part in parts if part is not None]
        if kept:
            batches.append(samples_to_batch([s for s, _ in kept.values()], [score for _, score in kept.values()]))
        batch = sort_batch(Batch.concat(batches))
        assert len(batch) == len(requests), f"{len(requests)} samples were asked for, {len(batch)} are there"
        self._num_reused += len(kept)
        return batch


class Judge:
    """Scores each sample as it ends and appends it to the journal, while others are still being generated.

    A failing reward must not leave the other ranks of the replica alone in a collective: ``error`` keeps the first one,
    and generation goes on.
    """

    def __init__(
        self, reward: RewardFunction, open_journal: Callable[[], RolloutWriter] | None = None, on_error: str = "stop"
    ) -> None:
        self._reward, self._on_error = reward, on_error
        self._scores: dict[tuple[int, int], float] = {}
        self.error: BaseException | None = None
        self._writer: RolloutWriter | None = None
        if open_journal is not None:
            with self._journal_may_fail():
                self._writer = open_journal()

    def __call__(self, sample: Sample) -> None:
        if self.error is not None:
            return
        try:
            with phase("reward"):
                (score,) = self._reward.score([sample])
            self._scores[sample.request.group_id, sample.request.sample_id] = score
            if self._writer is not None:
                with self._journal_may_fail():
                    self._writer.append(sample, score)
        except Exception as error:
            self.error = error

    @contextmanager
    def _journal_may_fail(self) -> Iterator[None]:
        """A full disk: ``checkpoint.on_error`` says whether the run goes on without the rest of this step's journal."""
        try:
            yield
        except OSError as error:
            if self._on_error == "continue":
                logger.warning("rollouts of this step are not kept any more: %s", error)
                self.close()
                return
            self.error = RunError(
                f"rollouts cannot be kept: {error}: make room and resume, or set checkpoint.rollouts=false or "
                "checkpoint.on_error=continue"
            )

    def scores_of(self, samples: Sequence[Sample]) -> list[float]:
        """The scores, in the order of ``samples``."""
        return [self._scores[s.request.group_id, s.request.sample_id] for s in samples]

    def close(self) -> None:
        """Ends the journal."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


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


def num_informative(batch: Batch) -> int:
    """Groups whose scores differ."""
    return int(batch["group_ids"][informative(batch["scores"], batch["group_ids"])].unique().numel())


def group_means(batch: Batch) -> tuple[list[int], list[float]]:
    """(prompt id, mean score) of each group, in the order of the groups."""
    groups, scores = batch["group_ids"], batch["scores"].double()
    means = group_sum(scores, groups) / group_sum(torch.ones_like(scores), groups)
    first = torch.searchsorted(groups, groups.unique())
    return batch["prompt_ids"][first].tolist(), means[first].tolist()


def choose_groups(batch: Batch, count: int) -> Batch:
    """The first ``count`` groups whose scores differ, then the first others; numbered anew in the order they came."""
    groups = batch["group_ids"]
    teaches = torch.zeros(int(groups.max()) + 1, dtype=torch.bool)
    teaches[groups[informative(batch["scores"], groups)]] = True
    order = torch.argsort((~teaches).to(torch.int8), stable=True)
    chosen = order[:count].sort().values
    number = torch.full_like(order, -1)
    number[chosen] = torch.arange(len(chosen))
    kept = batch.select((number[groups] >= 0).nonzero()[:, 0])
    return kept.with_sequences(group_ids=number[kept["group_ids"]])


def staleness(batch: Batch, config: Config, step: int) -> dict[str, float]:
    """How many steps the weights that sampled each response token are behind those that will learn from it.

    Raises: RunError on every rank if any token is more than ``algorithm.max_staleness`` steps behind.
    """
    behind = step - 1 - batch["versions"]
    limit = config.algorithm.max_staleness
    if int(behind.max()) > limit:
        worst = int(behind.argmax())
        raise RunError(
            f"prompt_id {int(batch['prompt_ids'][worst])} was sampled with weights of version "
            f"{int(batch['versions'][worst])}, {int(behind[worst])} steps behind those of step {step}, but "
            f"algorithm.max_staleness = {limit}: sync the weights more often, or raise it"
        )
    index = batch.sequence_index()[batch["response_mask"]]
    per_token = behind[index].double()
    mean = float(per_token.mean()) if per_token.numel() else 0.0
    return {"off_policy_steps_mean": mean, "off_policy_steps_max": float(behind.max())}


def rollout_key(config: Config) -> str:
    """What a step's rollouts depend on, beside the step: a digest of the run's settings and of its reward's code."""
    code = code_digest(config.reward.function)
    parts = (config.seed, config.model, config.parallel, config.data, config.rollout, config.reward, code)
    learning = (config.algorithm, config.actor, config.critic)
    return hashlib.blake2b(repr((parts, learning)).encode(), digest_size=16).hexdigest()


def _journal(config: Config, step: int) -> Mapping[tuple[int, int], Record]:
    """(prompt id, sample id) -> what an earlier try of this step left on disk, the same on every rank."""
    found: Mapping[tuple[int, int], Record] = {}
    if rank() == 0 and (Path(config.run.dir) / "rollouts").is_dir():
        found = finished_samples(config.run.dir, step, rollout_key(config))
    return gather_objects(found)[0]


def _kept(
    requests: Sequence[Request], journal: Mapping[tuple[int, int], Record], version: int
) -> dict[tuple[int, int], tuple[Sample, float]]:
    """(group, sample) -> whole, scored samples of the journal that answer ``requests``; none of other weights."""
    kept = {}
    for request in requests:
        record = journal.get((request.prompt.prompt_id, request.sample_id))
        sample = record.sample(request) if record is not None else None
        if record is not None and sample is not None and sample.version == version and record.score == record.score:
            kept[request.group_id, request.sample_id] = (sample, record.score)
    return kept


def _token_level_scores(batch: Batch) -> Tensor:
    """float32 [N]: each sequence's score at its last token, if that is a response token; 0 elsewhere."""
    last = batch.cu_seqlens[1:] - 1
    has_response = batch["response_mask"][last]
    scores = torch.zeros(batch.num_tokens)
    scores[last[has_response]] = batch["scores"][has_response]
    return scores
