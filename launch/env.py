"""Who am I in this job: the only reader of RANK, SLURM_*, OMPI_*, PMI_* and MPI_* variables.

|            | torchrun, local  | openmpi (OMPI_COMM_WORLD_) | mpich           | srun (SLURM_)           | none      |
| ---------- | ---------------- | -------------------------- | --------------- | ----------------------- | --------- |
| rank       | RANK             | RANK                       | PMI_RANK        | PROCID                  | 0         |
| world size | WORLD_SIZE       | SIZE                       | PMI_SIZE        | STEP_NUM_TASKS          | 1         |
| local rank | LOCAL_RANK       | LOCAL_RANK                 | MPI_LOCALRANKID | LOCALID                 | 0         |
| local size | LOCAL_WORLD_SIZE | LOCAL_SIZE                 | MPI_LOCALNRANKS | STEP_TASKS_PER_NODE     | 1         |
| nodes      | GROUP_RANK       | over MPI                   | over MPI        | NODEID, STEP_NODELIST   | 1         |
| address    | MASTER_ADDR      | over MPI                   | over MPI        | first of STEP_NODELIST  | localhost |
| port       | MASTER_PORT      | free, over MPI             | free, over MPI  | from JOB_ID and STEP_ID | free      |

MASTER_ADDR and MASTER_PORT, where set, win everywhere. Ranks are numbered node by node in every case, so that tensor
parallel groups stay inside a node; another placement is refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hpc_rl.errors import UserError
from launch import rendezvous
from launch.hostlist import expand_counts, expand_hosts

Launcher = Literal["none", "local", "torchrun", "openmpi", "mpich", "srun"]
Environ = Mapping[str, str]

MPI_NAMES = {  # rank, world size, local rank, local world size
    "openmpi": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
START_WITH = "start with torchrun, mpirun or srun, or unset what another job left"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This process's place in the job; ``hostnames`` has one per node in order, or is empty where no launcher tells."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    num_nodes: int
    node_rank: int
    master_addr: str
    master_port: int  # 0: none agreed yet, rank 0 takes a free one
    launcher: Launcher
    hostnames: tuple[str, ...] = ()


_joined: dict[int, RankInfo] = {}  # process id -> what `export_torch_env` made known, whatever a library then changes


@dataclass(frozen=True, slots=True)
class Allocation:
    """The Slurm job that this process is in, whether or not srun started it."""

    job_id: str
    num_nodes: int
    hostnames: tuple[str, ...]
    restart_count: int
    port: int  # for whatever the job's nodes must agree on without talking
    tasks_per_node: int | None = None  # where the job says so
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None  # allocated, asked for or not
    cpus_per_node: int | None = None
    is_batch_script: bool = False  # this process is, or was started by, the job's script and no srun


def allocation(environ: Environ | None = None) -> Allocation | None:
    """None outside Slurm.

    Raises:
        UserError: SLURM_JOB_ID without a node list.
    """
    environ = os.environ if environ is None else environ
    if "SLURM_JOB_ID" not in environ:
        return None
    hosts = expand_hosts(_get(environ, "SLURM_JOB_NODELIST"))
    restarts = int(environ.get("SLURM_RESTART_COUNT", 0))
    names = ("SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_CPUS_ON_NODE")
    tasks, cpus, gpus, node_cpus = (_int(environ, name) if name in environ else None for name in names)
    port = slurm_port({"SLURM_STEP_ID": "0", **environ})
    is_script = "SLURM_STEP_ID" not in environ
    counts = {"tasks_per_node": tasks, "cpus_per_task": cpus, "gpus_per_node": gpus, "cpus_per_node": node_cpus}
    return Allocation(environ["SLURM_JOB_ID"], len(hosts), hosts, restarts, port, **counts, is_batch_script=is_script)


def detect(environ: Environ | None = None) -> RankInfo:
    """Finds rank, world and master address as the launcher above this process gave them.

    Args:
        environ: None: this process's own environment.

    Returns:
        The same world in every rank. Under mpirun the first call initialises MPI (mpi4py) and is collective.

    Raises:
        UserError: a variable is missing or contradicts another; ranks are not numbered node by node; the MPI library
            and mpirun are of different kinds, so that each rank would be a world of its own.
    """
    if environ is None and os.getpid() in _joined:
        return _joined[os.getpid()]
    return _detect(os.environ if environ is None else environ)


def _detect(environ: Environ) -> RankInfo:
    if "TORCHELASTIC_RUN_ID" in environ or "HPC_RL_LOCAL" in environ:
        return _from_torch(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _from_mpi(environ, "openmpi")
    if "MPI_LOCALRANKID" in environ and "PMI_RANK" in environ:
        return _from_mpi(environ, "mpich")
    # A step of one task is a shell (srun --pty, salloc) or one process to start local ranks in: no world of its own.
    if "SLURM_STEP_ID" in environ and (environ.get("SLURM_STEP_NUM_TASKS") != "1" or is_supervised(environ)):
        return _from_srun(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _from_torch(environ)
    return _alone(environ)


def export_torch_env(info: RankInfo, timeout_s: float = 1800.0) -> RankInfo:
    """Prepares ``init_process_group`` by env:// in this process; rank 0 serves the store from here on.

    Call it before anything is imported that reads RANK or LOCAL_RANK. A second call changes nothing.

    Args:
        info: what `detect` found.
        timeout_s: longest wait of the store's clients.

    Returns:
        ``info`` with the port that is in use.

    Raises:
        UserError: the port is in use on rank 0's node.
    """
    if joined := _joined.get(os.getpid()):
        return joined
    if info.rank == 0 and info.launcher != "torchrun":  # torchrun's agent serves a store already
        if fd := os.environ.pop("HPC_RL_STORE_FD", None):
            rendezvous.adopt(info.master_port, int(fd))
        info = replace(info, master_port=rendezvous.host_store(info.master_port, timeout_s))
    os.environ.update(
        RANK=str(info.rank),
        WORLD_SIZE=str(info.world_size),
        LOCAL_RANK=str(info.local_rank),
        LOCAL_WORLD_SIZE=str(info.local_world_size),
        GROUP_RANK=str(info.node_rank),
        MASTER_ADDR=info.master_addr,
        MASTER_PORT=str(info.master_port),
    )
    _joined[os.getpid()] = info
    return info


def job_id(environ: Environ = os.environ) -> str | None:
    """The batch system's number of this job, the same after a requeue; None without one."""
    return environ.get("SLURM_JOB_ID")


