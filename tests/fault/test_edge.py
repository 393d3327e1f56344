"""What becomes of an exception: its kind, its place, its line; real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpc_rl.errors import NotFiniteError, RunError, UserError
from hpc_rl.fault.edge import Reporter, failure_of, kind_of, recorded, reporting
from hpc_rl.fault.phase import phase
from hpc_rl.fault.report import read_failures
from hpc_rl.reward.score import RewardFunction
from hpc_rl.rollout.protocol import Prompt, Request, Sample


def caught(function) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


def score_with(function) -> None:
    request = Request(Prompt(3, (1,), "1+1=", {}), 0, 0, 0)
    RewardFunction(function).score([Sample(request, (2,), (0.0,), True, 0, "2", 0.0)])


def test_out_of_memory_is_found_wherever_it_arose() -> None:
    assert kind_of(caught(lambda: bytearray(1 << 60))) == "out_of_memory"
    assert kind_of(caught(lambda: torch.empty(1 << 55, dtype=torch.uint8))) == "out_of_memory"
    assert kind_of(caught(lambda: score_with(lambda *_: float(len(bytearray(1 << 60)))))) == "out_of_memory"
    assert kind_of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")) == "out_of_memory"


def test_other_kinds() -> None:
    assert kind_of(UserError("x")) == "user"
    assert kind_of(NotFiniteError("loss is nan")) == "nan"
    assert kind_of(RunError("rank 1 failed: MemoryError: out of memory")) == "exception"
    failed = caught(lambda: score_with(lambda *_: 1 / 0))
    assert (type(failed), kind_of(failed)) == (RunError, "exception")


def test_recorded_once_with_place_and_stack(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, 4, "n4", is_alone=True)

    def fail() -> None:
        raise KeyError("weights\nof layer 7")

    with pytest.raises(KeyError) as error, reporting(reporter), phase("critic", 9), reporting(reporter):
        fail()
    (failure,) = read_failures(tmp_path)
    assert failure == recorded(error.value)
    assert (failure.rank, failure.node, failure.kind, failure.phase, failure.step) == (
        4,
        "n4",
        "exception",
        "critic",
        9,
    )
    assert failure.message.startswith("KeyError: 'weights\\nof layer 7', at fail (test_edge.py:")
    assert failure.stack[-1].endswith('raise KeyError("weights\\nof layer 7")')
    assert json.loads((tmp_path / "failure.json").read_text())["summary"].startswith("rank 4 on n4 failed in critic of")


def test_a_rank_that_only_lost_the_others_writes_no_final_report(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, 0, "n0", is_alone=True)
    with pytest.raises(RuntimeError), reporting(reporter):
        raise RuntimeError("Connection closed by peer [10.0.0.7]:4711")
    assert len(read_failures(tmp_path)) == 1
    assert not (tmp_path / "failure.json").exists()


def test_ctrl_c_and_exit_are_no_failures(tmp_path: Path) -> None:
    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind), reporting(Reporter(tmp_path, 0, "n0", is_alone=True)):
            raise kind
    assert not list(tmp_path.iterdir())


def test_one_line_however_long() -> None:
    failure = failure_of(ValueError("a\n" * 5000), 0, "n0")
    assert "\n" not in failure.message and len(failure.message) < 1200
