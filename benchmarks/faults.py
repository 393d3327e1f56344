"""How long a job takes to start under Slurm, to go on after a lost node, and how fast it is then.

    python -m benchmarks.faults          needs Slurm's daemons, root and the tests: a real Slurm of four nodes on this machine

The job is slurm/ppo_70b.sh with the quickstart's model, one CPU rank a node. On a small machine the
ranks share its cores while they start, so the model's own start, which is measured too, is most of what a restart takes.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.launch.cluster import PYTHON, ROOT, Cluster, local_cluster
from tests.slurm.jobs import TINY, submit

KILLED_IN_STEP, STEPS = 5, 9
SIZE = {"data.prompts_per_step": 64}
EXACT_MATCH = "hpc_rl.reward.functions:exact_match"


def main() -> None:
    """Prints the table of benchmarks/results/slurm.md."""
    with local_cluster() as cluster, tempfile.TemporaryDirectory(prefix="faults") as directory:
        own_start_s = measure_own_start(Path(directory) / "alone")
        rows = measure_job(cluster, Path(directory) / "job", own_start_s)
        version = cluster.run("sinfo", "--version").stdout.strip()
    print(f"{datetime.now(UTC):%Y-%m-%d}, {version}, Python {platform.python_version()}\n")
    print("| what | measured | must |\n| --- | --- | --- |")
    print(f"| the model's own start, 4 ranks without Slurm: command to first step | {own_start_s:.1f} s | |")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def measure_own_start(run_dir: Path) -> float:
    """Four local ranks of the same run, without Slurm."""
    values = TINY | {"run.dir": run_dir, "launch.nproc": 4, "steps": 1, "reward.function": EXACT_MATCH, **SIZE}
    argv = [PYTHON, "-m", "hpc_rl.cli", "train", "configs/ppo_70b.yaml", *(f"{k}={v}" for k, v in values.items())]
    began = time.time()
    subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return (run_dir / "metrics.jsonl").stat().st_mtime - began


def measure_job(cluster: Cluster, out: Path, own_start_s: float) -> list[tuple[str, str, str]]:
    """A job of four nodes that loses one."""
    began = time.time()
    faults = f"0:generation:{KILLED_IN_STEP}:3:wait"
    job = submit(cluster, out, 4, faults=faults, steps=STEPS, data__prompts_per_step=64)
    first_s = job.first_step_after(began)
    job.at_fault(0)
    node = job.attempts()[0]["nodes"][3]
    cluster.control("fail", node)
    again_s = job.first_step_after(time.time())
    assert job.wait() == "COMPLETED", job.log
    lines = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    speed = {line["step"]: line["tokens_per_second"] for line in lines}
    before = statistics.median(speed[step] for step in range(2, KILLED_IN_STEP))
    after = statistics.median(speed[step] for step in range(KILLED_IN_STEP + 1, STEPS + 1))
    return [
        ("sbatch to the first step, beyond the model's own start", f"{first_s - own_start_s:.1f} s", "< 20 s"),
        ("node killed (power loss, no warning) to the next step done", f"{again_s:.1f} s", "< 45 s"),
        ("throughput on 3 of 4 nodes / on 4", f"{after / before:.2f} ({before:.0f} -> {after:.0f} tokens/s)", ">= 0.70"),
    ]


if __name__ == "__main__":
    main()
