"""The Megatron-core GPT that actor, critic and reference share: no Transformer Engine, packed sequences, two heads."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hpc_rl.config import Config
from hpc_rl.engine.head import token_log_probs
from hpc_rl.engine.kernels import rotate, swiglu
from hpc_rl.engine.packed import Packed
from hpc_rl.errors import UserError
from hpc_rl.parallel.state import ParallelState
from hpc_rl.tensors.canonical import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that Megatron's sequence parallelism accepts (its WrappedTorchNorm does not)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  Megatron reads it


class SwiGLU(torch.nn.Module):
    """The MLP's gated activation, [gate | up] -> silu(gate) * up."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x)


class PackedAttention(MegatronModule):
    """Rotary embedding and causal attention within each sequence of a packed row.

    The varlen kernel on CUDA, padded SDPA on the CPU and for float32. Positions need not be 0, 1, 2, ...: the angles
    are computed once for the micro-batch, where Megatron would rebuild them in every layer.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Packed, **__: Any
    ) -> Tensor:
        """query [t, 1, heads, d], key and value [t, 1, groups, d] -> [t, 1, heads * d]."""
        cos, sin = packed_seq_params.angles()
        q, k, v = rotate(query[:, 0], cos, sin), rotate(key[:, 0], cos, sin), value[:, 0]
        attend = _padded_attention if packed_seq_params.pad_index is not None else _varlen_attention
        return attend(q, k, v, packed_seq_params, self.scale).flatten(1)[:, None]


def _padded_attention(q: Tensor, k: Tensor, v: Tensor, p: Packed, scale: float | None) -> Tensor:
    assert p.pad_index is not None and p.token_index is not None

    def pad(x: Tensor) -> Tensor:  # [t, heads, d] -> [b, heads, s, d]; trailing padding is never attended to (causal)
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])[p.pad_index]
        return x.view(p.num_sequences, p.max_seqlen, *x.shape[1:]).transpose(1, 2)

    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(pad(q), pad(k), pad(v), is_causal=True, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2).flatten(0, 1)[p.token_index]


def _varlen_attention(q: Tensor, k: Tensor, v: Tensor, p: Packed, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # The kernel has always known grouped queries; newer versions ask that one says so.
    grouped: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    bounds, longest = p.cu_seqlens, p.max_seqlen
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0), **grouped)
    assert isinstance(out, Tensor)
    return out


def rotary_frequencies(spec: ModelSpec) -> Tensor:
    """Inverse frequencies, float32 [head_dim / 2]. Types ``default``, ``linear`` and ``llama3`` of the HF config.

    Raises: UserError for another type.
    """
    dim, rope = spec.head_dim, spec.rope
    inv_freq = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    kind = rope["rope_type"]
    if kind == "linear":
        return inv_freq / rope["factor"]
    if kind == "llama3":
        return _llama3_frequencies(inv_freq, rope)
    if kind != "default":
        raise UserError(f"rope_type {kind!r} of the model is not supported: use one of default, linear, llama3")
    return inv_freq


def _llama3_frequencies(inv_freq: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Low frequencies are divided by ``factor``, high ones kept, those between blended (Llama 3.1)."""
    old_len = rope["original_max_position_embeddings"]
    low, high = old_len / rope["low_freq_factor"], old_len / rope["high_freq_factor"]
    wavelen = 2 * math.pi / inv_freq
    blend = (old_len / wavelen - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    between = (1 - blend) * inv_freq / rope["factor"] + blend * inv_freq
    return torch.where(wavelen > low, inv_freq / rope["factor"], torch.where(wavelen < high, inv_freq, between))


class PackedGPT(GPTModel):
    """GPTModel over packed rows. The last stage returns per-token outputs instead of logits.

    ``role`` "actor" (or "reference"): float32 [2, t], log-probs and entropy of the counted tokens, 0 elsewhere.
    ``role`` "critic": float32 [1, t], the value of the state before each counted token.
    """

    def __init__(
        self, config: TransformerConfig, spec: ModelSpec, role: str, state: ParallelState, **kwargs: Any
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=layer_specs(config, len(state.layout.layers_of(state.pp_rank, spec.num_layers)[0])),
            max_sequence_length=spec.max_position_embeddings,
            pre_process=state.is_first_stage,
            post_process=state.is_last_stage,
            position_embedding_type="none",  # PackedAttention rotates
            share_embeddings_and_output_weights=spec.tie_embeddings and role != "critic",
            **kwargs,
        )
        self.role, self.temperature, self.true_vocab_size = role, 1.0, spec.vocab_size
        self.tp_group = state.tp_group if state.layout.tp > 1 else None
        self.inv_freq = rotary_frequencies(spec).to(state.device)
        if role == "critic" and self.post_process:
            del self.output_layer
            self.value_head = torch.nn.Linear(
                spec.hidden_size, 1, bias=False, dtype=config.params_dtype, device=state.device
            )
        self.output_names = ("values",) if role == "critic" else ("log_probs", "entropy")
        for p in self.parameters():
            p.detach().zero_()  # padded vocabulary rows stay 0; all else is written from a checkpoint
        _mark_parallel_parameters(self)

    def forward(self, packed: Packed) -> Tensor:
        """One pipeline stage: hidden states [t / tp, 1, h], or the last stage's outputs [k, t]."""
        hidden = self.decoder(
            hidden_states=self.embedding(packed.input_ids, packed.position_ids) if self.pre_process else None,
            attention_mask=None,
            packed_seq_params=packed.with_frequencies(self.inv_freq, self.config.params_dtype),
        )
        return self._head(hidden, packed) if self.post_process else hidden

    def _head(self, hidden: Tensor, packed: Packed) -> Tensor:
        is_critic = self.role == "critic"
        if self.config.sequence_parallel:
            # The vocabulary-parallel head leaves each rank a part of the gradient; the value head leaves all of it.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=not is_critic
            )
        elif not is_critic:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        states = hidden[packed.predict_from, 0]  # [m, h]
        if is_critic:
            outputs = [self.value_head(states)[:, 0].float()]
        else:
            weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
            weight = self.output_layer.weight if weight is None else weight
            outputs = list(
                token_log_probs(states, weight, packed.targets, self.temperature, self.true_vocab_size, self.tp_group)
            )
        flat = states.new_zeros(len(outputs), packed.input_ids.shape[1], dtype=torch.float32)
        return flat.index_copy(1, packed.predict_at, torch.stack(outputs))


