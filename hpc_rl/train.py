"""The loop. One RL step reads top to bottom in `RLTrainer.step`; every rank runs the same program."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hpc_rl.algo.kl import KLController
from hpc_rl.algo.registry import algorithm, needs_old_log_probs
from hpc_rl.algo.step import mini_batches, policy_loss, prepare, sampled_metrics, value_loss
from hpc_rl.batch import Batch
from hpc_rl.build import Job, build
from hpc_rl.config import Config
from hpc_rl.data.curriculum import Curriculum
from hpc_rl.data.prompts import PromptSet
from hpc_rl.evaluate import evaluate
from hpc_rl.fault.phase import phase
from hpc_rl.rollout.collect import collect_step
from hpc_rl.trainer import Trainer


class RLTrainer(Trainer):
    """PPO, GRPO and their kin on this job's ranks.

    Under a launcher (torchrun, mpirun, srun, `hpc-rl train`) every rank makes one; without, it is a job of one rank.

    Args:
        config: from `load_config`.
    Raises:
        UserError: what does not fit, before any model is built.
    """

    job: Job

    def __init__(self, config: Config) -> None:
        algorithm(config.algorithm.name)  # an objective without rollouts has a trainer of its own
        job = build(config)
        self.kl = KLController(config.algorithm)
        self.curriculum = Curriculum(job.prompts, config.data)
        super().__init__(config, job)
        with phase("reshard", self.steps_done):
            self._verified_s = self._sync_weights()["reshard/seconds_verify"]  # what `verify: first` costs, told in step 1

    def step(self, step: int) -> dict[str, float]:
        """One RL step: rollouts, scores, advantages, updates of critic and actor, weights to the sampler."""
        meter = self._meter()
        with meter.phase("rollout"), phase("generation", step):
            batch, rollout_metrics = self._rollout(step)
        with meter.phase("score"), phase("scoring", step):
            batch = self._score(step, batch)
        batch, metrics = prepare(batch, self.config, self.kl.coef)
        self.job.checkpointer.fence()  # weights may change once the save in flight has its copy
        with meter.phase("update"):
            metrics |= self._update(step, batch)
        with meter.phase("reshard"), phase("reshard", step):
            self.steps_done = step
            metrics |= self._sync_weights()
        metrics["reshard/seconds_verify"] = metrics.get("reshard/seconds_verify", 0.0) + self._verified_s
        self._verified_s = 0.0
        metrics["kl_coef"] = self.kl.coef
        if "kl" in metrics:  # a KL that nobody measured moves nothing
            self.kl.update(metrics["kl"], len(batch))
        response_tokens = int(batch["response_mask"].sum())
        return metrics | rollout_metrics | meter.summary(batch.num_tokens, response_tokens)

    def evaluate(self) -> dict[str, float]:
        """Samples and scores the held-out prompts; the weights are those that the sampler holds."""
        job = self.job
        job.colocation.generate()
        metrics = evaluate(job.sampler, job.reward, self._held_out, self.config)
        job.colocation.train()
        self._sync_weights()  # a sampler that slept has none
        return metrics

    # ---- parts of a step --------------------------------------------------------------------------------------

    def _rollout(self, step: int) -> tuple[Batch, dict[str, float]]:
        job = self.job
        job.colocation.generate()
        return collect_step(job.sampler, job.reward, self.curriculum, self.config, step)

    def _trains_actor(self, step: int) -> bool:
        return step > self.config.algorithm.critic_warmup_steps or self.job.critic is None

    def _score(self, step: int, batch: Batch) -> Batch:
        """Adds old and reference log-probs and values, as the algorithm needs them."""
        job = self.job
        job.colocation.train()
        if needs_old_log_probs(self.config, self._trains_actor(step)):
            batch = batch.with_tokens(old_log_probs=job.actor.forward(batch)["log_probs"])
        if job.reference is not None:
            batch = batch.with_tokens(ref_log_probs=job.reference.forward(batch)["log_probs"])
        if job.critic is not None:
            batch = batch.with_tokens(values=job.critic.forward(batch)["values"])
        return batch

    def _update(self, step: int, batch: Batch) -> dict[str, float]:
        """All optimizer steps of one RL step; metrics are means over them."""
        job, config = self.job, self.config
        shuffle = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        means = Means()
        for mini in mini_batches(batch, config, shuffle):
            if job.critic is not None:
                with phase("critic", step):
                    means.add(job.critic.train_batch(mini, value_loss(config)), prefix="critic/")
            if self._trains_actor(step):
                outputs: dict[str, Tensor] | None = None if "old_log_probs" in mini else {}
                with phase("actor", step):
                    means.add(job.actor.train_batch(mini, policy_loss(config, self.kl.coef), outputs), prefix="actor/")
                if outputs is not None:
                    means.add(sampled_metrics(mini, outputs["log_probs"], config))
        metrics = means.result()
        return metrics | {"loss": metrics.get("actor/loss", metrics.get("critic/loss", 0.0))}

    def _sync_weights(self) -> dict[str, float]:
        """The actor's weights into the sampler, stamped with the number of steps they have learned."""
        job, version = self.job, self.steps_done
        job.colocation.reshard()
        if job.parallel.device.type == "cuda" and self.config.rollout.sleep_level == 2:
            job.resharder.invalidate()  # the sampler slept its weights away: a delta has nothing to change
        metrics = job.resharder.sync(version)
        job.sampler.set_version(version)
        return {
            f"reshard/{name}": float(value) for name, value in metrics.items() if name.startswith(("bytes", "seconds"))
        }

    @cached_property
    def _held_out(self) -> PromptSet:
        return PromptSet.from_config(self.config, self.job.tokenizer, self.job.reward.required_fields, evaluation=True)

    # ---- resume -----------------------------------------------------------------------------------------------

    def _small_state(self) -> dict[str, Any]:
        return {"kl": self.kl.state(), "curriculum": self.curriculum.state()}

    def _load_small_state(self, state: Mapping[str, Any]) -> None:
        self.kl.load_state(state["kl"])
        self.curriculum.load_state(state.get("curriculum", {}))


class Means:
    """Running means of metrics over the optimizer steps of one RL step."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: dict[str, float], prefix: str = "") -> None:
        for name, value in metrics.items():
            self._sums[prefix + name] = self._sums.get(prefix + name, 0.0) + value
            self._counts[prefix + name] = self._counts.get(prefix + name, 0) + 1

    def result(self) -> dict[str, float]:
        return {name: total / self._counts[name] for name, total in self._sums.items()}
