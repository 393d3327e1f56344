"""Messages bound to memory: views of local tensors, and staging space in two buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpc_rl.reshard.messages import Copy, Cut, Message, aligned, num_elements, rounds_of
from hpc_rl.reshard.plan import Link
from hpc_rl.tensors.shardmap import Piece, view


@dataclass(slots=True)
class Slot:
    """One message at one of its ends.

    ``flat`` [n], of the dtype on the wire, is what is sent or received: the local tensor itself if the message is one
    run of it, else staging space that ``pack`` fills and ``unpack`` empties.
    """

    peer: int
    message: Message
    pieces: tuple[Piece, ...]
    views: list[Tensor]
    direct: Tensor | None
    offset: int = 0  # of its staging space in the bucket, in bytes
    flat: Tensor = field(default_factory=lambda: torch.empty(0))
    parts: list[Tensor] = field(default_factory=list)

    def bind(self, bucket: Tensor) -> None:
        """Gives the message its place in ``bucket`` (uint8)."""
        if self.direct is not None:
            self.flat = self.direct
            return
        wire = wire_of(self.message.links[0])
        self.flat = bucket[self.offset : self.offset + self.message.nbytes].view(wire)
        sizes = [p.numel for p in self.pieces]
        self.parts = [f.view(p.shape) for f, p in zip(self.flat.split(sizes), self.pieces, strict=True)]

    def pack(self) -> None:
        """Local tensors -> ``flat``."""
        if self.direct is None:
            torch._foreach_copy_(self.parts, self.views)

    def unpack(self) -> None:
        """``flat`` -> local tensors."""
        if self.direct is None:
            torch._foreach_copy_(self.views, self.parts)


@dataclass(slots=True)
class Round:
    """Messages that are in flight together."""

    sends: list[Slot]
    receives: list[Slot]
    staging_bytes: int = 0


def wire_of(link: Link) -> torch.dtype:
    """The torch dtype in which ``link`` travels."""
    dtype = getattr(torch, link.dtypes.wire)
    assert isinstance(dtype, torch.dtype)
    return dtype


def make_rounds(
    sends: Sequence[tuple[int, Sequence[Link]]],
    receives: Sequence[tuple[int, Sequence[Link]]],
    cut: Cut,
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
) -> list[Round]:
    """All messages of this rank, with views of its tensors."""
    out: list[Round] = []
    for pairs, outgoing in ((sends, True), (receives, False)):
        tensors = sources if outgoing else targets
        for peer, links in pairs:
            for number, messages in enumerate(rounds_of(links, cut)):
                while len(out) <= number:
                    out.append(Round([], []))
                slots = [_slot(peer, m, tensors, outgoing) for m in messages]
                (out[number].sends if outgoing else out[number].receives).extend(slots)
    for r in out:
        for slot in (*r.sends, *r.receives):
            if slot.direct is None:
                slot.offset = r.staging_bytes
                r.staging_bytes += aligned(slot.message.nbytes)
    return out


def bind_buckets(rounds: Sequence[Round], buckets: Sequence[Tensor]) -> None:
    """Deals the rounds' staging over two buckets, in turn."""
    for number, r in enumerate(rounds):
        for slot in (*r.sends, *r.receives):
            slot.bind(buckets[number % 2] if slot.direct is None else slot.direct)


def _slot(peer: int, message: Message, tensors: Mapping[str, Tensor], outgoing: bool) -> Slot:
    pieces = tuple(link.source if outgoing else link.target for link in message.links)
    direct = None
    first = tensors[pieces[0].local]
    if len(pieces) == 1 and pieces[0].is_contiguous and first.dtype == wire_of(message.links[0]):
        direct = first.view(-1)[pieces[0].offset : pieces[0].offset + num_elements(message)]
    return Slot(peer, message, pieces, [view(p, tensors[p.local]) for p in pieces], direct)


_LARGE_BYTES = 16 << 20  # from here on a copy of its own is faster on a GPU than a share of a multi-tensor one


class LocalCopies:
    """Copies within this rank, in as few launches as are fast."""

    def __init__(self, copies: Sequence[Copy], sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        self.nbytes = 0
        self._single: list[tuple[Tensor, Tensor]] = []
        groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for c in copies:
            source = _strided(sources[c.source], c.shape, c.source_strides, c.source_offset)
            target = _strided(targets[c.target], c.shape, c.target_strides, c.target_offset)
            nbytes = target.numel() * min(target.element_size(), source.element_size())
            self.nbytes += nbytes
            # A strided box would make torch copy a whole list one by one.
            if len(c.shape) > 1 or (nbytes >= _LARGE_BYTES and source.dtype == target.dtype):
                self._single.append((target, source))
            else:
                into, out_of = groups.setdefault((source.dtype, target.dtype), ([], []))
                into.append(target)
                out_of.append(source)
        self._groups = list(groups.values())

    def run(self) -> None:
        """Does them, in order of the current stream."""
        for target, source in self._single:
            target.copy_(source, non_blocking=True)
        for into, out_of in self._groups:
            torch._foreach_copy_(into, out_of)


def _strided(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
    assert tensor.is_contiguous(), "resharding needs contiguous tensors"
    return tensor.view(-1).as_strided(shape, strides, tensor.storage_offset() + offset)
