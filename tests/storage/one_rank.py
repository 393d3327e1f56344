"""A checkpointer of one rank, and a small state whose values follow from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpc_rl.config import CheckpointConfig, StorageConfig
from hpc_rl.storage import manifest
from hpc_rl.storage.checkpoint import Checkpointer
from hpc_rl.storage.files import Files
from tests.storage.layouts import Layout, assert_reference, component

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
