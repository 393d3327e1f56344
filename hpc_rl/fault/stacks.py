"""What this process's threads are doing, as text, and the collective that one of them waits in."""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import PurePath
from traceback import FrameSummary

# Files whose functions wait for other ranks.
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/rendezvous.py",
    "vllm/distributed/",
    "hpc_rl/reshard/agreement.py",
    "launch/mpi_world.py",
)
_WAITERS = ("_await_events",)  # functions that ask again and again
_HELPERS = ("hpc_rl/parallel/collectives.py",)  # who calls these is more telling
# A wait in C shows as the line that calls it. With a GPU the host waits for kernels, which wait for other ranks.
_WAIT = re.compile(r"\.wait\(")
_DEVICE_WAIT = re.compile(r"\.(item|tolist|cpu|numpy|synchronize|run_backward)\(")


def stack_of(thread: threading.Thread) -> list[FrameSummary]:
    """Its frames, outermost first; empty if it has none (any more)."""
    frame = sys._current_frames().get(thread.ident or 0)
    return list(traceback.extract_stack(frame)) if frame is not None else []


def lines_of(stack: Sequence[FrameSummary]) -> list[str]:
    """One line a frame, innermost last: ``score (rewards.py:12): return slow(response)``."""
    return [f"{frame.name} ({frame.filename}:{frame.lineno}): {frame.line or '?'}" for frame in stack]


def place_in(stack: Sequence[FrameSummary]) -> str:
    """The innermost frame, ``score (rewards.py:12)``."""
    return f"{stack[-1].name} ({PurePath(stack[-1].filename).name}:{stack[-1].lineno})" if stack else "an unknown place"


def all_stacks(first: threading.Thread) -> str:
    """Every thread's name and frames: ``first``, then the others, this thread last."""
    parts, last = [], threading.current_thread()
    for thread in sorted(threading.enumerate(), key=lambda t: (t is not first, t is last)):
        lines = lines_of(stack_of(thread))
        parts.append(f"Thread {thread.name}:\n" + "".join(f"  {line}\n" for line in lines))
    return "\n".join(parts)


def watchers_last(text: str) -> str:
    """A dump of faulthandler, whose threads come youngest first: the main thread leads, the watchdog's goes last."""
    head, *blocks = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", text)
    is_main = [bool(blocks) and block is blocks[-1] for block in blocks]  # the eldest
    order = sorted(range(len(blocks)), key=lambda i: ("fault/watchdog.py" in blocks[i], not is_main[i], i))
    return head + "\n".join(blocks[i].rstrip("\n") + "\n" for i in order)


def collective_of(stack: Sequence[FrameSummary], on_gpu: bool = False) -> str:
    """``all_gather_object from _draw (collect.py:137)`` if the stack waits for other ranks, else empty.

    Args:
        stack: outermost first.
        on_gpu: the job's collectives run on a GPU, so a host that waits for it may wait for other ranks.
    """
    for index, frame in enumerate(stack):
        if _is_in(frame, _COLLECTIVES) or frame.name in _WAITERS:
            return f"{frame.name} from {_caller(stack[:index])}"
    if not stack:
        return ""
    line = stack[-1].line or ""
    waits = _WAIT.search(line) or (on_gpu and _DEVICE_WAIT.search(line))
    return f"{waits[0].strip('.(')} from {_caller(stack)}" if waits else ""


def _caller(stack: Sequence[FrameSummary]) -> str:
    """The innermost frame that is no helper's."""
    for frame in reversed(stack):
        if not _is_in(frame, _HELPERS) and frame.name != "wrapper":
            return place_in([frame])
    return "?"


def _is_in(frame: FrameSummary, places: Sequence[str]) -> bool:
    return any(place in frame.filename.replace("\\", "/") for place in places)
