"""A disk that fills up while sequences are journalled: told in a line, HDF5 never meets it, and what was kept is whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpc_rl.rollout.protocol import Prompt, Request, Sample
from hpc_rl.storage.rollouts import ROOM_BYTES, RolloutReader, RolloutWriter
from tests.storage.small_disk import small_disk

DISK = 6 << 20


def sample(prompt_id: int, num_tokens: int) -> Sample:
    request = Request(Prompt(prompt_id, (1, 2, 3), "abc"), prompt_id, 0, 7)
    ids = tuple(range(num_tokens))
    return Sample(request, ids, tuple(0.0 for _ in ids), True, 0, "x" * num_tokens, 0.1)


def test_a_full_disk_is_an_error_and_no_crash(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", DISK) as mounted:
        if not mounted:
            pytest.skip("a small disk needs the right to mount one")
        run_dir = tmp_path / "disk" / "run"
        kept: list[int] = []
        with RolloutWriter(run_dir, 1, 0) as writer, pytest.raises(OSError, match="No space left") as caught:
            fill(writer, kept)
        assert caught.value.errno == errno.ENOSPC
        assert len(kept) > 5
        assert len(list(RolloutReader(run_dir, 1))) == len(kept), "all before the error are there, whole"
        (tmp_path / "disk" / "filler").write_bytes(bytes(free(tmp_path / "disk") - ROOM_BYTES // 2))
        with pytest.raises(OSError, match="No space left"):
            RolloutWriter(run_dir, 2, 0)


def fill(writer: RolloutWriter, kept: list[int]) -> None:
    """Appends until the disk is full."""
    while True:
        writer.append(sample(len(kept), 20_000), 0.5)
        kept.append(len(kept))


def test_the_room_beyond_the_end_is_given_back(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", DISK) as mounted:
        if not mounted:
            pytest.skip("a small disk needs the right to mount one")
        before = free(tmp_path / "disk")
        with RolloutWriter(tmp_path / "disk" / "run", 1, 0) as writer:
            writer.append(sample(0, 10), 0.5)
            assert before - free(tmp_path / "disk") >= ROOM_BYTES
        assert before - free(tmp_path / "disk") < ROOM_BYTES


def free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
