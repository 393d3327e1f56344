"""Sizes of published models, so that a cluster's job can be planned where its weights are not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hpc_rl.config_check import read_hf_config_file

_COLUMNS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip
_LLAMA, _QWEN2, _QWEN3 = ("llama", 131072), ("qwen2", 32768), ("qwen3", 40960)
_ROWS: dict[str, tuple[tuple[str, int], tuple[int, ...]]] = {
    "smollm2-135m": (("llama", 8192), (576, 1536, 30, 9, 3, 64, 49152, 1)),
    "smollm2_critic": (("llama", 8192), (576, 1536, 6, 9, 3, 64, 49152, 1)),  # as configs/ppo_smollm2.yaml has it made
    "llama-3.2-1b": (_LLAMA, (2048, 8192, 16, 32, 8, 64, 128256, 1)),
    "llama-3.2-3b": (_LLAMA, (3072, 8192, 28, 24, 8, 128, 128256, 1)),
    "llama-3.1-8b": (_LLAMA, (4096, 14336, 32, 32, 8, 128, 128256, 0)),
    "llama-3.1-70b": (_LLAMA, (8192, 28672, 80, 64, 8, 128, 128256, 0)),
    "llama-3.3-70b": (_LLAMA, (8192, 28672, 80, 64, 8, 128, 128256, 0)),
    "llama-3.1-405b": (_LLAMA, (16384, 53248, 126, 128, 8, 128, 128256, 0)),
    "qwen2.5-0.5b": (_QWEN2, (896, 4864, 24, 14, 2, 64, 151936, 1)),
    "qwen2.5-1.5b": (_QWEN2, (1536, 8960, 28, 12, 2, 128, 151936, 1)),
    "qwen2.5-3b": (_QWEN2, (2048, 11008, 36, 16, 2, 128, 151936, 1)),
    "qwen2.5-7b": (_QWEN2, (3584, 18944, 28, 28, 4, 128, 152064, 0)),
    "qwen2.5-14b": (_QWEN2, (5120, 13824, 48, 40, 8, 128, 152064, 0)),
    "qwen2.5-32b": (_QWEN2, (5120, 27648, 64, 40, 8, 128, 152064, 0)),
    "qwen2.5-72b": (_QWEN2, (8192, 29568, 80, 64, 8, 128, 152064, 0)),
    "qwen3-0.6b": (_QWEN3, (1024, 3072, 28, 16, 8, 128, 151936, 1)),
    "qwen3-1.7b": (_QWEN3, (2048, 6144, 28, 16, 8, 128, 151936, 1)),
    "qwen3-4b": (_QWEN3, (2560, 9728, 36, 32, 8, 128, 151936, 1)),
    "qwen3-8b": (_QWEN3, (4096, 12288, 36, 32, 8, 128, 151936, 0)),
    "qwen3-14b": (_QWEN3, (5120, 17408, 40, 40, 8, 128, 151936, 0)),
    "qwen3-32b": (_QWEN3, (5120, 25600, 64, 64, 8, 128, 151936, 0)),
}
_ALIASES = {"smollm2": "smollm2-135m"}


def published_name(path: str) -> str | None:
    """The published model that a directory which is not there is named after, or None: ``models/Qwen2.5-32B-Instruct``."""
    if Path(path).exists():
        return None
    name = re.sub(r"-(instruct|base|chat)$", "", Path(path).name.lower())
    name = _ALIASES.get(name.removeprefix("meta-"), name.removeprefix("meta-"))
    return name if name in _ROWS else None


def model_config(key: str, path: str) -> dict[str, Any]:
    """The HF config values of a directory, or of the published model that it is named after.

    Raises: UserError if there is neither.
    """
    name = published_name(path)
    if name is None:
        return read_hf_config_file(key, path)
    (model_type, positions), sizes = _ROWS[name]
    values: dict[str, Any] = dict(zip(_COLUMNS, sizes, strict=True))
    values["tie_word_embeddings"] = bool(values["tie_word_embeddings"])
    return values | {"model_type": model_type, "max_position_embeddings": positions}
