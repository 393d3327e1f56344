"""The command line of srun and the text of batch scripts, as pure functions."""

from __future__ import annotations

import shlex

from launch.spec import LaunchSpec
from launch.torchrun import torchrun_argv

SAVE_BEFORE_S = 300  # how long before the time limit the supervisor hears of it
# --mpi=none: ranks find each other through SLURM_*, so that no PMI plugin can be the wrong one.
COMMON = ("--kill-on-bad-exit=1", "--distribution=block", "--mpi=none", "--export=ALL")


def srun_argv(spec: LaunchSpec) -> tuple[str, ...]:
    """srun inside a Slurm job, one task per rank. All GPUs of a node stay visible to each of its ranks."""
    return ("srun", *_tasks(spec.num_nodes, spec.ranks_per_node, spec.threads), *COMMON, spec.python, *spec.program)


def srun_torchrun_argv(spec: LaunchSpec, endpoint: str, run_id: str) -> tuple[str, ...]:
    """srun inside a Slurm job, one torchrun per node."""
    tasks = _tasks(spec.num_nodes, 1, spec.threads * spec.ranks_per_node)
    return ("srun", *tasks, *COMMON, *torchrun_argv(spec, endpoint, run_id))


def _tasks(num_nodes: int, per_node: int, cpus: int) -> tuple[str, ...]:
    """All of them: what is left out would come from the batch script's own SLURM_NTASKS, SLURM_CPUS_PER_TASK, ..."""
    counts = {"nodes": num_nodes, "ntasks": num_nodes * per_node, "ntasks-per-node": per_node, "cpus-per-task": cpus}
    return tuple(f"--{name}={count}" for name, count in counts.items())


def sbatch_text(spec: LaunchSpec) -> str:
    """A batch script that runs the supervisor, as slurm/*.sh do: it starts the ranks with srun, also after a requeue."""
    options = ("--requeue", f"--signal=B:USR1@{SAVE_BEFORE_S}", "--no-kill")
    return _script(spec, f"exec {shlex.join((spec.python, *spec.supervisor))}", options)


def sbatch_torchrun_text(spec: LaunchSpec) -> str:
    """A batch script that runs `srun_torchrun_argv`; the first node is known only there.

    No supervisor hears of the time limit, so the job is not put back into the queue.
    """
    argv = srun_torchrun_argv(spec, "HEAD:29400", "JOB")
    line = shlex.join(argv).replace("HEAD:", '"$head":').replace("--rdzv-id=JOB", '--rdzv-id="$SLURM_JOB_ID"')
    return _script(spec, f'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nexec {line}', ("--no-requeue",))


def _quoted(value: str) -> str:
    return f'"{value}"' if " " in value else value  # sbatch knows double quotes, and no others


def _script(spec: LaunchSpec, body: str, more: tuple[str, ...]) -> str:
    options = [
        f"--job-name={spec.name}",
        f"--nodes={spec.num_nodes}",
        f"--ntasks-per-node={spec.ranks_per_node}",
        f"--cpus-per-task={spec.threads}",
        *([f"--gpus-per-node={spec.ranks_per_node}"] if spec.gpus else []),
        "--output=" + _quoted(f"{spec.log_dir}/slurm-%j.log"),
        "--open-mode=append",
        *more,
    ]
    head = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in spec.env.items()]
    note = "# Partition, account and time limit: SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT"
    return "\n".join([*head, note, *exports, body, ""])
