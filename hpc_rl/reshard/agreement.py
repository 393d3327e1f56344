"""All ranks end a sync alike: a version every rank agrees on, and an error of one rank is an error of all.

Runs over the job's key-value store rather than a collective, so that a dead or late rank can be named.
"""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import count
from typing import NoReturn

from torch.distributed import PrefixStore, Store

from hpc_rl.errors import RunError

_WELL = "all well"
_made: dict[str, count[int]] = {}  # how many meeting points of each name this process has made


class Agreement:
    """The ranks' meeting point for one kind of operation, in which they meet again and again.

    Args:
        store: the job's store, the same for all ranks.
        name: of the operation; all ranks create their meeting points of one name in the same order.
        rank, num_ranks: of this process, and how many meet.
        timeout_s: longest wait for the others.
    """

    def __init__(self, store: Store | None, name: str, rank: int, num_ranks: int, timeout_s: float) -> None:
        assert store is not None or num_ranks == 1, "more than one rank needs a store"
        number = next(_made.setdefault(name, count()))
        self._store = PrefixStore(f"agreement/{name}/{number}", store) if store is not None and num_ranks > 1 else None
        self._rank, self._num_ranks, self._timeout_s = rank, num_ranks, timeout_s
        self._meeting = 0

    def meet(self, value: str, what: str) -> None:
        """Waits for every rank, all of which must bring the same ``value`` (told as ``what``).

        Raises:
            RunError: on all ranks: if two bring different values, if one calls ``fail``, if some do not come in time.
        """
        self._meeting += 1
        if self._store is None:
            return
        try:
            self._store.set(self._key(f"rank{self._rank}"), value)
            if self._store.add(self._key("count"), 1) == self._num_ranks:
                self._close(what)
            self._wait()
            outcome = self._store.get(self._key("end")).decode()
            self._forget()
        except RunError:
            raise
        except Exception as lost:
            raise RunError(self._lost(lost)) from lost
        if outcome != _WELL:
            raise RunError(outcome)

    def fail(self, message: str) -> NoReturn:
        """Makes the running meeting fail on every rank, and raises RunError with the first failed rank's message."""
        if self._store is not None:
            try:
                message = self._store.compare_set(self._key("end"), "", message).decode()
            except Exception as lost:  # the store is gone too: the first message says more
                message = f"{message} ({self._lost(lost)})"
        raise RunError(message)

    def fail_next(self, message: str) -> NoReturn:
        """``fail`` by a rank that will not come to the next meeting."""
        self._meeting += 1
        self.fail(message)

    def _close(self, what: str) -> None:
        # The last to come compares what all brought.
        assert self._store is not None
        values = [v.decode() for v in self._store.multi_get([self._key(f"rank{r}") for r in range(self._num_ranks)])]
        odd = next((r for r, value in enumerate(values) if value != values[0]), None)
        end = _WELL if odd is None else f"rank {odd} has {what} {values[odd]}, but rank 0 has {values[0]}"
        self._store.compare_set(self._key("end"), "", end)

    def _wait(self) -> None:
        assert self._store is not None
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                left = max(0.001, deadline - time.monotonic())
                return self._store.wait([self._key("end")], timedelta(seconds=left))
            except Exception:  # timed out, or the store is lost, which the check tells
                if self._store.check([self._key("end")]):
                    return None
                if time.monotonic() >= deadline:
                    absent = [r for r in range(self._num_ranks) if not self._store.check([self._key(f"rank{r}")])]
                    self.fail(f"ranks {absent} did not finish within {self._timeout_s:g} s")
                time.sleep(0.01)

    def _forget(self) -> None:
        # Whoever came to this meeting has read the one before: nobody needs the one before that.
        old = self._meeting - 2
        if old > 0:
            self._store.delete_key(f"{old}/rank{self._rank}")  # type: ignore[union-attr]
            if self._rank == 0:
                for key in ("count", "end"):
                    self._store.delete_key(f"{old}/{key}")  # type: ignore[union-attr]

    def _key(self, name: str) -> str:
        return f"{self._meeting}/{name}"

    def _lost(self, error: Exception) -> str:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        return f"rank {self._rank} lost the job's store, whose host (rank 0 or the launcher) may have died: {text}"
