"""Collects one step's figures: where its seconds went, means, sums, and tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class Meter:
    """One rank's figures of the step in progress.

    Units are in the names it reports: ``step_seconds``, ``seconds/PHASE``, ``tokens_per_second``.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        """``synchronize`` waits for the device (``torch.cuda.synchronize``), so that a phase pays for its own kernels."""
        self._synchronize = synchronize
        self.start_step()

    def start_step(self) -> None:
        """Forgets the last step and starts the clock of the next."""
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._weighted: dict[str, tuple[float, float]] = {}
        self._tokens = 0

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
        total, weights = self._weighted.get(name, (0.0, 0.0))
        self._weighted[name] = (total + float(value) * weight, weights + weight)

    def set(self, values: Mapping[str, float]) -> None:
        """Reports ``values`` as they are, in place of what was collected under these names."""
        for name, value in values.items():
            self._weighted.pop(name, None)
            self._sums[name] = float(value)

    def add_tokens(self, num_tokens: int) -> None:
        """Counts tokens (prompt and response, over all ranks) towards ``tokens_per_second``."""
        self._tokens += int(num_tokens)

    def finish_step(self) -> dict[str, float]:
        """All figures of the step, by name; `start_step` begins the next."""
        step_seconds = time.perf_counter() - self._start
        figures = {**self._sums, **{k: total / w if w else float("nan") for k, (total, w) in self._weighted.items()}}
        figures["step_seconds"] = step_seconds
        if self._tokens:
            figures["num_tokens"] = float(self._tokens)
            figures["tokens_per_second"] = self._tokens / step_seconds
        for name, seconds in self._seconds.items():
            figures[f"seconds/{name}"] = seconds
        return figures
