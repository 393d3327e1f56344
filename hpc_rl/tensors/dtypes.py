"""Names and sizes of dtypes, without torch."""

from __future__ import annotations

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


def wire_dtype(source: str, target: str) -> str:
    """What travels when a tensor of one dtype is written into one of another: the smaller, the target's in a tie."""
    return target if ITEM_BYTES[target] <= ITEM_BYTES[source] else source
