"""Runs in the batch script's process: starts the ranks, waits, finds out what happened, decides, and starts them again."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from hpc_rl.config import Config
from hpc_rl.errors import RunError
from hpc_rl.fault import decide as decisions
from hpc_rl.fault import report
from hpc_rl.fault.decide import Attempt, Continue, Decision, Finish, GiveUp, Outcome, Policy, Restart
from hpc_rl.fault.failure import Failure, Kind
from hpc_rl.fault.history import History, newest_step
from hpc_rl.fault.scale import Queue, choose_size, measured_rates

GRACE_S = 5.0  # from the first sign of a failure until what is left is ended: other ranks write what they saw
LOOK_EVERY_S = 5.0  # at the nodes' states
RESEND_S = 5.0  # a signal may come before srun has started the ranks
LISTEN_S = 120.0  # a signal ends a rank that is being started: it waits until all have said where they are, or so long


class TaskError(Protocol):
    """A task that failed, as the launcher tells it."""

    @property
    def node(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def how(self) -> str: ...


class Step(Protocol):
    """Ranks that run."""

    last_words: str

    @property
    def errors(self) -> Sequence[TaskError]: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout_s: float) -> int | None: ...
    def signal(self, number: signal.Signals) -> None: ...
    def kill(self) -> None: ...


class BatchJob(Protocol):
    """The job of the batch system (launch/slurm_job.py)."""

    job_id: str
    restart: int
    ranks_per_node: int

    def nodes(self) -> tuple[str, ...]: ...
    def ends_at(self) -> float | None: ...
    def down(self, nodes: Sequence[str]) -> set[str]: ...
    def answering(self, nodes: Sequence[str], attempt: int) -> set[str]: ...
    def start(self, nodes: Sequence[str], attempt: int, overrides: Sequence[str]) -> Step: ...
    def guard(self, nodes: Sequence[str], sizes: Sequence[int]) -> None: ...
    def dismiss(self) -> None: ...
    def has_lost(self, nodes: Iterable[str]) -> bool: ...
    def queue(self) -> Queue: ...
    def usable_nodes(self, exclude: Iterable[str]) -> int: ...
    def requeue(self, num_nodes: int, exclude: Iterable[str]) -> None: ...
    def chain(self, num_nodes: int, exclude: Iterable[str]) -> str: ...


class Supervisor:
    """One slice of a job: from the start of its batch script to its end.

    Args:
        job: of the batch system.
        config: of the run; ``config.job`` is the policy.
        sizes: numbers of nodes, spares not counted, that layout and batch allow, ascending.
    """

    def __init__(self, job: BatchJob, config: Config, sizes: Sequence[int]) -> None:
        self.job, self.config, self.sizes = job, config, tuple(sizes)
        self.run_dir = Path(config.run.dir)
        self.history = History.of(self.run_dir)
        self.attempts: list[Attempt] = []
        self.received: signal.Signals | None = None
        self._told_at = 0.0  # when the ranks were last told to stop

    def run(self) -> int:
        """Returns the exit code of the batch script: 0 also when a next slice goes on."""
        with self._signals():
            self.all_nodes = self.job.nodes()
            self._alive = set(self.all_nodes)
            self.ends_at = self.job.ends_at()
            wanted = len(self.all_nodes) - self.config.job.spares
            allowed = tuple(size for size in self.sizes if self.config.job.min_nodes <= size <= wanted)
            policy = Policy(wanted, allowed, self.config.job.max_restarts, self.config.job.backoff_s)
            self.history.begin_slice(self.job.job_id, self.job.restart, newest_step(self.run_dir))
            (self.run_dir / "failure.json").unlink(missing_ok=True)
            decision = decisions.first_decision(self.history.began_at, self.all_nodes, policy)
            while isinstance(decision, Restart):
                self._pause(decision.wait_s)
                self.attempts.append(self._attempt(decision.nodes))
                if self.received is signal.SIGTERM:
                    return self._end(f"cancelled, saved up to step {newest_step(self.run_dir)}", 128 + signal.SIGTERM)
                alive = [node for node in self.all_nodes if node in self._alive]
                decision = decisions.decide(self.attempts, alive, policy, self.history.began_at, ending=self._is_ending())
                self._say(decision.text)
            return self._act(decision)

    # ---- one attempt ------------------------------------------------------------------------------------------

    def _attempt(self, nodes: tuple[str, ...]) -> Attempt:
        number, began_at = len(self.history.attempts), newest_step(self.run_dir)
        report.begin_attempt(self.run_dir, number)
        self.job.guard([node for node in self.all_nodes if node in self._alive], self.sizes)
        usable = self._alive - decisions.unfit(self.attempts)
        spares = [node for node in self.all_nodes if node in usable and node not in nodes]
        waiting = f", {' '.join(spares)} standing by" if spares else ""
        self._say(f"attempt {number} after step {began_at} on {' '.join(nodes)}{waiting}")
        self.history.begin_attempt(nodes, began_at)
        # A run that began from a checkpoint elsewhere goes on from its own, once it has one.
        own = began_at > 0 or self.config.resume == "none"
        step = self.job.start(nodes, number, ["resume=auto"] if own else [])
        self._watch(step, nodes, number)
        self._alive = self.job.answering(self.job.nodes(), number)
        lost = set(nodes) - self._alive
        outcome = self._outcome(step, number, lost)
        cause = outcome.cause
        self.history.end_attempt(step=outcome.step, cause=report.describe(cause) if cause else None, lost=sorted(lost))
        if cause is not None:
            self._say(report.describe(cause))
        return Attempt(nodes, began_at, outcome)

    def _watch(self, step: Step, nodes: tuple[str, ...], number: int) -> None:
        """Until the ranks have ended, by themselves or, after a failure or at the time limit, by us."""
        self._told_at, began = 0.0, time.time()
        end, next_look = self._last_call(), began + LOOK_EVERY_S
        failures = report.failures_dir(self.run_dir, number)
        ranks = len(nodes) * self.job.ranks_per_node
        while step.wait(0.1) is None:
            now = time.time()
            if now >= began + LISTEN_S or len(list(failures.glob("rank_*.stack"))) >= ranks:
                self._hand_on_signals(step, now)
            if step.errors or (failures.is_dir() and any(failures.glob("*.json"))):
                end = min(end, now + GRACE_S)
            if now >= next_look:
                next_look = now + LOOK_EVERY_S
                if self.job.down(nodes):
                    end = min(end, now + GRACE_S)
            if now >= end:
                if now >= self._last_call():  # no failure of theirs, even if they have not begun
                    self.received = self.received or signal.SIGUSR1
                step.kill()

    def _hand_on_signals(self, step: Step, now: float) -> None:
        if self.ends_at is not None and self.received is None and now >= self.ends_at - self._lead_s():
            self._say(f"the time limit is {self.ends_at - now:.0f} s away")
            self.received = signal.SIGUSR1
        if self.received is not None and now >= self._told_at + RESEND_S:
            if not self._told_at:
                self._say(f"told to stop by {self.received.name}: this step is the last, and will be saved")
            self._told_at = now
            step.signal(signal.SIGUSR1)  # never TERM: of Slurm's scancel the ranks hear directly, and two of them end a rank

    def _lead_s(self) -> float:
        """How long before the time limit ranks must hear of it: the step that they are in still has to end."""
        longest = 0.0
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()[-20:]
            longest = max((float(json.loads(line)["step_seconds"]) for line in lines), default=0.0)
        return self.config.job.save_before_s + longest

    def _last_call(self) -> float:
        """When ranks that are still at it are ended, so that there is time left to go on in another slice."""
        return float("inf") if self.ends_at is None else self.ends_at - self.config.job.save_before_s / 5

    def _is_ending(self) -> bool:
        too_late = self.ends_at is not None and time.time() >= self.ends_at - self.config.job.save_before_s
        return self.received is not None or too_late

    def _outcome(self, step: Step, number: int, lost: set[str]) -> Outcome:
        at = newest_step(self.run_dir)
        finished, stopped = at >= self.config.steps, self.received is not None
        code = step.poll()
        if code == 0 or any(error.how == f"Exited with exit code {decisions.TRY_AGAIN}" for error in step.errors):
            return Outcome(at, finished, told_to_stop=True, lost=frozenset(lost))
        failures = report.read_failures(self.run_dir, number)
        failures += [self._lost(node, number) for node in sorted(lost)]
        if not stopped and not lost:
            failures += self._unsaid(step, {failure.rank for failure in failures}, number)
        cause = report.first_cause(failures) if failures and not finished else None
        return Outcome(at, finished, stopped and not lost, cause, frozenset(lost))

    def _lost(self, node: str, number: int) -> Failure:
        """Of a node: the phase is that in which one of its ranks was last seen."""
        message, phase, step = "the node does not answer (the phase is the last that it noted)", "start", 0
        for path in report.failures_dir(self.run_dir, number).glob("rank_*.stack"):
            place = report.last_place(self.run_dir, int(path.stem.removeprefix("rank_")), number)
            if place[0] == node:
                _, phase, step = place
        return Failure(-1, node, "node_lost", phase, step, message, time.time())

    def _unsaid(self, step: Step, known: set[int], number: int) -> list[Failure]:
        """The failure of a rank that could not write one, by what the launcher said first of its tasks."""
        if not step.errors:
            words = step.last_words or "the ranks were not started"
            return [] if known else [Failure(-1, "", "start", "start", 0, words, time.time())]
        first = step.errors[0]
        if first.rank in known:
            return []
        kinds: dict[str, Kind] = {"Out Of Memory": "out_of_memory", "Exited with exit code 2": "user"}
        kind = kinds.get(first.how, "exception" if first.how.startswith("Exited") else "killed")
        _, phase, at = report.last_place(self.run_dir, first.rank, number)
        # Of the time it has as little idea as we: before all others, whose connections it took with it.
        return [Failure(first.rank, first.node, kind, phase, at, first.how, time.time() - GRACE_S)]

    # ---- what follows -----------------------------------------------------------------------------------------

    def _act(self, decision: Decision) -> int:
        if isinstance(decision, Finish):
            return self._end(decision.text, 0)
        if isinstance(decision, Continue):
            self._go_on(decision.exclude)
            return 0
        assert isinstance(decision, GiveUp)
        self._report(decision)
        return self._end(decision.text, 1)

    def _report(self, decision: GiveUp) -> None:
        number = len(self.history.attempts) - 1
        failures = report.read_failures(self.run_dir, number)
        cause = self.attempts[-1].outcome.cause
        if cause is None:
            cause = Failure(-1, "", "no_progress", "end", newest_step(self.run_dir) + 1, decision.text, time.time())
        report.final_report(
            self.run_dir, cause, decided=f"the job ends: {decision.text}", attempt=number, failures=failures,
            restarts=self.history.attempts[:-1],
        )  # fmt: skip

    def _go_on(self, exclude: frozenset[str]) -> None:
        """The next slice, on as many nodes as this one unless ``job.scale`` or the partition say otherwise."""
        nodes = self._next_size(exclude)
        total = nodes + self.config.job.spares
        self.job.dismiss()
        lost = {node for attempt in self.attempts for node in attempt.outcome.lost}
        if self.config.job.next_slice == "requeue" and self.job.has_lost(lost):
            try:
                self._say(f"back into the queue, {total} nodes{', without ' * bool(exclude)}{' '.join(sorted(exclude))}")
                self.job.requeue(total, exclude)
                return
            except RunError as error:
                self._say(f"{error}; so another job takes over")
        self._say(f"job {self.job.chain(total, exclude)} goes on after this one, {total} nodes")

    def _next_size(self, exclude: frozenset[str]) -> int:
        policy, now = self.config.job, len(self.all_nodes) - self.config.job.spares
        there = self.job.usable_nodes(exclude) - policy.spares
        sizes = [size for size in self.sizes if size <= there] or list(self.sizes)
        if policy.scale == "fixed":
            return now if now in sizes else sizes[-1]
        starts = [(len(attempt["nodes"]), int(attempt["began_at"])) for attempt in self.history.attempts]
        rates = measured_rates(self.run_dir / "metrics.jsonl", starts)
        choice = choose_size(now, sizes, self.job.queue(), rates, policy.min_nodes, policy.max_nodes or now)
        self._say(f"job.scale = auto: {choice.nodes} nodes next ({choice.text})")
        return choice.nodes

    def _end(self, why: str, code: int) -> int:
        self.history.end(why)
        self.job.dismiss()
        return code

    def _pause(self, wait_s: float) -> None:
        end = time.monotonic() + wait_s
        while time.monotonic() < end and self.received is None:
            time.sleep(0.1)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self.received = signal.Signals(number)

        before = {number: signal.signal(number, note) for number in (signal.SIGUSR1, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @staticmethod
    def _say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} Supervisor: {text}", flush=True)
