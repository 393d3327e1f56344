"""Small HF directories made on the spot: a byte-level tokenizer and weights of random numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from hpc_rl.errors import UserError
from hpc_rl.tensors.canonical import EMBEDDING, ModelSpec

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(
    directory: Path,
    *,
    eos: str | None = "<eos>",
    chat_template: str | None = CHAT_TEMPLATE,
    bos: bool = False,
    extra: int = 0,
) -> int:
    """A tokenizer with one id a byte and <bos>, <eos>; ``bos`` frames texts as <bos> text <eos>. Returns its size."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", *(f"<extra{i}>" for i in range(extra))])
    if bos:
        ids = [(t, tokenizer.token_to_id(t)) for t in ("<bos>", "<eos>")]
        tokenizer.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=ids)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": eos}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return int(tokenizer.get_vocab_size())


def hf_config(**changes: Any) -> dict[str, Any]:
    """config.json of a tiny Qwen2 that fits `write_tokenizer`."""
    values = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 264,
        "max_position_embeddings": 4096,
    }
    return {k: v for k, v in (values | changes).items() if v is not None}


def write_model(directory: Path, *, vocab_rows: int | None = None, tokenizer: bool = True, **changes: Any) -> Path:
    """A model directory; ``vocab_rows``: rows of the embedding where they shall differ from vocab_size."""
    directory.mkdir(parents=True, exist_ok=True)
    config = hf_config(**changes)
    (directory / "config.json").write_text(json.dumps(config))
    try:
        shapes = ModelSpec.from_hf_config(config).tensors()
    except UserError:  # a model that the test wants refused
        shapes = {EMBEDDING: (8, 16)}
    rows = shapes[EMBEDDING][0] if vocab_rows is None else vocab_rows
    weights = {name: np.zeros((rows, 16) if name == EMBEDDING else shape, np.float32) for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors")
    if tokenizer:
        write_tokenizer(directory)
    return directory
