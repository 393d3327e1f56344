"""What every training has in common: it runs steps, hands out their figures, saves, and goes on where it was."""

from __future__ import annotations

import difflib
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml

from hpc_rl import rng
from hpc_rl.build import undo_on_error
from hpc_rl.config import Config
from hpc_rl.config_load import dump_config
from hpc_rl.data.prompts import PromptStream
from hpc_rl.data.tokenizer import tokenizer_path
from hpc_rl.engine.make import Engine
from hpc_rl.errors import UserError
from hpc_rl.fault.phase import phase
from hpc_rl.fault.signals import StopSignals
from hpc_rl.metrics.meter import Meter
from hpc_rl.metrics.sinks import Sinks
from hpc_rl.parallel.state import ParallelState
from hpc_rl.run_dir import resume_line, say
from hpc_rl.run_lock import check_run_dir
from hpc_rl.storage.checkpoint import Checkpointer
from hpc_rl.storage.identity import check_identity, tokenizer_digest


class TrainingJob(Protocol):
    """The parts of a run that a `Trainer` itself needs."""

    parallel: ParallelState
    prompts: PromptStream
    checkpointer: Checkpointer
    resume_from: Path | None

    @property
    def trained(self) -> dict[str, Engine]:
        """Role -> engine, of those that learn."""

    def close(self) -> None: ...


class Trainer(ABC):
    """One run on this job's ranks; every rank runs the same program.

    A subclass says what a step is, how held-out data are scored, and which small values beside weights, optimizers,
    prompt cursor and generators a resume needs.
    """

    def __init__(self, config: Config, job: TrainingJob) -> None:
        self.config = config
        self.job: TrainingJob = job
        self._synchronize = torch.cuda.synchronize if job.parallel.device.type == "cuda" else None
        self.steps_done = 0
        self.stopped_by: signal.Signals | None = None
        self._signals = StopSignals()
        self._identity = {"tokenizer": tokenizer_digest(tokenizer_path(config)[1])}
        with undo_on_error() as undo, phase("load"):
            undo.callback(job.close)
            self._restore()
        self.sinks = Sinks.from_config(config, self.steps_done, job.parallel.rank)

    def train(self, max_steps: int | None = None) -> dict[str, float]:
        """Runs to ``config.steps``, or ``max_steps`` more; returns the last step's metrics.

        On SIGUSR1 or SIGTERM all ranks end with the step that they are in, saved; ``stopped_by`` says so.
        """
        last = self.config.steps if max_steps is None else min(self.config.steps, self.steps_done + max_steps)
        metrics: dict[str, float] = {}
        for step in range(self.steps_done + 1, last + 1):
            with phase("end", step):  # what is in no phase of its own
                metrics = self.step(step)
                if self._is_due(self.config.eval.every, step, self.config.steps):
                    with phase("eval"):
                        metrics |= self.evaluate()
                self.sinks.write(step, metrics)
                self._check_best(metrics)
                self.job.checkpointer.poll()
                check_run_dir()
                self.stopped_by = self._signals.agreed(self.job.parallel.device)
                ends = step == last or self.stopped_by is not None
                if ends or self._is_due(self.config.checkpoint.every, step, last):
                    with phase("save"):
                        self._save(step, metrics)
            if ends:
                break
        with phase("save", self.steps_done):
            self.job.checkpointer.wait()
        return metrics

    def _check_best(self, metrics: Mapping[str, float]) -> None:
        """A metric that no step has would never be judged by. The actor's may come later, after the critic's warm-up."""
        best = self.config.checkpoint.keep_best
        if best is None or best in metrics or best.startswith(("eval/", "actor/")):
            return
        close = difflib.get_close_matches(best, metrics, n=1) or ["reward_mean"]
        raise UserError(
            f"checkpoint.keep_best = {best}, but a step of this run has no such metric: set it to one of those in "
            f"metrics.jsonl, such as {close[0]}, or to null"
        )

    @abstractmethod
    def step(self, step: int) -> dict[str, float]:
        """One step; its figures."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Figures of the held-out data, ``eval/...``."""

    def close(self) -> None:
        """Ends the run's writers and leaves the job."""
        self.sinks.close()
        self.job.close()
        self._signals.close()

    def _meter(self) -> Meter:
        return Meter(self._synchronize)

    @staticmethod
    def _is_due(every: int, step: int, last: int) -> bool:
        return every > 0 and (step % every == 0 or step == last)

    # ---- resume -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _small_state(self) -> dict[str, Any]:
        """What a subclass wants back at a resume, as small JSON values."""

    @abstractmethod
    def _load_small_state(self, state: Mapping[str, Any]) -> None:
        """Takes ``_small_state()`` back."""

    def _save(self, step: int, metrics: Mapping[str, float]) -> None:
        states = {role: engine.state() for role, engine in self.job.trained.items()}
        extra = {
            "step": step,
            "config": yaml.safe_load(dump_config(self.config)),
            "identity": self._identity,
            "prompts": self.job.prompts.state(),
            "engines": {role: values for role, (_, _, values) in states.items()},
            **self._small_state(),
        }
        components = {role: (shard_map, tensors) for role, (shard_map, tensors, _) in states.items()}
        best = self.config.checkpoint.keep_best
        judged_by = {best: float(metrics[best])} if best is not None and best in metrics else {}
        # The next step's rollouts and scores only read the state: `step` fences before it changes it.
        overlap = self.config.checkpoint.asynchronous and not self.config.parallel.offload
        self.job.checkpointer.save(step, components, extra, rng.capture(), judged_by, overlap=overlap)

    def _restore(self) -> None:
        path = self.job.resume_from
        if path is None:
            return
        engines = self.job.trained
        components = {role: engine.state()[:2] for role, engine in engines.items()}
        if self.config.resume == "auto":
            loaded = self.job.checkpointer.load_newest(components)
            assert loaded is not None, f"{path} was there when the run started"
            path, extra, per_rank = loaded  # an older one, where the newest proved damaged
        else:
            extra, per_rank = self.job.checkpointer.load(path, components)
        check_identity(extra, path, **self._identity)
        for role, engine in engines.items():
            engine.load_state(extra["engines"][role])
        self.job.prompts.load_state(extra["prompts"])
        self._load_small_state(extra)
        self.steps_done = int(extra["step"])
        if per_rank is not None:
            rng.restore(per_rank)
        if self.job.parallel.rank == 0:
            say(resume_line(self.config, path))
