"""Rotary embedding and causal attention within each sequence of a packed row."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpc_rl.engine.kernels import rotate
from hpc_rl.engine.packed import Packed
from hpc_rl.tensors.canonical import ModelSpec


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float | None = None) -> Tensor:
    """Rotates queries and keys by the row's angles, then attends: the varlen kernel, or padded SDPA (CPU, float32).

    Args: q [t, heads, d]; k and v [t, groups, d]. scale: None for 1 / sqrt(d). Returns: [t, heads, d].
    """
    cos, sin = packed.angles()
    attend = _padded if packed.pad_index is not None else _varlen
    return attend(rotate(q, cos, sin), rotate(k, cos, sin), v, packed, scale)


def _padded(q: Tensor, k: Tensor, v: Tensor, p: Packed, scale: float | None) -> Tensor:
    assert p.pad_index is not None and p.token_index is not None

    def pad(x: Tensor) -> Tensor:  # [t, heads, d] -> [b, heads, s, d]; trailing padding is never attended to (causal)
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])[p.pad_index]
        return x.view(p.num_sequences, p.max_seqlen, *x.shape[1:]).transpose(1, 2)

    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(pad(q), pad(k), pad(v), is_causal=True, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2).flatten(0, 1)[p.token_index]


def _varlen(q: Tensor, k: Tensor, v: Tensor, p: Packed, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # The kernel has always known grouped queries; newer versions ask that one says so.
    grouped: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    bounds, longest = p.cu_seqlens, p.max_seqlen
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0), **grouped)
    assert isinstance(out, Tensor)
    return out


def rotary_frequencies(spec: ModelSpec) -> Tensor:
    """Inverse frequencies, float32 [head_dim / 2]. Types ``default``, ``linear`` and ``llama3`` of the HF config."""
    dim, rope = spec.head_dim, spec.rope
    inv_freq = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    kind = rope["rope_type"]
    if kind == "linear":
        return inv_freq / rope["factor"]
    if kind == "llama3":
        return _llama3_frequencies(inv_freq, rope)
    assert kind == "default", f"ModelSpec.from_hf_config takes no rope_type {kind!r}"
    return inv_freq


def _llama3_frequencies(inv_freq: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Low frequencies are divided by ``factor``, high ones kept, those between blended (Llama 3.1)."""
    old_len = rope["original_max_position_embeddings"]
    low, high = old_len / rope["low_freq_factor"], old_len / rope["high_freq_factor"]
    wavelen = 2 * math.pi / inv_freq
    blend = (old_len / wavelen - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    between = (1 - blend) * inv_freq / rope["factor"] + blend * inv_freq
    return torch.where(wavelen > low, inv_freq / rope["factor"], torch.where(wavelen < high, inv_freq, between))
