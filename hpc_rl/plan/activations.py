"""Bytes of activations: what the layers save for the backward pass, and what is alive beside it for a moment.

Counted from the operations of engine/megatron_model.py, head.py and kernels.py; tests hold them against the tensors
that autograd really saves. Terms are per token of a micro-batch, for one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_rl.plan.job import PlannedJob
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.megatron_map import padded_vocab_size

CHUNK_TOKENS = 2048  # engine/head.py's (not imported: it needs torch); a test compares them


@dataclass(frozen=True, slots=True)
class Cut:
    """How a micro-batch is computed. ``fused``: the CUDA kernels; ``varlen``: attention without padding or copies."""

    tp: int
    sequence_parallel: bool
    item_bytes: int
    fused: bool
    varlen: bool
    recompute: bool
    longest: int
    fused_weights: bool = True  # Megatron's: one projection for queries, keys and values, one for gate and up

    @property
    def shards(self) -> int:
        """Into how many parts the token dim of norms and residuals is cut."""
        return self.tp if self.sequence_parallel else 1


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage of one model."""

    num_layers: int
    is_first: bool
    is_last: bool


def stage_of(job: PlannedJob, spec: ModelSpec, pp: int) -> Stage:
    """Stage ``pp`` of a model of ``job``."""
    return Stage(len(job.layout.layers_of(pp, spec.num_layers)[0]), pp == 0, pp == job.layout.pp - 1)


def cut_of(job: PlannedJob) -> Cut:
    """How ``job`` computes a micro-batch."""
    fused = not job.on_cpu
    return Cut(
        tp=job.layout.tp,
        sequence_parallel=job.sequence_parallel,
        item_bytes=job.item_bytes,
        fused=fused,
        varlen=fused and job.config.model.dtype != "float32",
        recompute=job.config.parallel.recompute == "full",
        longest=job.longest,
        fused_weights=job.config.parallel.engine == "megatron",
    )


def layer_bytes(spec: ModelSpec, cut: Cut) -> float:
    """Saved by one layer without recomputation, per token.

    Fused and varlen, with h hidden (/ tp under sequence parallelism), q = heads * head_dim / tp, k = kv_heads *
    head_dim / tp, f = ffn / tp, b bytes an element: ``b (4 h + 3 q + 3 k + 3 f) + 4 heads / tp + 8``: inputs of the two
    norms and of the two linear layers behind them; rotated queries and keys, the fused projection that the values are a
    part of, attention's output and log-sum-exp; the two halves before SwiGLU and its result. A norm on the CPU keeps
    its input and result in float32 instead.
    """
    b, hidden = cut.item_bytes, spec.hidden_size / cut.shards
    inner = spec.intermediate_size / cut.tp
    norms = 2 * (b * hidden if cut.fused else 8 * hidden) + 8 / cut.shards
    inputs = 2 * b * hidden
    mlp = b * inner * (3 if cut.fused and cut.fused_weights else 4)
    return norms + inputs + _attention(spec, cut) + _qk_norm(spec, cut) + mlp


def _widths(spec: ModelSpec, cut: Cut) -> tuple[float, float, float]:
    """(query heads, width of all queries, width of all keys) on one rank."""
    heads = spec.num_heads / cut.tp
    return heads, heads * spec.head_dim, max(1.0, spec.num_kv_heads / cut.tp) * spec.head_dim


def _attention(spec: ModelSpec, cut: Cut) -> float:
    b, (heads, query, key) = cut.item_bytes, _widths(spec, cut)
    if cut.varlen:
        return b * (2 * query + key + _fused_qkv(spec, cut)) + 4 * heads
    if cut.fused:  # float32 on a GPU: SDPA keeps the whole attention matrix of each padded row
        return b * (5 * query + heads * cut.longest)
    return b * (3 * query + 2 * key) + 4 * heads


def _fused_qkv(spec: ModelSpec, cut: Cut) -> float:
    """Width of the projection that values are a part of; all of it on a rank where there are more ranks than key heads."""
    if not cut.fused_weights:
        return float(spec.num_kv_heads * spec.head_dim)
    whole = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return whole if spec.num_kv_heads < cut.tp else whole / cut.tp


