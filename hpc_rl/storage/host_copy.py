"""Between the local tensors of a rank and the bytes of its extents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from hpc_rl.storage.blocks import WRITE_BYTES
from hpc_rl.storage.plan import Extent, full_name
from hpc_rl.storage.restore import Copy
from hpc_rl.storage.shards import Member
from hpc_rl.storage.tensor_io import itemsize
from hpc_rl.tensors.shardmap import Piece, ShardMap, crop, view

COPY_THREADS = 2  # one rarely fills the memory bandwidth; more would take cores from other ranks of the node


class Sources:
    """Finds the local tensor behind a box of a canonical tensor."""

    def __init__(self, components: Mapping[str, tuple[ShardMap, Mapping[str, Tensor]]]) -> None:
        self.pieces: dict[str, list[tuple[Piece, Tensor]]] = defaultdict(list)
        for component, (shard_map, tensors) in components.items():
            for piece in shard_map.pieces:
                self.pieces[full_name(component, piece.name)].append((piece, tensors[piece.local]))

    def view(self, extent: Extent) -> Tensor:
        """The elements of ``extent``, strided, in the local tensor that holds them."""
        for piece, tensor in self.pieces[extent.name]:
            inside = all(
                p <= s and s + m <= p + n
                for p, n, s, m in zip(piece.start, piece.shape, extent.start, extent.shape, strict=True)
            )
            if inside:
                dtype = str(tensor.dtype).removeprefix("torch.")
                assert dtype == extent.dtype, f"{extent.name} is {dtype}, not {extent.dtype}"
                return view(crop(piece, extent.start, extent.shape), tensor)
        raise AssertionError(f"{extent.name}: no local tensor holds {extent.start} + {extent.shape}")


def fill(
    buffer: Tensor, member: Member, sources: Sources, state: bytes, filled: Callable[[int], None],
    ready: torch.cuda.Event | None = None, num_threads: int = COPY_THREADS,
) -> None:  # fmt: skip
    """Copies all that a rank writes to its host buffer; ``filled(n)`` as the first n bytes of it get there.

    Host copies run in threads. Copies from a GPU start after ``ready`` and are announced once, when all are done.
    """
    try:
        copy_all(buffer, member, sources, state, filled, ready, num_threads)
    except BaseException:
        filled(-1)  # the writer gives this save up
        raise


def copy_all(
    buffer: Tensor, member: Member, sources: Sources, state: bytes, filled: Callable[[int], None],
    ready: torch.cuda.Event | None, num_threads: int,
) -> None:  # fmt: skip
    """See `fill`."""
    begin_of = {region.dataset.split("/")[1]: region.offset for region in member.regions()}
    for region in member.regions():  # what an earlier save left in the padding is no part of this file's digest
        used = sum(e.nbytes for e in member.all_extents() if member.dataset(e) == region.dataset.split("/")[1])
        buffer[region.offset + used : region.offset + region.nbytes].zero_()
    if state:
        begin = begin_of["state"]
        buffer[begin : begin + len(state)] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    pairs = []
    for extent in member.extents:
        begin = begin_of[extent.dtype] + extent.begin * itemsize(extent.dtype)
        source = sources.view(extent)
        pairs.append((buffer[begin : begin + extent.nbytes].view(source.dtype).view(extent.shape), source))
    device = next((source.device for _, source in pairs if source.is_cuda), None)
    if device is not None:
        copy_from_gpu(pairs, device, ready)
    else:
        base = buffer.data_ptr()
        copy_in_order(pairs, lambda target: filled(target.data_ptr() + target.nbytes - base), num_threads)
    filled(buffer.numel())


def copy_from_gpu(pairs: list[tuple[Tensor, Tensor]], device: torch.device, ready: torch.cuda.Event | None) -> None:
    """Copies on a stream of its own, after ``ready``; returns when all is in host memory."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        if ready is not None:
            stream.wait_event(ready)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        stream.synchronize()


def copy_in_order(pairs: list[tuple[Tensor, Tensor]], done: Callable[[Tensor], None], num_threads: int) -> None:
    """Copies in threads (without the interpreter lock); ``done(target)`` about every 8 MiB: all up to it is there."""
    groups: list[list[tuple[Tensor, Tensor]]] = [[]]
    for pair in pairs:
        if sum(target.nbytes for target, _ in groups[-1]) >= WRITE_BYTES:
            groups.append([])
        groups[-1].append(pair)

    def copy(group: list[tuple[Tensor, Tensor]]) -> None:
        for target, source in group:
            target.copy_(source)

    with ThreadPoolExecutor(num_threads) as pool:
        for group, _ in zip(groups, pool.map(copy, groups), strict=True):
            if group:
                done(group[-1][0])


def fill_local(copy: Copy, data: memoryview, dtype: str, tensors: Mapping[str, Tensor]) -> None:
    """Copies the common box out of an extent's bytes into the local tensor."""
    stored = torch.frombuffer(data, dtype=getattr(torch, dtype))
    view(copy.local, tensors[copy.local.local]).copy_(view(copy.stored, stored))
