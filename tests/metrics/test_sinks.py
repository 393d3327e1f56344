from __future__ import annotations

import builtins
import io
import json
import os
import pty
import re
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rl.config import Config, MetricsConfig, RunConfig
from hpc_rl.metrics.sinks import Console, JsonlSink, PrometheusSink, Sinks, TensorBoardSink, plain, step_line
from tests.config.refusal import refused
from tests.ranks import free_port

METRICS = {"loss": 0.4212, "reward_mean": 0.87, "kl": 0.0031, "tokens_per_second": 1234.5, "step_seconds": 1.5}
LINE = "Step 2 | Loss: 0.421 | Reward: 0.870 | KL: 0.0031 | Tokens/s: 1234 | Seconds: 1.50"


def test_step_line() -> None:
    assert step_line(2, METRICS) == LINE
    assert step_line(3, {"loss": float("nan"), "unknown": 1}) == "Step 3 | Loss: not finite"


def test_console_without_a_terminal_prints_plain_lines() -> None:
    stream = io.StringIO()
    console = Console(4, stream=stream)
    console.write(2, METRICS)
    console.close()
    assert stream.getvalue() == LINE + "\n"


def test_console_on_a_terminal_shows_a_bar_and_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    output = on_a_terminal(lambda stream: Console(4, resumed_step=1, stream=stream))
    assert LINE in output
    assert "2/4" in output
    plain_output = on_a_terminal(lambda stream: Console(4, progress=False, stream=stream))
    assert plain_output.replace("\r\n", "\n") == LINE + "\n"


def on_a_terminal(make: Any) -> str:
    """What a console writes to a real (pseudo) terminal, without control sequences."""
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        console = make(stream)
        console.write(2, METRICS)
        console.close()
    text = b""
    try:
        while part := os.read(leader, 65536):
            text += part
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode())


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_is_flushed_and_safe_for_nan(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"loss": np.float32(0.5), "kl": float("nan"), "n": 3, "t": torch.tensor(2.0), "x": float("-inf")})
    assert read(path) == [{"step": 1, "loss": 0.5, "kl": None, "n": 3, "t": 2.0, "x": None}], "before close"
    assert "NaN" not in path.read_text()
    sink.close()


def write_steps(path: Path, steps: range, resumed_step: int = 0) -> None:
    sink = JsonlSink(path, resumed_step)
    for step in steps:
        sink.write(step, {"loss": step / 7})
    sink.close()


@pytest.mark.parametrize("torn", ["", '{"step": 6, "lo', "\0\0\0\0", '{"step": 6, "loss": 0.1}'])
def test_resumed_file_equals_that_of_a_run_never_killed(tmp_path: Path, torn: str) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    write_steps(whole, range(1, 8))
    write_steps(killed, range(1, 6))  # steps 4 and 5 came after the checkpoint of step 3
    with killed.open("a") as file:
        file.write(torn)
    write_steps(killed, range(4, 8), resumed_step=3)
    assert killed.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["killed.jsonl", "whole.jsonl"], "no temporary file stays"


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    write_steps(whole, range(1, 6))
    write_steps(killed, range(1, 4))
    killed.write_bytes(killed.read_bytes().removesuffix(b"\n"))
    write_steps(killed, range(4, 6), resumed_step=3)
    assert killed.read_bytes() == whole.read_bytes()


def test_truncation_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 6))
    before = path.read_bytes()

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        JsonlSink(path, resumed_step=3)
    assert path.read_bytes() == before


def test_a_new_run_keeps_the_old_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    write_steps(path, range(1, 2))
    assert [row["step"] for row in read(path)] == [1]
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl.bak")] == [1, 2, 3]


def test_tensorboard_reads_back_and_resume_purges(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        sink.write(step, {"loss": step / 2, "kl": float("nan")})
    sink.close()
    resumed = TensorBoardSink(tmp_path, resumed_step=1)
    resumed.write(2, {"loss": 9.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert {(e.step, e.value) for e in events.Scalars("loss")} == {(1, 0.5), (2, 9.0)}


def test_prometheus_serves_the_newest_step() -> None:
    port = free_port()
    sink = PrometheusSink(port)
    sink.write(1, {"loss": 0.5})
    sink.write(2, {"loss": 0.25, "seconds/update": 3, "kl": None})
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert "hpc_rl_step 2.0\n" in text
    assert "hpc_rl_loss 0.25\n" in text
    assert "hpc_rl_seconds_update 3.0\n" in text
    assert "hpc_rl_kl NaN\n" in text
    with refused(f"metrics.prometheus_port = {port}", "must be a free port", "set another"):
        PrometheusSink(port)
    sink.close()
    PrometheusSink(port).close()


@pytest.mark.parametrize(
    ("package", "make", "key"),
    [
        ("torch.utils.tensorboard", lambda: TensorBoardSink("unused"), "metrics.tensorboard = true"),
        ("prometheus_client", lambda: PrometheusSink(9), "metrics.prometheus_port = 9"),
    ],
)
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, package: str, make: Any, key: str) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with refused(key, "which is not installed", "pip install"):
        make()


def test_sinks_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(run=RunConfig(str(tmp_path)), metrics=MetricsConfig(tensorboard=True))
    with Sinks.from_config(config) as sinks:
        sinks.write(2, METRICS)
    assert capsys.readouterr().out == LINE + "\n"
    assert read(tmp_path / "metrics.jsonl") == [{"step": 2, **METRICS}]
    assert list((tmp_path / "logs" / "tensorboard").iterdir())
    with Sinks.from_config(config, resumed_step=2, rank=1) as sinks:
        sinks.write(3, METRICS)
    assert capsys.readouterr().out == ""
    assert len(read(tmp_path / "metrics.jsonl")) == 1, "rank 0 alone writes"


def test_plain() -> None:
    assert plain(True) == 1
    assert type(plain(np.int64(3))) in (int, float)
    assert plain(None) is None
    assert plain(torch.tensor(float("inf"))) is None
