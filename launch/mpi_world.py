"""What mpirun does not put into the environment, agreed over MPI itself: the nodes, and where rank 0 listens."""

from __future__ import annotations

import os
import socket
from functools import cache
from typing import Any

from hpc_rl.errors import UserError
from launch.rendezvous import listen

MPIRUN_HELP = (
    "use the mpirun of the library that mpi4py loads, or have it load the other: "
    "MPI4PY_MPIABI=openmpi or mpich, and MPI4PY_LIBMPI"
)


@cache  # collective: a second call asks nobody
def agree(rank: int, world_size: int, local_rank: int, kind: str) -> tuple[int, tuple[str, ...], str, int]:
    """Collective over all ranks of mpirun; rank 0 is left listening for `launch.rendezvous.host_store`.

    Returns:
        This rank's node (0-based, in rank order), one host name per node, rank 0's host name and port.

    Raises:
        UserError: no MPI library; a library that does not know this mpirun, so that each rank is a world of its own;
            ranks of one node that are not consecutive.
    """
    comm = _load(kind).COMM_WORLD
    if (comm.size, comm.rank) != (world_size, rank):
        raise UserError(
            f"mpirun ({kind}) started {world_size} ranks, but to the MPI library rank {rank} is {comm.rank} of "
            f"{comm.size}: {world_size} runs instead of one. Fix: {MPIRUN_HELP}"
        )
    port = listen("", 0) if rank == 0 else 0
    everyone: list[tuple[str, int, int]] = comm.allgather((socket.gethostname(), port, local_rank))
    starts = [i for i, (_, _, local) in enumerate(everyone) if local == 0]
    node_rank = sum(start <= rank for start in starts) - 1
    hosts = tuple(everyone[start][0] for start in starts)
    if starts[node_rank] + local_rank != rank or everyone[starts[node_rank]][0] != socket.gethostname():
        raise UserError(
            f"rank {rank} is number {local_rank} of {socket.gethostname()}, so ranks are not numbered node by node: "
            "start with mpirun --map-by slot (OpenMPI) or -ppn RANKS_PER_NODE (MPICH)"
        )
    return node_rank, hosts, everyone[0][0], everyone[0][1]


def _load(kind: str) -> Any:
    os.environ.setdefault("MPI4PY_MPIABI", kind)
    try:
        import mpi4py

        # A rank that ends without MPI_Finalize makes mpirun end the others, also when its exit code alone would not
        # (MPICH); and after an exception, finalizing would wait for ranks that never come. So: finish() on success.
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"mpirun ({kind}) started this, but its MPI does not load ({reason}): {MPIRUN_HELP}") from None
    return MPI


def finish() -> None:
    """Ends MPI; collective, called once all work of this rank has succeeded."""
    from mpi4py import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
