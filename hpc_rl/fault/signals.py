"""Signals that ask a run to end: noted when they come, acted on at a step's end, by all ranks alike."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import torch

from hpc_rl.parallel.collectives import merge

# USR1: what sbatch --signal=USR1@300 sends before the time limit. TERM: scancel, preemption, a local launcher.
STOPPING = (signal.SIGUSR1, signal.SIGTERM)


class StopSignals:
    """Catches `STOPPING` in this process from now on; a second TERM ends it at once, as without this.

    Signals reach ranks at different times, some only one of them: `agreed` makes it one decision.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # Python allows it there only
            self._before = {s: signal.signal(s, self._note) for s in STOPPING}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # a supervisor holds back what came before

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is signal.SIGTERM and number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        self.received = signal.Signals(number)

    def agreed(self, device: torch.device) -> signal.Signals | None:
        """The signal that any rank has received, the same on every rank. A collective: call it at every step's end."""
        counts = torch.tensor([float(self.received is s) for s in STOPPING], device=device)
        found = [s for s, count in zip(STOPPING, merge(counts).tolist(), strict=True) if count]
        return found[0] if found else None

    def close(self) -> None:
        """Puts the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
