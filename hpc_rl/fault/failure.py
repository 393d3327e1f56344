"""What went wrong on one rank, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["user", "nan", "exception", "hang", "out_of_memory", "killed", "node_lost", "start", "no_progress"]

EXIT_HANG = 79  # exit code of a rank whose watchdog ended it


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's failure.

    Attributes:
        rank: global rank, -1 if unknown (a node lost before it could say anything).
        node: host name of the rank's node, as Slurm calls it.
        kind: user: wrong input, a restart would not help. nan: a loss that is not finite, likewise. exception: any other
            Python exception. hang: no progress within the phase's time-out. out_of_memory: of the host or the GPU. killed:
            ended by a signal. node_lost: the node does not answer. start: the ranks never met. no_progress: no rank's failure, the
            job came no further.
        phase: of the step: start, generation, reward, scoring, critic, actor, reshard, save, load, eval, end.
        step: the step that was under way, counted from 1; 0 before the first.
        message: one line: the exception, or where the rank hung.
        time: seconds since the epoch, by that node's clock.
        stack: where the rank stood, innermost last; empty if unknown.
        collective: the collective in which the rank waited for others; empty: in none.
    """

    rank: int
    node: str
    kind: Kind
    phase: str
    step: int
    message: str
    time: float
    stack: tuple[str, ...] = ()
    collective: str = ""
