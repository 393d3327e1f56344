"""RUN/slices.json: every slice of a job and every start of its ranks, kept over requeues and chained jobs."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COMPLETE = re.compile(r"checkpoint_(\d+)_complete")


def newest_step(run_dir: Path) -> int:
    """Of the newest whole checkpoint; 0 without one."""
    try:
        found = [_COMPLETE.fullmatch(entry.name) for entry in (run_dir / "checkpoints").iterdir()]
    except FileNotFoundError:
        return 0
    return max((int(match[1]) for match in found if match), default=0)


@dataclass
class History:
    """What is in ``RUN/slices.json``; each change is on disk when the call returns."""

    path: Path
    slices: list[dict[str, Any]]

    @staticmethod
    def of(run_dir: Path) -> History:
        """Reads it; empty where there is none, or none that can be read."""
        path = run_dir / "slices.json"
        try:
            slices = json.loads(path.read_text())["slices"]
        except (OSError, ValueError, KeyError, TypeError):
            slices = []
        return History(path, slices)

    def begin_slice(self, job_id: str, restart: int, began_at: int) -> None:
        self.slices.append(
            {"job": job_id, "restart": restart, "began_at": began_at, "time": time.time(), "attempts": []}
        )
        self._write()

    def begin_attempt(self, nodes: tuple[str, ...], began_at: int) -> None:
        self.slices[-1]["attempts"].append({"nodes": list(nodes), "began_at": began_at, "time": time.time()})
        self._write()

    def end_attempt(self, **what: Any) -> None:
        self.slices[-1]["attempts"][-1] |= {**what, "ended": time.time()}
        self._write()

    def end(self, why: str) -> None:
        """Nothing follows this slice by itself: one that a person starts later counts anew."""
        self.slices[-1]["last"] = why
        self._write()

    @property
    def began_at(self) -> list[int]:
        """The checkpoint's step at the start of each slice, of those that followed each other by themselves."""
        began: list[int] = []
        for entry in self.slices:
            began.append(int(entry["began_at"]))
            if "last" in entry and entry is not self.slices[-1]:
                began = []
        return began

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Of all slices, oldest first."""
        return [attempt for entry in self.slices for attempt in entry["attempts"]]

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        part.write_text(json.dumps({"slices": self.slices}, indent=1) + "\n")
        os.replace(part, self.path)
