"""The reward of the tests' runs, whose import makes a rank fail where the test wants it.

HPC_RL_TEST_FAULTS="ATTEMPT:PHASE:STEP:RANK:HOW ..." in the environment of sbatch; ATTEMPT may be "all".
PHASE: generation (a reward is asked for), actor (its second mini-batch), save (the shard is being written).
HOW: wait (touches fault_ATTEMPT in HPC_RL_TEST_DIR and waits for what the test does to the node, or for go_on_ATTEMPT),
stop (SIGSTOP, all of the process), kill (SIGKILL), raise, memory (a rank that may have little memory asks for much).
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_rl.reward.functions import exact_match, requires

_scored: list[int] = []
_generating: set[tuple[str, int]] = set()  # (phase, step) in which this rank is


@requires("answer")
def score(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """1 for the right sum. A rank that is to fail has a few samples scored before."""
    _scored.append(1)
    for phase, step in _generating if len(_scored) > 2 else ():
        fail_if_asked(phase, step)
    return exact_match(prompt, response, fields)


def fail_if_asked(phase: str, step: int) -> None:
    attempt, rank = os.environ["HPC_RL_ATTEMPT"], os.environ["SLURM_PROCID"]
    for fault in os.environ["HPC_RL_TEST_FAULTS"].split():
        which, *where, how = fault.split(":")
        if which in (attempt, "all") and where == [phase, str(step), rank]:
            fail(how, attempt)


def fail(how: str, attempt: str) -> None:
    if how == "raise":
        raise RuntimeError("boom")
    if how == "memory":
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, before[1]))
        try:
            bytearray(1 << 34)
        finally:  # the samples that are still being generated are to end as usual
            resource.setrlimit(resource.RLIMIT_AS, before)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    directory = Path(os.environ["HPC_RL_TEST_DIR"])
    (directory / f"fault_{attempt}").touch()
    while not (directory / f"go_on_{attempt}").exists():
        time.sleep(0.05)


def install() -> None:
    """Looks in at the phases of a step, without changing what they do."""
    from hpc_rl.train import RLTrainer

    rollout, update, save = RLTrainer._rollout, RLTrainer._update, RLTrainer._save

    def watched_rollout(self: RLTrainer, step: int) -> Any:
        _generating.add(("generation", step))
        try:
            return rollout(self, step)
        finally:
            _generating.clear()

    def watched_update(self: RLTrainer, step: int, *args: Any) -> Any:
        work, seen = self.job.actor.train_batch, []

        def train_batch(*args: Any) -> Any:
            seen.append(1)
            if len(seen) == 2:
                fail_if_asked("actor", step)
            return work(*args)

        self.job.actor.train_batch = train_batch  # type: ignore[method-assign]
        try:
            return update(self, step, *args)
        finally:
            del self.job.actor.train_batch

    def watched_save(self: RLTrainer, step: int, *args: Any) -> Any:
        asked = f":save:{step}:{os.environ['SLURM_PROCID']}:" in os.environ["HPC_RL_TEST_FAULTS"]
        if asked and os.environ["HPC_RL_ATTEMPT"] in os.environ["HPC_RL_TEST_FAULTS"]:
            stop_writer()
        save(self, step, *args)
        fail_if_asked("save", step)

    for name, function in (("_rollout", watched_rollout), ("_update", watched_update), ("_save", watched_save)):
        setattr(RLTrainer, name, function)


def stop_writer() -> None:
    """This rank's shard stays unwritten: the save is in flight for as long as the test wants."""
    children = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "storage.writer"], capture_output=True, text=True)
    for pid in children.stdout.split():
        os.kill(int(pid), signal.SIGSTOP)


if "HPC_RL_TEST_FAULTS" in os.environ and "HPC_RL_START" in os.environ:
    install()
