"""Saved at one layout, read at another: bitwise, by canonical element; each element is written once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import distributed as dist

from hpc_rl.config import CheckpointConfig, StorageConfig
from hpc_rl.errors import UserError
from hpc_rl.storage.checkpoint import Checkpointer
from tests.ranks import run_ranks
from tests.storage.layouts import Layout, assert_reference, component, reference

TP2PP2DP2 = Layout(tp=2, pp=2, dp=2)
OTHERS = [Layout(), Layout(tp=4), Layout(pp=4), Layout(dp=8), Layout(tp=2, dp=3), Layout(tp=2, pp=2, dp=2)]


def make(run_dir: Path, world_size: int, storage: StorageConfig | None = None, **config: Any) -> Checkpointer:
    if world_size > 1:
        dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    group = dist.group.WORLD if world_size > 1 else None
    settings = CheckpointConfig(**config)
    return Checkpointer(run_dir, settings, rank=rank, world_size=world_size, group=group, storage=storage)


def save(run_dir: Path, layout: Layout, step: int, storage: StorageConfig | None = None) -> None:
    checkpointer = make(run_dir, layout.world_size, storage)
    parts = {role: component(layout, checkpointer.rank, seed) for role, seed in (("actor", 1), ("critic", 2))}
    checkpointer.save(step, parts, {"layout": str(layout)}, {"rng": np.full(5000, checkpointer.rank), "raw": b"\n\0"})
    checkpointer.close()


def load(run_dir: Path, layout: Layout, saved: Layout) -> None:
    checkpointer = make(run_dir, layout.world_size)
    parts = {role: component(layout, checkpointer.rank) for role in ("actor", "critic")}
    path = checkpointer.latest()
    assert path
    extra, own = checkpointer.load(path, parts)
    assert extra == {"layout": str(saved)}
    for role, seed in (("actor", 1), ("critic", 2)):
        assert_reference(*parts[role], seed)
    if layout == saved:
        assert own is not None and own["raw"] == b"\n\0"
        assert np.array_equal(own["rng"], np.full(5000, checkpointer.rank))
    else:
        assert own is None


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    run_ranks(8, save, run_dir, TP2PP2DP2, 3)
    return run_dir


@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_any_layout_reads_it_bitwise(saved: Path, layout: Layout) -> None:
    run_ranks(layout.world_size, load, saved, layout, TP2PP2DP2)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, dp=3)], ids=str)
def test_and_back(tmp_path: Path, layout: Layout) -> None:
    run_ranks(layout.world_size, save, tmp_path, layout, 1)
    run_ranks(8, load, tmp_path, TP2PP2DP2, layout)


@pytest.mark.parametrize("files_per_node", [1, 3])
def test_ranks_of_a_node_share_files(tmp_path: Path, files_per_node: int) -> None:
    storage = StorageConfig(files_per_node=files_per_node, page_bytes=4096)
    run_ranks(8, save, tmp_path, TP2PP2DP2, 1, storage)
    assert len(list(tmp_path.glob("checkpoints/*/shards/*"))) == files_per_node
    run_ranks(8, load, tmp_path, TP2PP2DP2, TP2PP2DP2)


def test_each_element_is_stored_once_and_the_ranks_share_the_work(saved: Path) -> None:
    shard_map, _ = component(Layout(), 0)
    sizes = {"bfloat16": 2, "float32": 4, "int64": 8}
    expected = 2 * sum(int(np.prod(s.shape)) * sizes[s.dtype] for s in shard_map.specs.values())
    written = []
    for path in sorted(saved.glob("checkpoints/*/shards/*.h5")):
        with h5py.File(path, "r") as file:
            (group,) = file.values()
            data = [d for name, d in group.items() if name not in ("state", "extents.json")]
            written.append(sum(d.size * d.dtype.itemsize for d in data))
    assert expected <= sum(written) <= expected + 8 * 3 * 4096, "padded to 4096 bytes per dtype and rank, no more"


def test_plain_h5py_sees_each_tensor_whole(saved: Path) -> None:
    shard_map, _ = component(Layout(), 0)
    (path,) = saved.glob("checkpoints/*")
    with h5py.File(path / "index.h5", "r") as file:
        for name, spec in shard_map.specs.items():
            stored = torch.from_numpy(np.asarray(file[f"critic/{name}"][()]))
            assert torch.equal(stored.view(spec.shape).to(getattr(torch, spec.dtype)), reference(name, spec, 2)), name


def load_without(run_dir: Path, drop: str) -> None:
    checkpointer = make(run_dir, 2)
    parts = {"actor": component(Layout(tp=2, num_layers=6), checkpointer.rank)}
    path = checkpointer.latest()
    assert path
    with pytest.raises(UserError, match=drop):
        checkpointer.load(path, parts)


def test_a_tensor_that_is_not_in_it_is_named_on_every_rank(saved: Path) -> None:
    message = r"56 of 173 tensors are not in it \(actor/exp_avg, .*; first actor/param/layers.4"
    run_ranks(2, load_without, saved, message)
