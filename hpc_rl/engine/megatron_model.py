"""The Megatron-core GPT that actor, critic and reference share: no Transformer Engine, packed sequences, two heads."""

from __future__ import annotations

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
from hpc_rl.engine.attention import packed_attention, rotary_frequencies
from hpc_rl.engine.head import token_log_probs
from hpc_rl.engine.kernels import swiglu
from hpc_rl.engine.packed import Packed
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
        attended = packed_attention(query[:, 0], key[:, 0], value[:, 0], packed_seq_params, self.scale)
        return attended.flatten(1)[:, None]


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
        return packed.spread(outputs)


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
