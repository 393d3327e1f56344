"""Failures on disk and the cause among them, by hand-made cases."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hpc_rl.fault import report
from hpc_rl.fault.report import Failure, Kind, first_cause

CLOSED = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:21318"
)
RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:525] Read error [10.0.0.2]:41: Connection reset by peer"
NCCL = "DistBackendError: NCCL error: remote process exited or there was a network error, ncclRemoteError"
STORE = "RunError: rank 2 lost the job's store, whose host (rank 0 or the launcher) may have died: Broken pipe"
AGREED = "RunError: rank 1 failed: ValueError: no such thing"
WAITED = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation"


def failed(
    rank: int,
    time: float,
    message: str = "ValueError: x",
    kind: Kind = "exception",
    *,
    node: str = "",
    phase: str = "actor",
    step: int = 3,
    collective: str = "",
) -> Failure:
    return Failure(rank, node or f"node{rank}", kind, phase, step, message, time, collective=collective)


def hung(rank: int, time: float, collective: str = "", **where: object) -> Failure:
    return failed(rank, time, "no progress for 60 s", "hang", collective=collective, **where)  # type: ignore[arg-type]


CASES = {
    "alone": (1, [failed(1, 9.0)]),
    "earliest": (2, [failed(1, 30.0), failed(2, 10.0), failed(3, 20.0)]),
    "peers-lost-it-first-by-their-clocks": (1, [failed(0, 8.0, CLOSED), failed(1, 10.0), failed(2, 9.0, RESET)]),
    "nccl-and-the-store": (3, [failed(0, 1.0, NCCL), failed(2, 2.0, STORE), failed(3, 4.0)]),
    "agreed-by-all": (1, [failed(0, 1.0, AGREED), failed(1, 2.0, "ValueError: no such thing"), failed(2, 1.0, AGREED)]),
    "its-own-words": (1, [failed(0, 2.0, CLOSED), failed(1, 2.5, AGREED)]),
    "only-lost-connections": (2, [failed(0, 20.0, CLOSED), failed(2, 10.0, RESET)]),
    "a-reward-has-connections-of-its-own": (
        1,
        [failed(0, 5.0, CLOSED), failed(1, 4.0, "ConnectionResetError: Connection reset by peer", phase="reward")],
    ),
    "killed-within-the-skew": (1, [failed(0, 10.0, "KeyError: 3"), failed(1, 13.0, "SIGKILL", "killed")]),
    "killed-later-than-the-skew": (0, [failed(0, 10.0), failed(1, 19.0, "SIGKILL", "killed")]),
    "one-node-one-clock": (
        0,
        [failed(0, 10.0, node="a"), failed(1, 10.2, "SIGKILL", "killed", node="a")],
    ),
    "out-of-memory-before-an-exception": (1, [failed(0, 10.0), failed(1, 12.0, "MemoryError", "out_of_memory")]),
    "all-see-the-nan": (0, [failed(r, 10.0 - r, "RunError: loss is nan", "nan") for r in range(4)]),
    "all-see-it-on-one-node": (0, [failed(r, 10.0 - r, "UserError: x", "user", node="a") for r in range(4)]),
    "hang-outside": (2, [hung(0, 60.0, "all_reduce"), hung(1, 60.1, "all_reduce"), hung(2, 61.0)]),
    "hang-outside-although-late": (2, [hung(0, 60.0, "all_reduce"), hung(2, 90.0), failed(1, 20.0, WAITED)]),
    "exception-while-the-others-wait": (1, [hung(0, 10.0, "all_reduce"), failed(1, 40.0)]),
    "other-collective": (
        3,
        [hung(0, 5.0, "all_reduce"), hung(1, 4.0, "all_reduce"), hung(2, 6.0, "all_reduce"), hung(3, 9.0, "broadcast")],
    ),
    "less-far-in-the-step": (1, [hung(0, 5.0, "all_reduce"), hung(1, 6.0, "all_reduce", phase="generation")]),
    "a-step-behind": (1, [hung(0, 5.0, "all_reduce", phase="generation"), hung(1, 6.0, "all_reduce", step=2)]),
    "node-lost": (-1, [failed(0, 1.0, CLOSED), failed(-1, 60.0, "no answer", "node_lost", node="n7"), failed(2, 1.0)]),
}


@pytest.mark.parametrize(("rank", "failures"), CASES.values(), ids=CASES)
def test_first_cause(rank: int, failures: list[Failure]) -> None:
    for seed in range(6):  # whatever the order in which the files are read
        shuffled = random.Random(seed).sample(failures, len(failures))
        assert first_cause(shuffled).rank == rank


def test_who_said_nothing_while_all_others_waited() -> None:
    waiting = [hung(r, 60.0, "all_gather_object", phase="generation") for r in (0, 2, 3)]
    cause = first_cause(waiting, world_size=4)
    assert (cause.rank, cause.kind, cause.phase, cause.step) == (1, "hang", "generation", 3)
    assert cause.message == "said nothing while rank 0 waited in all_gather_object"
    assert first_cause([*waiting, failed(1, 90.0)], world_size=4).message == "ValueError: x"
    assert first_cause(waiting[:1], world_size=1) == waiting[0]


def test_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(report.ATTEMPT_VARIABLE, "2")
    first = Failure(11, "n1", "exception", "critic", 7, "KeyError: 'x'", 5.5, ("File a, line 1",), "all_reduce")
    lost = Failure(-1, "n2", "node_lost", "critic", 7, "no answer", 6.0)
    path = report.record(first, tmp_path)
    report.record(lost, tmp_path)
    assert path == tmp_path / "logs/failures/2/rank_00011.json"
    assert report.read_failures(tmp_path) == [lost, first]
    assert report.read_failures(tmp_path, 1) == []
    (path.parent / "rank_00003.json").write_text('{"rank": 3, "no')  # its node died while it wrote, on a poor disk
    (path.parent / "rank_00012.json").write_text(json.dumps({**json.loads(path.read_text()), "new": 1, "rank": 12}))
    assert [f.rank for f in report.read_failures(tmp_path)] == [-1, 11, 12]
    report.begin_attempt(tmp_path)
    assert report.read_failures(tmp_path) == []


def test_a_disk_that_refuses_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    assert report.record(failed(1, 1.0), tmp_path) is None


def test_final_report(tmp_path: Path) -> None:
    failures = [failed(0, 2.0, CLOSED), failed(1, 3.0, "ValueError: a\n  b")]
    restarts = [{"attempt": 0, "cause": "node n7 was lost", "decided": "restart without n7"}]
    cause = first_cause(failures)
    report.final_report(tmp_path, cause, decided="the run ends", attempt=1, failures=failures, restarts=restarts)
    written = json.loads((tmp_path / "failure.json").read_text())
    assert written["summary"] == "rank 1 on node1 failed in actor of step 3: ValueError: a b"
    assert (written["rank"], written["node"], written["phase"], written["step"]) == (1, "node1", "actor", 3)
    assert (written["kind"], written["attempt"], written["decided"]) == ("exception", 1, "the run ends")
    assert written["restarts"] == restarts
    assert [(o["rank"], o["message"]) for o in written["others"]] == [(0, CLOSED)]
    report.begin_attempt(tmp_path, 0)
    assert not (tmp_path / "failure.json").exists()
