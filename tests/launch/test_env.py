"""Who am I: from the variables that launchers really set (OpenMPI 4.1, MPICH 4.0, Slurm 22.05, torchrun 2.13)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.errors import UserError
from launch.env import RankInfo, detect, slurm_port
from launch.hostlist import expand_counts, expand_hosts

SRUN = {
    "SLURMD_NODENAME": "node3",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[1-4]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "4",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "12", "SLURM_NNODES": "2", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


def test_srun() -> None:
    hosts = ("node1", "node2", "node3", "node4")
    assert detect(SRUN) == RankInfo(5, 8, 1, 2, 4, 2, "node1", slurm_port(SRUN), "srun", hosts)


def test_srun_uneven_nodes() -> None:
    last = {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_NUM_TASKS": "7"}
    info = detect(SRUN | last | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_STEP_NODELIST": "node[1-3]"})
    assert (info.rank, info.local_rank, info.local_world_size, info.num_nodes) == (6, 0, 1, 3)


def test_torchrun() -> None:
    assert detect(TORCHRUN) == RankInfo(5, 8, 1, 4, 2, 1, "node1", 29500, "torchrun", ())


def test_torchrun_wins_under_srun() -> None:
    under = SRUN | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"} | TORCHRUN
    assert detect(under).launcher == "torchrun"


def test_none() -> None:
    info = detect({})
    assert (info.rank, info.world_size, info.master_port, info.launcher) == (0, 1, 0, "none")


def test_shell_in_a_slurm_job_is_no_launcher() -> None:
    one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert detect(SRUN | one).launcher == "none"
    assert detect(BATCH_SCRIPT | {"SLURM_NNODES": "1"}).launcher == "none"


def test_master_variables_win() -> None:
    info = detect(SRUN | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4242"})
    assert (info.master_addr, info.master_port) == ("10.0.0.7", 4242)


def test_another_retry_gets_another_port() -> None:
    assert slurm_port(SRUN) != slurm_port(SRUN | {"SLURM_RESTART_COUNT": "1"})
    assert slurm_port(SRUN | {"SLURM_STEP_RESV_PORTS": "31001-31002"}) == 31001


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID is not set"),
        ({"SLURM_PROCID": "five"}, "SLURM_PROCID='five' must be a whole number"),
        ({"SLURM_STEP_NODELIST": "node[1-3]"}, r"SLURM_STEP_NODELIST=node\[1-3\] \(3 nodes\)"),
        ({"SLURM_STEP_NUM_TASKS": "9"}, "SLURM_STEP_NUM_TASKS=9"),
        ({"SLURMD_NODENAME": "node9"}, "this is node node9, but SLURM_NODEID=2"),
        ({"SLURM_PROCID": "2"}, "--distribution=block"),
        ({"SLURM_STEP_NODELIST": "node[1-x]"}, r"node\[1-x\].*cannot be read"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2*4"}, r"2\*4.*cannot be read"),
    ],
)
def test_bad_slurm_values(change: dict[str, str | None], message: str) -> None:
    environ = {k: v for k, v in (SRUN | change).items() if v is not None}
    with pytest.raises(UserError, match=message):
        detect(environ)


def test_forgotten_srun_is_refused() -> None:
    with pytest.raises(UserError, match=r"2 nodes .*put srun before the command"):
        detect(BATCH_SCRIPT)


def test_mpirun_in_each_task_is_refused() -> None:
    """Eight mpirun of one rank each, inside a job of eight tasks: eight runs, not one."""
    values = {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    alone = {f"OMPI_COMM_WORLD_{k}": v for k, v in values.items()}
    with pytest.raises(UserError, match="SLURM_NTASKS is 8: this would be 8 runs"):
        detect(SRUN | alone)


def test_impossible_torchrun_values() -> None:
    with pytest.raises(UserError, match="rank 9 of 8"):
        detect(TORCHRUN | {"RANK": "9"})
    with pytest.raises(UserError, match="MASTER_PORT is not set"):
        detect({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("node[1-3,7],gpu-x", ["node1", "node2", "node3", "node7", "gpu-x"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("n[1]-ib,m", ["n1-ib", "m"]),
    ],
)
def test_expand_hosts(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n[]", "n[1-2-3]"])
def test_expand_hosts_refuses(text: str) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        expand_hosts(text)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 9)), min_size=1, max_size=6))
def test_expand_counts(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)
    assert expand_counts(text) == tuple(count for count, times in groups for _ in range(times))
