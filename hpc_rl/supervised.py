"""Training without rollouts: SFT, DPO, IPO and reward models, on the engines, checkpoints and launchers of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_rl.algo.registry import Objective, objective
from hpc_rl.algo.supervised import supervised_loss, with_weights
from hpc_rl.batch import Batch
from hpc_rl.build import build_checkpointer, build_engine, find_checkpoint, join, undo_on_error
from hpc_rl.config import Config
from hpc_rl.data.examples import Examples
from hpc_rl.data.prompts import PromptStream
from hpc_rl.data.tokenizer import load_tokenizer
from hpc_rl.engine.make import Engine
from hpc_rl.fault.phase import phase
from hpc_rl.parallel import state as parallel_state
from hpc_rl.parallel.state import ParallelState
from hpc_rl.run_dir import say
from hpc_rl.run_lock import release_run_dir
from hpc_rl.storage.checkpoint import Checkpointer
from hpc_rl.trainer import Trainer


@dataclass
class SupervisedJob:
    """The parts of one run on this rank. ``reference`` is None where nothing needs it; nothing generates."""

    goal: Objective
    parallel: ParallelState
    examples: Examples
    prompts: PromptStream
    model: Engine
    reference: Engine | None
    tokenizer: Any
    checkpointer: Checkpointer
    resume_from: Path | None

    @property
    def trained(self) -> dict[str, Engine]:
        """Role -> engine, of those that learn."""
        return {self.model.role: self.model}

    def close(self) -> None:
        """Waits for the write in flight, leaves the process group."""
        self.checkpointer.close()
        parallel_state.destroy()
        release_run_dir()


def build_supervised(config: Config) -> SupervisedJob:
    """Joins the job and builds everything; every rank calls it at the same time.

    Raises: UserError on every rank, before any model is built, for what does not fit.
    """
    goal = objective(config.algorithm.name)
    assert goal is not None, "supervised_loss refuses algorithms with rollouts"
    with undo_on_error():
        tokenizer = load_tokenizer(config)
        examples = Examples(config, goal, tokenizer)
        prompts = PromptStream(examples.prompts, config.seed, config.data.shuffle, config.data.prompts_per_step)
        parallel = join(config, prompts)
        if parallel.rank == 0:
            say(f"Examples: {examples.summary()}")
        model = build_engine(goal.role, config, parallel)
        reference = build_engine("reference", config, parallel) if goal.needs_reference else None
        checkpointer = build_checkpointer(config, parallel)
        return SupervisedJob(
            goal=goal,
            parallel=parallel,
            examples=examples,
            prompts=prompts,
            model=model,
            reference=reference,
            tokenizer=tokenizer,
            checkpointer=checkpointer,
            resume_from=find_checkpoint(config, checkpointer),
        )


class SupervisedTrainer(Trainer):
    """SFT, DPO, IPO or a reward model; a step is one optimizer step on ``data.prompts_per_step`` lines.

    Args:
        config: from `load_config`.
    Raises:
        UserError: what does not fit, before any model is built.
    """

    job: SupervisedJob

    def __init__(self, config: Config) -> None:
        self._loss = supervised_loss(config)
        super().__init__(config, build_supervised(config))

    def step(self, step: int) -> dict[str, float]:
        """One step: texts, the reference's log-probs of them, an update."""
        job, meter = self.job, self._meter()
        batch = job.examples.batch(job.prompts.next_step())
        with meter.phase("score"), phase("scoring", step):
            batch = self._score(batch)
        job.checkpointer.fence()  # weights may change once the save in flight has its copy
        with meter.phase("update"), phase("actor" if job.model.role == "actor" else "critic", step):
            metrics = job.model.train_batch(batch, self._loss)
        self.steps_done = step
        return metrics | meter.summary(batch.num_tokens, int(batch["response_mask"].sum()))

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics of the held-out lines."""
        meter, count = self._meter(), self.config.eval.num_prompts
        prompts = self._held_out.prompts
        lines = [prompts[i] for i in range(min(len(prompts), count or len(prompts)))]
        batch = self._score(self._held_out.batch(lines))
        loss, metrics = self._loss(self.job.model.forward(batch), batch)
        values = {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}}
        values |= {"num_prompts": float(len(lines)), "seconds": meter.summary()["step_seconds"]}
        return {f"eval/{name}": value for name, value in values.items()}

    def _small_state(self) -> dict[str, Any]:
        return {}

    def _load_small_state(self, state: Mapping[str, Any]) -> None:
        pass

    def _score(self, batch: Batch) -> Batch:
        """Adds what each token or pair counts and, for DPO and IPO, the frozen reference's log-probs."""
        batch = with_weights(batch, self.config)
        if self.job.reference is None:
            return batch
        return batch.with_tokens(ref_log_probs=self.job.reference.forward(batch)["log_probs"])

    @cached_property
    def _held_out(self) -> Examples:
        return Examples(self.config, self.job.goal, self.job.tokenizer, evaluation=True)
