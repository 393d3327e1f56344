"""Only what changed moves: lossless sparse deltas of raw bits, against a snapshot or a mask of changes.

A delta of n changed elements is laid out as [values n | number of changes per block of 65,536 elements, int32 | place
within the block, n x uint16], each part starting on a multiple of 8 bytes: about 4 bytes per changed bf16 value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hpc_rl.reshard.messages import aligned
from hpc_rl.tensors.shardmap import Piece, view

DENSE = -1  # in place of a number of changes: the whole message follows
_BLOCK = 1 << 16
_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def delta_bytes(num_changes: int, numel: int, item_bytes: int) -> int:
    """Size of a delta of ``num_changes`` out of ``numel`` elements."""
    return aligned(num_changes * item_bytes) + aligned(4 * -(-numel // _BLOCK)) + aligned(2 * num_changes)


def changes(new: Tensor, old: Tensor) -> Tensor:
    """int64 [n]: places, rising, where two flat tensors of one dtype differ in their bits."""
    kind = _INTS[new.element_size()]
    if new.device.type == "cpu":  # numpy is several times as fast here
        return torch.from_numpy(np.flatnonzero(new.view(kind).numpy() != old.view(kind).numpy()))
    return (new.view(kind) != old.view(kind)).nonzero().view(-1)


def encode(values: Tensor, index: Tensor) -> tuple[int, Tensor | None]:
    """(number of changes, delta as uint8), or (DENSE, None) where a delta would not be at most half as large.

    Args:
        values: flat [n], of the dtype on the wire.
        index: int64, rising: which of them changed.
    """
    count, item = index.numel(), values.element_size()
    if count == 0:
        return 0, None
    size = delta_bytes(count, values.numel(), item)
    if 2 * size > values.numel() * item:
        return DENSE, None
    delta = torch.empty(size, dtype=torch.uint8, device=values.device)
    new, blocks, places = _parts(delta, count, values)
    torch.index_select(values.view(_INTS[item]), 0, index, out=new)
    edges = torch.arange(blocks.numel() + 1, device=values.device) << 16
    blocks.copy_(torch.searchsorted(index, edges).diff())  # bincount would make the host wait
    places.copy_((index & (_BLOCK - 1)) - (_BLOCK >> 1))
    return count, delta


def decode(delta: Tensor, count: int, into: Tensor) -> None:
    """Writes the ``count`` changes of a delta into the flat tensor ``into`` of the dtype on the wire."""
    new, blocks, places = _parts(delta, count, into)
    block_starts = torch.arange(blocks.numel(), device=into.device) << 16
    index = block_starts.repeat_interleave(blocks.to(torch.int64), output_size=count)
    index += places.to(torch.int64) + (_BLOCK >> 1)
    into.view(_INTS[into.element_size()])[index] = new


def _parts(delta: Tensor, count: int, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    item, blocks = values.element_size(), -(-values.numel() // _BLOCK)
    first = aligned(count * item)
    second = first + aligned(4 * blocks)
    return (
        delta[: count * item].view(_INTS[item]),
        delta[first : first + 4 * blocks].view(torch.int32),
        delta[second : second + 2 * count].view(torch.int16),
    )


class Snapshot:
    """What the receivers have: a copy of the source tensors as last sent, in the dtype on the wire.

    Args:
        kind: ``gpu``: beside the tensors; ``host``: in host memory, for a copy over PCIe at each comparison.
    """

    def __init__(self, kind: Literal["gpu", "host"]) -> None:
        self._kind = kind
        self._copies: dict[str, Tensor] = {}

    def take(self, sources: Mapping[str, Tensor], wires: Mapping[str, torch.dtype]) -> None:
        """Copies the source tensors named in ``wires`` (local name -> dtype on the wire)."""
        for local, wire in wires.items():
            if local not in self._copies:
                self._copies[local] = self._empty(sources[local], wire)
        if not self._copies:  # this rank sends nothing
            return
        torch._foreach_copy_(list(self._copies.values()), [sources[local] for local in self._copies], non_blocking=True)

    def flat(self, pieces: Iterable[Piece], device: torch.device) -> Tensor:
        """The snapshot's values of ``pieces``, packed one after another on ``device``."""
        parts = [view(p, self._copies[p.local]).reshape(-1) for p in pieces]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(device, non_blocking=True)

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return sum(c.numel() * c.element_size() for c in self._copies.values())

    def _empty(self, like: Tensor, wire: torch.dtype) -> Tensor:
        if self._kind == "host" and like.device.type != "cpu":
            return torch.empty(like.shape, dtype=wire, pin_memory=True)
        return torch.empty_like(like, dtype=wire, memory_format=torch.contiguous_format)


def masked(changed: Mapping[str, Tensor], pieces: Iterable[Piece]) -> Tensor | None:
    """int64, rising: places in the packed ``pieces`` that the masks of their local tensors mark.

    None if one of those has no mask, so that all of it may have changed.
    """
    parts = []
    for p in pieces:
        if p.local not in changed:
            return None
        parts.append(view(p, changed[p.local]).reshape(-1))
    mask = torch.cat(parts)
    return torch.from_numpy(np.flatnonzero(mask.numpy())) if mask.device.type == "cpu" else mask.nonzero().view(-1)
