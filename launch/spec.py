"""`hpc-rl launch`: one description of a job, and the exact command of each launcher for it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.config import Config, ParallelConfig
from hpc_rl.config_load import load_config
from hpc_rl.errors import UserError
from hpc_rl.preflight import check_outputs
from launch.env import Allocation, allocation

LAUNCHERS = ("auto", "torchrun", "mpi", "srun")
PROGRAMS = ("srun", "sbatch", "mpirun")


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A job of ``num_nodes * ranks_per_node`` ranks, before it is known who starts it."""

    name: str
    program: tuple[str, ...]  # what each rank runs, after the Python interpreter: -m hpc_rl.cli train CONFIG ...
    num_nodes: int
    ranks_per_node: int
    threads: int  # of each rank
    gpus: bool  # one per rank
    log_dir: str
    python: str = sys.executable
    supervisor: tuple[str, ...] = ()  # as `program`, of a batch script's own process

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def env(self) -> dict[str, str]:
        """Set for every rank, whatever starts it."""
        return {"OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, or, with ``script``, to hand to it as standard input."""

    argv: tuple[str, ...]
    env: dict[str, str]
    script: str = ""

    def text(self) -> str:
        """As one would type it; a batch script as it is."""
        words = [f"{key}={value}" for key, value in self.env.items()]
        return self.script or shlex.join([*words, *self.argv])


@dataclass(frozen=True, slots=True)
class Site:
    """What the machine offers. ``mpi``: the kind of the mpirun found first, or ""."""

    programs: frozenset[str]
    mpi: str
    job: Allocation | None
    master_addr: str


def launch(launcher: str, path: Path, overrides: Sequence[str], *, dry_run: bool) -> int:
    """Starts a training through a launcher, or prints the exact command; returns the exit code.

    Raises:
        UserError: unknown launcher, one that is not installed, or a placement that it cannot give.
    """
    config = load_config(path, overrides)
    site = look_around()
    spec = make_spec(config, path, overrides, site)
    command = make_command(choose(launcher, spec, site), spec, site)
    for warning in check_placement(config.parallel, spec.num_nodes, spec.ranks_per_node):
        print(f"hpc-rl: warning: {warning}", file=sys.stderr)
    if dry_run:
        print(command.text().rstrip("\n"))
        return 0
    check_outputs(config)
    Path(spec.log_dir).mkdir(parents=True, exist_ok=True)  # sbatch --output makes no directory
    if command.script:
        return subprocess.run(command.argv, input=command.script, text=True, check=False).returncode
    sys.stdout.flush()
    os.execvpe(command.argv[0], command.argv, {**os.environ, **command.env})


def look_around() -> Site:
    """The launchers on PATH, the Slurm job that this process is in, and MASTER_ADDR."""
    programs = frozenset(name for name in PROGRAMS if shutil.which(name))
    version = ""
    if "mpirun" in programs:
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    mpi = "openmpi" if "Open MPI" in version else "mpich" if "HYDRA" in version.upper() else ""
    return Site(programs, mpi, allocation(), os.environ.get("MASTER_ADDR", ""))


def make_spec(config: Config, path: Path, overrides: Sequence[str], site: Site) -> LaunchSpec:
    """Sizes from the config; ``launch.nodes`` null means every node of the job this is in, else one."""
    nodes = config.launch.nodes or (site.job.num_nodes if site.job else 1)
    if site.job and nodes > site.job.num_nodes:
        raise UserError(
            f"launch.nodes={nodes}, but job {site.job.job_id} has {site.job.num_nodes} nodes: "
            f"lower it, or ask Slurm for --nodes={nodes}"
        )
    return LaunchSpec(
        name=Path(config.run.dir).name,
        program=("-m", "hpc_rl.cli", "train", str(path), *overrides),
        num_nodes=nodes,
        ranks_per_node=config.launch.nproc,
        threads=config.launch.threads,
        gpus=config.launch.device != "cpu",  # a login node cannot tell what the nodes have
        log_dir=f"{config.run.dir}/logs",
        supervisor=("-m", "hpc_rl.cli", "launch", "--supervise", str(path), "resume=auto", *overrides),
    )


def choose(launcher: str, spec: LaunchSpec, site: Site) -> str:
    """The launcher for "auto": srun where Slurm is and has more than this node to give, else torchrun."""
    if launcher not in LAUNCHERS:
        raise UserError(f"--launcher {launcher} is unknown: use one of {', '.join(LAUNCHERS)}")
    if launcher == "auto":
        slurm = "srun" in site.programs and (site.job is not None or spec.num_nodes > 1)
        return "srun" if slurm else "torchrun"
    if launcher == "mpi" and not site.mpi:
        raise UserError(
            "--launcher mpi: there is no mpirun of OpenMPI or MPICH on PATH: load its module, or use torchrun"
        )
    if launcher == "srun" and not {"srun", "sbatch"} <= site.programs:
        raise UserError("--launcher srun: srun and sbatch are not on PATH: use --launcher torchrun or mpi")
    return launcher


def make_command(launcher: str, spec: LaunchSpec, site: Site) -> Command:
    """The exact command. Outside a Slurm job, srun and many-node torchrun become a batch script for sbatch."""
    from launch import mpi, srun, torchrun

    if launcher == "mpi":
        return Command(mpi.mpirun_argv(spec, site.mpi), spec.env)
    if launcher == "srun":
        if site.job:
            return Command(srun.srun_argv(spec), spec.env)
        return Command(("sbatch",), {}, srun.sbatch_text(spec))
    if spec.num_nodes == 1:
        return Command(torchrun.torchrun_argv(spec), spec.env)
    if site.job:
        endpoint = f"{site.job.hostnames[0]}:{site.job.port}"
        return Command(srun.srun_torchrun_argv(spec, endpoint, site.job.job_id), spec.env)
    if site.master_addr:
        return Command(torchrun.torchrun_argv(spec, f"{site.master_addr}:29400", spec.name), spec.env)
    if "sbatch" in site.programs:
        return Command(("sbatch",), {}, srun.sbatch_torchrun_text(spec))
    raise UserError(
        f"launch.nodes={spec.num_nodes} by torchrun needs the first node's address: set MASTER_ADDR, the same on every "
        "node, and run this command on each; or use srun or mpi"
    )


def check_placement(parallel: ParallelConfig, num_nodes: int, ranks_per_node: int) -> list[str]:
    """Tensor parallelism must stay inside a node, context and expert parallelism should.

    Ranks are numbered node by node, and the grid runs TP, then CP and EP, then DP, then PP (parallel/layout.py).

    Returns:
        Warnings.

    Raises:
        UserError: a TP group would cross nodes.
    """
    if num_nodes == 1:
        return []
    if ranks_per_node % parallel.tp:
        raise UserError(
            f"parallel.tp={parallel.tp} does not divide the {ranks_per_node} ranks of a node, so TP groups would cross "
            f"nodes: choose tp from the divisors of {ranks_per_node}"
        )
    warnings = []
    for axis, size in (("cp", parallel.cp), ("ep", parallel.ep)):
        if size > 1 and ranks_per_node % (parallel.tp * size):
            warnings.append(
                f"parallel.tp*{axis} = {parallel.tp}*{size} does not divide the {ranks_per_node} ranks of a node: "
                f"{axis.upper()} groups cross nodes and will be slower"
            )
    return warnings
