"""Small jobs for forked ranks that hang in one way or another, under a real watchdog."""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hpc_rl.fault.phase import beat, phase
from hpc_rl.fault.watchdog import Watchdog

LIMIT_S = 1.6


def join(run_dir: Path, rank: int) -> Watchdog:
    dist.init_process_group("gloo")
    watchdog = Watchdog(run_dir, dist.get_rank(), f"node{dist.get_rank()}", lambda name: LIMIT_S, announce=False)
    watchdog.start()
    return watchdog


def one_rank_stays_away(run_dir: Path, culprit: int) -> None:
    """All but one stand in a collective; that one moved last, so its time is over after theirs would be."""
    join(run_dir, culprit)
    with phase("actor", 5):
        if dist.get_rank() == culprit:
            time.sleep(0.4)
            beat()
            with phase("reward"):
                time.sleep(600)
        everyone_adds()


def everyone_adds() -> None:
    dist.all_reduce(torch.ones(1))


def slow_but_alive(run_dir: Path) -> list[str]:
    """Much longer than the limit, with signs of progress; then what is left on disk."""
    watchdog = join(run_dir, 0)
    with phase("generation", 1):
        for _ in range(8):
            time.sleep(LIMIT_S / 4)
            beat()
    everyone_adds()
    watchdog.stop()
    dist.barrier()
    return [path.name for path in run_dir.rglob("*")]


def never_lets_go_of_the_lock(run_dir: Path) -> None:
    join(run_dir, 0)
    with phase("reward", 2):
        time.sleep(0.5)
        re.match(r"(a+)+$", "a" * 60 + "b")
