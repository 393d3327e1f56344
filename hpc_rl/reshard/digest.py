"""Digests of boxes, equal exactly when (all but surely) the bits are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_CHUNK_WORDS = 1 << 18
_LOW_32 = 0xFFFFFFFF


def digests(views: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    """One digest for each view, of its values as ``wire`` in the box's row-major order: int64 [len(views)], on the CPU.

    digest = sum over 8-byte words of (w xor w >> 32) * k(position) mod 2^64, with odd k: a change of one word always
    shows, since both steps are one to one; any other change is missed with a chance of about 2^-60.
    """
    if not views:
        return torch.zeros(0, dtype=torch.int64)
    return torch.stack([_digest(v.to(wire).contiguous()) for v in views]).cpu()


def differing(pairs: Sequence[tuple[Tensor, Tensor, torch.dtype]]) -> list[int]:
    """Numbers of the pairs of views that do not hold the same bits once both are of the given dtype."""
    flags = [(a.to(t).view(_INTS[t.itemsize]) != b.to(t).view(_INTS[t.itemsize])).any() for a, b, t in pairs]
    return torch.stack(flags).nonzero().view(-1).tolist() if flags else []


_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digest(value: Tensor) -> Tensor:
    raw = value.view(-1).view(torch.uint8)
    tail = raw.numel() % 8
    words = _aligned_words(raw[: raw.numel() - tail])
    if tail:
        last = raw.new_zeros(8)
        last[:tail] = raw[raw.numel() - tail :]
        words = torch.cat([words, last.view(torch.int64)])
    keys = _keys(value.device)
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for number, chunk in enumerate(words.split(_CHUNK_WORDS)):
        mixed = chunk ^ ((chunk >> 32) & _LOW_32)
        total += (mixed * keys[: chunk.numel()]).sum() * (2 * number + 1)
    return total


def _aligned_words(raw: Tensor) -> Tensor:
    if raw.storage_offset() % 8:
        raw = raw.clone()
    return raw.view(torch.int64)


@lru_cache(maxsize=4)
def _keys(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0x5EED)
    keys = torch.randint(-(1 << 62), 1 << 62, (_CHUNK_WORDS,), generator=generator, dtype=torch.int64)
    return (keys * 2 + 1).to(device)
