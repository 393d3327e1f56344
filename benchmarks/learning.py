"""`hpc-rl bench learning`: does each algorithm learn? Held-out exact match of the quickstart's task, before and after.

Each run is `hpc-rl train configs/grpo_addition.yaml algorithm.name=NAME seed=SEED` on 2 ranks of this machine. All of it
writes benchmarks/results/learning.csv and learning.svg; ``--quick`` runs PPO and GRPO with one seed and writes nothing.
"""

from __future__ import annotations

import csv
import datetime
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import bar
from benchmarks._command import hpc_rl, versions
from benchmarks._svg import line_chart

ROOT = Path(__file__).parents[1]
CONFIG = "configs/grpo_addition.yaml"
RESULTS = ROOT / "benchmarks" / "results"
ALGORITHMS = ("ppo", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "remax", "dapo", "gspo", "cispo")
SEEDS = {"ppo": (0, 1, 2), "grpo": (0, 1, 2)}  # of the others: 0
STEPS, EVAL_EVERY = 20, 4
GAIN_GOAL, SECONDS_GOAL = 0.15, 300.0


def run(quick: bool = False) -> dict[str, Any]:
    """All algorithms and seeds; bars: the smallest gain and the longest run of each algorithm's seeds."""
    names, seeds = (("ppo", "grpo"), {}) if quick else (ALGORITHMS, SEEDS)
    with tempfile.TemporaryDirectory() as scratch:
        before = untrained(Path(scratch))
        runs = [train(name, seed, before, Path(scratch)) for name in names for seed in seeds.get(name, (0,))]
    bars = []
    for name in names:
        mine = [r for r in runs if r["algorithm"] == name]
        bars.append(bar(f"{name}_gain", min(r["gain"] for r in mine), "exact match", GAIN_GOAL, "higher"))
        bars.append(bar(f"{name}_seconds", max(r["seconds"] for r in mine), "s", SECONDS_GOAL, "lower"))
    if not quick:
        write_results(runs)
    return {"bars": bars, "table": [{k: v for k, v in r.items() if k != "curve"} for r in runs]}


def train(name: str, seed: int, before: float, scratch: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """One run, start and evaluations included in its seconds. ``curve``: (step, held-out exact match)."""
    run_dir = scratch / f"{name}-{seed}"
    values = [f"algorithm.name={name}", f"seed={seed}", f"steps={STEPS}", f"eval.every={EVAL_EVERY}"]
    begin = time.perf_counter()
    hpc_rl("train", CONFIG, *values, f"run.dir={run_dir}", *overrides)
    seconds = time.perf_counter() - begin
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    curve = [(0, before)] + [(line["step"], line["eval/pass_at_1"]) for line in lines if "eval/pass_at_1" in line]
    after = curve[-1][1]
    return {
        "algorithm": name, "seed": seed, "before": before, "after": after, "gain": after - before,
        "seconds": round(seconds, 1), "curve": curve,
    }  # fmt: skip


def untrained(scratch: Path) -> float:
    """Held-out exact match of the model that every run starts from."""
    report = json.loads(hpc_rl("eval", CONFIG, "launch.nproc=1", f"run.dir={scratch / 'untrained'}", "--json"))
    return float(report["pass_at_1"])


def write_results(runs: Sequence[dict[str, Any]]) -> None:
    """The curves as CSV and SVG, with date, versions and command."""
    about = [
        f"{datetime.date.today()}, hpc-rl bench learning ({os.cpu_count()} CPU cores)",
        versions(),
        f"held-out exact match, sampled at temperature 1: {CONFIG}, algorithm.name and seed as below, {STEPS} steps",
    ]
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "learning.csv").open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {line}\n" for line in about)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["algorithm", "seed", "step", "exact_match", "run_seconds"])
        for r in runs:
            writer.writerows(
                [r["algorithm"], r["seed"], step, f"{value:.4f}", r["seconds"]] for step, value in r["curve"]
            )
    names = dict.fromkeys(r["algorithm"] for r in runs)
    series = {name: [r["curve"] for r in runs if r["algorithm"] == name] for name in names}
    chart = line_chart("Held-out exact match, two-digit additions", "RL step", "exact match", series, about[0])
    (RESULTS / "learning.svg").write_text(chart, encoding="utf-8")
