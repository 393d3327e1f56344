"""`hpc-rl bench smollm2`: GRPO of SmolLM2-135M-Instruct on one-digit sums of reasoning-gym; held-out pass@1 over steps.

Makes weights and prompts as configs/grpo_smollm2.yaml says (`bash launch/setup_env.sh --with smollm2` first), scores the
untrained model, trains 60 steps in runs/bench_smollm2 (started again, it goes on there) and writes
benchmarks/results/smollm2.csv and smollm2.svg. Without a GPU a step has 16 of the 64 prompts and takes about a minute on 2
cores. ``--quick``: 20 steps, nothing written.
"""

from __future__ import annotations

import csv
import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import bar
from benchmarks._command import ROOT, hpc_rl, python, versions
from benchmarks._svg import line_chart

CONFIG = "configs/grpo_smollm2.yaml"
RUN = ROOT / "runs" / "bench_smollm2"
RESULTS = ROOT / "benchmarks" / "results"
ON_CPU = (
    "launch.device=cpu", "launch.threads=2", "data.prompts_per_step=16", "algorithm.micro_batch_tokens=4096",
    "rollout.max_num_seqs=128",
)  # fmt: skip
RATIO_GOAL, SECONDS_GOAL = 2.0, 480.0  # the latter on a GPU


def run(quick: bool = False) -> dict[str, Any]:
    """Bars: held-out pass@1 after training over that before; seconds of all steps, evaluations included."""
    prepare()
    where = () if torch.cuda.is_available() else ON_CPU
    before = json.loads(hpc_rl("eval", CONFIG, f"run.dir={RUN}-untrained", *where, "--json"))["pass_at_1"]
    steps = 20 if quick else 60
    hpc_rl("train", CONFIG, f"run.dir={RUN}", f"steps={steps}", "resume=auto", "checkpoint.every=20", *where)
    curve, seconds = read(RUN, float(before))
    if not quick:
        write_results(curve, seconds, RESULTS, where)
    last = curve[-1][1]
    bars = [bar("held_out_pass_at_1_ratio", last / max(float(before), 1e-9), "x", RATIO_GOAL, "higher")]
    if torch.cuda.is_available():
        bars.append(bar("seconds", seconds, "s", SECONDS_GOAL, "lower"))
    table = [{"step": step, "held-out pass@1": round(value, 4)} for step, value in curve]
    return {"bars": bars, "table": table, "seconds": round(seconds, 1)}


def prepare() -> None:
    """Weights and prompts, where they are not there yet."""
    if not (ROOT / "models" / "smollm2" / "config.json").is_file():
        python("hpc_rl.data.tasks.smollm2", "models/smollm2")
    train, held_out = ROOT / "prompts" / "sums_train.jsonl", ROOT / "prompts" / "sums_eval.jsonl"
    if train.is_file() and held_out.is_file():
        return
    sizes = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = ["--task", "chain_sum", *(word for name, value in sizes.items() for word in ("--set", f"{name}={value}"))]
    train.parent.mkdir(exist_ok=True)
    python("hpc_rl.data.tasks.reasoning", *task, "--num", "160", str(train))
    python("hpc_rl.data.tasks.reasoning", *task, "--num", "80", "--seed", "1", "--exclude", str(train), str(held_out))


def read(run_dir: Path, before: float) -> tuple[list[tuple[int, float]], float]:
    """(step, held-out pass@1) from step 0 on, and the seconds of all steps and evaluations of a run."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    curve = [(0, before)] + [(line["step"], line["eval/pass_at_1"]) for line in lines if "eval/pass_at_1" in line]
    return curve, sum(line["step_seconds"] + line.get("eval/seconds", 0.0) for line in lines)


def write_results(
    curve: Sequence[tuple[int, float]], seconds: float, directory: Path, overrides: Sequence[str] = ()
) -> None:
    """The curve as CSV and SVG, with date, versions and command."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    about = [
        f"{datetime.date.today()}, hpc-rl bench smollm2 ({device}), {seconds:.0f} s in all",
        versions(),
        f"held-out pass@1 at temperature 1, 80 prompts x 4 samples: {' '.join((CONFIG, *overrides))}",
    ]
    with (directory / "smollm2.csv").open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {line}\n" for line in about)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "pass_at_1"])
        writer.writerows([step, f"{value:.4f}"] for step, value in curve)
    title = "SmolLM2-135M-Instruct, GRPO on one-digit sums: held-out pass@1"
    chart = line_chart(title, "RL step", "pass@1", {"grpo": [curve]}, about[0])
    (directory / "smollm2.svg").write_text(chart, encoding="utf-8")
