"""From the shared host buffer to a shard file: blocks of it, digested on the way, several writes at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_128

from hpc_rl.storage.files import new_buffer
from hpc_rl.storage.tensor_io import itemsize

if TYPE_CHECKING:
    from hpc_rl.storage.shards import Member

WRITE_BYTES, NUM_IN_FLIGHT = 8 << 20, 6  # size of a write, and writes at a time


@cache
def spare_blocks() -> SimpleQueue[memoryview]:
    """This process's blocks for writes, in huge pages: shared memory seldom is.

    A disk takes a block of scattered 4 KiB pages as many small requests, up to a quarter slower.
    """
    blocks: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(NUM_IN_FLIGHT + 1):  # one is being filled
        blocks.put(new_buffer(WRITE_BYTES))
    return blocks


def write_data(
    write: Callable[[memoryview, int], None], member: Member, offsets: dict[str, int], buffer: memoryview,
    wait_filled: Callable[[int], None],
) -> list[bytes]:  # fmt: skip
    """Writes all regions, a block at a time by way of a spare one. Returns the digests of their extents.

    One thread copies a block and digests it while it is in the processor's cache; the others only wait for the disk.
    """
    blocks, digests = spare_blocks(), ExtentDigests(member)
    writes: deque[Future[None]] = deque()

    def send(block: memoryview, nbytes: int, offset: int) -> None:
        try:
            write(block[:nbytes], offset)
        finally:
            blocks.put(block)

    with ThreadPoolExecutor(NUM_IN_FLIGHT) as pool:
        for region in member.regions():
            for low in range(0, region.nbytes, WRITE_BYTES):
                begin, nbytes = region.offset + low, min(WRITE_BYTES, region.nbytes - low)
                wait_filled(begin + nbytes)
                block = blocks.get()
                np.copyto(np.frombuffer(block, np.uint8, nbytes), np.frombuffer(buffer, np.uint8, nbytes, begin))
                writes.append(pool.submit(send, block, nbytes, offsets[region.dataset] + low))
                digests.update(begin, block[:nbytes])
                while writes and writes[0].done():
                    writes.popleft().result()
        for pending_write in writes:
            pending_write.result()
    return digests.done


class ExtentDigests:
    """Digests of a rank's extents, from the bytes of its regions in order."""

    def __init__(self, member: Member) -> None:
        begin_of = {region.dataset.split("/")[1]: region.offset for region in member.regions()}
        begins = [
            begin_of[member.dataset(extent)] + extent.begin * itemsize(extent.dtype) for extent in member.all_extents()
        ]
        self._ends = deque(
            zip(begins, (b + e.nbytes for b, e in zip(begins, member.all_extents(), strict=True)), strict=True)
        )
        self._hash = xxh3_128()
        self.done: list[bytes] = []

    def update(self, begin: int, data: memoryview) -> None:
        """Takes the bytes [begin, begin + len(data)) of the regions; those between extents count for none."""
        end = begin + data.nbytes
        while self._ends:
            first, last = self._ends[0]
            if first < end:
                self._hash.update(data[max(first, begin) - begin : min(last, end) - begin])
            if last > end:
                return
            self._ends.popleft()
            self.done.append(self._hash.digest())
            self._hash.reset()
