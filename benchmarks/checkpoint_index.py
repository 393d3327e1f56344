"""The plan and the index of a 70 B model on 512 ranks, without its data: what grows with the size of the job."""

from __future__ import annotations

import io
import time

import h5py

from hpc_rl.storage import index
from hpc_rl.storage.plan import Holding, holding, plan
from hpc_rl.storage.shards import Member, Report, shard_files, skeleton, spans
from hpc_rl.tensors.shardmap import (
    Piece,
    ShardMap,
    TensorSpec,
    column_piece,
    flat_ranges,
    merged,
    prefixed,
    row_piece,
    whole_piece,
)

HIDDEN, FFN, HEAD, HEADS, GROUPS, VOCAB, LAYERS = 8192, 28672, 128, 64, 8, 128256, 80


def qkv(stem: str, tp: int, tp_size: int) -> tuple[int, dict[str, tuple[int, ...]], list[Piece]]:
    """Elements, shapes and pieces of a fused local tensor: [q.. k v] of each of the rank's query groups."""
    heads = {"q_proj": HEADS // GROUPS, "k_proj": 1, "v_proj": 1}
    shapes: dict[str, tuple[int, ...]] = {
        f"{stem}self_attn.{n}.weight": (c * GROUPS * HEAD, HIDDEN) for n, c in heads.items()
    }
    pieces, row = [], 0
    for group in range(tp * GROUPS // tp_size, (tp + 1) * GROUPS // tp_size):
        for (name, shape), count in zip(shapes.items(), heads.values(), strict=True):
            low = group * count * HEAD
            pieces.append(row_piece(name, shape, low, low + count * HEAD, stem + "qkv", row=row))
            row += count * HEAD
    return row * HIDDEN, shapes, pieces


def stage_map(tp: int, tp_size: int, pp: int, pp_size: int) -> tuple[ShardMap, dict[str, int]]:
    """Parameters of one rank of a Llama-3-70B shape, and the elements of each local tensor."""
    maps: list[ShardMap] = []
    sizes: dict[str, int] = {}

    def add(local: str, numel: int, shapes: dict[str, tuple[int, ...]], pieces: list[Piece]) -> None:
        maps.append(ShardMap({n: TensorSpec(s, "bfloat16") for n, s in shapes.items()}, tuple(pieces)))
        sizes[local] = numel

    def rows(local: str, name: str, num: int) -> None:
        part = num // tp_size
        shape = (num, HIDDEN)
        add(local, part * HIDDEN, {name: shape}, [row_piece(name, shape, tp * part, (tp + 1) * part, local)])

    if pp == 0:
        rows("embed", "model.embed_tokens.weight", VOCAB)
    for layer in range(pp * LAYERS // pp_size, (pp + 1) * LAYERS // pp_size):
        stem = f"model.layers.{layer}."
        add(stem + "qkv", *qkv(stem, tp, tp_size))
        for name, width in (("self_attn.o_proj.weight", HEADS * HEAD), ("mlp.down_proj.weight", FFN)):
            part = width // tp_size
            piece = column_piece(stem + name, (HIDDEN, width), tp * part, (tp + 1) * part, stem + name)
            add(stem + name, HIDDEN * part, {piece.name: (HIDDEN, width)}, [piece])
        ffn = FFN // tp_size
        names = [f"{stem}mlp.{n}_proj.weight" for n in ("gate", "up")]
        gate_up = [
            row_piece(n, (FFN, HIDDEN), tp * ffn, (tp + 1) * ffn, stem + "gate_up", row=i * ffn)
            for i, n in enumerate(names)
        ]
        add(stem + "gate_up", 2 * ffn * HIDDEN, dict.fromkeys(names, (FFN, HIDDEN)), gate_up)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            add(stem + name, HIDDEN, {stem + name: (HIDDEN,)}, [whole_piece(stem + name, (HIDDEN,), stem + name)])
    if pp == pp_size - 1:
        rows("head", "lm_head.weight", VOCAB)
        add("norm", HIDDEN, {"model.norm.weight": (HIDDEN,)}, [whole_piece("model.norm.weight", (HIDDEN,), "norm")])
    return merged(maps), sizes


def holdings(tp_size: int = 8, pp_size: int = 8, dp_size: int = 8) -> list[Holding]:
    """Parameters, and the optimizer's flat ranges, of all ranks."""
    out = []
    for pp in range(pp_size):
        for dp in range(dp_size):
            for tp in range(tp_size):
                shard_map, sizes = stage_map(tp, tp_size, pp, pp_size)
                share = -(-sum(sizes.values()) // dp_size)
                low, position, ranges = dp * share, 0, {}
                for local, numel in sizes.items():
                    begin, end = max(0, low - position), min(numel, low + share - position)
                    if begin < end:
                        ranges[local] = (begin, end, "flat", position + begin - low)
                    position += numel
                kinds = [flat_ranges(shard_map, ranges, f"{k}/", "float32") for k in ("main", "exp_avg", "exp_avg_sq")]
                out.append(holding({"actor": merged([prefixed(shard_map, "param/"), *kinds])}))
    return out


def measure() -> dict[str, float]:
    """Seconds to plan (each rank), to build index.h5 (rank 0's writer) and to open it; its bytes and extents."""
    held = holdings()
    start = time.perf_counter()
    made = plan(held)
    planned = time.perf_counter()
    members = [Member(rank, extents, 8192) for rank, extents in enumerate(made.ranks)]
    files = [name for name, _ in shard_files([f"node{rank // 8}" for rank in range(len(held))], 0)]
    reports = {}
    for member in members:  # each rank makes its own: not part of the time
        frame = skeleton([member], 1 << 20)
        offsets = [offset for offset, _ in spans([member], frame.offsets)]
        digests = ["00" * 16] * len(offsets)
        reports[member.rank] = Report(member.rank, files[member.rank], frame.nbytes, "00" * 16, offsets, digests)
    begin = time.perf_counter()
    image = index.build(made.specs, members, reports, ["00" * 16] * len(members), 0)
    built = time.perf_counter()
    table = index.read(io.BytesIO(image), index.digests(members, reports))
    opened = time.perf_counter()
    with h5py.File(io.BytesIO(image), "r") as file:
        shape = file["actor/exp_avg/model.layers.79.mlp.down_proj.weight"].shape
    assert shape == (HIDDEN, FFN), shape
    seen = time.perf_counter()
    loads = [sum(extent.nbytes for extent in extents) for extents in made.ranks]
    return {
        "plan_s": planned - start, "build_s": built - begin, "open_s": opened - built, "h5py_open_s": seen - opened,
        "bytes": len(image), "extents": len(table.name), "tensors": len(made.specs),
        "state_bytes": sum(loads), "imbalance": max(loads) / (sum(loads) / len(loads)),
    }  # fmt: skip


if __name__ == "__main__":
    print(measure())
