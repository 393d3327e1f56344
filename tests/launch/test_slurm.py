"""Jobs of several nodes under a real Slurm: srun, torchrun and mpirun find the same world."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
from pathlib import Path

import pytest

from launch.env import slurm_port
from launch.mpi import mpirun_argv
from launch.spec import LaunchSpec
from launch.srun import sbatch_torchrun_text
from tests.launch.cluster import PYTHON, ROOT, Cluster, missing_programs, mpich_env, wait_until

pytestmark = pytest.mark.slurm
HELLO = ROOT / "tests/launch/hello.py"


def check_world(out: Path, hosts: list[str], ranks_per_node: int, launcher: str) -> None:
    """Every rank saw the same world, numbered node by node."""
    world = len(hosts) * ranks_per_node
    for rank in range(world):
        seen = json.loads((out / f"rank_{rank}.json").read_text())
        assert (seen["rank"], seen["world_size"], seen["size"]) == (rank, world, world)
        assert (seen["local_rank"], seen["local_world_size"]) == (rank % ranks_per_node, ranks_per_node)
        assert (seen["node_rank"], seen["num_nodes"]) == (rank // ranks_per_node, len(hosts))
        assert seen["sum"] == world * (world - 1) / 2
        assert seen["launcher"] == launcher
        assert seen["hostnames"] == ([] if launcher == "torchrun" else hosts)
        assert seen["master_addr"] == hosts[0]


def running(out: Path) -> list[int]:
    """Processes on any node that were started with ``out`` as an argument."""
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(out).encode() in cmdline.read_bytes().split(b"\0"):
                found.append(int(cmdline.parent.name))
    return found


def test_srun_on_four_nodes(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run("srun", "-N4", "--ntasks-per-node=2", "--kill-on-bad-exit=1", PYTHON, HELLO, tmp_path)
    assert done.returncode == 0, done.stderr
    check_world(tmp_path, ["node1", "node2", "node3", "node4"], 2, "srun")


@pytest.mark.parametrize("plugin", ["pmi2", "pmix"])
def test_srun_in_sbatch_needs_no_mpi_plugin(cluster: Cluster, tmp_path: Path, plugin: str) -> None:
    """Rank and world come from SLURM_*, so that whichever plugin a site has as default gives one world."""
    script = f"srun --mpi={plugin} {PYTHON} {HELLO} {tmp_path}"
    job = cluster.sbatch("-N2", "--ntasks-per-node=1", "-w", "node[2-3]", "-o", tmp_path / "log", "--wrap", script)
    assert cluster.wait(job) == "COMPLETED", (tmp_path / "log").read_text()
    check_world(tmp_path, ["node2", "node3"], 1, "srun")


def spec_for(out: Path, num_nodes: int, ranks_per_node: int) -> LaunchSpec:
    return LaunchSpec("hello", (str(HELLO), str(out)), num_nodes, ranks_per_node, 1, True, str(out), PYTHON)


def test_batch_script_of_torchrun(cluster: Cluster, tmp_path: Path) -> None:
    """The text that `hpc-rl launch --launcher torchrun` hands to sbatch, on two nodes of two ranks."""
    spec = dataclasses.replace(spec_for(tmp_path, 2, 2), gpus=False)
    (tmp_path / "job.sh").write_text(sbatch_torchrun_text(spec))
    job = cluster.sbatch("-w", "node[1-2]", tmp_path / "job.sh")
    assert cluster.wait(job) == "COMPLETED", (tmp_path / f"slurm-{job}.log").read_text()
    hosts = ["node1", "node2"]  # its agents number the nodes as they come
    hosts.sort(key=json.loads((tmp_path / "rank_0.json").read_text())["master_addr"].__ne__)
    check_world(tmp_path, hosts, 2, "torchrun")


@pytest.mark.slow
def test_batch_script_of_srun_goes_on_after_a_requeue(cluster: Cluster, tmp_path: Path) -> None:
    """The real `hpc-rl launch --launcher srun`, told of its time limit in the first step."""
    run = tmp_path / "run"
    words = ("configs/quickstart.yaml", f"run.dir={run}", "launch.nodes=2", "launch.nproc=1", "steps=2")
    done = cluster.run(PYTHON, "-m", "hpc_rl.cli", "launch", "--launcher", "srun", *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]  # Submitted batch job 7
    log = run / "logs" / f"slurm-{job}.log"
    wait_until(lambda: log.exists() and "Supervisor: attempt 0" in log.read_text())
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    slices = json.loads((run / "slices.json").read_text())["slices"]
    assert [(s["restart"], s["began_at"]) for s in slices] == [(0, 0), (1, 1)], log.read_text()


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_mpirun_on_two_nodes(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    if missing_programs((f"mpirun.{kind}",)):
        pytest.skip(f"not installed: mpirun.{kind}")
    hosts = ["node3", "node4"]
    program, *rest = mpirun_argv(spec_for(tmp_path, 2, 2), kind)
    argv = ("salloc", "-N2", "--ntasks-per-node=2", "-w", "node[3-4]", f"{program}.{kind}", *rest)
    done = cluster.run(*argv, **mpich_env(tmp_path), UCX_TLS="tcp,self")  # these nodes share a kernel, but no /dev/shm
    assert done.returncode == 0, done.stderr
    check_world(tmp_path, hosts, 2, kind)


def test_cyclic_placement_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    argv = ("srun", "-N2", "-n4", "--distribution=cyclic", "--kill-on-bad-exit=1", PYTHON, HELLO, tmp_path)
    done = cluster.run(*argv)
    assert done.returncode != 0
    assert "ranks are not numbered node by node: start with srun --distribution=block" in done.stderr


def test_port_in_use_is_named_and_no_rank_stays(cluster: Cluster, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as holder:
        port = str(holder.getsockname()[1])
        argv = ("srun", "-N2", "-n2", "-w", "node[1-2]", "--kill-on-bad-exit=1", PYTHON, HELLO, tmp_path)
        done = cluster.run(*argv, MASTER_PORT=port)
    assert done.returncode != 0
    assert f"port {port} on node1 cannot be used" in done.stderr
    wait_until(lambda: not running(tmp_path))


def test_killed_rank_ends_the_step(cluster: Cluster, tmp_path: Path) -> None:
    argv = ("srun", "-N2", "-n2", "--kill-on-bad-exit=1", PYTHON, HELLO, tmp_path, "--fail", "1", "kill")
    done = cluster.run(*argv)
    assert done.returncode in (128 + signal.SIGKILL, 128 + signal.SIGTERM)  # of the killed rank, or of the ended ones
    wait_until(lambda: not running(tmp_path))


def test_forgotten_srun_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch("-N2", "-o", tmp_path / "log", "--wrap", f"{PYTHON} {HELLO} {tmp_path}")
    assert cluster.wait(job) == "FAILED"
    assert "put srun before the command" in (tmp_path / "log").read_text()


def test_jobs_of_one_cluster_take_different_ports() -> None:
    ports = {slurm_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0"}) for job in range(1000, 1200)}
    assert len(ports) == 200
