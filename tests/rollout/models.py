"""Tiny random models that vLLM can run on CPU, and what Hugging Face computes with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB_SIZE = 100  # vLLM pads it to 128
EOS = 3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.2,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen2_tied": {
        **_SIZES, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True,
    },
    "qwen3": {**_SIZES, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {
        **_SIZES,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
}  # fmt: skip


def write_model(root: Path, kind: str) -> str:
    """A directory with config.json alone."""
    directory = root / kind
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[kind]))
    return str(directory)


def hf_model(kind: str, seed: int) -> Any:
    """The float32 HF model with random weights, biases and norms included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(CONFIGS[kind])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def canonical(model: Any) -> dict[str, Tensor]:
    """The model's weights by the names of a checkpoint, where each expert has its own."""
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for k, fused in enumerate(value):
                gate, up = fused.chunk(2)
                out[name.replace("gate_up_proj", f"{k}.gate_proj.weight")] = gate
                out[name.replace("gate_up_proj", f"{k}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            for k, down in enumerate(value):
                out[name.replace("down_proj", f"{k}.down_proj.weight")] = down
        elif not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            out[name] = value
    return out


@torch.no_grad()
def greedy(model: Any, prompt: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The most likely continuation, EOS included."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, max_new_tokens=limit, do_sample=False, eos_token_id=EOS, pad_token_id=0)
    return tuple(out[0, len(prompt) :].tolist())


@torch.no_grad()
def log_probs(model: Any, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float) -> Tensor:
    """log_softmax(logits / T) of each response token, [len(response)]."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def character_tokenizer() -> Any:
    """A tokenizer without files: id 3 is EOS, ids from 5 on are the printable characters from the blank on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<unk>", "<bos>", "<eos>", "<x>", *(chr(c) for c in range(32, 127))]
    inner = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
