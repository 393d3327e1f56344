"""The checkpointer with its real writer process."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rl.config import CheckpointConfig, StorageConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.storage import manifest
from hpc_rl.storage.checkpoint import Checkpointer, DamagedCheckpoint
from hpc_rl.storage.files import Files
from hpc_rl.storage.lock import RunLock
from hpc_rl.tensors.shardmap import Piece, ShardMap, TensorSpec, whole_piece
from tests.ranks import run_ranks
from tests.storage.disks import Broken, Slow
from tests.storage.layouts import Layout, assert_reference, component
from tests.storage.small_disk import small_disk
from tests.storage.test_layouts import make

ONE = Layout(num_layers=1)


@contextmanager
def checkpointer(run_dir: Path, files: Files | None = None, **config: Any) -> Iterator[Checkpointer]:
    storage = StorageConfig(stage_dir=config.pop("stage_dir", None))
    one = Checkpointer(run_dir, CheckpointConfig(**config), files=files, storage=storage)
    try:
        yield one
    finally:
        one.close()


def state(seed: int | None = None) -> dict[str, Any]:
    return {"actor": component(ONE, 0, seed)}


def steps(run_dir: Path) -> list[int]:
    return [step for step, _ in manifest.complete(run_dir / "checkpoints")]


def assert_loads(one: Checkpointer, step: int) -> dict[str, Any]:
    loaded = state()
    path = one.latest()
    assert path is not None and path.name == f"checkpoint_{step}_complete"
    extra, _ = one.load(path, loaded)
    assert_reference(*loaded["actor"], step)
    return extra


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


def child_that_saves(run_dir: Path) -> None:
    one = make(run_dir, 1)
    one.files = Slow()
    one.save(2, state(2), {})
    assert one._spool is not None
    (run_dir / "writer.pid").write_text(str(one._spool.process.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_writer_ends_with_its_killed_trainer(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(1, child_that_saves, tmp_path)
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


BALLAST = 4 << 20


def test_a_full_disk_keeps_the_old_checkpoint_and_stops_or_goes_on_by_policy(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", BALLAST) as mounted:
        run_dir = tmp_path / "disk" / "run"
        big = state(2) | {"ballast": whole(torch.zeros(BALLAST, dtype=torch.uint8))}
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (BALLAST, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
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


def test_the_step_decides_what_is_newest_and_no_clock(tmp_path: Path) -> None:
    with checkpointer(tmp_path, asynchronous=False) as one:
        for step in (1, 2):
            one.save(step, state(step), {})
        os.utime(one.root / "checkpoint_2_complete", (0, 0))
        os.utime(one.root / "checkpoint_2_complete" / "manifest.json", (0, 0))
        assert_loads(one, 2)


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


def test_staging_frees_the_host_buffer_before_the_shard_is_written(tmp_path: Path) -> None:
    with checkpointer(tmp_path / "run", Slow(), stage_dir=str(tmp_path / "stage")) as one:
        for step in (1, 2, 3):
            one.save(step, state(step), {})
        assert steps(tmp_path / "run") == [1], "the second is being carried, the third waits on the staging disk"
        one.wait()
        assert_loads(one, 3)
    assert list((tmp_path / "stage").iterdir()) == []


def test_every_dtype_and_shape_comes_back_bitwise(tmp_path: Path) -> None:
    kinds = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    kinds += ["float8_e4m3fn", "float8_e5m2"]
    rng = np.random.default_rng(0)
    with checkpointer(tmp_path, asynchronous=False) as one:
        made: dict[str, torch.Tensor] = {}
        for kind in kinds:
            for shape in [(), (1,), (5, 3), (0, 4), (2, 1, 3)]:
                dtype = getattr(torch, kind)
                count = int(np.prod(shape)) * dtype.itemsize
                raw = torch.from_numpy(rng.integers(0, 2 if kind == "bool" else 256, count, dtype=np.uint8))
                tensor = raw.view(dtype).view(shape) if count else torch.zeros(shape, dtype=dtype)
                made[f"{kind}_{len(shape)}_{sum(shape)}"] = tensor
        specs = {n: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in made.items()}
        pieces = tuple(Piece(n, (0,) * t.dim(), tuple(t.shape), n, 0, t.stride()) for n, t in made.items())
        one.save(1, {"actor": (ShardMap(specs, pieces), made)}, {})
        back = {n: torch.zeros_like(t) for n, t in made.items()}
        path = one.latest()
        assert path
        one.load(path, {"actor": (ShardMap(specs, pieces), back)})
        for name, tensor in made.items():
            assert raw_bytes(tensor) == raw_bytes(back[name]), name


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("saved")
    with checkpointer(run_dir) as one:
        one.save(1, state(1), {})
    return run_dir


def refused(saved: Path, parts: dict[str, Any], message: str) -> None:
    one = Checkpointer(saved, CheckpointConfig())
    path = one.latest()
    assert path
    with pytest.raises(UserError, match=message) as caught:
        one.load(path, parts)
    assert not isinstance(caught.value, DamagedCheckpoint), "an older checkpoint would not help"
    assert "\n" not in str(caught.value)


def test_another_model_shape_or_dtype_is_named(saved: Path) -> None:
    shard_map, tensors = component(ONE, 0)
    name = "param/layers.0.norm.weight"
    for spec, message in [
        (TensorSpec((17,), "bfloat16"), r"actor/param/layers.0.norm.weight is \[16\] bfloat16, but the run has \[17\]"),
        (TensorSpec((16,), "float32"), r"layers.0.norm.weight is \[16\] bfloat16, but the run has \[16\] float32"),
    ]:
        changed = ShardMap({**shard_map.specs, name: spec}, shard_map.pieces)
        refused(saved, {"actor": (changed, tensors)}, message)


def test_a_missing_optimizer_is_not_replaced_by_a_fresh_one(tmp_path: Path) -> None:
    shard_map, tensors = component(ONE, 0, 1)
    kept = {n: s for n, s in shard_map.specs.items() if n.startswith("param/")}
    pieces = tuple(p for p in shard_map.pieces if p.name in kept)
    with checkpointer(tmp_path) as one:
        one.save(1, {"actor": (ShardMap(kept, pieces), tensors)}, {})
    refused(tmp_path, state(), "tensors are not in it .actor, actor/exp_avg.*that holds its optimizer")


def test_a_newer_schema_is_refused_and_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with checkpointer(tmp_path) as one:
        one.save(1, state(1), {})
        one.wait()
        path = one.root / "checkpoint_1_complete" / "manifest.json"
        content = manifest.read(path.parent)
        monkeypatch.setattr(manifest, "SCHEMA", 2)
        path.write_bytes(manifest.encode(content))
        monkeypatch.undo()
        with pytest.raises(UserError, match="schema 2, but this version reads up to 1: update hpc_rl"):
            one.latest()


def test_what_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as one:
        with pytest.raises(TypeError):
            one.save(1, state(1), {"tensor": torch.zeros(1)})
        assert not one.root.exists()


def test_the_manifest_reads_as_plain_json(saved: Path) -> None:
    content = json.loads((saved / "checkpoints" / "checkpoint_1_complete" / "manifest.json").read_text())
    assert (content["step"], content["schema"]) == (1, 1)
    assert set(content["files"]) == {"index.h5", "digests.bin", "shards/rank_00000.h5"}
