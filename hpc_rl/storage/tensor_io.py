"""How a canonical dtype lies in HDF5 and in numpy. No torch in here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from h5py import h5t

# canonical dtype -> numpy dtype of the same bits
BITS = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2",
    "float8_e4m3fn": "|u1", "float8_e5m2": "|u1",
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "|i1", "uint8": "|u1", "bool": "|u1",
}  # fmt: skip


def bits(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that holds the bits of canonical ``dtype``."""
    assert dtype in BITS, f"dtype {dtype} cannot be stored: know {', '.join(BITS)}"
    return np.dtype(BITS[dtype])


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return bits(dtype).itemsize


def h5_type(dtype: str) -> Any:
    """The HDF5 type (low level) of canonical ``dtype``; any reader sees bfloat16 as numbers."""
    if dtype != "bfloat16":
        return h5t.py_create(bits(dtype))
    kind = h5t.IEEE_F16LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)  # sign at bit 15, 8 bits of exponent from bit 7, 7 bits of mantissa
    kind.set_ebias(127)
    return kind


def values(raw: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The numbers behind the bits: bfloat16 becomes float32 (exactly), bool becomes bool."""
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.bool_) if dtype == "bool" else raw


def digest(data: Any) -> bytes:
    """xxh3-128 of a buffer, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def pack(state: Mapping[str, bytes | np.ndarray[Any, Any]]) -> bytes:
    """A rank's own values as bytes: a line of JSON (name -> [dtype or null, shape, bytes]), then their data."""
    header: dict[str, list[Any]] = {}
    parts: list[bytes] = []
    for name, value in state.items():
        if isinstance(value, bytes):
            parts.append(value)
            header[name] = [None, [], len(value)]
        else:
            parts.append(value.tobytes())
            header[name] = [value.dtype.str, list(value.shape), value.nbytes]
    return json.dumps(header).encode() + b"\n" + b"".join(parts) if state else b""


def unpack(data: bytes) -> dict[str, bytes | np.ndarray[Any, Any]]:
    """The values behind `pack`."""
    header, _, rest = data.partition(b"\n")
    out: dict[str, bytes | np.ndarray[Any, Any]] = {}
    begin = 0
    for name, (dtype, shape, nbytes) in json.loads(header).items() if data else ():
        part = rest[begin : begin + nbytes]
        out[name] = part if dtype is None else np.frombuffer(part, dtype=dtype).reshape(shape).copy()
        begin += nbytes
    return out
