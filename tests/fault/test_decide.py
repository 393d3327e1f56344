"""The supervisor's decisions and the size of the next slice, case by case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_rl.fault.decide import Attempt, Continue, Finish, GiveUp, Outcome, Policy, Restart, decide, first_decision
from hpc_rl.fault.failure import Failure, Kind
from hpc_rl.fault.history import History, newest_step
from hpc_rl.fault.scale import Queue, choose_size, measured_rates

ABCD = ("a", "b", "c", "d")
THREE = Policy(nodes=3, sizes=(1, 2, 3), max_restarts=2, backoff_s=4.0)


def cause(node: str, kind: Kind = "exception") -> Failure:
    return Failure(0, node, kind, "actor", 1, "boom", 0.0)


def failed(node: str = "b", kind: Kind = "exception", *, nodes: tuple[str, ...] = ABCD[:3], at: int = 5, began: int = 3) -> Attempt:
    lost = frozenset({node}) if kind == "node_lost" else frozenset()
    return Attempt(nodes, began, Outcome(at, cause=cause(node, kind), lost=lost))


def test_done() -> None:
    assert decide([Attempt(ABCD[:3], 0, Outcome(9, finished=True))], ABCD, THREE, [0]) == Finish()


@pytest.mark.parametrize("kind", ["user", "nan"])
def test_what_would_come_again_is_not_started_again(kind: Kind) -> None:
    assert isinstance(decide([failed("b", kind)], ABCD, THREE, [3]), GiveUp)


@pytest.mark.parametrize("kind", ["exception", "hang", "out_of_memory", "killed", "start"])
def test_first_failure_of_a_node(kind: Kind) -> None:
    assert decide([failed("b", kind)], ABCD, THREE, [3]) == Restart(("a", "b", "c"), "restart on the same nodes", 0.0)


def test_the_same_node_twice_is_replaced_by_a_spare() -> None:
    decision = decide([failed("b"), failed("b", at=7, began=5)], ABCD, THREE, [3])
    assert decision == Restart(("a", "c", "d"), "restart with d in place of b", 0.0)


def test_a_lost_node_is_replaced_at_once() -> None:
    decision = decide([failed("b", "node_lost")], ("a", "c", "d"), THREE, [3])
    assert isinstance(decision, Restart)
    assert decision.nodes == ("a", "c", "d")


def test_without_a_spare_data_parallelism_shrinks_to_what_the_layout_allows() -> None:
    pairs = Policy(nodes=4, sizes=(2, 4))
    decision = decide([failed("b", "node_lost", nodes=ABCD)], ("a", "c", "d"), pairs, [3])
    assert isinstance(decision, Restart)
    assert decision.nodes == ("a", "c")
    assert "less data parallelism (2 of 4 nodes)" in decision.text


def test_too_few_nodes_for_the_layout_is_for_the_queue() -> None:
    decision = decide([failed("b", "node_lost")], ("a", "c"), Policy(nodes=3, sizes=(3,)), [3])
    assert isinstance(decision, Continue)
    assert decision.exclude == {"b"}


def test_restarts_without_progress_are_counted_and_wait_longer() -> None:
    idle = [failed(node, at=3) for node in "abc"]
    first, second = (decide(idle[:n], ABCD, THREE, [3]) for n in (1, 2))
    assert isinstance(first, Restart) and isinstance(second, Restart)
    assert (first.wait_s, second.wait_s) == (0.0, 4.0)
    assert isinstance(decide(idle, ABCD, THREE, [3]), GiveUp)
    assert isinstance(decide([*idle[:2], failed("c", at=4)], ABCD, THREE, [3]), Restart)  # a newer checkpoint


def test_told_to_stop() -> None:
    stopped = Attempt(ABCD[:3], 3, Outcome(4, told_to_stop=True))
    assert isinstance(decide([stopped], ABCD, THREE, [3]), Continue)
    assert isinstance(decide([failed("b")], ABCD, THREE, [3], ending=True), Continue)  # no time for another start


def test_two_slices_without_progress() -> None:
    idle = Attempt(ABCD[:3], 4, Outcome(4, told_to_stop=True))
    assert isinstance(decide([idle], ABCD, THREE, [0, 4]), Continue)
    assert isinstance(decide([idle], ABCD, THREE, [0, 4, 4]), GiveUp)
    assert isinstance(first_decision([4, 4], ABCD, THREE), Restart)
    assert isinstance(first_decision([4, 4, 4], ABCD, THREE), GiveUp)  # both were killed before they could decide


def test_slices_that_a_person_started_count_anew(tmp_path: Path) -> None:
    history = History.of(tmp_path)
    for _ in range(2):
        history.begin_slice("1", 0, 4)
    history.end("gave up")
    again = History.of(tmp_path)
    assert again.began_at == [4, 4]
    again.begin_slice("2", 0, 4)
    assert again.began_at == [4]


def test_newest_step(tmp_path: Path) -> None:
    assert newest_step(tmp_path) == 0
    for name in ("checkpoint_2_complete", "checkpoint_10_complete", "checkpoint_11_partial_x_0"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_step(tmp_path) == 10


@pytest.mark.parametrize(
    ("queue", "rates", "nodes"),
    [
        (Queue(6, 0), {}, 8),  # all that are there
        (Queue(3, 0), {}, 4),  # 5 of them do not fit the layout
        (Queue(6, 2), {}, 2),  # others wait for the idle ones
        (Queue(6, 0), {2: 200.0, 4: 380.0}, 8),  # 95 of 100 per node: more may pay
        (Queue(6, 0), {2: 200.0, 4: 240.0}, 2),  # 60 of 100 per node: it does not
        (Queue(6, 0), {2: 200.0, 4: 380.0, 8: 400.0}, 4),
    ],
)
def test_size_of_the_next_slice(queue: Queue, rates: dict[int, float], nodes: int) -> None:
    assert choose_size(2, (1, 2, 4, 8), queue, rates, least=2, most=8).nodes == nodes


def test_least_and_most() -> None:
    assert choose_size(4, (1, 2, 4, 8), Queue(9, 0), {}, least=1, most=4).nodes == 4
    assert choose_size(1, (1, 2, 4, 8), Queue(0, 0), {}, least=2, most=4).nodes == 2  # waited for
    assert choose_size(3, (4,), Queue(0, 0), {}, least=1, most=3).nodes == 3


def test_speeds_are_of_the_nodes_that_a_step_ran_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rates = (10, 100, 110, 10, 60, 50, 55)  # steps 1 and 4: right after a start
    lines = [json.dumps({"step": step, "tokens_per_second": rate}) for step, rate in enumerate(rates, 1)]
    path.write_text("\n".join([*lines, '{"step": 8, "tok']))
    assert measured_rates(path, [(4, 0), (2, 3)]) == {4: 105.0, 2: 55.0}
    assert measured_rates(tmp_path / "none", [(4, 0)]) == {}
