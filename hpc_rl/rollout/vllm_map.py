"""The shard map of a live vLLM model, read from its modules by layer class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpc_rl.errors import UserError
from hpc_rl.tensors.shardmap import Piece, ShardMap, TensorSpec, column_piece, row_piece, whole_piece

Shape = tuple[int, ...]
Placed = list[tuple[Piece, Shape]]  # pieces, each with the global shape of its canonical tensor


def live_shard_map(model: nn.Module) -> tuple[ShardMap, dict[str, Tensor]]:
    """Canonical HF tensors held by this rank's vLLM model, and the live parameters by vLLM's names.

    Raises:
        UserError: a parameter of a layer class that is not known here.
    """
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    local: dict[str, Tensor] = {}
    padding: dict[str, int] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # tied to one that has its name already
                continue
            seen.add(id(parameter))
            name = f"{path}.{leaf}" if path else leaf
            assert parameter.is_contiguous(), f"{name} must be contiguous"
            local[name] = parameter.data
            placed = _place(name, module, leaf, tuple(parameter.shape), packed)
            for piece, shape in placed:
                pieces.append(piece)
                specs[piece.name] = TensorSpec(shape, str(parameter.dtype).removeprefix("torch."))
            if rest := parameter.numel() - sum(piece.numel for piece, _ in placed):
                padding[name] = rest
    return ShardMap(specs, tuple(pieces), padding), local


def _place(name: str, module: Any, leaf: str, shape: Shape, packed: Mapping[str, list[str]]) -> Placed:
    """Pieces of one parameter of ``module``; only a vocabulary leaves elements of it without a piece."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, RoutedExperts) and leaf in ("w13_weight", "w2_weight"):
        return _experts(name, module, leaf, shape)
    if leaf in ("weight", "bias"):
        if isinstance(module, VocabParallelEmbedding):
            rows = module.shard_indices
            low, high = rows.org_vocab_start_index, rows.org_vocab_end_index
            whole = (module.org_vocab_size, *shape[1:])
            return [(row_piece(name, whole, low, high, name), whole)] if low < high else []
        if isinstance(module, ColumnParallelLinear):
            return _columns(name, module, leaf, shape, packed)
        if isinstance(module, RowParallelLinear) and leaf == "weight":
            width = shape[1]
            whole2 = (shape[0], width * module.tp_size)
            return [(column_piece(name, whole2, module.tp_rank * width, (module.tp_rank + 1) * width, name), whole2)]
        if isinstance(module, (RowParallelLinear, ReplicatedLinear, RMSNorm, GemmaRMSNorm, nn.LayerNorm)):
            return [(whole_piece(name, shape, name), shape)]
    raise UserError(
        f"vLLM parameter {name} {list(shape)} belongs to layer class {type(module).__name__}, which has no shard map: "
        "use a Llama, Qwen2, Qwen3 or Qwen3-MoE model without quantization, or teach hpc_rl/rollout/vllm_map.py"
    )


def _columns(name: str, module: Any, leaf: str, shape: Shape, packed: Mapping[str, list[str]]) -> Placed:
    """A column-parallel parameter: one part, or several that lie one after the other."""
    path = name.removesuffix(f".{leaf}")
    parent, _, own = path.rpartition(".")
    parts = _parts(module)  # (rows here, first of them in the whole, rows of the whole)
    names = packed.get(own, [own])
    if len(names) not in (1, len(parts)):
        raise UserError(
            f"vLLM layer {path} has {len(parts)} parts, but its model names {names} for them, so it has no shard map: "
            "use a Llama, Qwen2, Qwen3 or Qwen3-MoE model"
        )
    total = sum(rows for _, _, rows in parts)
    placed: Placed = []
    row = base = 0
    for index, (rows, start, whole_rows) in enumerate(parts):
        fused = len(names) < len(parts)  # fused in the HF checkpoint too: parts of one canonical tensor
        canonical = f"{parent}.{names[0 if fused else index]}.{leaf}".removeprefix(".")
        low = base + start if fused else start
        whole = (total if fused else whole_rows, *shape[1:])
        placed.append((row_piece(canonical, whole, low, low + rows, name, row), whole))
        row += rows
        base += whole_rows
    assert row == shape[0], f"{name} has {shape[0]} rows, its parts have {row}"
    return placed


def _parts(module: Any) -> list[tuple[int, int, int]]:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

    rank, tp = module.tp_rank, module.tp_size
    if isinstance(module, QKVParallelLinear):
        kv_rank = rank // module.num_kv_head_replicas  # neighbours hold the same head when tp > number of KV heads
        heads = [(module.num_heads, rank, module.total_num_heads, module.head_size)]
        heads += [
            (module.num_kv_heads, kv_rank, module.total_num_kv_heads, size)
            for size in (module.head_size, module.v_head_size)
        ]
        return [(n * size, index * n * size, total * size) for n, index, total, size in heads]
    if isinstance(module, MergedColumnParallelLinear):
        return [(rows // tp, rank * (rows // tp), rows) for rows in module.output_sizes]
    rows = module.output_size_per_partition
    return [(rows, rank * rows, module.output_size)]


def _experts(name: str, module: Any, leaf: str, shape: Shape) -> Placed:
    """w13 [experts, gate | up, hidden] and w2 [experts, hidden, inner] of this rank's experts."""
    base = name.removesuffix(f".{leaf}").removesuffix(".routed_experts")
    config = module.moe_config.moe_parallel_config
    expert_map = module.expert_map_manager.expert_map  # global -> local number, or None: all experts are here
    numbers = range(shape[0]) if expert_map is None else torch.where(expert_map >= 0)[0].tolist()
    gate, up, down = (f"{x}.weight" for x in ("gate_proj", "up_proj", "down_proj"))
    placed: Placed = []
    for index, number in enumerate(numbers):
        if leaf == "w13_weight":
            width = shape[1] // 2
            whole = (width * config.tp_size, shape[2])
            low = config.tp_rank * width
            for part, kind in enumerate((gate, up)):
                row = (2 * index + part) * width
                placed.append((row_piece(f"{base}.{number}.{kind}", whole, low, low + width, name, row), whole))
        else:
            width = shape[2]
            whole = (shape[1], width * config.tp_size)
            low, offset = config.tp_rank * width, index * shape[1] * width
            placed.append((column_piece(f"{base}.{number}.{down}", whole, low, low + width, name, offset), whole))
    return placed


def uncovered(shard_map: ShardMap, local: Mapping[str, Tensor]) -> dict[str, list[tuple[int, int]]]:
    """Flat ranges of local tensors that no piece covers: the padding of vocabularies.

    Returns:
        local name -> [(begin, end), ...] in elements; tensors without such ranges are left out.
    """
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in shard_map.padding}
    for piece in shard_map.pieces:
        if piece.local in ranges:
            assert piece.is_contiguous, f"{piece.name} is not contiguous in {piece.local}"
            ranges[piece.local].append((piece.offset, piece.offset + piece.numel))
    gaps: dict[str, list[tuple[int, int]]] = {}
    for name, covered in ranges.items():
        end = local[name].numel()
        stops = [0, *(stop for _, stop in sorted(covered))]
        starts = [*(start for start, _ in sorted(covered)), end]
        gaps[name] = [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]
    return gaps


@torch.no_grad()
def zero_uncovered(shard_map: ShardMap, local: Mapping[str, Tensor]) -> None:
    """Sets all elements that no piece covers to 0; nothing else ever writes them."""
    for name, gaps in uncovered(shard_map, local).items():
        for begin, end in gaps:
            local[name].view(-1)[begin:end].zero_()
