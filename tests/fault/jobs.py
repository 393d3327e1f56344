"""Small jobs for forked ranks that hang in one way or another, under a real watchdog."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
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


def waits_in_the_kernel(run_dir: Path, holds_lock: bool) -> None:
    join(run_dir, 0)
    library = (ctypes.PyDLL if holds_lock else ctypes.CDLL)(str(run_dir / "wait.so"))
    with phase("save", 4):
        library.wait_in_kernel()


def killed_as_a_phase_begins(run_dir: Path) -> None:
    join(run_dir, 0)
    with phase("scoring", 12), phase("critic"):
        os.kill(os.getpid(), signal.SIGKILL)


def seconds_per_phase(run_dir: Path) -> tuple[float, float]:
    """With a watchdog that notes it, and without."""
    watchdog = join(run_dir, 0)
    noted = _seconds_per_phase()
    watchdog.stop()
    return noted, _seconds_per_phase()


def _seconds_per_phase() -> float:
    """Of this thread's own time: the machine may be busy."""
    begin = time.thread_time()
    for step in range(1000):
        with phase("reward", step):
            pass
    return (time.thread_time() - begin) / 1000


def suspended_with_its_witness(run_dir: Path) -> str:
    """Both are stopped for much longer than the limit; another process wakes them."""
    watchdog = join(run_dir, 0)
    assert watchdog._witness is not None and watchdog._witness._process is not None
    witness = watchdog._witness._process.pid
    wake = f"sleep 12; kill -CONT {os.getpid()} {witness}"
    subprocess.Popen(["sh", "-c", wake])
    os.kill(witness, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(LIMIT_S / 2)
    beat()
    watchdog.stop()
    return "went on"
