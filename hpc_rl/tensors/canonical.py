"""What a model is made of: the canonical tensors (Hugging Face names and shapes) that follow from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from hpc_rl.errors import UserError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")
VALUE_HEAD = "value_head.weight"
EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
CLASSIFIER = "score.weight"  # of a stored sequence classifier: with one label it is a critic's value head
IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # computed, but stored by some old checkpoints

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and switches of a decoder-only model. ``role`` critic: a value head stands in the output layer's place."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    max_position_embeddings: int
    rope: Mapping[str, Any] = field(hash=False)  # rope_theta, rope_type and what the type needs
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    moe_layers: tuple[int, ...] = ()  # layers whose MLP is a mixture of experts
    initializer_range: float = 0.02
    dtype: str = "bfloat16"  # as the checkpoint stores it
    role: Literal["actor", "critic"] = "actor"

    @staticmethod
    def from_hf_config(config: Mapping[str, Any], role: Literal["actor", "critic"] = "actor") -> ModelSpec:
        """The spec that a Hugging Face ``config.json`` describes.

        Raises:
            UserError: for an architecture or a switch that is not supported.
        """
        kind = config.get("model_type")
        _check_supported(config)
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            spec = ModelSpec(
                model_type=str(kind),
                num_layers=int(config["num_hidden_layers"]),
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                vocab_size=int(config["vocab_size"]),
                tie_embeddings=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=kind == "qwen2",
                qk_norm=kind in ("qwen3", "qwen3_moe"),
                norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
                rope=_rope(config),
                initializer_range=float(config.get("initializer_range", 0.02)),
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
                role=role,
            )
            return replace(spec, **_moe(config, spec.num_layers)) if kind == "qwen3_moe" else spec
        except KeyError as missing:
            raise UserError(f"the model's config.json has no {missing}, which model_type {kind} needs") from None

    def with_role(self, role: Literal["actor", "critic"]) -> ModelSpec:
        """The same backbone as an actor or a critic."""
        return replace(self, role=role)

    def tensors(self) -> Mapping[str, Shape]:
        """Canonical name -> shape, in model order. A tied output layer is not listed: it is the embedding."""
        return _tensors(self)

    def layer_tensors(self, layer: int) -> dict[str, Shape]:
        """The tensors of one layer, by full name."""
        return {f"model.layers.{layer}.{name}": shape for name, shape in _layer(self, layer in self.moe_layers).items()}

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        total = 0
        for shape in self.tensors().values():
            count = 1
            for n in shape:
                count *= n
            total += count
        return total


_ROPE_KEYS: Mapping[str, tuple[str, ...]] = {  # rope_type -> what its frequencies are made of, beside rope_theta
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _check_supported(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise UserError(f"model_type {kind!r} is not supported: use one of {', '.join(ARCHITECTURES)}")
    if config.get("quantization_config"):
        raise UserError(f"the {kind} checkpoint is quantized: use its unquantized weights")
    for switch in ("mlp_bias", "use_sliding_window", "attention_bias"):
        if config.get(switch) and not (switch == "attention_bias" and kind == "qwen2"):
            raise UserError(f"{switch} = true is not supported for model_type {kind}: use a model without it")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act {config['hidden_act']!r} is not supported: use a model with silu")
    rope = _rope(config)
    if rope["rope_type"] not in _ROPE_KEYS:
        raise UserError(
            f"rope_type {rope['rope_type']!r} of the model is not supported: use a model with one of {', '.join(_ROPE_KEYS)}"
        )
    missing = [key for key in _ROPE_KEYS[rope["rope_type"]] if not isinstance(rope.get(key), int | float)]
    if missing:
        raise UserError(f"rope_type {rope['rope_type']!r} needs the number {missing[0]}: add it to the model's rope values")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    # transformers 5 writes rope_parameters; earlier ones rope_theta beside rope_scaling (with "type" in old files).
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    rope.setdefault("rope_theta", float(config.get("rope_theta") or 10000.0))
    return rope


def _moe(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    experts = int(config["num_experts"] if "num_experts" in config else config["num_local_experts"])
    step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or []
    return {
        "num_experts": experts,
        "experts_per_token": int(config["num_experts_per_tok"]),
        "moe_intermediate_size": int(config["moe_intermediate_size"]),
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "moe_layers": tuple(i for i in range(num_layers) if experts and i not in dense and (i + 1) % step == 0),
    }


@lru_cache(maxsize=16)
def _tensors(spec: ModelSpec) -> Mapping[str, Shape]:
    out: dict[str, Shape] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        out |= spec.layer_tensors(layer)
    out["model.norm.weight"] = (spec.hidden_size,)
    if spec.role == "critic":
        out[VALUE_HEAD] = (1, spec.hidden_size)
    elif not spec.tie_embeddings:
        out[OUTPUT] = (spec.vocab_size, spec.hidden_size)
    return out


@lru_cache(maxsize=32)
def _layer(spec: ModelSpec, moe: bool) -> Mapping[str, Shape]:
    hidden, query, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    out: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    for name, rows in (("q", query), ("k", kv), ("v", kv)):
        out[f"self_attn.{name}_proj.weight"] = (rows, hidden)
        if spec.qkv_bias:
            out[f"self_attn.{name}_proj.bias"] = (rows,)
    out["self_attn.o_proj.weight"] = (hidden, query)
    if spec.qk_norm:
        out |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    out["post_attention_layernorm.weight"] = (hidden,)
    if not moe:
        return out | _mlp("mlp.", hidden, spec.intermediate_size)
    out["mlp.gate.weight"] = (spec.num_experts, hidden)
    for expert in range(spec.num_experts):
        out |= _mlp(f"mlp.experts.{expert}.", hidden, spec.moe_intermediate_size)
    return out


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }
