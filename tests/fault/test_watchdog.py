"""Ranks that hang: in Python, in C, outside a collective while the others wait in one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpc_rl.config import FaultConfig
from hpc_rl.errors import RunError
from hpc_rl.fault import phase as phases
from hpc_rl.fault.phase import current, phase, place_of
from hpc_rl.fault.report import first_cause, last_place, read_failures
from hpc_rl.fault.watchdog import limit_of
from tests.fault import jobs
from tests.ranks import RankFailed, run_ranks


def test_the_rank_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="died without a word|closed by peer"):  # by its own watchdog, or as the first one left
        run_ranks(3, jobs.one_rank_stays_away, tmp_path, 1, timeout_s=60)
    zero, culprit, two = read_failures(tmp_path)
    assert (culprit.rank, culprit.node, culprit.kind, culprit.phase, culprit.step) == (1, "node1", "hang", "reward", 5)
    assert culprit.collective == ""
    assert "one_rank_stays_away (jobs.py:" in culprit.message
    assert culprit.stack[-1].endswith("time.sleep(600)")
    for other in (zero, two):
        assert (other.kind, other.phase, other.step) == ("hang", "actor", 5)
        assert other.collective.startswith("all_reduce from everyone_adds (jobs.py:")
        assert other.time > culprit.time, "a rank in a collective is given longer"
    assert first_cause([zero, two, culprit]) == culprit
    for rank in range(3):
        text = (tmp_path / f"logs/failures/0/rank_{rank:05d}.stack").read_text()
        assert text.startswith(f"rank {rank} on node{rank}, ")
        threads = [line for line in text.splitlines() if line.startswith("Thread ")]
        assert threads[0] == "Thread MainThread:" and threads[-1] == "Thread watchdog:"


def test_a_slow_phase_with_progress_goes_on_and_leaves_nothing(tmp_path: Path) -> None:
    assert run_ranks(2, jobs.slow_but_alive, tmp_path, timeout_s=60)[0] == ["logs"]


def test_a_rank_that_never_lets_go_of_the_interpreter_lock(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="died without a word"):
        run_ranks(1, jobs.never_lets_go_of_the_lock, tmp_path, timeout_s=60)
    (hang,) = read_failures(tmp_path)
    assert (hang.rank, hang.node, hang.kind, hang.phase, hang.step) == (0, "node0", "hang", "reward", 2)
    assert "stuck in C code (holds the interpreter lock)" in hang.message
    threads = [n for n, line in enumerate(hang.stack) if "hread 0x" in line]
    assert any("never_lets_go_of_the_lock" in line for line in hang.stack[threads[0] : threads[1]]), "the main thread leads"
    assert any("watchdog.py" in line for line in hang.stack[threads[-1] :])


C_SOURCE = """
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>
void wait_in_kernel(void) { if (vfork() == 0) { prctl(PR_SET_PDEATHSIG, SIGKILL); sleep(60); _exit(0); } }
"""


@pytest.mark.parametrize("holds_lock", [False, True])
def test_a_rank_in_an_uninterruptible_wait(tmp_path: Path, holds_lock: bool) -> None:
    """As for a disk that does not answer (state D): here for a child of vfork, which the kernel waits for in the same way."""
    (tmp_path / "wait.c").write_text(C_SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "wait.so", tmp_path / "wait.c"], check=True)
    with pytest.raises(RankFailed):
        run_ranks(1, jobs.waits_in_the_kernel, tmp_path, holds_lock, timeout_s=60)
    (hang,) = read_failures(tmp_path)
    assert (hang.kind, hang.phase, hang.step) == ("hang", "save", 4)
    assert "uninterruptible in the kernel (disk or file system)" in hang.message


def test_the_phase_is_noted_as_it_begins(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        run_ranks(1, jobs.killed_as_a_phase_begins, tmp_path, timeout_s=60)
    assert last_place(tmp_path, 0) == ("node0", "critic", 12)


def test_noting_a_phase_costs_microseconds(tmp_path: Path) -> None:
    ((noted, unnoted),) = run_ranks(1, jobs.seconds_per_phase, tmp_path, timeout_s=60)
    assert noted - unnoted < 100e-6


def test_a_rank_that_was_suspended_with_all_others_goes_on(tmp_path: Path) -> None:
    """Its witness as well, as by Ctrl-Z: nobody is to blame."""
    assert run_ranks(1, jobs.suspended_with_its_witness, tmp_path, timeout_s=60) == ["went on"]


def test_limits() -> None:
    assert limit_of(FaultConfig(timeout_s=10), "generation") == 10
    assert limit_of(FaultConfig(timeout_s=10), "save") == 30
    assert limit_of(FaultConfig(timeout_s=10, phase_timeout_s={"save": 7}), "save") == 7
    assert limit_of(FaultConfig(timeout_s=0), "start") == 0


def test_phases_nest_and_errors_know_where_they_arose() -> None:
    before = current()

    def fail() -> None:
        try:
            with phase("reward"):
                assert current() == ("reward", 4)
                raise ValueError("inner")
        except ValueError as error:
            assert current() == ("generation", 4)
            raise RunError("outer") from error

    with pytest.raises(RunError) as caught, phase("generation", 4):
        fail()
    assert place_of(caught.value) == ("reward", 4)
    assert current() == before
    phases.beat()
    assert phases.silent_s() < 1