def _qk_norm(spec: ModelSpec, cut: Cut) -> float:
    if not spec.qk_norm:
        return 0.0
    b, (heads, query, key) = cut.item_bytes, _widths(spec, cut)
    rstd = 4 * (heads + key / spec.head_dim)
    if cut.fused:  # the queries' copy, and the fused projection that the keys are a part of
        return b * (query + (0 if cut.varlen else _fused_qkv(spec, cut))) + rstd
    return (4 + 4) * (query + key) + (b * 2 * key if b == 4 else 0) + rstd


def saved_bytes(spec: ModelSpec, cut: Cut, stage: Stage, tokens: int) -> float:
    """Saved by one stage for one micro-batch of ``tokens``."""
    b, hidden = cut.item_bytes, spec.hidden_size / cut.shards
    each = b * hidden if cut.recompute else layer_bytes(spec, cut)
    angles = 4 * spec.head_dim
    total = stage.num_layers * each + angles + (8 if stage.is_first else 0) + (0 if cut.varlen else 16)
    if stage.is_last:  # final norm, the states that predict a token, and their indices and results
        total += (b if cut.fused else 8) * hidden + 4 / cut.shards + b * spec.hidden_size + 32
    else:
        total += b * hidden  # the output that is sent on
    return total * tokens


def head_forward_bytes(spec: ModelSpec, cut: Cut, tokens: int) -> float:
    """Alive in the forward pass of the actor's head: ``8 c v``, logits and their exponentials in float32, and 5 results."""
    return 8.0 * min(CHUNK_TOKENS, tokens) * padded_vocab_size(spec.vocab_size, cut.tp) / cut.tp + 20.0 * tokens


def head_bytes(spec: ModelSpec, cut: Cut, tokens: int) -> float:
    """Alive in the backward of the actor's head beside the saved: logits of a chunk, and the output weight's gradient.

    ``(8 + b') c v + 4 v h + b max(v, c) h``, c tokens of a chunk, v rows of the vocabulary on a rank; b' = b below float32,
    else 0.
    """
    if spec.role == "critic":
        return 2.0 * cut.item_bytes * tokens * spec.hidden_size
    b, rows = cut.item_bytes, padded_vocab_size(spec.vocab_size, cut.tp) / cut.tp
    chunk_tokens = min(CHUNK_TOKENS, tokens)
    weight = rows * spec.hidden_size
    states = (2 if cut.sequence_parallel else 1) * b * tokens * spec.hidden_size
    product = b * max(rows, chunk_tokens) * spec.hidden_size
    return (8 + (b if b < 4 else 0)) * chunk_tokens * rows + 4 * weight + product + states


def backward_bytes(spec: ModelSpec, cut: Cut, tokens: int) -> float:
    """Alive in the backward of one layer beside the saved: gradients around the MLP and of its first weight."""
    b, inner = cut.item_bytes, spec.intermediate_size / cut.tp
    recomputed = layer_bytes(spec, cut) * tokens if cut.recompute else 0.0
    return recomputed + b * (tokens * (3 * inner + 2 * spec.hidden_size) + 2 * spec.hidden_size * inner)


def gather_bytes(spec: ModelSpec, cut: Cut, tokens: int) -> float:
    """The buffer into which Megatron gathers the tokens of all TP ranks; it stays."""
    return float(cut.item_bytes * tokens * spec.hidden_size) if cut.sequence_parallel else 0.0


def training_bytes(spec: ModelSpec, cut: Cut, stage: Stage, tokens: int, in_flight: int) -> tuple[float, float]:
    """(saved by ``in_flight`` micro-batches, most that is alive beside it) of one stage."""
    saved = in_flight * saved_bytes(spec, cut, stage, tokens)
    beside = backward_bytes(spec, cut, tokens)
    if stage.is_last:
        beside = max(beside, head_bytes(spec, cut, tokens))
    return saved, beside + gather_bytes(spec, cut, tokens)


def forward_bytes(spec: ModelSpec, cut: Cut, stage: Stage, tokens: int) -> float:
    """Most that is alive in a forward pass without gradients."""
    b, hidden = cut.item_bytes, spec.hidden_size
    _, query, key = _widths(spec, cut)
    inner = spec.intermediate_size / cut.tp
    widest = max(5 * query + 4 * key, 3 * inner)
    layer = b * tokens * (3 * hidden / cut.shards + hidden + widest)
    if not stage.is_last or spec.role == "critic":
        return layer + gather_bytes(spec, cut, tokens)
    head = head_forward_bytes(spec, cut, tokens) + 2 * b * tokens * hidden
    return max(layer, head) + gather_bytes(spec, cut, tokens)