def node_name(environ: Environ = os.environ) -> str:
    """This node, as the batch system calls it."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


START_VARIABLE = "HPC_RL_START"  # set by a supervisor: names one start of the ranks, among those of all jobs


def is_supervised(environ: Environ = os.environ) -> bool:
    """Whether a supervisor has started this rank, and decides what follows when it ends."""
    return START_VARIABLE in environ


def finish(info: RankInfo) -> None:
    """Tells the launcher that this rank has succeeded. Under mpirun a rank that ends without it ends the whole job."""
    if info.launcher in ("openmpi", "mpich"):
        from launch import mpi_world

        mpi_world.finish()


def _from_torch(environ: Environ) -> RankInfo:
    rank, world = _int(environ, "RANK"), _int(environ, "WORLD_SIZE")
    local_rank, local_world = _int(environ, "LOCAL_RANK"), _int(environ, "LOCAL_WORLD_SIZE")
    _check(rank, world, local_rank, local_world)
    num_nodes = -(-world // local_world)
    node_rank = int(environ.get("GROUP_RANK", rank // local_world))
    port = _int(environ, "MASTER_PORT")
    launcher: Launcher = "local" if "HPC_RL_LOCAL" in environ else "torchrun"
    hosts = (socket.gethostname(),) if num_nodes == 1 else ()
    addr = _get(environ, "MASTER_ADDR")
    return RankInfo(rank, world, local_rank, local_world, num_nodes, node_rank, addr, port, launcher, hosts)


def _from_srun(environ: Environ) -> RankInfo:
    rank, world = _int(environ, "SLURM_PROCID"), _int(environ, "SLURM_STEP_NUM_TASKS")
    local_rank, node_rank = _int(environ, "SLURM_LOCALID"), _int(environ, "SLURM_NODEID")
    hosts = expand_hosts(_get(environ, "SLURM_STEP_NODELIST"))
    tasks = expand_counts(_get(environ, "SLURM_STEP_TASKS_PER_NODE"))
    _check_slurm(environ, world, hosts, tasks, node_rank)
    _check(rank, world, local_rank, tasks[node_rank])
    if rank != sum(tasks[:node_rank]) + local_rank:
        raise UserError(
            f"rank {rank} is task {local_rank} of node {node_rank} ({hosts[node_rank]}), so ranks are not numbered "
            "node by node: start with srun --distribution=block"
        )
    addr = environ.get("MASTER_ADDR", hosts[0])
    port = int(environ.get("MASTER_PORT", slurm_port(environ)))
    return RankInfo(rank, world, local_rank, tasks[node_rank], len(hosts), node_rank, addr, port, "srun", hosts)


def _check_slurm(environ: Environ, world: int, hosts: tuple[str, ...], tasks: tuple[int, ...], node_rank: int) -> None:
    if len(hosts) != len(tasks) or sum(tasks) != world or not node_rank < len(hosts):
        raise UserError(
            f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} ({len(hosts)} nodes), SLURM_STEP_TASKS_PER_NODE="
            f"{environ['SLURM_STEP_TASKS_PER_NODE']} ({len(tasks)} nodes, {sum(tasks)} tasks), SLURM_STEP_NUM_TASKS="
            f"{world} and SLURM_NODEID={node_rank} do not match: unset SLURM_* variables left from another job"
        )
    me = environ.get("SLURMD_NODENAME", hosts[node_rank])
    if me != hosts[node_rank]:
        raise UserError(
            f"this is node {me}, but SLURM_NODEID={node_rank} of SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} "
            f"is {hosts[node_rank]}: unset SLURM_* variables left from another job"
        )


def slurm_port(environ: Environ) -> int:
    """A port that all ranks of a step derive alike: 15000 to 30999, below the ephemeral range, other for each retry."""
    if ports := environ.get("SLURM_STEP_RESV_PORTS"):
        return int(ports.split("-")[0].split(",")[0])
    job, step = _int(environ, "SLURM_JOB_ID"), _int(environ, "SLURM_STEP_ID")
    restart = int(environ.get("SLURM_RESTART_COUNT", 0))
    return 15000 + (job * 61 + step * 7 + restart) % 16000


def _from_mpi(environ: Environ, kind: Literal["openmpi", "mpich"]) -> RankInfo:
    names = MPI_NAMES[kind]
    rank, world, local_rank, local_world = (_int(environ, name) for name in names)
    _check(rank, world, local_rank, local_world)
    slurm_tasks = int(environ.get("SLURM_NTASKS", world))
    if world == 1 and slurm_tasks > 1:
        raise UserError(
            f"{names[1]} is 1 but SLURM_NTASKS is {slurm_tasks}: this would be {slurm_tasks} runs of one rank. "
            "Start one mpirun (not one in each task), or srun without mpirun"
        )
    from launch import mpi_world  # needs mpi4py and a libmpi, which no other launcher does

    node_rank, hosts, addr, port = mpi_world.agree(rank, world, local_rank, kind)
    addr, port = environ.get("MASTER_ADDR", addr), int(environ.get("MASTER_PORT", port))
    return RankInfo(rank, world, local_rank, local_world, len(hosts), node_rank, addr, port, kind, hosts)


def _alone(environ: Environ) -> RankInfo:
    nodes = int(environ.get("SLURM_NNODES", 1))
    if nodes > 1 and "SLURM_STEP_ID" not in environ and "SLURM_JOB_ID" in environ:
        raise UserError(
            f"this Slurm job has {nodes} nodes (SLURM_NNODES), but no rank of it was started by srun: "
            "put srun before the command, or ask for --nodes=1"
        )
    port = int(environ.get("MASTER_PORT", 0))
    return RankInfo(0, 1, 0, 1, 1, 0, environ.get("MASTER_ADDR", "127.0.0.1"), port, "none", (socket.gethostname(),))


def _check(rank: int, world: int, local_rank: int, local_world: int) -> None:
    if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
        raise UserError(
            f"rank {rank} of {world} and local rank {local_rank} of {local_world} cannot be: "
            "unset RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE left from another job"
        )


def _get(environ: Environ, name: str) -> str:
    if name not in environ:
        raise UserError(f"{name} is not set, but other variables of a launcher are: {START_WITH}")
    return environ[name]


def _int(environ: Environ, name: str) -> int:
    value = _get(environ, name)
    try:
        return int(value)
    except ValueError:
        raise UserError(f"{name}={value!r} must be a whole number: {START_WITH}") from None
