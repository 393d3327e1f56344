"""slurm/ppo_70b.sh, not a line of it changed, with a tiny model given on the line of sbatch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch.cluster import PYTHON, ROOT, Cluster, wait_until

TINY = {
    "model.path": "configs/quickstart/model", "model.dtype": "float32", "parallel.tp": 1, "parallel.pp": 1,
    "parallel.recompute": "none", "rollout.tp": 1, "rollout.max_response_tokens": 4, "rollout.max_num_seqs": 64,
    "rollout.kv_cache_bytes": 1 << 26, "data.prompts": "configs/quickstart/prompts.jsonl", "data.eval_prompts": "null",
    "data.prompts_per_step": 8, "data.max_prompt_tokens": 8, "reward.function": "tests.slurm.faulty:score",
    "algorithm.critic_warmup_steps": 0, "algorithm.mini_batches": 4, "launch.device": "cpu", "checkpoint.every": 1,
    "steps": 2, "actor.warmup_steps": 0, "critic.warmup_steps": 0, "fault.timeout_s": 120,
}  # fmt: skip


@dataclass(frozen=True)
class TinyJob:
    """A job of sbatch and its run directory."""

    cluster: Cluster
    id: str
    dir: Path

    @property
    def run(self) -> Path:
        return self.dir / "run"

    @property
    def log(self) -> str:
        return (self.dir / "log").read_text() if (self.dir / "log").exists() else ""

    def wait(self, timeout_s: float = 240.0) -> str:
        return self.cluster.wait(self.id, timeout_s)

    def at_fault(self, attempt: int) -> None:
        """Waits until the rank that is to fail in this attempt stands where it is to fail."""
        path = self.dir / f"fault_{attempt}"
        wait_until(lambda: path.exists() or self.cluster.state(self.id) in ("FAILED", "COMPLETED"), 200)
        assert path.exists(), self.log

    def attempts(self) -> list[dict[str, Any]]:
        """All of ``RUN/slices.json``."""
        return [attempt for entry in self.slices() for attempt in entry["attempts"]]

    def slices(self) -> list[dict[str, Any]]:
        return json.loads((self.run / "slices.json").read_text())["slices"]

    def steps(self) -> list[int]:
        """Of ``metrics.jsonl``."""
        return [json.loads(line)["step"] for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def first_step_after(self, moment: float) -> float:
        """Seconds from then until the ranks had taken their next step."""
        path = self.run / "metrics.jsonl"
        wait_until(lambda: path.exists() and path.stat().st_mtime > moment and path.stat().st_size > 0, 200)
        return path.stat().st_mtime - moment


def submit(
    cluster: Cluster, out: Path, num_nodes: int, *, options: tuple[str, ...] = (), faults: str = "", **overrides: Any
) -> TinyJob:
    """``overrides``: a key's ``.`` is written ``__``."""
    program = out / "venv/bin/hpc-rl"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {PYTHON} -m hpc_rl.cli "$@"\n')
    program.chmod(0o755)
    values = TINY | {"run.dir": out / "run"} | {key.replace("__", "."): value for key, value in overrides.items()}
    line = ("--ntasks-per-node=1", "--chdir", ROOT, "-o", out / "log", *options, ROOT / "slurm/ppo_70b.sh")
    env = {"VENV": str(out / "venv"), "HPC_RL_TEST_DIR": str(out), "HPC_RL_TEST_FAULTS": faults}
    words = [f"{key}={value}" for key, value in values.items()]
    return TinyJob(cluster, cluster.sbatch(f"--nodes={num_nodes}", *line, *words, **env), out)


def figures(run_dir: Path) -> list[dict[str, float]]:
    """metrics.jsonl without the clock, and without how many samples came from the journal."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    skip = ("seconds", "per_second", "reused_samples")
    return [{k: v for k, v in line.items() if not any(word in k for word in skip)} for line in lines]


def rollouts(run_dir: Path) -> dict[tuple[int, int, int], tuple[list[int], float]]:
    """(step, prompt, sample) -> (ids of the response, score). A sequence that was generated twice is an error."""
    from hpc_rl.storage.rollout_reader import read_file

    found: dict[tuple[int, int, int], tuple[list[int], float]] = {}
    for path in sorted(run_dir.glob("rollouts/step_*/rank_*.h5")):
        for record in read_file(path):
            key = (int(path.parent.name[5:]), *record.key)
            assert key not in found, f"{key} was generated twice"
            found[key] = (record.response_ids.tolist(), record.score)
    return found


def same_run(one: Path, other: Path) -> bool:
    """Bit by bit: weights, optimizers and generators of the newest checkpoints, figures of each step, every sample."""
    from hpc_rl.storage.inspect import diff_paths

    newest = [max((run / "checkpoints").glob("*_complete"), key=lambda p: int(p.name.split("_")[1])) for run in (one, other)]
    report = diff_paths(*newest)
    assert report["same"], report
    assert figures(one) == figures(other)
    assert rollouts(one) == rollouts(other)
    return True

