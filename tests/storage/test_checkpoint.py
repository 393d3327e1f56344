"""The checkpointer with its real writer process: asynchronous saves, staging, pruning."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpc_rl.storage.verify import verify
from tests.storage.disks import Slow
from tests.storage.layouts import assert_reference
from tests.storage.one_rank import assert_loads, checkpointer, state, steps


def test_the_state_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    with checkpointer(tmp_path, Slow()) as one:
        saved = state(1)
        one.save(1, saved, {"a": [1, None, "x"]})
        assert steps(tmp_path) == [], "still being written"
        for tensor in saved["actor"][1].values():
            tensor.fill_(7)
        one.wait()
        assert assert_loads(one, 1) == {"a": [1, None, "x"]}


def test_prepare_leaves_only_the_copy_to_the_first_save(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as one:
        one.prepare(state(1), {"rng": b"12345"})
        assert one._spool is not None
        buffer, whole = one._spool.buffer.tensor, one._whole
        one.save(1, state(1), {}, {"rng": b"54321"})
        assert one._spool.buffer.tensor is buffer and one._whole is whole
        one.wait()
        assert_loads(one, 1)


def test_with_overlap_it_may_change_after_the_fence(tmp_path: Path) -> None:
    with checkpointer(tmp_path, Slow()) as one:
        saved = state(1)
        one.save(1, saved, {}, overlap=True)
        one.fence()
        for tensor in saved["actor"][1].values():
            tensor.fill_(7)
        one.wait()
        assert_loads(one, 1)


def test_the_next_save_waits_for_the_one_in_flight(tmp_path: Path) -> None:
    with checkpointer(tmp_path, Slow()) as one:
        one.save(1, state(1), {})
        assert one.poll() is None
        one.save(2, state(2), {})
        assert steps(tmp_path) == [1]
        deadline = time.monotonic() + 60
        while (done := one.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert done == 2 and one.poll() is None
        assert_loads(one, 2)


def test_synchronous_means_whole_on_return(tmp_path: Path) -> None:
    with checkpointer(tmp_path, asynchronous=False) as one:
        one.save(1, state(1), {})
        assert steps(tmp_path) == [1]


def test_close_waits_for_the_write_in_flight(tmp_path: Path) -> None:
    with checkpointer(tmp_path, Slow()) as one:
        one.save(1, state(1), {})
    assert steps(tmp_path) == [1]


def test_old_ones_go_by_policy_and_only_after_the_new_one_is_whole(tmp_path: Path) -> None:
    with checkpointer(tmp_path, keep_last=1, keep_every=4, keep_best="reward") as one:
        for step, reward in enumerate([0.1, 0.2, 0.9, 0.3, 0.4, 0.5, 0.6]):
            one.save(step, state(step), {}, metrics={"reward": reward})
    assert steps(tmp_path) == [0, 2, 4, 6], "every 4th, the best, the last"


def test_staging_frees_the_host_buffer_before_the_shard_is_written(tmp_path: Path) -> None:
    with checkpointer(tmp_path / "run", Slow(), stage_dir=str(tmp_path / "stage"), keep_last=3) as one:
        for step in (1, 2, 3):
            one.save(step, state(step), {})
        assert steps(tmp_path / "run") == [1], "the second is being carried, the third waits on the staging disk"
        one.wait()
        for step in (1, 2, 3):
            loaded = state()
            one.load(one.root / f"checkpoint_{step}_complete", loaded)
            assert_reference(*loaded["actor"], step)
    assert list((tmp_path / "stage").iterdir()) == []


def test_the_step_decides_what_is_newest_and_no_clock(tmp_path: Path) -> None:
    with checkpointer(tmp_path, asynchronous=False) as one:
        for step in (1, 2):
            one.save(step, state(step), {})
        os.utime(one.root / "checkpoint_2_complete", (0, 0))
        os.utime(one.root / "checkpoint_2_complete" / "manifest.json", (0, 0))
        assert_loads(one, 2)


def test_synchronous_saves_keep_no_copy_of_the_state_in_between(tmp_path: Path) -> None:
    for asynchronous in (True, False):
        with checkpointer(tmp_path, asynchronous=asynchronous) as one:
            for step in (1, 2):  # the second makes the buffer anew
                one.save(step, state(step), {})
                one.wait()
                assert one._spool is not None
                held = os.fstat(one._spool.buffer.fd).st_blocks
                assert (held > 0) == asynchronous
            assert_loads(one, 2)


def test_a_ranks_own_values_may_change_their_size(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as one:
        for step, nbytes in enumerate((10, 9000, 300)):  # pickled generators do
            own = {"rng": os.urandom(nbytes)}
            one.save(step, state(step), {}, own)
            one.wait()
            loaded, path = state(), one.root / f"checkpoint_{step}_complete"
            assert verify(path) == []
            assert one.load(path, loaded)[1] == own
            assert_reference(*loaded["actor"], step)
