"""An HDF5 file as it is now, in memory, whoever still writes it or was killed while writing.

h5py's SWMR mode reads such a file too, but retries for minutes on a checksum that does not match, so that a damaged
file looks like a hang. A copy with the writer's mark cleared (as `h5clear -s` does it) is read at once or refused.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_FLAGS, _STORED_END, _CHECKSUM = 11, 28, 44  # offsets in a superblock of version 2 or 3 with 8-byte addresses
_MASK = 0xFFFFFFFF


def snapshot(path: str | Path) -> io.BytesIO:
    """The file's bytes, ready for ``h5py.File(..., "r")``. Raises OSError where it cannot be read."""
    data = bytearray(Path(path).read_bytes())
    if data[:8] == _SIGNATURE and len(data) >= 48 and data[8] in (2, 3):
        intact = lookup3(bytes(data[:_CHECKSUM])) == struct.unpack_from("<I", data, _CHECKSUM)[0]
        if intact:  # else it stays as it is, to be refused
            (stored_end,) = struct.unpack_from("<Q", data, _STORED_END)
            data.extend(bytes(max(0, min(stored_end - len(data), 1 << 30))))  # room that is allocated, not written yet
            struct.pack_into("<Q", data, _STORED_END, len(data))  # a writer in SWMR mode tells it late
            data[_FLAGS] = 0
            struct.pack_into("<I", data, _CHECKSUM, lookup3(bytes(data[:_CHECKSUM])))
    return io.BytesIO(data)


def lookup3(data: bytes) -> int:
    """Jenkins' lookup3 hash with initial value 0, HDF5's metadata checksum.

    Source: Bob Jenkins, lookup3.c (2006), hashlittle; HDF5 file format specification, appendix.
    """
    a = b = c = (0xDEADBEEF + len(data)) & _MASK
    position = 0
    while len(data) - position > 12:
        x, y, z = struct.unpack_from("<III", data, position)
        a, b, c = _mix((a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK)
        position += 12
    if position == len(data):
        return c
    x, y, z = struct.unpack("<III", data[position:].ljust(12, b"\0"))
    return _final((a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK)


def _rotate(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    for bits in (4, 6, 8, 16, 19, 4):
        a = ((a - c) & _MASK) ^ _rotate(c, bits)
        c = (c + b) & _MASK
        a, b, c = b, c, a
    return a, b, c


def _final(a: int, b: int, c: int) -> int:
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotate(b, bits)) & _MASK
        a, b, c = b, c, a
    return b
