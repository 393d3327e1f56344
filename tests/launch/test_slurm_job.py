"""What is asked of Slurm and read from it, as pure functions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_rl.config_load import load_config
from hpc_rl.errors import UserError
from hpc_rl.supervised_job import chain_args, rank_command, run_supervised
from launch.env import allocation
from launch.slurm_job import RankCommand, chain_argv, parse_fields, parse_time, ranks_argv
from launch.srun_step import TaskError, parse_error

SHOWN = (  # scontrol -o show job
    "JobId=12 JobName=ppo_70b Account=(null) QOS=(null) TimeLimit=01:00:00 EndTime=2026-11-30T23:53:08 Partition=batch "
    "ExcNodeList=(null) NodeList=node[1-2] CPUs/Task=8 WorkDir=/w StdOut=/w/12/slurm-ppo_70b-12.log"
)


def test_ranks_argv_names_the_nodes() -> None:
    argv = ranks_argv(RankCommand(("python", "-m", "x"), 8, 4, {}), ("a", "c"))
    assert {"--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=4", "--nodelist=a,c"} < set(argv)
    assert argv[-3:] == ("python", "-m", "x")


    assert not any("gpus" in word for word in argv)
    assert "--gpus-per-node=8" in ranks_argv(RankCommand(("python",), 8, 4, {}, 8), ("a",))


IN_JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "2"}


@pytest.mark.parametrize(
    ("environ", "override", "expected"),  # ranks, GPUs and cores of a rank
    [
        ({}, "steps=2", (4, 4, 1)),
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "6"}, "steps=2", (2, 4, 6)),
        ({}, "launch.device=cpu", (8, 0, 1)),
        ({"SLURM_GPUS_ON_NODE": "1"}, "steps=2", (1, 1, min(2, os.cpu_count() or 1))),
    ],
)
def test_ranks_of_a_node_are_those_of_the_allocation(
    environ: dict[str, str], override: str, expected: tuple[int, int, int]
) -> None:
    job = allocation(IN_JOB | environ)
    assert job is not None
    config = load_config("configs/ppo_70b.yaml", [override])
    command = rank_command(config, Path("configs/ppo_70b.yaml"), [override], job)
    assert (command.ranks_per_node, command.gpus_per_node, command.cpus_per_rank) == expected


def test_chained_job_is_like_this_one() -> None:
    argv = chain_argv(parse_fields(SHOWN), 3, {"n9", "n7"}, 8)
    assert argv == (
        "sbatch", "--parsable", "--job-name=ppo_70b", "--nodes=3", "--ntasks-per-node=8", "--cpus-per-task=8",
        "--time=01:00:00", "--partition=batch", "--chdir=/w", "--output=/w/12/slurm-ppo_70b-%j.log", "--exclude=n7,n9",
        "--dependency=afterany:12",
    )  # fmt: skip


def test_parse_time() -> None:
    first, second = parse_time("2026-11-30T23:53:08"), parse_time("2026-11-30T23:54:08")
    assert first is not None and second is not None and second - first == 60
    assert parse_time("Unknown") is None


def test_parse_error() -> None:
    assert parse_error("srun: error: node2: task 1: Killed\n") == TaskError("node2", 1, "Killed")
    assert parse_error("srun: error: gpu-a: tasks 4-7,9: Out Of Memory") == TaskError("gpu-a", 4, "Out Of Memory")
    assert parse_error("srun: error: Node failure on node3") == TaskError("node3", -1, "node failure")
    assert parse_error("slurmstepd: error: *** STEP 1.0 ON node1 CANCELLED ***") is None


def test_chain_args_say_each_key_once() -> None:
    assert chain_args(["run.dir=a", "resume=none", "steps=3", "run.dir=b"]) == ["run.dir=b", "resume=auto", "steps=3"]


@pytest.mark.parametrize(
    ("environ", "overrides", "message"),
    [
        ({}, [], "--supervise is for the batch script of a Slurm job"),
        ({"SLURM_STEP_ID": "0"}, [], "--supervise is for the batch script of a Slurm job"),
        ({}, ["job.spares=2"], r"job.spares = 2 leaves no node to work on, job 12 has 2"),
        ({}, ["parallel.tp=3"], r"parallel.tp=3 does not divide the 4 ranks of a node"),
        ({}, ["parallel.pp=3"], r"must divide the number of ranks, but that is 8"),
    ],
)
def test_refused_before_anything_starts(
    environ: dict[str, str], overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "4"}
    for name, value in ((job if environ or overrides else {}) | environ).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        run_supervised(Path("configs/quickstart.yaml"), [f"run.dir={tmp_path / 'run'}", *overrides])
    assert not (tmp_path / "run").exists()
