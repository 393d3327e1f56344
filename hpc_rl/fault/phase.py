"""Which phase of which step this process is in, and when it last moved on: what a watchdog and an error report ask.

Known to this process and to who listens (`on_change`): no collective, no wait for a device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

PHASES = ("start", "load", "generation", "reward", "scoring", "critic", "actor", "reshard", "eval", "save", "end")
_MARK = "_hpc_rl_place"  # of an exception: the phase that it left first


@dataclass(slots=True)
class _Now:
    phase: str = "start"
    step: int = 0
    moved_at: float = 0.0  # time.monotonic()


_now = _Now(moved_at=time.monotonic())
_listener: Callable[[str, int], None] | None = None


def on_change(listener: Callable[[str, int], None] | None) -> None:
    """Has (phase, step) told to ``listener`` at each change from now on, on the thread that makes it; None: to nobody."""
    global _listener
    _listener = listener
    _tell()


def _tell() -> None:
    if _listener is not None:
        _listener(_now.phase, _now.step)


@contextlib.contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """This block is phase ``name`` (of `PHASES`) of ``step`` (None: of the step around it); blocks nest."""
    assert name in PHASES, f"{name} is no phase"
    outer = _now.phase, _now.step
    _now.phase, _now.moved_at = name, time.monotonic()
    _now.step = outer[1] if step is None else step
    _tell()
    try:
        yield
    except BaseException as error:
        if not hasattr(error, _MARK):
            with contextlib.suppress(AttributeError):
                setattr(error, _MARK, (_now.phase, _now.step))
        raise
    finally:
        _now.phase, _now.step = outer
        _now.moved_at = time.monotonic()
        _tell()


def beat() -> None:
    """There is progress: call it where a phase may be long, once for each part of its work."""
    _now.moved_at = time.monotonic()


def current() -> tuple[str, int]:
    """(phase, step) of this process."""
    return _now.phase, _now.step


def silent_s() -> float:
    """Seconds since this process last made progress."""
    return time.monotonic() - _now.moved_at


def place_of(error: BaseException) -> tuple[str, int]:
    """(phase, step) in which an exception, or what caused it, arose."""
    return next((getattr(e, _MARK) for e in reversed(chain_of(error)) if hasattr(e, _MARK)), current())


def chain_of(error: BaseException) -> list[BaseException]:
    """An exception, what it was raised from, and so on to where it began."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain
