"""The few collectives of the loop, over the whole world; each does the plain local thing in a job of one."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def merge(local: Tensor) -> Tensor:
    """The sum over all ranks, in place: each element is set on one rank and zero elsewhere, so the sum is exact.

    Args: local [...] on this rank's device. Returns the same tensor, now equal on every rank.
    """
    if world_size() > 1:
        dist.all_reduce(local)
    return local


def gather_objects(value: T) -> list[T]:
    """Every rank's small picklable ``value``, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    out: list[Any] = [None] * world_size()
    dist.all_gather_object(out, value)
    return out


def agree(error: BaseException | None) -> None:
    """All ranks go on, or all raise: the error of the lowest rank that has one, named with its rank.

    Call it where one rank may fail while the others wait in a collective.
    """
    errors = gather_objects(None if error is None else (type(error).__name__, str(error)))
    if error is not None:
        raise error
    for r, e in enumerate(errors):
        if e is not None:
            from hpc_rl.errors import RunError

            raise RunError(f"rank {r} failed: {e[0]}: {e[1]}")


def barrier() -> None:
    if world_size() > 1:
        merge(torch.zeros(1))
