"""A small transformer at any TP x PP x DP, as an engine describes it: fused QKV, gate_up, a padded and tied vocabulary,
replicated norms, and a distributed optimizer's flat ranges over DP. Real tensors, no model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_rl.tensors.shardmap import (
    Piece,
    ShardMap,
    TensorSpec,
    column_piece,
    flat_ranges,
    merged,
    prefixed,
    row_piece,
    view,
    whole_piece,
)

VOCAB, HIDDEN, GROUPS, HEADS_PER_GROUP, HEAD, FFN = 37, 16, 4, 2, 4, 24


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    num_layers: int = 4
    dtype: str = "bfloat16"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tp, dp, pp) of a rank: tp changes fastest."""
        return rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)


Component = tuple[ShardMap, dict[str, Tensor]]


def parameters(layout: Layout, rank: int) -> Component:
    """This rank's parameters, zero."""
    tp, _, pp = layout.coordinates(rank)
    maps, sizes = [], {}
    per_stage = layout.num_layers // layout.pp
    dtype = layout.dtype

    def add(local: str, numel: int, shapes: dict[str, tuple[int, ...]], pieces: list[Piece], padding: int = 0) -> None:
        sizes[local] = numel
        specs = {name: TensorSpec(shape, dtype) for name, shape in shapes.items()}
        maps.append(ShardMap(specs, tuple(pieces), {local: padding} if padding else {}))

    if pp in (0, layout.pp - 1):  # the tied embedding has two owners
        rows = -(-VOCAB // layout.tp)
        low, high = min(VOCAB, tp * rows), min(VOCAB, (tp + 1) * rows)
        name, shape = "embed.weight", (VOCAB, HIDDEN)
        pieces = [row_piece(name, shape, low, high, "embed")] if high > low else []
        add("embed", rows * HIDDEN, {name: shape}, pieces, (rows - (high - low)) * HIDDEN)
    for layer in range(pp * per_stage, (pp + 1) * per_stage):
        stem = f"layers.{layer}."
        add_attention(add, stem, tp, layout.tp)
        shape = (FFN, HIDDEN)
        ffn = FFN // layout.tp
        gate_up = [
            row_piece(stem + n, shape, tp * ffn, (tp + 1) * ffn, stem + "gate_up", row=i * ffn)
            for i, n in enumerate(("gate.weight", "up.weight"))
        ]
        add(stem + "gate_up", 2 * ffn * HIDDEN, {p.name: shape for p in gate_up}, gate_up)
        down = column_piece(stem + "down.weight", (HIDDEN, FFN), tp * ffn, (tp + 1) * ffn, stem + "down")
        add(stem + "down", HIDDEN * ffn, {down.name: (HIDDEN, FFN)}, [down])
        norm = whole_piece(stem + "norm.weight", (HIDDEN,), stem + "norm")
        add(stem + "norm", HIDDEN, {norm.name: (HIDDEN,)}, [norm])
    return merged(maps), {local: torch.zeros(numel, dtype=getattr(torch, dtype)) for local, numel in sizes.items()}


def add_attention(add: object, stem: str, tp: int, tp_size: int) -> None:
    """Fused QKV, one piece per tensor and query group: [q0 q1 k v] of each group."""
    shapes = {
        stem + "q.weight": (GROUPS * HEADS_PER_GROUP * HEAD, HIDDEN),
        stem + "k.weight": (GROUPS * HEAD, HIDDEN),
        stem + "v.weight": (GROUPS * HEAD, HIDDEN),
    }
    heads = dict(zip(shapes, (HEADS_PER_GROUP, 1, 1), strict=True))
    groups = GROUPS // tp_size
    pieces, row = [], 0
    for group in range(tp * groups, (tp + 1) * groups):
        for name, count in heads.items():
            rows = count * HEAD
            pieces.append(row_piece(name, shapes[name], group * rows, (group + 1) * rows, stem + "qkv", row=row))
            row += rows
    add(stem + "qkv", row * HIDDEN, shapes, pieces)  # type: ignore[operator]


def component(layout: Layout, rank: int, seed: int | None = None) -> Component:
    """Parameters and the optimizer states that a distributed optimizer keeps on this rank. ``seed``: None for zeros."""
    shard_map, tensors = parameters(layout, rank)
    _, dp, _ = layout.coordinates(rank)
    bounds, position, ranges = {}, 0, {}
    total = sum(t.numel() for t in tensors.values())
    share = -(-total // layout.dp)
    low, high = dp * share, min(total, (dp + 1) * share)
    for local, tensor in tensors.items():
        begin, end = max(0, low - position), min(tensor.numel(), high - position)
        if begin < end:
            ranges[local] = (begin, end, "flat", position + begin - low)
        bounds[local] = position
        position += tensor.numel()
    maps, out = [prefixed(shard_map, "param/", "param/")], {f"param/{k}": v for k, v in tensors.items()}
    for kind in ("exp_avg", "exp_avg_sq", "main"):
        maps.append(prefixed(flat_ranges(shard_map, ranges, f"{kind}/", "float32"), "", f"{kind}/"))
        out[f"{kind}/flat"] = torch.zeros(max(0, high - low))
    step = ShardMap({"step": TensorSpec((), "int64")}, (Piece("step", (), (), "step", 0, ()),))
    result = merged([*maps, step]), out | {"step": torch.zeros((), dtype=torch.int64)}
    if seed is not None:
        write_reference(*result, seed)
    return result


def reference(name: str, spec: TensorSpec, seed: int) -> Tensor:
    """The whole canonical tensor, the same wherever it is computed."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(ord(c) * (i + 1) for i, c in enumerate(name)))
    if spec.dtype == "int64":
        return torch.randint(0, 1000, spec.shape, generator=generator)
    return torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))


def write_reference(shard_map: ShardMap, tensors: dict[str, Tensor], seed: int) -> None:
    """Fills a rank's local tensors from the canonical ones."""
    for piece, target, source in matched(shard_map, tensors, seed):
        del piece
        target.copy_(source)


def assert_reference(shard_map: ShardMap, tensors: dict[str, Tensor], seed: int) -> None:
    """Every element that a piece speaks of is bitwise that of the canonical tensor."""
    for piece, target, source in matched(shard_map, tensors, seed):
        assert torch.equal(target, source), piece


def matched(shard_map: ShardMap, tensors: dict[str, Tensor], seed: int) -> list[tuple[Piece, Tensor, Tensor]]:
    whole = {name: reference(name, spec, seed) for name, spec in shard_map.specs.items()}
    out = []
    for piece in shard_map.pieces:
        box = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
        out.append((piece, view(piece, tensors[piece.local]), whole[piece.name][box]))
    return out
