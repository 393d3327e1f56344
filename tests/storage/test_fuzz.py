"""Flipped bits and cut files anywhere in a checkpoint: `verify` tells each, and loading never returns other values."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from hpc_rl.config import CheckpointConfig
from hpc_rl.errors import UserError
from hpc_rl.storage import restore
from hpc_rl.storage.access import open_checkpoint
from hpc_rl.storage.checkpoint import Checkpointer
from hpc_rl.storage.files import Files
from hpc_rl.storage.inspect import inspect_path
from hpc_rl.storage.verify import verify
from tests.ranks import run_ranks
from tests.storage.faulty import newest, save
from tests.storage.layouts import Layout, component

NUM_DAMAGES = 450  # 400 changed bytes, 50 cuts


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    save(path, 1, Files())
    return path


def files_of(run_dir: Path) -> list[Path]:
    return sorted(path for path in run_dir.rglob("*") if path.is_file())


def loads_right_or_is_refused(run_dir: Path) -> bool:
    """Whether loading refused; if it did not, `newest` has compared every element."""
    try:
        step = newest(run_dir)
    except UserError:
        return True
    assert step == 1
    return False


def test_random_damage_is_told(run_dir: Path) -> None:
    rng = random.Random(0)
    (checkpoint,) = run_dir.glob("checkpoints/*")
    assert verify(checkpoint) == []
    refused = 0
    for i in range(NUM_DAMAGES):
        # by bytes over all files, but every file in turn too, for the small ones
        files = files_of(run_dir)
        weights = [path.stat().st_size for path in files] if i % 2 else None
        (path,) = rng.choices(files, weights)
        original = path.read_bytes()
        position = rng.randrange(len(original))
        if i % 9 == 0:
            path.write_bytes(original[:position])
        else:
            damaged = bytearray(original)
            damaged[position] ^= rng.randrange(1, 256)
            path.write_bytes(damaged)
        problems = verify(checkpoint)
        assert problems, f"{path.name} byte {position}: not told"
        assert path.name in problems[0]
        refused += loads_right_or_is_refused(run_dir)
        path.write_bytes(original)
    assert verify(checkpoint) == [] and not loads_right_or_is_refused(run_dir)
    assert NUM_DAMAGES // 2 < refused < NUM_DAMAGES, "some damage (padding, HDF5 structure) is harmless to loading"


def test_a_flipped_bit_names_file_and_tensor(tmp_path: Path, run_dir: Path) -> None:
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    (checkpoint,) = tmp_path.glob("checkpoints/*")
    shard = checkpoint / "shards" / "rank_00000.h5"
    extents = inspect_path(shard)["extents"]
    wanted = extents[0]
    _, _, index = open_checkpoint(checkpoint)
    row = next(r for r in index.rows([wanted["name"]])[wanted["name"]] if index.box(r)[0] == tuple(wanted["start"]))
    with shard.open("r+b") as file:
        file.seek(int(index.offset[row]))
        byte = file.read(1)[0]
        file.seek(int(index.offset[row]))
        file.write(bytes([byte ^ 16]))
    (problem,) = verify(checkpoint)
    assert "rank_00000.h5: " + wanted["name"] in problem
    with pytest.raises(UserError, match="rank_00000.h5: " + wanted["name"]):
        newest_or_raise(tmp_path)


def newest_or_raise(run_dir: Path) -> None:
    (path,) = run_dir.glob("checkpoints/*")
    Checkpointer(run_dir, CheckpointConfig()).load(path, {"actor": component(Layout(num_layers=1), 0)})


def newest_in_small_reads(run_dir: Path) -> None:
    restore.READ_BYTES = 1  # one read an extent: more of them than threads
    with pytest.raises(UserError, match="its digest does not match"):
        newest_or_raise(run_dir)


def test_many_damages_at_a_time_end_the_load(tmp_path: Path, run_dir: Path) -> None:
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    (checkpoint,) = tmp_path.glob("checkpoints/*")
    _, _, index = open_checkpoint(checkpoint)
    assert len(index.name) > 2 * restore.NUM_IN_FLIGHT
    for row in range(len(index.name)):
        with (checkpoint / index.files[index.file[row]]).open("r+b") as file:
            file.seek(int(index.offset[row]))
            byte = file.read(1)[0]
            file.seek(int(index.offset[row]))
            file.write(bytes([byte ^ 1]))
    assert len(verify(checkpoint)) == len(index.name), "each extent is told, the ranks' own bytes too"
    run_ranks(1, newest_in_small_reads, tmp_path, timeout_s=30)


@pytest.mark.parametrize("name", ["manifest.json", "index.h5", "digests.bin", "shards/rank_00001.h5"])
def test_a_missing_file_is_named_and_the_checkpoint_before_is_used(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, Files())
    save(tmp_path, 2, Files())
    path = tmp_path / "checkpoints" / "checkpoint_2_complete" / name
    path.unlink()
    assert newest(tmp_path) == 1
    assert f"skipped a damaged checkpoint: {path}" in caplog.text
