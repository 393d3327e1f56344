"""slurm/ppo_70b.sh, not a line of it changed, with a tiny model given on the line of sbatch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch.cluster import PYTHON, ROOT, Cluster, wait_until

DOCUMENTED = ("model.path=configs/quickstart/model", "steps=2")  # after `sbatch --nodes=2 slurm/ppo_70b.sh`


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
    """The line of README.md and of the script's head; the run directory and the environment by the script's variables.

    Args:
        options: of sbatch, beside --nodes and the place of the log.
        faults: see faulty.py, whose reward is then taken.
        overrides: after those of the line; a key's ``.`` is written ``__``.
    """
    program = out / "venv/bin/hpc-rl"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {PYTHON} -m hpc_rl.cli "$@"\n')
    program.chmod(0o755)
    env = {"VENV": str(out / "venv"), "RUN": str(out / "run")}
    if faults:
        env |= {"HPC_RL_TEST_DIR": str(out), "HPC_RL_TEST_FAULTS": faults}
        overrides = {"reward.function": "tests.slurm.faulty:score", **overrides}
    words = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    line = (f"--nodes={num_nodes}", "-o", out / "log", *options, "slurm/ppo_70b.sh", *DOCUMENTED, *words)
    return TinyJob(cluster, cluster.sbatch(*line, cwd=ROOT, **env), out)


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

