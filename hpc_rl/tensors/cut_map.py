"""Shard maps of engines that hold canonical tensors as they are: whole on every rank, or cut by rows over all ranks."""

from __future__ import annotations

from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.shardmap import ShardMap, TensorSpec, row_piece, whole_piece


def whole_shard_map(spec: ModelSpec, dtype: str = "bfloat16") -> ShardMap:
    """Every tensor whole, in a local tensor of its name (DeepSpeed ZeRO-1 and ZeRO-2)."""
    specs = {name: TensorSpec(shape, dtype) for name, shape in spec.tensors().items()}
    return ShardMap(specs, tuple(whole_piece(name, s.shape, name) for name, s in specs.items()))


def row_shard_map(spec: ModelSpec, rank: int, world_size: int, dtype: str = "bfloat16") -> ShardMap:
    """Rank r holds rows [r c, (r + 1) c) of each tensor, c = ceil(rows / ranks), as torch.chunk cuts (FSDP2)."""
    specs = {name: TensorSpec(shape, dtype) for name, shape in spec.tensors().items()}
    pieces = []
    for name, s in specs.items():
        low, high = rows_of(s.shape[0], rank, world_size)
        if low < high:
            pieces.append(row_piece(name, s.shape, low, high, name))
    return ShardMap(specs, tuple(pieces))


def rows_of(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """[low, high): empty on the last ranks where there are too few rows."""
    each = -(-rows // world_size)
    return min(rows, each * rank), min(rows, each * (rank + 1))
