"""Which of many failures was the first: the cause, not the avalanche after it. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from hpc_rl.fault.failure import Failure

CLOCK_SKEW_S = 5.0  # nodes' clocks may differ by so much: failures closer than that have no order by time
PHASES = ("start", "load", "generation", "reward", "scoring", "critic", "actor", "reshard", "eval", "save", "end")
_KIND_ORDER = ("killed", "out_of_memory", "user", "nan", "start", "exception", "hang", "no_progress")  # where time says nothing

# What gloo, NCCL, the store and this project say on a rank that only lost another one.
_LOST = re.compile(
    r"connection (was |is )?(likely )?(closed|reset|aborted|refused|lost)|connection abort|broken pipe|socket (is )?closed"
    r"|got 0 bytes|recvvalue failed|sendbytes failed|recvbytes failed|no error: \[|timed? ?out wait|wait timeout"
    r"|lost the job's store|did not finish within|communicator was aborted|remote process|ncclremoteerror"
    r"|nccl (communicator|watchdog)|disterror|distnetworkerror|diststoreerror|distbackenderror"
    r"|peer (has )?(closed|gone|exited)|not connected",
    re.IGNORECASE,
)
_OTHER_FAILED = re.compile(r"^(?:RunError: )?rank (\d+)(?: failed)?: ")  # what all ranks say of one


def is_consequence(failure: Failure) -> bool:
    """Whether a rank failed only because another one had: it waited in a collective, or lost a connection."""
    if failure.kind == "hang":
        return bool(failure.collective)
    if failure.kind not in ("exception", "start") or failure.phase == "reward":  # a reward has connections of its own
        return False
    other = _OTHER_FAILED.search(failure.message)
    if other is not None and int(other[1]) != failure.rank:
        return True
    return bool(_LOST.search(failure.message))


def first_cause(failures: Sequence[Failure], world_size: int | None = None) -> Failure:
    """The failure that the others followed from.

    A lost node comes first. Then the earliest of those that are no consequence; across nodes, where clocks may differ,
    a death or a lack of memory goes before an exception, and that before a hang. If all waited for each other, the one
    that had come least far.

    Args:
        failures: of one attempt, at least one.
        world_size: if given, and all that failed waited in collectives, the rank that said nothing is the cause.
    """
    assert failures, "no failure, no cause"
    lost = [failure for failure in failures if failure.kind == "node_lost"]
    if lost:
        return min(lost, key=lambda failure: (failure.time, failure.rank))
    causes = [failure for failure in failures if not is_consequence(failure)]
    if causes:
        return _earliest(causes)
    hangs = [failure for failure in failures if failure.kind == "hang"]
    if not hangs:
        return _earliest(failures)
    straggler = _straggler(hangs)
    silent = sorted(set(range(world_size or 0)) - {failure.rank for failure in failures})
    return _silent(silent, straggler) if silent else straggler


def _earliest(failures: Sequence[Failure]) -> Failure:
    first_of_node: dict[str, Failure] = {}  # on one node there is one clock
    for failure in sorted(failures, key=lambda f: (f.time, f.rank)):
        first_of_node.setdefault(failure.node, failure)
    start = min(failure.time for failure in first_of_node.values())
    level = [failure for failure in first_of_node.values() if failure.time - start <= CLOCK_SKEW_S]
    found = min(level, key=lambda f: (_KIND_ORDER.index(f.kind), f.time, f.rank))
    # Where all ranks raise the same, as for a NaN, it is rank 0's, not that of the fastest.
    return min((f for f in failures if _is_same(f, found)), key=lambda failure: failure.rank)


def _is_same(one: Failure, other: Failure) -> bool:
    told_alike = (one.kind, one.message, one.step) == (other.kind, other.message, other.step)
    return told_alike and abs(one.time - other.time) <= CLOCK_SKEW_S


def _straggler(hangs: Sequence[Failure]) -> Failure:
    ranks_in = Counter(failure.collective for failure in hangs)

    def progress(failure: Failure) -> tuple[int, int, int, float, int]:
        phase = PHASES.index(failure.phase) if failure.phase in PHASES else len(PHASES)
        return failure.step, phase, ranks_in[failure.collective], failure.time, failure.rank

    return min(hangs, key=progress)


def _silent(ranks: Sequence[int], waiting: Failure) -> Failure:
    others = f" (as did {len(ranks) - 1} others)" if len(ranks) > 1 else ""
    message = f"said nothing{others} while rank {waiting.rank} waited in {waiting.collective}"
    return Failure(ranks[0], "", "hang", waiting.phase, waiting.step, message, waiting.time)
