"""Saves of two ranks inside one process, through a `Files` that dies, fails or takes notes at its n-th operation."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hpc_rl.config import CheckpointConfig
from hpc_rl.storage import manifest
from hpc_rl.storage.checkpoint import Checkpointer
from hpc_rl.storage.files import Files
from hpc_rl.storage.finish import Finish, Whole, partial_name
from hpc_rl.storage.host_copy import Sources, fill
from hpc_rl.storage.loading import layout_digest
from hpc_rl.storage.plan import holding, plan
from hpc_rl.storage.shards import Member
from hpc_rl.storage.spool import HostBuffer
from hpc_rl.storage.writer import Job, Writer
from tests.storage.layouts import Layout, component

LAYOUT = Layout(tp=2, num_layers=1)
OPERATIONS = (
    "makedirs", "open", "pwrite", "truncate", "fsync", "fsync_dir", "rename", "exchange", "unlink", "rmdir",
)  # fmt: skip


class Counting(Files):
    """Calls ``before(n, name, args)`` ahead of the n-th operation, counted from 0 over a whole save."""

    def __init__(self, before: Callable[[int, str, tuple[Any, ...]], None] = lambda n, name, args: None) -> None:
        self.count = 0
        self.before = before


def _counted(name: str) -> Callable[..., Any]:
    def call(self: Counting, *args: Any, **kwargs: Any) -> Any:
        self.before(self.count, name, args)
        self.count += 1
        return getattr(Files, name)(self, *args, **kwargs)

    return call


for _name in OPERATIONS:
    setattr(Counting, _name, _counted(_name))


def kill_at(n: int) -> Counting:
    """SIGKILL to this process ahead of operation n."""

    def before(count: int, name: str, args: tuple[Any, ...]) -> None:
        if count == n:
            os.kill(os.getpid(), signal.SIGKILL)

    return Counting(before)


def fail_at(n: int, code: int) -> Counting:
    """From operation n on, whatever needs room or I/O fails with an error code; removing still works."""

    def before(count: int, name: str, args: tuple[Any, ...]) -> None:
        if count >= n and name in ("makedirs", "open", "pwrite", "truncate", "fsync"):
            raise OSError(code, os.strerror(code))

    return Counting(before)


def save(run_dir: Path, step: int, files: Files, keep_last: int = 2, serial: int = 0) -> list[str | None]:
    """One save of both ranks, rank 1 first. Returns their errors. The state is the reference of seed ``step``."""
    root = run_dir / "checkpoints"
    states, whole = planned(step)
    errors: list[str | None] = []
    for rank in reversed(range(LAYOUT.world_size)):
        finish = Finish({"step": step}, {}, keep_last, 0, None, 0, 5.0)
        job = Job(
            serial=serial, step=step, rank=rank, partial=root / partial_name(step, f"pid{os.getpid()}", serial),
            final=root / manifest.complete_name(step), file=f"shards/rank_{rank:05d}.h5",
            members=(whole.members[rank],),
            alignment_bytes=1 << 20, direct=True, stage=None, files=files, finish=finish if rank == 0 else None,
        )  # fmt: skip
        errors.append(run_writer(job, whole, states[rank]))
    return errors


@cache
def planned(step: int) -> tuple[list[Any], Whole]:
    """State of both ranks, and the plan."""
    states = [{"actor": component(LAYOUT, rank, step)} for rank in range(LAYOUT.world_size)]
    held = [holding({name: shard_map for name, (shard_map, _) in state.items()}) for state in states]
    made = plan(held)
    members = tuple(Member(rank, extents, 3) for rank, extents in enumerate(made.ranks))
    return states, Whole(made.specs, members, tuple(layout_digest(one) for one in held))


def run_writer(job: Job, whole: Whole, state: Any) -> str | None:
    """The job in this process, its buffer filled beforehand."""
    buffer = HostBuffer()
    tensor = buffer.reserve(sum(region.nbytes for m in job.members for region in m.regions()))
    fill(tensor, job.members[0], Sources(state), b"rng", lambda nbytes: None)
    ours, theirs = socket.socketpair()
    writer = Writer(Connection(ours.detach()), buffer.fd)
    writer.whole = whole
    writer.inbox.filled[job.serial] = tensor.numel()
    error = writer.attempt(job)
    if not error:
        writer.tidy(job)
    theirs.close()
    buffer.close()
    return error


def in_child(fn: Callable[..., Any], *args: Any) -> int:
    """Exit code of ``fn(*args)`` in a forked process: 0, or -9 when it was killed."""
    process = mp.get_context("fork").Process(target=_quiet, args=(fn, args))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _quiet(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    fn(*args)
    os._exit(0)


def num_operations(fn: Callable[[Files], Any]) -> int:
    """How many operations ``fn(files)`` does when nothing fails."""
    files = Counting()
    fn(files)
    return files.count


def newest(run_dir: Path) -> int | None:
    """The step that a restart at another layout loads, verified and bitwise; None if there is none."""
    checkpointer = Checkpointer(run_dir, CheckpointConfig())
    shard_map, tensors = component(Layout(num_layers=1), 0)
    loaded = checkpointer.load_newest({"actor": (shard_map, tensors)})
    if loaded is None:
        return None
    step = int(loaded[1]["step"])
    expected = expected_tensors(step)
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors), "not bitwise what was saved"
    return step


@cache
def expected_tensors(step: int) -> dict[str, torch.Tensor]:
    """What `newest` has to load."""
    return component(Layout(num_layers=1), 0, step)[1]
