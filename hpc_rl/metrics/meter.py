"""Collects one step's figures: where its seconds went, means, sums, and tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Meter:
    """One rank's figures of one step; make a new one for each step. The clock starts with it.

    Units are in the names it reports: ``step_seconds``, ``seconds/PHASE``, ``tokens_per_second``.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        """``synchronize`` waits for the device (``torch.cuda.synchronize``): a phase pays for its own kernels."""
        self._synchronize = synchronize
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._means: dict[str, tuple[float, float]] = {}  # name -> sum of value * weight, sum of weights

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the wall time of a block towards ``seconds/name``; a block may come more than once in a step."""
        start = time.perf_counter()
        try:
            yield
            if self._synchronize is not None:
                self._synchronize()
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def add(self, name: str, value: float) -> None:
        """Adds to the sum reported as ``name``."""
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def mean(self, name: str, value: float, weight: float = 1.0) -> None:
        """Adds one value to the mean reported as ``name``, with a weight (for example its number of tokens)."""
        total, weights = self._means.get(name, (0.0, 0.0))
        self._means[name] = (total + float(value) * weight, weights + weight)

    def summary(self, num_tokens: int = 0, num_response_tokens: int = 0) -> dict[str, float]:
        """All figures of the step so far.

        Args:
            num_tokens: prompt and response tokens of the step, over all ranks.
            num_response_tokens: those that were sampled.

        Returns:
            Sums and means by name (a mean without weight is NaN), ``step_seconds``, ``seconds/PHASE`` of each phase,
            and ``tokens_per_second`` of all ``num_tokens`` over the whole step.
        """
        step_seconds = time.perf_counter() - self._start
        figures = self._sums | {k: total / w if w else float("nan") for k, (total, w) in self._means.items()}
        return figures | {
            "num_tokens": num_tokens,
            "num_response_tokens": num_response_tokens,
            "tokens_per_second": num_tokens / step_seconds,
            "step_seconds": step_seconds,
            **{f"seconds/{name}": seconds for name, seconds in self._seconds.items()},
        }
