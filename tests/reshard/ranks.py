"""Real gloo ranks, forked: each runs a function and hands back its result or its error."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(num_ranks: int, folder: Path, function: Callable[..., Any], *args: Any, deadline_s: float = 120) -> list:
    """``function(rank, *args)`` on every rank. Returns each one's result, its exception, or None if it was killed."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(queue, r, num_ranks, folder, function, args)) for r in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    results: list[Any] = [None] * num_ranks
    end = time.monotonic() + deadline_s
    while any(rank.is_alive() for rank in ranks) or not queue.empty():
        while not queue.empty():
            number, value = queue.get()
            results[number] = value
        if time.monotonic() > end:
            for rank in ranks:
                rank.kill()
            raise TimeoutError(f"ranks still ran after {deadline_s} s: {results}")
        time.sleep(0.01)
    return results


def _rank(queue: Any, rank: int, num_ranks: int, folder: Path, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    try:
        value = function(rank, *args)
        dist.barrier()
    except Exception as error:
        value = error if not isinstance(error, AssertionError) else AssertionError(traceback.format_exc())
    queue.put((rank, value))
    os._exit(0)  # a group with a dead rank cannot be taken down in order
