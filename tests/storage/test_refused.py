"""What does not fit is refused by name; what fits comes back bitwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rl.config import CheckpointConfig
from hpc_rl.errors import UserError
from hpc_rl.storage import manifest
from hpc_rl.storage.checkpoint import Checkpointer, DamagedCheckpoint
from hpc_rl.tensors.shardmap import Piece, ShardMap, TensorSpec
from tests.storage.layouts import component
from tests.storage.one_rank import ONE, checkpointer, state


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
        for step in (1, 2):
            one.save(step, state(step), {})
        one.wait()
        path = one.root / "checkpoint_2_complete" / "manifest.json"
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
