"""Cutting what a pair of ranks exchanges into messages and rounds: pure, and the same at both ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpc_rl.errors import UserError
from hpc_rl.reshard.plan import Link
from hpc_rl.tensors.dtypes import ITEM_BYTES
from hpc_rl.tensors.shardmap import Piece, crop

MIN_SHARE_BYTES = 1 << 10


class Cut(NamedTuple):
    """How a pair's boxes become messages; the same on all ranks.

    ``share``: bytes of staging that a pair may use in a round. ``message``: bytes of the largest message. ``alone``: a
    box of at least so many bytes is a message of its own, which needs no staging where it is one run.
    """

    share: int
    message: int
    alone: int


def cut_for(device: str, delta: bool, share: int) -> Cut:
    """The cut that suits a device: copying is what costs on a CPU, the number of operations on a GPU."""
    if delta:  # searching a round takes up to four times its bytes: masks, positions as int64, values
        share = max(MIN_SHARE_BYTES, share // 4 // 8 * 8)
    if device != "cpu":
        return Cut(share, share, 1 << 62)
    # A delta is one decision, dense, sparse or skipped, for each message, and its work fits the caches better in parts.
    return Cut(share, min(share, 16 << 20), 1 << 62) if delta else Cut(share, share, 256 << 10)


class Message(NamedTuple):
    """Boxes of one dtype that travel together, packed in this order."""

    links: tuple[Link, ...]
    nbytes: int


def share_bytes(bucket_bytes: int, max_peers: int) -> int:
    """The part of a bucket that one pair of ranks may use in a round, in bytes.

    Raises:
        UserError: if the bucket is too small for so many partners.
    """
    share = bucket_bytes // max(1, max_peers) // 8 * 8
    if share < MIN_SHARE_BYTES:
        raise UserError(
            f"reshard.bucket_bytes = {bucket_bytes} is too small for {max_peers} partners of a rank: "
            f"set it to {MIN_SHARE_BYTES * max_peers} or more"
        )
    return share


def rounds_of(links: Sequence[Link], cut: Cut) -> list[list[Message]]:
    """The messages of one pair, round by round, each round of at most ``cut.share`` bytes of staging."""
    rounds: list[list[Message]] = [[]]
    used = 0
    for message in _messages(links, cut):
        size = aligned(message.nbytes)
        if used + size > cut.share and rounds[-1]:
            rounds.append([])
            used = 0
        rounds[-1].append(message)
        used += size
    return rounds if rounds[-1] else []


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of 8."""
    return -(-nbytes // 8) * 8


def _messages(links: Sequence[Link], cut: Cut) -> list[Message]:
    out: list[Message] = []
    run: list[Link] = []
    size = 0

    def close() -> None:
        nonlocal run, size
        if run:
            out.append(Message(tuple(run), size))
        run, size = [], 0

    for link in sorted(links, key=lambda x: x.dtypes):  # stable; a message has one dtype on the wire
        for part in split(link, cut.message):
            if part.nbytes >= cut.alone:
                out.append(Message((part,), part.nbytes))
                continue
            if run and (run[-1].dtypes != part.dtypes or size + part.nbytes > cut.message):
                close()
            run.append(part)
            size += part.nbytes
    close()
    return out


def split(link: Link, max_bytes: int) -> list[Link]:
    """``link`` in parts of at most ``max_bytes``, cut along its first dims."""
    if link.nbytes <= max_bytes:
        return [link]
    shape, start = link.source.shape, link.source.start
    dim = next(d for d, n in enumerate(shape) if n > 1)
    row_bytes = link.nbytes // shape[dim]
    rows = max(1, max_bytes // row_bytes)
    out: list[Link] = []
    for low in range(0, shape[dim], rows):
        part_start = (*start[:dim], start[dim] + low, *start[dim + 1 :])
        part_shape = (*shape[:dim], min(rows, shape[dim] - low), *shape[dim + 1 :])
        cut = Link(crop(link.source, part_start, part_shape), crop(link.target, part_start, part_shape), link.dtypes)
        out += split(cut, max_bytes)
    return out


class Copy(NamedTuple):
    """A strided copy within one rank: offsets, shape and strides in elements."""

    source: str
    target: str
    source_offset: int
    target_offset: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]


def local_copies(links: Sequence[Link]) -> list[Copy]:
    """The fewest copies that do ``links``: boxes that are runs on both sides and follow each other there become one."""
    runs: list[tuple[str, str, int, int, int]] = []
    out: list[Copy] = []
    for link in links:
        source, target = link.source, link.target
        if source.is_contiguous and target.is_contiguous:
            runs.append((source.local, target.local, source.offset, target.offset, source.numel))
        else:
            out.append(_strided(source, target))
    merged: list[list] = []
    for run in sorted(runs):
        last = merged[-1] if merged else None
        if last and last[:2] == list(run[:2]) and last[2] + last[4] == run[2] and last[3] + last[4] == run[3]:
            last[4] += run[4]
        else:
            merged.append(list(run))
    return [Copy(a, b, i, j, (n,), (1,), (1,)) for a, b, i, j, n in merged] + out


def _strided(source: Piece, target: Piece) -> Copy:
    return Copy(source.local, target.local, source.offset, target.offset, source.shape, source.strides, target.strides)


def total_bytes(messages: Sequence[Message]) -> int:
    """Bytes of staging that ``messages`` need side by side."""
    return sum(aligned(m.nbytes) for m in messages)


def num_elements(message: Message) -> int:
    """Elements in a message."""
    return message.nbytes // ITEM_BYTES[message.links[0].dtypes.wire]
