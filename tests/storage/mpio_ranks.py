"""Run by mpirun under a Python whose h5py has MPI (no torch there): all ranks write one shared shard file."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from hpc_rl.storage.files import Files
from hpc_rl.storage.finish import Finish, IndexFile, Whole, finish, mark
from hpc_rl.storage.mpio import communicator, write_shared
from hpc_rl.storage.plan import Holding, plan
from hpc_rl.storage.shards import Member
from hpc_rl.storage.tensor_io import bits, itemsize
from hpc_rl.tensors.shardmap import TensorSpec

SPECS = {
    "actor/param/w": TensorSpec((64, 48), "bfloat16"),
    "actor/main/w": TensorSpec((64, 48), "float32"),
    "actor/param/norm": TensorSpec((48,), "bfloat16"),
    "actor/step": TensorSpec((), "int64"),
}


def value(name: str) -> np.ndarray:
    """The whole tensor, as bits."""
    spec = SPECS[name]
    raw = np.random.default_rng(len(name)).integers(
        0, 255, int(np.prod(spec.shape)) * itemsize(spec.dtype), dtype=np.uint8
    )
    return raw.view(bits(spec.dtype)).reshape(spec.shape)


def main(run_dir: Path) -> None:
    comm = communicator()
    rows = 64 // comm.size
    held = []
    for rank in range(comm.size):
        box = ((rank * rows, 0), (rows, 48))
        whole_boxes = {"actor/param/norm": (((0,), (48,)),), "actor/step": (((), ()),)}
        held.append(Holding(SPECS, {"actor/param/w": (box,), "actor/main/w": (box,), **whole_boxes}))
    made = plan(held)
    members = tuple(Member(rank, extents, 8) for rank, extents in enumerate(made.ranks))
    member = members[comm.rank]
    regions = {region.dataset.split("/")[1]: region for region in member.regions()}
    buffer = np.zeros(sum(region.nbytes for region in regions.values()), np.uint8)
    for extent in member.extents:
        begin = regions[extent.dtype].offset + extent.begin * itemsize(extent.dtype)
        box = tuple(slice(s, s + n) for s, n in zip(extent.start, extent.shape, strict=True))
        part = np.ascontiguousarray(value(extent.name)[box])
        buffer[begin : begin + extent.nbytes] = np.frombuffer(part.tobytes(), np.uint8)
    partial = run_dir / "checkpoints" / "checkpoint_3_partial_mpi_0"
    report = write_shared(comm, partial, members, comm.rank, memoryview(buffer), 1 << 20)
    mark(Files(), partial, comm.rank, report.to_json(), "json")
    if comm.rank == 0:
        whole = Whole(SPECS, members, ("",) * comm.size)
        job = Finish({"driver": "mpio"}, {}, 2, 0, None, 0, 60.0)
        finish(Files(), partial, partial.with_name("checkpoint_3_complete"), 3, whole, job, lambda: False, IndexFile())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
