"""`hpc-rl bench slurm`: how long a job takes to start under Slurm and to go on after a lost node, and how fast it is then.

A real Slurm of four nodes on this machine, which needs Slurm's daemons, root and the tests of the checkout. The job is
the documented line of slurm/ppo_70b.sh, one CPU rank a node. On a small machine the ranks share its cores while they
start, so the model's own start, which is measured too, is most of what a restart takes. ``--quick``: fewer steps, and
neither the slice nor the loss of the batch script's own node.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import bar
from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from tests.launch.cluster import Cluster
    from tests.slurm.jobs import TinyJob

ROOT = Path(__file__).parents[1]
EACH_STEP = {"checkpoint__every": 1, "algorithm__critic_warmup_steps": 0}
Row = dict[str, Any]


def run(quick: bool = False) -> dict[str, Any]:
    """Bars: what issue 6 asks for. Table: the parts of it."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    try:
        from tests.launch.cluster import SLURM_PROGRAMS, local_cluster, missing_programs
    except ImportError as error:
        raise UserError(f"the benchmark slurm needs the checkout's tests ({error}): run it there, with pytest installed") from None
    if missing := missing_programs(SLURM_PROGRAMS):
        raise UserError(f"not installed: {', '.join(missing)}: apt-get install slurm-wlm munge libpmix2")
    with local_cluster() as cluster, tempfile.TemporaryDirectory(prefix="slurm") as scratch:
        own_start_s = measure_own_start(Path(scratch) / "alone")
        bars, table = measure_lost_node(cluster, Path(scratch) / "lost", own_start_s, *((3, 5) if quick else (5, 9)))
        if not quick:
            bars.append(measure_slice(cluster, Path(scratch) / "slice", table))
            measure_script_node(cluster, Path(scratch) / "script", table)
        table.append({"what": "slurm", "value": cluster.run("sinfo", "--version").stdout.strip()})
    return {"bars": bars, "table": table}


def measure_own_start(run_dir: Path) -> float:
    """Four local ranks of the same run, without Slurm: seconds from the command to the end of the first step."""
    words = ["model.path=configs/quickstart/model", "steps=1", f"run.dir={run_dir}", "launch.nproc=4", "launch.device=cpu"]
    argv = [sys.executable, "-m", "hpc_rl.cli", "train", "configs/ppo_70b.yaml", *words]
    began = time.time()
    subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return (run_dir / "metrics.jsonl").stat().st_mtime - began


def measure_lost_node(
    cluster: Cluster, out: Path, own_start_s: float, killed_in_step: int, steps: int
) -> tuple[list[Row], list[Row]]:
    """A job of four nodes that loses one, with everything on it, in the generation of a step."""
    from tests.slurm.jobs import submit

    began = time.time()
    faults = f"0:generation:{killed_in_step}:3:wait"
    job = submit(cluster, out, 4, faults=faults, **{**EACH_STEP, "steps": steps})
    first_s = job.first_step_after(began)
    job.at_fault(0)
    cluster.control("fail", node := job.attempts()[0]["nodes"][3])
    again_s = job.first_step_after(time.time())
    assert job.wait() == "COMPLETED", job.log
    cluster.control("restore", node)
    speed = {line["step"]: line["tokens_per_second"] for line in metrics(job)}
    before = statistics.median(speed[step] for step in range(2, killed_in_step))
    after = statistics.median(speed[step] for step in range(killed_in_step + 1, steps + 1))
    bars = [
        bar("sbatch to the first step, beyond the model's own start", first_s - own_start_s, "s", 20.0, "lower"),
        bar("node killed to the next step done", again_s, "s", 45.0, "lower"),
        bar("throughput on 3 nodes / on 4", after / before, "ratio", 0.70, "higher"),
    ]
    table = [
        {"what": "the model's own start, 4 ranks without Slurm: command to first step, s", "value": round(own_start_s, 1)},
        {"what": "tokens/s on 4 nodes", "value": round(before)},
        {"what": "tokens/s on 3 nodes", "value": round(after)},
    ]
    return bars, table


def measure_slice(cluster: Cluster, out: Path, table: list[Row]) -> Row:
    """A slice whose time limit comes while one rank is in the middle of a generation that does not end."""
    from tests.slurm.jobs import rollouts, submit

    job = submit(cluster, out, 2, options=("--time=2",), faults="0:generation:1:1:wait", job__save_before_s=200)
    job.at_fault(0)
    time.sleep(5)  # the other rank finishes its share
    shutil.copytree(job.run / "rollouts", out / "then/rollouts")
    finished = rollouts(out / "then")
    assert job.wait(400) == "COMPLETED", job.log
    final = rollouts(job.run)  # refuses a sequence that was generated twice
    lost = sum(final.get(key) != value for key, value in finished.items())
    reused = int(metrics(job)[0]["reused_samples"])
    table.append({"what": "sequences finished when the slice ended, and taken over by the next one", "value": reused})
    return bar("finished sequences that a time-limit slice loses", lost + max(0, len(finished) - reused), "sequences", 0, "lower")


def measure_script_node(cluster: Cluster, out: Path, table: list[Row]) -> None:
    """The node of the batch script is lost: Slurm must see that, and start the whole job again."""
    from tests.launch.cluster import wait_until
    from tests.slurm.jobs import submit

    job = submit(cluster, out, 2, faults="0:actor:2:1:wait", **EACH_STEP)
    job.at_fault(0)
    cluster.control("fail", node := job.attempts()[0]["nodes"][0])
    last = time.time()
    moments = {
        "until Slurm says that it is down": lambda: "DOWN" in cluster.run("sinfo", "-h", "-n", node, "-o", "%T").stdout.upper(),
        "until the job is in the queue again": lambda: cluster.state(job.id) == "PENDING",
        "until its script runs again (cred_expire holds it back)": lambda: len(job.slices()) > 1,
        "until the next step is done": lambda: metrics(job)[-1]["step"] > 1,
    }
    for what, condition in moments.items():
        wait_until(condition)
        now = time.time()
        table.append({"what": f"batch script's own node killed: {what}, s", "value": round(now - last, 1)})
        last = now
    assert job.wait() == "COMPLETED", job.log
    cluster.control("restore", node)


def metrics(job: TinyJob) -> list[dict[str, float]]:
    """Of each step."""
    return [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
