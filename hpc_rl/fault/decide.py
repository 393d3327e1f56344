"""What a supervisor does after its ranks have ended: a pure function of what happened, so that every case can be tried.

Waits for: nothing. Consumes the history of attempts and the nodes that still answer; produces one `Decision`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpc_rl.fault.failure import Failure

HOPELESS = {"user": "the input is wrong", "nan": "a loss that is not finite would come again"}
TRY_AGAIN = 75  # exit code of ranks that stopped before the run's end, saved (EX_TEMPFAIL)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt ended.

    Attributes:
        step: of the newest whole checkpoint, 0 without one.
        finished: all steps are done and saved.
        told_to_stop: by the time limit or a signal, whether or not the ranks managed to save.
        cause: the first failure; None if no rank failed.
        lost: nodes that do not answer any more.
    """

    step: int
    finished: bool = False
    told_to_stop: bool = False
    cause: Failure | None = None
    lost: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Attempt:
    """Ranks started once: on which nodes, after which checkpoint, and how that ended."""

    nodes: tuple[str, ...]
    began_at: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Policy:
    """What may be done.

    Attributes:
        nodes: that the job works on when all is well; those beyond it are spares.
        sizes: numbers of nodes that the layout and the batch allow, ascending.
        max_restarts: in a row without a newer checkpoint.
        backoff_s: wait before the second restart in a row; doubled for each further one.
        max_idle_slices: slices in a row without a newer checkpoint after which the job ends.
    """

    nodes: int
    sizes: tuple[int, ...]
    max_restarts: int = 3
    backoff_s: float = 5.0
    max_idle_slices: int = 2


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is done."""

    text: str = "all steps are done"


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the ranks again in this job, after ``wait_s``."""

    nodes: tuple[str, ...]
    text: str
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Continue:
    """This job can do no more now: go on in its next slice, without the nodes of ``exclude``."""

    text: str
    exclude: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No restart would help."""

    text: str


Decision = Finish | Restart | Continue | GiveUp


def decide(
    history: Sequence[Attempt], alive: Sequence[str], policy: Policy, slices: Sequence[int], *, ending: bool = False
) -> Decision:
    """The decision after the last attempt of ``history``.

    Args:
        history: attempts of this job's slice, oldest first.
        alive: nodes of the job that answer, in node order.
        policy: what may be done.
        slices: the checkpoint's step at the start of each slice, this one last.
        ending: the time limit is too near for another start.
    """
    outcome = history[-1].outcome
    if outcome.finished:
        return Finish()
    cause = outcome.cause
    if cause is not None and cause.kind in HOPELESS:
        return GiveUp(f"{HOPELESS[cause.kind]}, so it is not started again")
    bad = unfit(history)
    if outcome.told_to_stop or ending:
        return _next_slice("the slice is over", bad, outcome.step, policy, slices)
    in_a_row = _without_progress(history)
    if in_a_row > policy.max_restarts:
        return GiveUp(
            f"{in_a_row} attempts in a row ended without a newer checkpoint than step {outcome.step} "
            f"(job.max_restarts = {policy.max_restarts})"
        )
    nodes = choose_nodes(history[-1].nodes, [node for node in alive if node not in bad], policy)
    if not nodes:
        why = f"too few nodes are left ({len(alive)} answer, {_named(bad)} excluded)"
        return _next_slice(why, bad, outcome.step, policy, slices)
    wait_s = 0.0 if in_a_row < 2 else policy.backoff_s * 2 ** (in_a_row - 2)
    return Restart(nodes, _restart_text(history[-1].nodes, nodes), wait_s)


def first_decision(slices: Sequence[int], nodes: Sequence[str], policy: Policy) -> Decision:
    """How a slice begins; ``slices`` as for `decide`. Slices that were killed could not decide for themselves."""
    before = slices[:-1]
    if sum(began_at >= slices[-1] for began_at in before[-policy.max_idle_slices :]) == policy.max_idle_slices:
        return _no_progress(policy.max_idle_slices, slices[-1])
    return Restart(choose_nodes((), nodes, policy), "start")


def unfit(history: Sequence[Attempt]) -> frozenset[str]:
    """Nodes not to be used again: lost ones, and those on which an attempt failed first twice."""
    lost = {node for attempt in history for node in attempt.outcome.lost}
    causes = [attempt.outcome.cause for attempt in history if attempt.outcome.cause is not None]
    lost |= {cause.node for cause in causes if cause.kind == "node_lost"}
    blamed = Counter(cause.node for cause in causes if cause.node)
    return frozenset(lost | {node for node, count in blamed.items() if count > 1})


def choose_nodes(before: Sequence[str], usable: Sequence[str], policy: Policy) -> tuple[str, ...]:
    """The nodes of the next attempt: those of the last one that are left, then spares, as many as the layout allows.

    Returns: the nodes in node order; empty if no allowed number of them is left.
    """
    ranked = [node for node in before if node in usable] + [node for node in usable if node not in before]
    fitting = [size for size in policy.sizes if size <= min(len(ranked), policy.nodes)]
    if not fitting:
        return ()
    chosen = set(ranked[: fitting[-1]])
    return tuple(node for node in usable if node in chosen)


def _without_progress(history: Sequence[Attempt]) -> int:
    """How many attempts at the end left no newer checkpoint than they began with."""
    count = 0
    for attempt in reversed(history):
        if attempt.outcome.step > attempt.began_at:
            break
        count += 1
    return count


def _next_slice(why: str, exclude: frozenset[str], step: int, policy: Policy, slices: Sequence[int]) -> Decision:
    idle = 0
    for began_at in reversed(slices):
        if began_at < step:
            break
        idle += 1
    if idle >= policy.max_idle_slices:
        return _no_progress(idle, step)
    return Continue(why, exclude)


def _no_progress(slices: int, step: int) -> GiveUp:
    newest = f"the checkpoint of step {step}" if step else "no checkpoint"
    return GiveUp(
        f"{slices} slices in a row made no progress: all of them ended with {newest}; a step must fit into a slice, so "
        "give the job more time or nodes, or make the step smaller"
    )


def _restart_text(before: Sequence[str], after: Sequence[str]) -> str:
    gone, new = [n for n in before if n not in after], [n for n in after if n not in before]
    if not gone:
        return "restart on the same nodes"
    if len(after) == len(before):
        return f"restart with {_named(new)} in place of {_named(gone)}"
    return f"restart without {_named(gone)}, with less data parallelism ({len(after)} of {len(before)} nodes)"


def _named(nodes: Sequence[str] | frozenset[str]) -> str:
    return ", ".join(sorted(nodes)) or "no node"
