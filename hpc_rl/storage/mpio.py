"""One shard file for all ranks through parallel HDF5 (`storage.driver: mpio`). Collective, so not in the background.

The other driver needs no MPI and writes as fast; this one is for file systems whose MPI-IO layer knows better.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpc_rl.errors import UserError
from hpc_rl.storage.shards import Member, Report, add_group, alignment, gap_digest, spans
from hpc_rl.storage.tensor_io import bits, digest, h5_type, itemsize

FILE = "shards/shared.h5"
WRITE_BYTES = 256 << 20  # MPI counts are 32-bit


def communicator() -> Any:
    """The world of this job. Raises UserError where h5py or mpi4py cannot do parallel HDF5."""
    if not h5py.get_config().mpi:
        raise UserError(
            f"storage.driver = mpio: this h5py ({h5py.__version__}) is built without MPI: "
            "build h5py with HDF5_MPI=ON, or set storage.driver=posix"
        )
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UserError("storage.driver = mpio: needs mpi4py: install it, or set storage.driver=posix") from error
    return MPI.COMM_WORLD


def write_shared(
    comm: Any, directory: Path, members: Sequence[Member], rank: int, buffer: memoryview, alignment_bytes: int
) -> Report:
    """Writes this rank's part of the one shard file, durable when this returns. A collective of ``comm``.

    Args: members: of all ranks. buffer: bytes of this rank's regions.
    """
    assert (comm.rank, comm.size) == (rank, len(members)), "MPI and the run must number ranks alike"
    path = directory / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(
        path, "w", driver="mpio", comm=comm, libver=("earliest", "v110"),
        alignment_threshold=4096, alignment_interval=alignment(members, alignment_bytes),
    ) as file:  # fmt: skip
        offsets = {name: offset for member in members for name, offset in add_group(file, member).items()}
        member = members[rank]
        for region in member.regions():
            write_region(file[region.dataset], region.dtype, buffer[region.offset : region.offset + region.nbytes])
    sync(path)
    comm.Barrier()  # all parts are durable
    gaps = gap_digest(path, spans(members, offsets)) if rank == members[0].rank else b""
    begin_of = {region.dataset.split("/")[1]: region.offset for region in member.regions()}
    digests = [
        digest(buffer[begin : begin + extent.nbytes])
        for extent, begin in (
            (e, begin_of[member.dataset(e)] + e.begin * itemsize(e.dtype)) for e in member.all_extents()
        )
    ]
    own = [offset for offset, _ in spans([member], offsets)]
    return Report(rank, FILE, path.stat().st_size, gaps.hex(), own, [d.hex() for d in digests])


def write_region(dataset: h5py.Dataset, dtype: str, data: memoryview) -> None:
    """A whole dataset, in pieces that MPI can count."""
    values = np.frombuffer(data, dtype=bits(dtype))
    step = WRITE_BYTES // values.itemsize
    for begin in range(0, len(values), step):
        part = np.ascontiguousarray(values[begin : begin + step])
        space = dataset.id.get_space()
        space.select_hyperslab((begin,), (len(part),))
        dataset.id.write(h5py.h5s.create_simple((len(part),)), space, part, mtype=h5_type(dtype))


def sync(path: Path) -> None:
    """The file and its directory to disk."""
    for target, flags in ((path, os.O_RDONLY), (path.parent, os.O_RDONLY | os.O_DIRECTORY)):
        fd = os.open(target, flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