def _mark_parallel_parameters(model: torch.nn.Module) -> None:
    """Tells Megatron's gradient norm which parameters differ between TP ranks; it does so only when it initialises."""
    for module in model.modules():
        if isinstance(module, tensor_parallel.RowParallelLinear):
            dims = {"weight": 1}
        elif isinstance(module, tensor_parallel.ColumnParallelLinear | tensor_parallel.VocabParallelEmbedding):
            dims = {"weight": 0, "bias": 0}
        else:
            continue
        for name, dim in dims.items():
            if getattr(module, name, None) is not None and not hasattr(getattr(module, name), "tensor_model_parallel"):
                tensor_parallel.set_tensor_model_parallel_attributes(getattr(module, name), True, dim, 1)


def layer_specs(config: TransformerConfig, num_layers: int) -> TransformerBlockSubmodules:
    """Megatron's local layer spec with our norm and core attention, for the layers of one stage (even or not)."""
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RMSNorm
    parts.self_attention.submodules.core_attention = PackedAttention
    parts.mlp.submodules.activation_func = SwiGLU
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=RMSNorm)


def transformer_config(spec: ModelSpec, config: Config, state: ParallelState) -> TransformerConfig:
    """Megatron's view of a model and a layout."""
    p, dtype, cuda = config.parallel, DTYPES[config.model.dtype], state.device.type == "cuda"
    recompute = p.recompute == "full"
    return TransformerConfig(
        # Only numbers the layers here; uneven stages get their own count of layer specs.
        num_layers=-(-spec.num_layers // p.pp) * p.pp,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        sequence_parallel=p.sequence_parallel and p.tp > 1,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=not cuda,
        calculate_per_token_loss=True,  # gradients are summed over DP: the loss weights hold the denominator
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one that goes with variable lengths
        batch_p2p_comm=True,
        batch_p2p_sync=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        use_te_activation_func=True,  # means: the module of the spec, which is our SwiGLU
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )
