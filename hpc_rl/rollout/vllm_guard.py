"""What vLLM changes in its process, kept from the trainer that shares it.

vLLM reseeds every global random generator, stubs parts of ``torch.cuda`` on CPU and overwrites environment variables.
A ``ProcessGuard`` lets vLLM have its way only while one of its calls runs.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# Attributes that vLLM's CPU worker replaces for the whole process when it is imported or started.
_STUBBED = (
    (torch, "Event"),
    (torch, "set_num_threads"),
    (torch.Tensor, "pin_memory"),
    (torch.Tensor, "record_stream"),
    (torch.accelerator, "synchronize"),
    (torch.accelerator, "empty_cache"),
    (torch.accelerator, "get_memory_info"),
    *((torch.cuda, name) for name in ("Event", "Stream", "set_stream", "current_stream", "stream")),
)
_MISSING = object()


def _random_state() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _set_random_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state(state[3])


def _attributes() -> list[Any]:
    return [getattr(owner, name, _MISSING) for owner, name in _STUBBED]


def _set_attributes(values: list[Any]) -> None:
    for (owner, name), value in zip(_STUBBED, values, strict=True):
        if value is not _MISSING:
            setattr(owner, name, value)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` for a while."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


class ProcessGuard:
    """Holds two versions of the process-wide state: the trainer's and vLLM's."""

    def __init__(self) -> None:
        self._inside: list[Any] | None = None  # attributes as vLLM left them
        self._outside: list[Any] | None = None  # attributes as the trainer has them; None while outside
        self._random: tuple[Any, ...] = ()

    def enter(self) -> None:
        """Saves the trainer's state and puts vLLM's attributes in place."""
        assert self._outside is None, "the guard is entered twice"
        self._outside, self._random = _attributes(), _random_state()
        if self._inside is not None:
            _set_attributes(self._inside)

    def leave(self) -> None:
        """Restores the trainer's state."""
        assert self._outside is not None, "the guard is left twice"
        self._inside = _attributes()
        _set_attributes(self._outside)
        _set_random_state(self._random)
        self._outside = None

    @contextmanager
    def vllm(self) -> Iterator[None]:
        """A stretch of code that belongs to vLLM."""
        self.enter()
        try:
            yield
        finally:
            if self._outside is not None:
                self.leave()

    @contextmanager
    def trainer(self) -> Iterator[None]:
        """Inside ``vllm()``: a stretch of code that belongs to the trainer again, such as a callback."""
        self.leave()
        try:
            yield
        finally:
            self.enter()

    @contextmanager
    def start(self) -> Iterator[None]:
        """``vllm()`` for the import and the start, which also change the environment and the matmul precision.

        Garbage collection rests meanwhile: walking the objects of all imported modules again and again would take
        half of the start.
        """
        environ, precision, collecting = dict(os.environ), torch.get_float32_matmul_precision(), gc.isenabled()
        gc.disable()
        with self.vllm():
            try:
                yield
            finally:
                os.environ.clear()
                os.environ.update(environ)
                torch.set_float32_matmul_precision(precision)
                if collecting:
                    gc.enable()


GUARD = ProcessGuard()  # one per process: vLLM changes the process when it is imported, and that happens once
