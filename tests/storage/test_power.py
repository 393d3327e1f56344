"""Power lost at every point of a save: the old or the new checkpoint is there, whole; once reported, the new one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.errors import UserError
from hpc_rl.storage.files import Files
from tests.storage.faulty import newest, save
from tests.storage.power import Notes, after_power_loss


def notes_of(run_dir: Path, step: int, keep_last: int) -> list[tuple[Any, ...]]:
    """Operations of a save on a copy of ``run_dir``, told as if they had been done there."""
    original = run_dir.with_name("original")
    shutil.copytree(run_dir, original)
    files = Notes()
    assert save(run_dir, step, files, keep_last) == [None, None]
    shutil.rmtree(run_dir)
    original.rename(run_dir)
    return files.log


@pytest.fixture
def run_dir(fast_dir: Path) -> Path:
    path = fast_dir / "run"
    path.mkdir()
    save(path, 1, Files())
    return path


@pytest.mark.parametrize(("step", "keep_last"), [(2, 2), (2, 1), (1, 1)], ids=["next", "pruning", "again"])
def test_a_whole_checkpoint_survives_a_power_loss_anywhere(run_dir: Path, step: int, keep_last: int) -> None:
    log = notes_of(run_dir, step, keep_last)
    published = next(i for i, op in enumerate(log) if op[0] in ("rename", "exchange") and "_complete" in op[2].name)
    durable = 1 + next(i for i, op in enumerate(log) if i > published and op[0] == "fsync_dir")
    rng, target, found = random.Random(0), run_dir.with_name("after"), set()
    for count in range(len(log) + 1):
        for _ in range(3):
            after_power_loss(run_dir, log, count, target, rng)
            found.add(newest(target))
            assert newest(target) in ({step} if count >= durable else {1, step}), f"after {log[count - 1][:2]}"
            shutil.rmtree(target)
    assert found == {1, step}


LOSSES = {
    "shards": lambda op: op[0] == "fsync" and "shards" in op[1].parts,
    "index": lambda op: op[0] == "fsync" and op[1].name == "index.h5",
    "digests": lambda op: op[0] == "fsync" and op[1].name == "digests.bin",
    "manifest": lambda op: op[0] == "fsync" and op[1].name == "manifest.json",
    "entries": lambda op: op[0] == "fsync_dir" and "_partial_" in str(op[1]),
    "everything": lambda op: op[0] in ("fsync", "fsync_dir"),
}


@pytest.mark.parametrize("lost", LOSSES)
def test_a_disk_that_drops_fsyncs_damages_the_new_checkpoint_and_it_is_told(run_dir: Path, lost: str) -> None:
    log = [op for op in notes_of(run_dir, 2, 2) if not LOSSES[lost](op)]
    rng, target, found = random.Random(0), run_dir.with_name("after"), set()
    for _ in range(20):
        after_power_loss(run_dir, log, len(log), target, rng)
        complete = (target / "checkpoints" / "checkpoint_2_complete").exists()
        found.add((complete, newest(target)))
        shutil.rmtree(target)
    assert (True, 1) in found, "the new one had its name but was not whole: each fsync is needed"
    assert {step for _, step in found} <= {1, 2}


def test_with_no_other_checkpoint_left_the_damage_is_an_error_not_a_fresh_start(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "checkpoint_1_complete" / "shards" / "rank_00001.h5").write_bytes(b"")
    with pytest.raises(UserError, match=r"rank_00001.h5: 0 bytes, but \d+ were saved"):
        newest(run_dir)
