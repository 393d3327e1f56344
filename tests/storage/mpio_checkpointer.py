"""Run by mpirun: the checkpointer with ``driver: mpio`` on every rank, saved twice and loaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI
from torch import distributed as dist

from hpc_rl.config import CheckpointConfig, StorageConfig
from hpc_rl.storage.checkpoint import Checkpointer
from tests.storage.layouts import Layout, assert_reference, component


def main(run_dir: Path, port: str) -> None:
    rank, world_size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    dist.init_process_group("gloo")
    layout = Layout(tp=2, dp=world_size // 2)
    one = Checkpointer(
        run_dir, CheckpointConfig(keep_last=1), rank=rank, world_size=world_size, group=dist.group.WORLD,
        storage=StorageConfig(driver="mpio"),
    )  # fmt: skip
    for step in (1, 2):
        one.save(step, {"actor": component(layout, rank, step)}, {"saved": step}, {"rng": np.arange(9) + rank})
    one.wait()
    parts = {"actor": component(layout, rank)}
    path = one.latest()
    assert path is not None
    extra, own = one.load(path, parts)
    assert_reference(*parts["actor"], 2)
    assert extra == {"saved": 2} and own is not None and own["rng"][0] == rank
    one.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
