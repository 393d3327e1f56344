"""What a rank of a vLLM replica holds, worked out from the model alone: for plans and dry runs without vLLM.

The map used in a run is read from the live module (``rollout/``); the two agree.
"""

from __future__ import annotations

from functools import lru_cache

from hpc_rl.errors import UserError
from hpc_rl.tensors.canonical import EMBEDDING, OUTPUT, ModelSpec
from hpc_rl.tensors.shardmap import Piece, ShardMap, TensorSpec, column_piece, row_piece, whole_piece

VOCAB_MULTIPLE = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


@lru_cache(maxsize=256)
def vllm_shard_map(spec: ModelSpec, tp: int, rank: int, dtype: str | None = None, ep: bool = False) -> ShardMap:
    """The boxes of canonical tensors in the parameters of one vLLM rank.

    Args:
        spec: the model (an actor).
        tp: tensor-parallel size of the replica.
        rank: tensor-parallel rank, in ``[0, tp)``.
        dtype: of vLLM's parameters; None: as the checkpoint stores them.
        ep: whole experts are dealt over the ranks, instead of a slice of each (vLLM's enable_expert_parallel).

    Raises:
        UserError: if vLLM cannot cut the model this way.
    """
    _check(spec, tp, ep)
    pieces: list[Piece] = []
    padding: dict[str, int] = {}
    size = -(-spec.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // tp
    low, high = rank * size, min((rank + 1) * size, spec.vocab_size)
    for name in (EMBEDDING,) if spec.tie_embeddings else (EMBEDDING, OUTPUT):
        if low < high:
            pieces.append(row_piece(name, (spec.vocab_size, spec.hidden_size), low, high, name))
        if max(low, high) < (rank + 1) * size:
            padding[name] = (size - max(0, high - low)) * spec.hidden_size
    for layer in range(spec.num_layers):
        pieces += _layer_pieces(spec, layer, tp, rank, ep)
    pieces.append(whole_piece("model.norm.weight", (spec.hidden_size,), "model.norm.weight"))
    shapes = spec.tensors()
    return ShardMap({p.name: TensorSpec(shapes[p.name], dtype or spec.dtype) for p in pieces}, tuple(pieces), padding)


def _check(spec: ModelSpec, tp: int, ep: bool) -> None:
    vocab = -(-spec.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    divisions = [("num_attention_heads", spec.num_heads), ("vocabulary padded to 64", vocab)]
    if len(spec.moe_layers) < spec.num_layers:
        divisions.append(("intermediate_size", spec.intermediate_size))
    if spec.moe_layers:
        divisions.append(
            ("num_experts", spec.num_experts) if ep else ("moe_intermediate_size", spec.moe_intermediate_size)
        )
    for name, value in divisions:
        if value % tp:
            raise UserError(f"{name} = {value} is not a multiple of rollout.tp = {tp}: choose one of its divisors")
    if spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        raise UserError(
            f"num_key_value_heads = {spec.num_kv_heads} is neither a multiple nor a divisor of "
            f"rollout.tp = {tp}: choose another"
        )


def _layer_pieces(spec: ModelSpec, layer: int, tp: int, rank: int, ep: bool) -> list[Piece]:
    name, hidden = f"model.layers.{layer}.", spec.hidden_size
    out = [
        whole_piece(name + x, (hidden,), name + x)
        for x in ("input_layernorm.weight", "post_attention_layernorm.weight")
    ]
    out += _qkv(spec, name + "self_attn.", "weight", tp, rank, (hidden,))
    if spec.qkv_bias:
        out += _qkv(spec, name + "self_attn.", "bias", tp, rank, ())
    if spec.qk_norm:
        norms = (f"{name}self_attn.{x}_norm.weight" for x in "qk")
        out += [whole_piece(norm, (spec.head_dim,), norm) for norm in norms]
    query = spec.num_heads * spec.head_dim
    width = query // tp
    output = name + "self_attn.o_proj.weight"
    out.append(column_piece(output, (hidden, query), rank * width, (rank + 1) * width, output))
    if layer in spec.moe_layers:
        return out + _experts(spec, name + "mlp.", tp, rank, ep)
    inner = spec.intermediate_size
    width = inner // tp
    low, high = rank * width, (rank + 1) * width
    fused, down = name + "mlp.gate_up_proj.weight", name + "mlp.down_proj.weight"
    return [
        *out,
        row_piece(name + "mlp.gate_proj.weight", (inner, hidden), low, high, fused),
        row_piece(name + "mlp.up_proj.weight", (inner, hidden), low, high, fused, width),
        column_piece(down, (hidden, inner), low, high, down),
    ]


def _qkv(spec: ModelSpec, name: str, kind: str, tp: int, rank: int, tail: tuple[int, ...]) -> list[Piece]:
    # Rows q | k | v. With more ranks than KV heads, neighbouring ranks hold the same head.
    query, kv = spec.num_heads * spec.head_dim // tp, max(1, spec.num_kv_heads // tp) * spec.head_dim
    share = rank // max(1, tp // spec.num_kv_heads)
    out, row = [], 0
    for x, rows, total, index in (
        ("q", query, spec.num_heads, rank),
        ("k", kv, spec.num_kv_heads, share),
        ("v", kv, spec.num_kv_heads, share),
    ):
        shape = (total * spec.head_dim, *tail)
        canonical = f"{name}{x}_proj.{kind}"
        out.append(row_piece(canonical, shape, index * rows, (index + 1) * rows, f"{name}qkv_proj.{kind}", row))
        row += rows
    return out


def _experts(spec: ModelSpec, name: str, tp: int, rank: int, ep: bool) -> list[Piece]:
    # w13 [experts, gate | up, hidden] and w2 [experts, hidden, inner], stacked over the rank's experts.
    hidden, inner = spec.hidden_size, spec.moe_intermediate_size
    width = inner if ep else inner // tp
    low = 0 if ep else rank * width
    count = spec.num_experts // tp if ep else spec.num_experts
    out = [whole_piece(name + "gate.weight", (spec.num_experts, hidden), name + "gate.weight")]
    w13, w2 = name + "experts.w13_weight", name + "experts.w2_weight"
    for k in range(count):
        expert = f"{name}experts.{(rank * count if ep else 0) + k}."
        row = 2 * width * k
        out += [
            row_piece(expert + "gate_proj.weight", (inner, hidden), low, low + width, w13, row),
            row_piece(expert + "up_proj.weight", (inner, hidden), low, low + width, w13, row + width),
            column_piece(expert + "down_proj.weight", (hidden, inner), low, low + width, w2, k * hidden * width),
        ]
    return out
