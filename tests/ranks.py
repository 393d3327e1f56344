"""Runs a function on N real ranks (forked processes with gloo), so that a world of 8 starts in milliseconds.

The heavy imports happen once, in the parent; each child sets RANK, WORLD_SIZE, MASTER_* as a launcher would.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing as mp
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from threading import Lock
from typing import Any


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; the message holds its traceback."""


_ports = itertools.count(int.from_bytes(os.urandom(4), "big"))  # next() is atomic: threads start ranks side by side


_forking = Lock()  # a child forked by another thread would keep the socket that tries a port, and the ends of pipes


def free_port() -> int:
    """A port that no other call here gets and nothing takes by chance: 9000 to 14999.

    That is below the ephemeral ones (each outgoing connection takes one of those) and below those of Slurm's jobs.
    """
    for number in itertools.islice(_ports, 6000):
        port = 9000 + number % 6000
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("", port))
            return port
    raise AssertionError("no free port from 9000 to 14999")


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """``fn(*args)`` on every rank; results in rank order. The first failure ends all ranks and is raised."""
    context = mp.get_context("fork")
    pipes, processes = [], []
    with _forking:
        port = free_port()
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(there, rank, world_size, port, fn, args), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
    try:
        return _collect(pipes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting.values())} did not end in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                error, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if error is not None:
                raise RankFailed(f"rank {rank}:\n{error}")
    return results


def _child(pipe: Connection, rank: int, world_size: int, port: int, fn: Callable[..., Any], args: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        import torch

        torch.set_num_threads(1)
        # By value: torch's own pickling would hand over file descriptors of a process that is about to end.
        pipe.send_bytes(pickle.dumps((None, fn(*args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
    finally:
        os._exit(0)  # no destructors of forked libraries
