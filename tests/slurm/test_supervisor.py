"""slurm/ppo_70b.sh under a real Slurm of four nodes: to the end, through requeue and chain, and through every fault."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.launch.cluster import ROOT, Cluster, wait_until
from tests.slurm.jobs import DOCUMENTED, TinyJob, rollouts, same_run, submit

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
EACH_STEP = {"checkpoint__every": 1, "algorithm__critic_warmup_steps": 0}  # is saved, and trains the actor
NUM_SAMPLES = 512 * 4  # of a step: data.prompts_per_step * rollout.samples_per_prompt


@pytest.fixture(scope="module")
def long_run(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> TinyJob:
    """The documented line and nothing else, in one go."""
    job = submit(cluster, tmp_path_factory.mktemp("long"), 2)
    assert job.wait() == "COMPLETED", job.log
    return job


def fail(job: TinyJob, attempt: int, node: str) -> float:
    """The node dies while its rank stands where it was told to; the time of its death."""
    job.at_fault(attempt)
    job.cluster.control("fail", node)
    return time.time()


def test_the_script_runs_to_the_end(long_run: TinyJob) -> None:
    assert long_run.steps() == [1, 2]
    assert [len(attempt["nodes"]) for attempt in long_run.attempts()] == [2]
    assert "2 ranks: tp 1, pp 1, dp 2" in long_run.log
    assert not (long_run.run / "failure.json").exists()


def test_told_to_stop_it_requeues_itself_and_is_the_same_run(cluster: Cluster, tmp_path: Path, long_run: TinyJob) -> None:
    """The documented line and nothing else; USR1 to the batch script, as `--signal=B:USR1@300` does, in the first step."""
    job = submit(cluster, tmp_path, 2)
    wait_until(lambda: "Supervisor: attempt 0" in job.log)
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    assert job.wait() == "COMPLETED", job.log
    assert "told to stop by SIGUSR1" in job.log
    assert [(s["restart"], s["began_at"]) for s in job.slices()] == [(0, 0), (1, 1)]
    assert "Stopped by SIGUSR1 after step 1 of 2, saved" in job.log
    assert same_run(job.run, long_run.run)


def test_chained_slices_are_the_same_run(cluster: Cluster, tmp_path: Path, long_run: TinyJob) -> None:
    """The time limit is so near that each slice ends with its first step; the next job has the same script."""
    job = submit(cluster, tmp_path, 2, options=("--time=10",), job__save_before_s=600, job__next_slice="chain")
    assert job.wait() == "COMPLETED", job.log
    following = str(int(job.id) + 1)
    assert f"job {following} goes on after this one, 2 nodes" in job.log
    assert cluster.wait(following) == "COMPLETED", job.log
    assert [(s["job"], s["began_at"]) for s in job.slices()] == [(job.id, 0), (following, 1)]
    assert same_run(job.run, long_run.run)


def test_a_requeue_takes_the_nodes_that_are_idle(cluster: Cluster, tmp_path: Path) -> None:
    """job.scale=auto: the second slice has two nodes, and loads what one has saved."""
    job = submit(cluster, tmp_path, 1, job__scale="auto", job__max_nodes=2)
    wait_until(lambda: "Supervisor: attempt 0" in job.log)
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    assert job.wait() == "COMPLETED", job.log
    assert "job.scale = auto: 2 nodes next (" in job.log
    assert [(s["restart"], s["began_at"]) for s in job.slices()] == [(0, 0), (1, 1)]
    assert [len(attempt["nodes"]) for attempt in job.attempts()] == [1, 2]
    assert "2 ranks: tp 1, pp 1, dp 2" in job.log
    assert job.steps() == [1, 2]


def test_its_checkpoint_is_scored_by_the_script_for_it(cluster: Cluster, tmp_path: Path, long_run: TinyJob) -> None:
    env = {"VENV": str(long_run.dir / "venv"), "RUN": str(long_run.run), "CONFIG": "configs/ppo_70b.yaml"}
    line = ("--nodes=2", "-o", tmp_path / "log", "slurm/eval.sh", DOCUMENTED[0], "eval.num_prompts=16")
    job = cluster.sbatch(*line, cwd=ROOT, **env)
    assert cluster.wait(job) == "COMPLETED", (tmp_path / "log").read_text()
    assert "checkpoint_2_complete" in (tmp_path / "log").read_text().replace("\n", "")


def test_two_slices_without_progress_end_the_chain(cluster: Cluster, tmp_path: Path) -> None:
    """Slices of ten seconds, too short for a step: the second one says so instead of submitting a third.

    With job.scale=auto the second one takes another node, which is idle.
    """
    short = {"options": ("--time=1",), "faults": "all:generation:1:0:wait", "job__save_before_s": 250}
    job = submit(cluster, tmp_path, 1, **short, job__next_slice="chain", job__scale="auto", job__max_nodes=2)
    assert job.wait() == "COMPLETED", job.log
    last = str(int(job.id) + 1)
    assert cluster.wait(last) == "FAILED", job.log
    assert [len(attempt["nodes"]) for attempt in job.attempts()] == [1, 2]
    report = json.loads((job.run / "failure.json").read_text())
    assert report["kind"] == "no_progress"
    assert "2 slices in a row made no progress" in report["summary"]


def test_nodes_lost_in_each_phase(cluster: Cluster, tmp_path: Path) -> None:
    """Two nodes work, two stand by. Lost: one in generation, its spare in training, the next in the save; one is left."""
    faults = "0:generation:1:1:wait 1:actor:2:1:wait 2:save:3:1:wait"
    job = submit(cluster, tmp_path, 4, faults=faults, job__spares=2, steps=3, **EACH_STEP)
    try:
        again_s = []
        for attempt, node in enumerate(("node2", "node3", "node4")):
            moment = fail(job, attempt, node)
            again_s.append(job.first_step_after(moment))
        assert job.wait() == "COMPLETED", job.log
    finally:
        cluster.control("restore", "node2", "node3", "node4")
    attempts = job.attempts()
    worked_on = [["node1", "node2"], ["node1", "node3"], ["node1", "node4"], ["node1"]]
    assert [attempt["nodes"] for attempt in attempts] == worked_on
    for attempt, phase in zip(attempts, ("reward of step 1", "actor of step 2", "save of step 3"), strict=False):
        assert phase in attempt["cause"]
    assert [attempt["began_at"] for attempt in attempts] == [0, 0, 1, 2]
    assert job.steps() == [1, 2, 3]
    print("node killed to the next step, s:", again_s)
    assert max(again_s) < 60
    assert len(rollouts(job.run)) == 3 * NUM_SAMPLES  # none of them twice
    lines = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["reused_samples"] > 0  # those of the lost node that were finished
    assert lines[2]["reused_samples"] == NUM_SAMPLES
    assert "1 rank: tp 1, pp 1, dp 1" in job.log


def test_hanging_rank_rank_out_of_memory_killed_rank(cluster: Cluster, tmp_path: Path) -> None:
    """The first two are started again on the same nodes, after the second failure of the same node without it."""
    faults = "0:generation:1:0:kill 1:generation:2:1:memory 2:actor:2:1:stop"
    limits = {"fault__timeout_s": 5, "fault__phase_timeout_s": "{start: 100, load: 100}"}
    job = submit(cluster, tmp_path, 2, faults=faults, **limits, **EACH_STEP)
    assert job.wait() == "COMPLETED", job.log
    attempts = job.attempts()
    first, second = attempts[0]["nodes"]
    assert [attempt["nodes"] for attempt in attempts] == [[first, second]] * 3 + [[first]]
    assert f"rank 0 on {first} was killed in reward of step 1" in attempts[0]["cause"]
    assert f"rank 1 on {second} ran out of memory in reward of step 2" in attempts[1]["cause"]
    assert f"rank 1 on {second} hung in actor of step 2" in attempts[2]["cause"]
    assert "the process is stopped (SIGSTOP or a debugger)" in attempts[2]["cause"]
    assert job.steps() == [1, 2]


def test_the_batch_scripts_own_node_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm keeps such a job without its script; another node puts it back into the queue."""
    job = submit(cluster, tmp_path, 2, faults="0:actor:2:1:wait", **EACH_STEP)
    job.at_fault(0)
    own = job.attempts()[0]["nodes"][0]
    moment = fail(job, 0, own)
    try:
        assert job.wait() == "COMPLETED", job.log
    finally:
        cluster.control("restore", own)
    assert [(s["restart"], s["began_at"]) for s in job.slices()] == [(0, 0), (1, 1)]
    assert own not in job.attempts()[1]["nodes"]
    assert job.steps() == [1, 2]
    print("the script's own node killed to the end of the job, s:", time.time() - moment)


def test_a_failure_that_comes_again_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    limits = {"job__max_restarts": 1, "job__backoff_s": 0}
    job = submit(cluster, tmp_path, 1, faults="all:generation:1:0:raise", **limits)
    assert job.wait() == "FAILED", job.log
    report = json.loads((job.run / "failure.json").read_text())
    assert (report["rank"], report["node"], report["phase"], report["step"]) == (0, job.attempts()[0]["nodes"][0], "reward", 1)
    assert "RuntimeError: boom" in report["message"]
    assert "2 attempts in a row ended without a newer checkpoint" in report["decided"]
    assert len(report["restarts"]) == 1
