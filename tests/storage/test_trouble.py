"""Writers that die, disks that fill up, become read-only or fail on one rank: told, and nothing is lost."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from hpc_rl.errors import RunError, UserError
from hpc_rl.storage.files import Files
from hpc_rl.storage.lock import RunLock
from hpc_rl.tensors.shardmap import ShardMap, TensorSpec, whole_piece
from tests.ranks import run_ranks
from tests.storage.disks import Broken, Slow, SlowSync
from tests.storage.layouts import Layout, component
from tests.storage.one_rank import assert_loads, checkpointer, state, steps
from tests.storage.small_disk import small_disk
from tests.storage.test_layouts import make


def test_a_killed_writer_is_reported_at_the_next_step(tmp_path: Path) -> None:
    with checkpointer(tmp_path, asynchronous=False) as one:
        one.save(1, state(1), {})
    with checkpointer(tmp_path, Slow(), keep_last=1) as one:
        one.save(2, state(2), {})
        assert one._spool is not None
        os.kill(one._spool.process.pid, signal.SIGKILL)
        one._spool.process.wait()
        with pytest.raises(RunError, match="rank 0: the checkpoint writer process died with exit code -9"):
            one.poll()
        assert steps(tmp_path) == [1]
        one.save(3, state(3), {})
        one.wait()
        assert_loads(one, 3)


def test_signals_of_the_job_do_not_end_the_writer(tmp_path: Path) -> None:
    with checkpointer(tmp_path, Slow()) as one:
        one.save(1, state(1), {})
        time.sleep(0.5)
        assert one._spool is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(one._spool.process.pid, number)
        one.wait()
    assert steps(tmp_path) == [1]


def child_that_saves(run_dir: Path, all_written: bool) -> None:
    one = make(run_dir, 1)
    begun = run_dir / "begun"
    one.files = SlowSync(begun) if all_written else Slow()
    one.save(2, state(2), {})
    assert one._spool is not None
    (run_dir / "writer.pid").write_text(str(one._spool.process.pid))
    while all_written and not begun.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("all_written", [False, True], ids=["writing", "syncing"])
def test_the_writer_ends_with_its_killed_trainer(tmp_path: Path, all_written: bool) -> None:
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(1, child_that_saves, tmp_path, all_written)
    writer = Path("/proc") / (tmp_path / "writer.pid").read_text()
    deadline = time.monotonic() + 20
    while writer.exists() and "State:\tZ" not in (writer / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    time.sleep(0.5)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before, "something still writes"
    with checkpointer(tmp_path) as one:
        assert one.latest() is None
        one.save(3, state(3), {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_3_complete"]


def test_a_failed_write_prunes_nothing_even_where_the_policy_keeps_fewer_than_there_are(tmp_path: Path) -> None:
    with checkpointer(tmp_path, keep_last=2) as one:
        one.save(1, state(1), {})
        one.save(2, state(2), {})
    with checkpointer(tmp_path, Broken(), keep_last=1, on_error="continue") as one:
        one.save(3, state(3), {})
        one.save(4, state(4), {})
        with pytest.raises(RunError, match="Input/output error"):
            one.wait()
    assert steps(tmp_path) == [1, 2]


def test_with_on_error_continue_a_failed_write_is_a_warning_at_the_next_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with checkpointer(tmp_path, Broken(), on_error="continue") as one:
        one.save(1, state(1), {})
        deadline = time.monotonic() + 60
        while one._writing and time.monotonic() < deadline:
            assert one.poll() is None
            time.sleep(0.02)
        assert "a checkpoint could not be written: rank 0: OSError" in caplog.text
        one.files = Files()
        one.save(2, state(2), {})
        one.wait()
        assert_loads(one, 2)


BALLAST = 4 << 20


def test_a_full_disk_keeps_the_old_checkpoint_and_stops_or_goes_on_by_policy(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with small_disk(tmp_path / "disk", BALLAST) as mounted:
        run_dir = tmp_path / "disk" / "run"
        big = state(2) | {"ballast": whole(torch.zeros(BALLAST, dtype=torch.uint8))}
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (BALLAST, limits[1]))  # the writers inherit it
        request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
        with checkpointer(run_dir, asynchronous=False, keep_last=1) as one:
            one.save(1, state(1), {})
            with pytest.raises(RunError, match=r"could not be written: rank 0: OSError: .*(No space left|too large)"):
                one.save(2, big, {})
            assert_loads(one, 1)
            assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["checkpoint_1_complete"], (
                "its room is free"
            )
        with checkpointer(run_dir, on_error="continue", keep_last=1) as one:
            one.save(2, big, {})
            one.save(3, state(3), {})
            one.wait()
            assert_loads(one, 3)
            assert steps(run_dir) == [3]


def test_a_directory_that_became_read_only_is_named_and_the_old_checkpoint_loads(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", BALLAST) as mounted:
        run_dir = tmp_path / "disk" / "run"
        with checkpointer(run_dir, asynchronous=False) as one:
            one.save(1, state(1), {})
            if mounted:
                subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
            else:
                (run_dir / "checkpoints").chmod(0o555)
            with pytest.raises(
                RunError, match="rank 0: .*(Read-only file system|Permission denied).*checkpoint_2_partial"
            ):
                one.save(2, state(2), {})
            assert_loads(one, 1)
        if mounted:
            with pytest.raises(UserError, match="lock: cannot be written .Read-only file system.: set run.dir"):
                RunLock(run_dir)


def fails_on_one_rank(run_dir: Path) -> None:
    one = make(run_dir, 2, asynchronous=True)
    one.deadline_s = 60
    parts = {"actor": component(Layout(tp=2, num_layers=1), one.rank, 1)}
    one.save(1, parts, {})
    one.wait()
    if one.rank == 1:
        one.files = Broken()
    before = time.monotonic()
    one.save(2, parts, {})
    with pytest.raises(RunError, match="rank 1: .*Input/output error"):
        one.wait()
    assert time.monotonic() - before < 50, "rank 0 must not wait for its deadline"
    one.files = Files()
    one.save(3, parts, {})
    one.close()


def test_a_failure_on_one_rank_is_raised_on_all_and_the_next_save_works(tmp_path: Path) -> None:
    run_ranks(2, fails_on_one_rank, tmp_path)
    assert steps(tmp_path) == [1, 3]
    assert not list((tmp_path / "checkpoints").glob("*_partial_*"))


def whole(tensor: torch.Tensor) -> tuple[ShardMap, dict[str, torch.Tensor]]:
    spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return ShardMap({"x": spec}, (whole_piece("x", spec.shape, "x"),)), {"x": tensor}
