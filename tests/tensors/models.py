"""Tiny models of every supported kind, and ways to cut them without processes."""

from __future__ import annotations

from typing import Any

import torch

from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.shardmap import ShardMap, view

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 250,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "model_type": "llama"},
    "llama_tied": {**_SIZES, "model_type": "llama", "tie_word_embeddings": True, "head_dim": 8},
    "qwen2": {**_SIZES, "model_type": "qwen2"},
    "qwen3": {**_SIZES, "model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 4},
    "qwen3_moe": {
        **_SIZES,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
}


def spec_of(kind: str, **changes: Any) -> ModelSpec:
    return ModelSpec.from_hf_config({**CONFIGS[kind], **changes})


def random_tensors(spec: ModelSpec, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(shape, generator=generator).to(dtype) for k, shape in spec.tensors().items()}


def local_numels(shard_map: ShardMap) -> dict[str, int]:
    """Sizes of the local tensors, if the map fills them up to its padding."""
    out = dict(shard_map.padding)
    for piece in shard_map.pieces:
        out[piece.local] = out.get(piece.local, 0) + piece.numel
    return out


def empty_locals(shard_map: ShardMap, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.full((n,), float("nan"), dtype=dtype) for name, n in local_numels(shard_map).items()}


def fill(shard_map: ShardMap, tensors: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    """Writes each piece's box of the canonical tensors into the local tensors."""
    for p in shard_map.pieces:
        box = tuple(slice(s, s + n) for s, n in zip(p.start, p.shape, strict=True))
        view(p, tensors[p.local]).copy_(whole[p.name][box])
