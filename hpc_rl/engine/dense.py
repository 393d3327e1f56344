"""The dense decoder (Llama, Qwen2, Qwen3) in plain torch, over packed rows, its parameters under canonical names.

What the engines without tensor or pipeline parallelism train. The same attention, kernels and head as Megatron's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpc_rl.engine.attention import packed_attention, rotary_frequencies
from hpc_rl.engine.head import token_log_probs
from hpc_rl.engine.packed import Packed
from hpc_rl.tensors.canonical import ModelSpec


class Attention(nn.Module):
    """Grouped-query attention, with biases (Qwen2) or norms (Qwen3) on queries and keys."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = d = spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, spec.num_heads * d, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden_size, spec.num_kv_heads * d, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden_size, spec.num_kv_heads * d, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.num_heads * d, spec.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(d, eps=spec.norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(d, eps=spec.norm_eps) if spec.qk_norm else nn.Identity()

    def forward(self, x: Tensor, packed: Packed) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(packed_attention(self.q_norm(q), self.k_norm(k), v, packed).flatten(1))


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer layer, [t, h] -> [t, h]. ``recompute``: keeps its input only, and runs again in the backward."""

    def __init__(self, spec: ModelSpec, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_eps)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, packed: Packed) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._run, x, packed, use_reentrant=False, preserve_rng_state=False)
        return self._run(x, packed)

    def _run(self, x: Tensor, packed: Packed) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), packed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, spec: ModelSpec, recompute: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList([Layer(spec, recompute) for _ in range(spec.num_layers)])
        self.norm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_eps)

    def forward(self, packed: Packed) -> Tensor:
        x = self.embed_tokens(packed.input_ids[0])
        for layer in self.layers:
            x = layer(x, packed)
        return self.norm(x)


class DenseLM(nn.Module):
    """The whole model. ``forward(packed)`` gives per-token outputs, as `PackedGPT` does, instead of logits.

    ``role`` "actor" (or "reference"): float32 [2, t], log-probs and entropy of the counted tokens, 0 elsewhere.
    ``role`` "critic": float32 [1, t], the value of the state before each counted token.
    ``dtype``: of the computation, to which rotary angles are rounded; parameters may be kept in another.
    """

    def __init__(self, spec: ModelSpec, role: str, dtype: torch.dtype, recompute: bool = False) -> None:
        super().__init__()
        self.spec, self.role, self.dtype, self.temperature = spec, role, dtype, 1.0
        self.model = Body(spec, recompute)
        if role == "critic":
            self.value_head = nn.Linear(spec.hidden_size, 1, bias=False)
        elif not spec.tie_embeddings:
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.output_names = ("values",) if role == "critic" else ("log_probs", "entropy")
        self._inv_freq: Tensor | None = None

    def forward(self, packed: Packed) -> Tensor:
        if self._inv_freq is None:
            self._inv_freq = rotary_frequencies(self.spec).to(packed.input_ids.device)
        hidden = self.model(packed.with_frequencies(self._inv_freq, self.dtype))
        states = hidden[packed.predict_from]  # [m, h]
        if self.role == "critic":
            return packed.spread([self.value_head(states)[:, 0]])
        weight = self.model.embed_tokens.weight if self.spec.tie_embeddings else self.lm_head.weight
        outputs = token_log_probs(states, weight, packed.targets, self.temperature, self.spec.vocab_size, None)
        return packed.spread(list(outputs))
