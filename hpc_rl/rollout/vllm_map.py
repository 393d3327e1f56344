"""The shard map of a live vLLM model, read from its modules by layer class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hpc_rl.errors import UserError
from hpc_rl.tensors.shardmap import Piece, ShardMap, TensorSpec

# One part of a parameter: canonical module name, first local row, rows, first global row, rows of the whole tensor.
Part = tuple[str, int, int, int, int]


def live_shard_map(model: nn.Module) -> tuple[ShardMap, dict[str, Tensor]]:
    """Canonical HF tensors held by this rank's vLLM model, and the live parameters by vLLM's names.

    Raises:
        UserError: a parameter of a layer class that is not known here.
    """
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    local: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # tied to one that has its name already
                continue
            seen.add(id(parameter))
            name = f"{path}.{leaf}" if path else leaf
            assert parameter.is_contiguous(), f"{name} must be contiguous"
            local[name] = parameter.data
            for piece, shape in _pieces(name, module, leaf, parameter, packed):
                pieces.append(piece)
                specs[piece.name] = TensorSpec(shape, str(parameter.dtype).removeprefix("torch."))
    return ShardMap(specs, tuple(pieces)), local


def _pieces(
    name: str, module: nn.Module, leaf: str, parameter: Tensor, packed: Mapping[str, list[str]]
) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Pieces of one parameter, each with the global shape of its canonical tensor."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    shape = tuple(parameter.shape)
    path = name.removesuffix(f".{leaf}")
    if leaf in ("weight", "bias"):
        if isinstance(module, VocabParallelEmbedding):
            indices = module.shard_indices
            start, stop = indices.org_vocab_start_index, indices.org_vocab_end_index
            yield from _rows(name, leaf, shape, [(path, 0, stop - start, start, module.org_vocab_size)])
            return
        if isinstance(module, ColumnParallelLinear):
            yield from _rows(name, leaf, shape, _column_parts(path, module, packed))
            return
        if isinstance(module, RowParallelLinear) and leaf == "weight":
            box = (0, module.tp_rank * shape[1])
            yield Piece(name, box, shape, name, 0, (shape[1], 1)), (shape[0], shape[1] * module.tp_size)
            return
        if isinstance(module, (RowParallelLinear, ReplicatedLinear, RMSNorm, GemmaRMSNorm, nn.LayerNorm)):
            yield Piece(name, (0,) * len(shape), shape, name, 0, _dense(shape)), shape
            return
    raise UserError(
        f"vLLM parameter {name} {list(shape)} belongs to layer class {type(module).__name__}, which has no shard map: "
        "use a Llama, Qwen2 or Qwen3 model without quantization, or teach hpc_rl/rollout/vllm_map.py that class"
    )


def _column_parts(path: str, module: Any, packed: Mapping[str, list[str]]) -> list[Part]:
    """The parts of a column-parallel parameter, fused or not, in local row order."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

    parent, _, leaf = path.rpartition(".")
    rank, tp = module.tp_rank, module.tp_size
    if isinstance(module, QKVParallelLinear):
        q_rows, kv_rows = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        v_rows = module.num_kv_heads * module.v_head_size
        kv_rank = rank // module.num_kv_head_replicas  # several ranks hold the same KV head when tp > KV heads
        total_kv = module.total_num_kv_heads
        sizes = [
            (q_rows, rank * q_rows, module.total_num_heads * module.head_size),
            (kv_rows, kv_rank * kv_rows, total_kv * module.head_size),
            (v_rows, kv_rank * v_rows, total_kv * module.v_head_size),
        ]
    elif isinstance(module, MergedColumnParallelLinear):
        sizes = [(size // tp, rank * (size // tp), size) for size in module.output_sizes]
    else:
        rows = module.output_size_per_partition
        sizes = [(rows, rank * rows, module.output_size)]
    names = packed.get(leaf, [leaf])
    if len(names) != len(sizes) and len(names) != 1:
        raise UserError(
            f"vLLM layer {path} has {len(sizes)} parts, but its model names {names} for them: "
            "this model has no shard map; use a Llama, Qwen2 or Qwen3 model"
        )
    total = sum(size[2] for size in sizes)
    parts: list[Part] = []
    offset = base = 0
    for index, (rows, start, global_rows) in enumerate(sizes):
        if len(names) == len(sizes):
            parts.append((f"{parent}.{names[index]}" if parent else names[index], offset, rows, start, global_rows))
        else:  # fused in the HF checkpoint too
            parts.append((f"{parent}.{names[0]}" if parent else names[0], offset, rows, base + start, total))
        offset += rows
        base += global_rows
    return parts


def _rows(name: str, leaf: str, shape: tuple[int, ...], parts: list[Part]) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Row ranges of a parameter of ``shape`` as pieces; a part without rows on this rank keeps its spec out."""
    rest = shape[1:]
    strides = _dense(shape)
    for module_name, offset, rows, start, global_rows in parts:
        if rows:
            box = (start, *(0,) * len(rest))
            piece = Piece(f"{module_name}.{leaf}", box, (rows, *rest), name, offset * strides[0], strides)
            yield piece, (global_rows, *rest)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def uncovered(shard_map: ShardMap, local: Mapping[str, Tensor]) -> dict[str, list[tuple[int, int]]]:
    """Flat ranges of local tensors that no piece covers (vocabulary padding), so that coverage can be proven.

    Returns:
        local name -> [(begin, end), ...] in elements; tensors without such ranges are left out.
    """
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in local}
    for piece in shard_map.pieces:
        assert piece.strides == _dense(piece.shape) or piece.numel == 0, f"{piece.name} is not dense in {piece.local}"
        ranges[piece.local].append((piece.offset, piece.offset + piece.numel))
    gaps: dict[str, list[tuple[int, int]]] = {}
    for name, covered in ranges.items():
        position = 0
        for begin, end in sorted(covered) + [(local[name].numel(), local[name].numel())]:
            assert begin >= position, f"elements {begin} to {position} of {name} are covered twice"
            if begin > position:
                gaps.setdefault(name, []).append((position, begin))
            position = end
    return gaps


@torch.no_grad()
def zero_uncovered(shard_map: ShardMap, local: Mapping[str, Tensor]) -> None:
    """Sets all elements that no piece covers to 0; nothing else ever writes them."""
    for name, gaps in uncovered(shard_map, local).items():
        for begin, end in gaps:
            local[name].view(-1)[begin:end].zero_()
