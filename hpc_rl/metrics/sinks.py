"""Where the figures of a step go: the console, ``metrics.jsonl``, TensorBoard, Prometheus. Rank 0 alone writes."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from hpc_rl.config import Config
from hpc_rl.errors import UserError

log = logging.getLogger(__name__)

Metrics = Mapping[str, Any]

# Shown on the console, in this order, if the step has them: metric, label, format.
_SHOWN = (
    ("loss", "Loss", "{:.3f}"),
    ("reward_mean", "Reward", "{:.3f}"),
    ("kl", "KL", "{:.4f}"),
    ("critic/loss/value", "Value loss", "{:.3f}"),
    ("actor/entropy", "Entropy", "{:.3f}"),
    ("response_tokens_mean", "Length", "{:.0f}"),
    ("tokens_per_second", "Tokens/s", "{:.0f}"),
    ("step_seconds", "Seconds", "{:.2f}"),
)


class Sink(Protocol):
    """Takes one step's metrics."""

    def write(self, step: int, metrics: Metrics) -> None: ...
    def close(self) -> None: ...


class Sinks:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    @staticmethod
    def from_config(config: Config, resumed_step: int = 0, rank: int = 0) -> Sinks:
        """Those that the configuration asks for, of a run that goes on after ``resumed_step`` (0: a new one).

        Ranks other than 0 get none: writing to them does nothing.
        """
        if rank != 0:
            return Sinks([])
        run_dir = Path(config.run.dir)
        sinks: list[Sink] = [
            Console(config.steps, resumed_step, progress=config.metrics.progress),
            JsonlSink(run_dir / "metrics.jsonl", resumed_step),
        ]
        if config.metrics.tensorboard:
            sinks.append(TensorBoardSink(run_dir / "logs" / "tensorboard", resumed_step))
        if config.metrics.prometheus_port is not None:
            sinks.append(PrometheusSink(config.metrics.prometheus_port))
        return Sinks(sinks)

    def write(self, step: int, metrics: Metrics) -> None:
        """Hands one step's metrics to each sink."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        """Closes each sink; nothing can be written after it."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Console:
    """One line a step; on a terminal a progress bar below them."""

    def __init__(self, steps: int, resumed_step: int = 0, progress: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._progress: Any = None
        if progress and self._stream.isatty():
            self._start_progress(steps, resumed_step)

    def _start_progress(self, steps: int, resumed_step: int) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("Steps"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=RichConsole(file=self._stream, highlight=False, soft_wrap=True))
        self._task = self._progress.add_task("steps", total=steps, completed=resumed_step)
        self._progress.start()

    def write(self, step: int, metrics: Metrics) -> None:
        line = step_line(step, metrics)
        if self._progress is None:
            print(line, file=self._stream, flush=True)
        else:
            self._progress.print(line, markup=False)
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def step_line(step: int, metrics: Metrics) -> str:
    """``Step 2 | Loss: 0.421 | Reward: 0.870 | KL: 0.0030 | ...``: those of the known metrics that are there."""
    parts = [f"Step {step}"]
    for name, label, form in _SHOWN:
        if name in metrics:
            value = plain(metrics[name])
            parts.append(f"{label}: {'not finite' if value is None else form.format(value)}")
    return " | ".join(parts)


class JsonlSink:
    """``metrics.jsonl``: one JSON object a step, flushed as it is written; NaN and infinity are null.

    A resumed run first removes, in one atomic step, the lines after the step it goes on from, so that its file is the
    same as that of a run that was never killed. A new run keeps an old file as ``metrics.jsonl.bak``.
    """

    def __init__(self, path: str | Path, resumed_step: int = 0) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            if resumed_step:
                _truncate(self._path, resumed_step)
            else:
                os.replace(self._path, self._path.with_name(self._path.name + ".bak"))
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Metrics) -> None:
        values = {name: plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _truncate(path: Path, last_step: int) -> None:
    """Keeps whole lines of steps up to ``last_step``; writes beside the file and renames."""
    kept: list[bytes] = []
    broken = 0
    for line in path.read_bytes().split(b"\n"):
        try:
            if line and json.loads(line)["step"] <= last_step:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):
            broken += 1
    if broken:
        log.warning("%s: removed %d broken lines (a run that was killed while it wrote)", path, broken)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class TensorBoardSink:
    """Scalars for TensorBoard; a resumed run hides what was written after the step it goes on from."""

    def __init__(self, directory: str | Path, resumed_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "metrics.tensorboard = true needs the package tensorboard, which is not installed: pip install "
                "tensorboard, or set metrics.tensorboard=false"
            ) from None
        self._writer: Any = SummaryWriter(str(directory), purge_step=resumed_step + 1 if resumed_step else None)

    def write(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if (number := plain(value)) is not None:
                self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class PrometheusSink:
    """Serves the newest step's metrics as gauges ``hpc_rl_NAME`` on ``http://HOST:port/metrics``."""

    def __init__(self, port: int) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise UserError(
                f"metrics.prometheus_port = {port} needs the package prometheus_client, which is not installed: pip "
                "install prometheus_client, or set metrics.prometheus_port=null"
            ) from None
        self._gauge = prometheus_client.Gauge
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, registry=self._registry)
        except OSError as error:
            raise UserError(
                f"metrics.prometheus_port = {port} cannot be served ({error.strerror}), but must be a free port: set "
                "another"
            ) from None

    def write(self, step: int, metrics: Metrics) -> None:
        for name, value in {"step": step, **metrics}.items():
            key = "hpc_rl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            if key not in self._gauges:
                self._gauges[key] = self._gauge(key, name, registry=self._registry)
            number = plain(value)
            self._gauges[key].set(math.nan if number is None else number)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def plain(value: Any) -> int | float | None:
    """A metric as a plain number; None if it is not finite or None. Takes numpy and one-element torch values."""
    if value is None:
        return None
    if isinstance(value, bool | int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
