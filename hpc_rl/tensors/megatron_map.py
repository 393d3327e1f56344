"""What a rank of a megatron-core GPTModel holds, worked out from the layout alone.

Local names are those of ``GPTModel.named_parameters()`` built from the local (no Transformer Engine) layer spec, with
experts as SequentialMLP. Layer numbers in them count from 0 in each model chunk, as megatron-core's do. With
interleaved pipelining (vpp > 1) each name starts with ``chunk{v}.``, where v is the virtual stage.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm

from hpc_rl.errors import UserError
from hpc_rl.parallel.layout import Layout
from hpc_rl.tensors.canonical import EMBEDDING, OUTPUT, VALUE_HEAD, ModelSpec
from hpc_rl.tensors.shardmap import Piece, ShardMap, TensorSpec, column_piece, row_piece, whole_piece

VOCAB_MULTIPLE = 64  # vLLM's: with the borders of its shards, equal layouts have nothing to send


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """The smallest multiple of `VOCAB_MULTIPLE` and ``tp`` that holds the vocabulary."""
    multiple = lcm(VOCAB_MULTIPLE, tp)
    return -(-vocab_size // multiple) * multiple


def megatron_shard_map(
    spec: ModelSpec, layout: Layout, rank: int, padded_vocab: int | None = None, dtype: str | None = None
) -> ShardMap:
    """The boxes of canonical tensors in the parameters of one rank.

    Args:
        spec: the model.
        layout: the rank grid.
        rank: which rank.
        padded_vocab: rows of the embedding over all TP ranks; None: ``padded_vocab_size``.
        dtype: of the local parameters; None: as the checkpoint stores them.

    Returns:
        The rank's map. Ranks that hold the same shards get the same object.

    Raises:
        UserError: if the model cannot be cut this way.
    """
    at = layout.coords(rank)
    rows = padded_vocab or padded_vocab_size(spec.vocab_size, layout.tp)
    return _stage_map(spec, layout, at.tp, at.pp, at.etp, at.ep, rows, dtype or spec.dtype)


def check_megatron_layout(spec: ModelSpec, layout: Layout, padded_vocab: int) -> None:
    """Raises UserError if ``spec`` cannot be cut over ``layout``."""
    divisions = [
        ("num_attention_heads", spec.num_heads, "tp", layout.tp),
        ("padded vocabulary", padded_vocab, "tp", layout.tp),
        ("num_experts", spec.num_experts, "ep", layout.ep),
        ("moe_intermediate_size", spec.moe_intermediate_size, "etp", layout.etp),
    ]
    if len(spec.moe_layers) < spec.num_layers:
        divisions.append(("intermediate_size", spec.intermediate_size, "tp", layout.tp))
    for name, value, axis, size in divisions:
        if value % size:
            raise UserError(f"{name} = {value} is not a multiple of {axis} = {size}: choose {axis} among its divisors")
    if spec.num_kv_heads % layout.tp and layout.tp % spec.num_kv_heads:
        raise UserError(
            f"num_key_value_heads = {spec.num_kv_heads} is neither a multiple nor a divisor of "
            f"tp = {layout.tp}: choose another tp"
        )
    if padded_vocab < spec.vocab_size:
        raise UserError(f"the padded vocabulary {padded_vocab} is smaller than the vocabulary {spec.vocab_size}")
    if layout.ep > 1 and not spec.num_experts:
        raise UserError(f"ep is {layout.ep}, but {spec.model_type} has no experts: set ep to 1")


@lru_cache(maxsize=4096)
def _stage_map(
    spec: ModelSpec, layout: Layout, tp: int, pp: int, etp: int, ep: int, padded_vocab: int, dtype: str
) -> ShardMap:
    check_megatron_layout(spec, layout, padded_vocab)
    pieces: list[Piece] = []
    padding: dict[str, int] = {}
    chunks = layout.layers_of(pp, spec.num_layers)
    first, last = pp == 0, pp == layout.pp - 1

    def vocab(name: str, local: str) -> None:
        size = padded_vocab // layout.tp
        low, high = tp * size, min((tp + 1) * size, spec.vocab_size)
        if low < high:
            pieces.append(row_piece(name, (spec.vocab_size, spec.hidden_size), low, high, local))
        if max(low, high) < (tp + 1) * size:
            padding[local] = (size - max(0, high - low)) * spec.hidden_size

    for v, layers in enumerate(chunks):
        prefix = f"chunk{v}." if layout.vpp > 1 else ""
        if first and v == 0:
            vocab(EMBEDDING, prefix + "embedding.word_embeddings.weight")
        for local_layer, layer in enumerate(layers):
            pieces += _layer_pieces(spec, layout, layer, f"{prefix}decoder.layers.{local_layer}.", tp, etp, ep)
        if last and v == len(chunks) - 1:
            pieces.append(
                whole_piece("model.norm.weight", (spec.hidden_size,), prefix + "decoder.final_layernorm.weight")
            )
            if spec.role == "critic":
                pieces.append(whole_piece(VALUE_HEAD, (1, spec.hidden_size), prefix + VALUE_HEAD))
            elif not spec.tie_embeddings:
                vocab(OUTPUT, prefix + "output_layer.weight")
            elif layout.pp > 1:  # the last stage keeps a second copy of a tied embedding
                vocab(EMBEDDING, prefix + "output_layer.weight")
    shapes = spec.tensors()
    return ShardMap({p.name: TensorSpec(shapes[p.name], dtype) for p in pieces}, tuple(pieces), padding)


def _layer_pieces(spec: ModelSpec, layout: Layout, layer: int, local: str, tp: int, etp: int, ep: int) -> list[Piece]:
    name, hidden = f"model.layers.{layer}.", spec.hidden_size
    out = [
        whole_piece(name + "input_layernorm.weight", (hidden,), local + "input_layernorm.weight"),
        *_fused_qkv(spec, layout.tp, tp, name, local, "weight", hidden),
        *(_fused_qkv(spec, layout.tp, tp, name, local, "bias", 0) if spec.qkv_bias else ()),
    ]
    if spec.qk_norm:
        for x in "qk":
            out.append(
                whole_piece(
                    f"{name}self_attn.{x}_norm.weight", (spec.head_dim,), f"{local}self_attention.{x}_layernorm.weight"
                )
            )
    query = spec.num_heads * spec.head_dim
    width = query // layout.tp
    out += [
        column_piece(
            name + "self_attn.o_proj.weight",
            (hidden, query),
            tp * width,
            (tp + 1) * width,
            local + "self_attention.linear_proj.weight",
        ),
        whole_piece(name + "post_attention_layernorm.weight", (hidden,), local + "pre_mlp_layernorm.weight"),
    ]
    if layer not in spec.moe_layers:
        return out + _mlp(name + "mlp.", local + "mlp.", hidden, spec.intermediate_size, layout.tp, tp)
    out.append(whole_piece(name + "mlp.gate.weight", (spec.num_experts, hidden), local + "mlp.router.weight"))
    count = spec.num_experts // layout.ep
    for k in range(count):
        expert, place = f"{name}mlp.experts.{ep * count + k}.", f"{local}mlp.experts.local_experts.{k}."
        out += _mlp(expert, place, hidden, spec.moe_intermediate_size, layout.etp, etp)
    return out


def _mlp(name: str, local: str, hidden: int, inner: int, tp_size: int, tp: int) -> list[Piece]:
    width = inner // tp_size
    low, high = tp * width, (tp + 1) * width
    return [
        row_piece(name + "gate_proj.weight", (inner, hidden), low, high, local + "linear_fc1.weight"),
        row_piece(name + "up_proj.weight", (inner, hidden), low, high, local + "linear_fc1.weight", width),
        column_piece(name + "down_proj.weight", (hidden, inner), low, high, local + "linear_fc2.weight"),
    ]


def _fused_qkv(spec: ModelSpec, tp_size: int, tp: int, name: str, local: str, kind: str, hidden: int) -> list[Piece]:
    # The whole fused tensor is [q of group 0 | k 0 | v 0 | q of group 1 | ...], cut into equal row ranges: through the
    # middle of a group when there are more ranks than groups.
    dim, groups = spec.head_dim, spec.num_kv_heads
    blocks = (("q", spec.num_heads // groups * dim), ("k", dim), ("v", dim))
    total = groups * sum(rows for _, rows in blocks)
    low, high = tp * total // tp_size, (tp + 1) * total // tp_size
    place = f"{local}self_attention.linear_qkv.{kind}"
    out: list[Piece] = []
    begin = 0
    for group in range(groups):
        for x, rows in blocks:
            start, stop = max(begin, low), min(begin + rows, high)
            if start < stop:
                shape = (groups * rows, hidden) if hidden else (groups * rows,)
                at = group * rows + start - begin
                out.append(
                    row_piece(f"{name}self_attn.{x}_proj.{kind}", shape, at, at + stop - start, place, start - low)
                )
            begin += rows
    return out
