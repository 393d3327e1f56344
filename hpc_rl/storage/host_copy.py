"""Between the local tensors of a rank and the bytes of its extents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hpc_rl.storage.plan import Extent, full_name
from hpc_rl.storage.restore import Copy
from hpc_rl.storage.shards import WRITE_BYTES, Member
from hpc_rl.storage.tensor_io import itemsize
from hpc_rl.tensors.shardmap import Piece, ShardMap, crop, view


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
                assert str(tensor.dtype) == f"torch.{extent.dtype}", f"{extent.name} is {tensor.dtype}, not {extent.dtype}"
                return view(crop(piece, extent.start, extent.shape), tensor)
        raise AssertionError(f"{extent.name}: no local tensor holds {extent.start} + {extent.shape}")


def fill(buffer: Tensor, member: Member, sources: Sources, state: bytes, filled: Callable[[int], None]) -> None:
    """Copies all that a rank writes to its host buffer; ``filled(n)`` as the first n bytes of it get there.

    Copies from a GPU are queued on the current stream and announced once, when all are done.
    """
    begin_of = {region.dataset.split("/")[1]: region.offset for region in member.regions()}
    announced, on_gpu = 0, False
    for extent in member.extents:
        begin = begin_of[extent.dtype] + extent.begin * itemsize(extent.dtype)
        source = sources.view(extent)
        target = buffer[begin : begin + extent.nbytes].view(source.dtype).view(extent.shape)
        target.copy_(source, non_blocking=True)
        on_gpu = on_gpu or source.is_cuda
        if not on_gpu and begin + extent.nbytes - announced >= WRITE_BYTES:
            announced = begin + extent.nbytes
            filled(announced)
    if state:
        begin = begin_of["state"]
        buffer[begin : begin + len(state)] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    filled(buffer.numel())


def fill_local(copy: Copy, data: memoryview, dtype: str, tensors: Mapping[str, Tensor]) -> None:
    """Copies the common box out of an extent's bytes into the local tensor."""
    stored = torch.frombuffer(data, dtype=getattr(torch, dtype))
    view(copy.local, tensors[copy.local.local]).copy_(view(copy.stored, stored))
