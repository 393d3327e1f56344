"""`hpc-rl launch --supervise`: checks the input, then hands the Slurm job that this is in to the supervisor."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_rl.config import Config
from hpc_rl.config_check import cross_check, read_hf_config
from hpc_rl.config_load import load_config
from hpc_rl.errors import UserError
from hpc_rl.fault.supervise import Supervisor
from hpc_rl.plan.fit import fit, notes
from hpc_rl.run_dir import set_aside
from hpc_rl.storage.lock import RunLock
from launch.env import Allocation, allocation
from launch.slurm_job import RankCommand, SlurmJob
from launch.spec import check_placement


def run_supervised(path: Path, overrides: Sequence[str]) -> int:
    """Returns the exit code of the batch script.

    Raises:
        UserError: wrong input, or not in a batch script.
    """
    from hpc_rl.preflight import preflight

    config = load_config(path, overrides)
    job = own_job()
    command = rank_command(config, path, overrides, job)
    nodes = job.num_nodes - config.job.spares
    if nodes < 1:
        raise UserError(
            f"job.spares = {config.job.spares} leaves no node to work on, job {job.job_id} has {job.num_nodes}: "
            f"lower it, or ask Slurm for more --nodes"
        )
    placed = at_size(config, nodes, command.ranks_per_node)
    warnings = notes(config, placed) + check_placement(placed.parallel, nodes, command.ranks_per_node)
    for warning in warnings:
        print(f"hpc-rl: warning: {warning}", file=sys.stderr)
    preflight(placed, nodes * command.ranks_per_node)
    if job.restart_count == 0:
        with RunLock(config.run.dir, job.job_id):
            line = set_aside(config)
        if line is not None:
            print(line, flush=True)
    log_dir = Path(config.run.dir) / "logs"
    log_dir.mkdir(parents=True, exist_ok=True)
    slurm = SlurmJob(job.job_id, job.restart_count, command, log_dir.resolve(), chain_args(overrides))
    return Supervisor(slurm, config, sizes(config, job.num_nodes, command.ranks_per_node)).run()


def own_job() -> Allocation:
    """The job that this process is the batch script of. Raises UserError outside."""
    job = allocation()
    if job is None or not job.is_batch_script:
        raise UserError(
            "--supervise is for the batch script of a Slurm job, which this process is not: sbatch slurm/ppo_70b.sh, or "
            "leave --supervise out"
        )
    return job


def rank_command(config: Config, path: Path, overrides: Sequence[str], job: Allocation) -> RankCommand:
    """Ranks and cores as the job asked for them; else one rank for each GPU of a node, which share its cores."""
    gpus = 0 if config.launch.device == "cpu" else job.gpus_per_node or 0
    ranks = job.tasks_per_node or gpus or config.launch.nproc
    shared = min(job.cpus_per_node or 0, os.cpu_count() or 1)  # a test's nodes have fewer than Slurm believes
    cpus = job.cpus_per_task or (max(shared // ranks, 1) if shared else config.launch.threads)
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(cpus)}
    return RankCommand(
        argv=(sys.executable, "-m", "hpc_rl.cli", "train", str(path), *overrides),
        ranks_per_node=ranks,
        gpus_per_node=gpus,
        cpus_per_rank=cpus,
        env={"PYTHONUNBUFFERED": "1", **threads},
    )


def sizes(config: Config, num_nodes: int, ranks_per_node: int) -> list[int]:
    """Numbers of nodes that the layout and the batch allow, up to those of the job or to job.max_nodes."""
    hf_config = read_hf_config(config)
    return [
        nodes
        for nodes in range(1, max(num_nodes, config.job.max_nodes or 0) + 1)
        if _fits(config, nodes, ranks_per_node, hf_config)
    ]


def at_size(config: Config, nodes: int, ranks_per_node: int) -> Config:
    """As `fit` leaves it, with ``parallel: auto`` in the layout that the ranks will choose. Raises UserError if none fits."""
    if not config.parallel.auto:
        return fit(config)
    from hpc_rl.plan.choose import chosen
    from hpc_rl.plan.hardware import gpu_here

    return chosen(config, gpu_here(config.launch.device), nodes, ranks_per_node)


def _fits(config: Config, nodes: int, ranks_per_node: int, hf_config: dict[str, object]) -> bool:
    try:
        placed = at_size(config, nodes, ranks_per_node)
        check_placement(placed.parallel, nodes, ranks_per_node)
        cross_check(placed, nodes * ranks_per_node, hf_config)
    except UserError:
        return False
    return True


def chain_args(overrides: Sequence[str]) -> list[str]:
    """What the script of the next slice is called with: each key once, and it goes on with this run."""
    last = {text.partition("=")[0]: text for text in overrides}
    return list((last | {"resume": "resume=auto"}).values())


