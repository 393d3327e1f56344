"""The loop. One RL step reads top to bottom in `RLTrainer.step`; every rank runs the same program."""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_rl import rng
from hpc_rl.algo import registry
from hpc_rl.algo.kl import KLController
from hpc_rl.algo.step import (
    mini_batches,
    needs_old_log_probs,
    policy_loss,
    prepare,
    sampled_metrics,
    value_loss,
)
from hpc_rl.batch import Batch
from hpc_rl.build import build
from hpc_rl.config import Config
from hpc_rl.metrics.meter import Meter
from hpc_rl.metrics.sinks import Sinks
from hpc_rl.rollout.collect import collect


class RLTrainer:
    """PPO, GRPO and their kin on this job's ranks.

    Under a launcher (torchrun, mpirun, srun, `hpc-rl train`) every rank makes one; without, it is a job of one rank.

    Args:
        config: from `load_config`.
    Raises:
        UserError: what does not fit, before any model is built.
    """

    def __init__(self, config: Config) -> None:
        registry.validate(config)
        self.config = config
        self.job = build(config)
        self.kl = KLController(config.algorithm)
        self._synchronize = torch.cuda.synchronize if self.job.parallel.device.type == "cuda" else None
        self.steps_done = 0
        self._restore()
        self.sinks = Sinks.from_config(config, self.steps_done, self.job.parallel.rank)
        self._sync_weights()

    def train(self, max_steps: int | None = None) -> dict[str, float]:
        """Runs to ``config.steps``, or ``max_steps`` more; returns the last step's metrics."""
        last = self.config.steps if max_steps is None else min(self.config.steps, self.steps_done + max_steps)
        metrics: dict[str, float] = {}
        for step in range(self.steps_done + 1, last + 1):
            metrics = self.step(step)
            self.sinks.write(step, metrics)
            self._save(step, is_last=step == last)
        self.job.checkpointer.wait()
        return metrics

    def step(self, step: int) -> dict[str, float]:
        """One RL step: rollouts, scores, advantages, updates of critic and actor, weights to the sampler."""
        meter = Meter(self._synchronize)
        with meter.phase("rollout"):
            batch, rollout_metrics = self._rollout(step)
        with meter.phase("score"):
            batch = self._score(batch)
        batch, metrics = prepare(batch, self.config, self.kl.coef)
        self.job.checkpointer.fence()  # weights may change once the save in flight has its copy
        with meter.phase("update"):
            metrics |= self._update(step, batch)
        with meter.phase("reshard"):
            self.steps_done = step
            metrics |= self._sync_weights()
        metrics.setdefault("kl", 0.0)
        metrics["kl_coef"] = self.kl.coef
        self.kl.update(metrics["kl"], len(batch))
        response_tokens = int(batch["response_mask"].sum())
        return metrics | rollout_metrics | meter.summary(batch.num_tokens, response_tokens)

    def close(self) -> None:
        """Ends the run's writers and leaves the job."""
        self.sinks.close()
        self.job.close()

    # ---- parts of a step --------------------------------------------------------------------------------------

    def _rollout(self, step: int) -> tuple[Batch, dict[str, float]]:
        job = self.job
        job.colocation.generate()
        return collect(job.sampler, job.reward, job.prompts.next_step(), self.config, step)

    def _score(self, batch: Batch) -> Batch:
        """Adds old and reference log-probs and values, as the algorithm needs them."""
        job = self.job
        job.colocation.train()
        if needs_old_log_probs(self.config):
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
        train_actor = step > config.algorithm.critic_warmup_steps or job.critic is None
        means = Means()
        for mini in mini_batches(batch, config, shuffle):
            if job.critic is not None:
                means.add(job.critic.train_batch(mini, value_loss(config)), prefix="critic/")
            if train_actor:
                outputs: dict[str, Tensor] | None = None if "old_log_probs" in mini else {}
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

    # ---- resume -----------------------------------------------------------------------------------------------

    def _save(self, step: int, *, is_last: bool) -> None:
        self.job.checkpointer.poll()
        every = self.config.checkpoint.every
        if not is_last and (every == 0 or step % every):
            return
        engines = self.job.trained
        states = {role: engine.state() for role, engine in engines.items()}
        extra = {
            "step": step,
            "prompts": self.job.prompts.state(),
            "kl": self.kl.state(),
            "engines": {role: values for role, (_, _, values) in states.items()},
        }
        self.job.checkpointer.save(step, {role: (m, t) for role, (m, t, _) in states.items()}, extra, rng.capture())

    def _restore(self) -> None:
        path = self.job.resume_from
        if path is None:
            return
        engines = self.job.trained
        states = {role: engine.state() for role, engine in engines.items()}
        components = {role: (m, t) for role, (m, t, _) in states.items()}
        if self.config.resume == "auto":  # a newest one that turns out damaged is passed over
            loaded = self.job.checkpointer.load_newest(components)
            assert loaded is not None, f"{path} was there when the run started"
            _, extra, per_rank = loaded
        else:
            extra, per_rank = self.job.checkpointer.load(path, components)
        for role, engine in engines.items():
            engine.load_state(extra["engines"][role])
        self.job.prompts.load_state(extra["prompts"])
        self.kl.load_state(extra["kl"])
        self.steps_done = int(extra["step"])
        if per_rank is not None:
            rng.restore(per_rank)


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
