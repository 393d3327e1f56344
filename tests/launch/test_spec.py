"""`hpc-rl launch --dry-run`: the exact commands, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hpc_rl.config import Config, LaunchConfig, ParallelConfig, RunConfig
from hpc_rl.errors import UserError
from launch.env import Allocation
from launch.spec import LaunchSpec, Site, check_placement, choose, launch, make_command, make_spec

PROGRAM = ("-m", "hpc_rl.cli", "train", "c.yaml", "run.dir=my runs/a")
SUPERVISOR = ("-m", "hpc_rl.cli", "launch", "--supervise", "c.yaml", "resume=auto", "run.dir=my runs/a")
SPEC = LaunchSpec("ppo", PROGRAM, 2, 8, 4, True, "my runs/a/logs", "/v/bin/python", SUPERVISOR)
JOB = Allocation("77", 2, ("n1", "n2"), 0, 19697)
BARE = Site(frozenset({"mpirun"}), "openmpi", None, "")
SLURM = Site(frozenset({"srun", "sbatch"}), "", None, "")
IN_JOB = dataclasses.replace(SLURM, job=JOB)
TRAIN = "/v/bin/python -m hpc_rl.cli train c.yaml 'run.dir=my runs/a'"
ENV = "OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1 "
SRUN = "--kill-on-bad-exit=1 --distribution=block --mpi=none --export=ALL "
TORCHRUN = "/v/bin/python -m torch.distributed.run --nnodes={} --nproc-per-node=8 --max-restarts=0 --rdzv-backend=c10d "
LOGS = "'--log-dir=my runs/a/logs' --tee=3 --local-ranks-filter=0 -m hpc_rl.cli train c.yaml 'run.dir=my runs/a'"


def test_srun_inside_a_job() -> None:
    expected = f"{ENV}srun --nodes=2 --ntasks=16 --ntasks-per-node=8 --cpus-per-task=4 {SRUN}{TRAIN}"
    assert make_command("srun", SPEC, IN_JOB).text() == expected


def test_srun_outside_a_job_is_a_batch_script() -> None:
    command = make_command("srun", SPEC, SLURM)
    assert command.argv == ("sbatch",)
    assert command.text() == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=ppo\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=8\n"
        "#SBATCH --cpus-per-task=4\n"
        "#SBATCH --gpus-per-node=8\n"
        '#SBATCH --output="my runs/a/logs/slurm-%j.log"\n'
        "#SBATCH --open-mode=append\n"
        "#SBATCH --requeue\n"
        "#SBATCH --signal=B:USR1@300\n"
        "#SBATCH --no-kill\n"
        "# Partition, account and time limit: SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT\n"
        "export OMP_NUM_THREADS=4\n"
        "export PYTHONUNBUFFERED=1\n"
        "exec /v/bin/python -m hpc_rl.cli launch --supervise c.yaml resume=auto 'run.dir=my runs/a'\n"
    )


def test_torchrun_outside_a_job_is_a_batch_script_that_is_not_requeued() -> None:
    """Nobody there would hear of the time limit, and the ranks would begin at step 1."""
    text = make_command("torchrun", SPEC, SLURM).text()
    assert "#SBATCH --no-requeue\n" in text and "--signal" not in text and "--requeue" not in text


def test_no_gpus_are_asked_for_on_cpu() -> None:
    text = make_command("srun", dataclasses.replace(SPEC, gpus=False), SLURM).text()
    assert "gpus" not in text


def test_torchrun_on_one_node() -> None:
    one = dataclasses.replace(SPEC, num_nodes=1)
    expected = f"{ENV}{TORCHRUN.format(1)}--rdzv-endpoint=localhost:0 --rdzv-id=hpc_rl {LOGS}"
    assert make_command("torchrun", one, BARE).text() == expected


def test_torchrun_inside_a_job_is_one_per_node() -> None:
    srun = f"srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=32 {SRUN}"
    torchrun = f"{TORCHRUN.format(2)}--rdzv-endpoint=n1:19697 --rdzv-id=77 {LOGS}"
    assert make_command("torchrun", SPEC, IN_JOB).text() == ENV + srun + torchrun


def test_torchrun_with_a_given_master() -> None:
    site = dataclasses.replace(BARE, master_addr="10.0.0.1")
    assert "--rdzv-endpoint=10.0.0.1:29400 --rdzv-id=ppo" in make_command("torchrun", SPEC, site).text()


def test_torchrun_without_a_master_is_refused() -> None:
    with pytest.raises(UserError, match="set MASTER_ADDR"):
        make_command("torchrun", SPEC, BARE)


def test_mpirun() -> None:
    openmpi = "mpirun -n 16 --map-by ppr:8:node:oversubscribe --bind-to none -x OMP_NUM_THREADS -x PYTHONUNBUFFERED "
    assert make_command("mpi", SPEC, BARE).text() == f"{ENV}{openmpi}{TRAIN}"
    mpich = "mpirun -n 16 -ppn 8 -genv OMP_NUM_THREADS 4 -genv PYTHONUNBUFFERED 1 "
    assert make_command("mpi", SPEC, dataclasses.replace(BARE, mpi="mpich")).text() == f"{ENV}{mpich}{TRAIN}"


@pytest.mark.parametrize(
    ("site", "num_nodes", "launcher"),
    [(BARE, 1, "torchrun"), (BARE, 2, "torchrun"), (SLURM, 1, "torchrun"), (SLURM, 2, "srun"), (IN_JOB, 1, "srun")],
)
def test_auto(site: Site, num_nodes: int, launcher: str) -> None:
    assert choose("auto", dataclasses.replace(SPEC, num_nodes=num_nodes), site) == launcher


@pytest.mark.parametrize(
    ("launcher", "site", "message"),
    [
        ("ray", BARE, "--launcher ray is unknown: use one of auto, torchrun, mpi, srun"),
        ("mpi", SLURM, "there is no mpirun of OpenMPI or MPICH on PATH"),
        ("srun", BARE, "srun and sbatch are not on PATH"),
    ],
)
def test_launcher_that_is_not_there(launcher: str, site: Site, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose(launcher, SPEC, site)


def test_sizes_come_from_the_config() -> None:
    config = Config(run=RunConfig(dir="runs/x"), launch=LaunchConfig(nproc=4, nodes=None, threads=2, device="cpu"))
    spec = make_spec(config, Path("c.yaml"), ["steps=2"], IN_JOB)
    assert (spec.num_nodes, spec.ranks_per_node, spec.threads, spec.gpus) == (2, 4, 2, False)
    assert spec.program == ("-m", "hpc_rl.cli", "train", "c.yaml", "steps=2")
    assert spec.supervisor == ("-m", "hpc_rl.cli", "launch", "--supervise", "c.yaml", "resume=auto", "steps=2")
    assert make_spec(config, Path("c.yaml"), [], BARE).num_nodes == 1


def test_more_nodes_than_the_job_has() -> None:
    config = Config(launch=LaunchConfig(nodes=3))
    with pytest.raises(UserError, match=r"launch.nodes=3, but job 77 has 2 nodes"):
        make_spec(config, Path("c.yaml"), [], IN_JOB)


def test_tensor_parallel_groups_stay_inside_a_node() -> None:
    with pytest.raises(UserError, match=r"parallel.tp=8 does not divide the 4 ranks of a node"):
        check_placement(ParallelConfig(tp=8), num_nodes=2, ranks_per_node=4)
    assert check_placement(ParallelConfig(tp=8), num_nodes=1, ranks_per_node=4) == []
    assert check_placement(ParallelConfig(tp=4, pp=2), num_nodes=2, ranks_per_node=4) == []
    warnings = check_placement(ParallelConfig(tp=4, cp=2), num_nodes=2, ranks_per_node=4)
    assert len(warnings) == 1
    assert "CP groups cross nodes" in warnings[0]


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="run.dir: .* cannot be a directory, because .*file is a file"):
        launch("torchrun", Path("configs/quickstart.yaml"), [f"run.dir={tmp_path}/file/run"], dry_run=False)
