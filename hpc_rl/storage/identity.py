"""What else must be the same when a run goes on, beside the tensors: the tokenizer, above all. No torch in here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from hpc_rl.errors import UserError

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def tokenizer_digest(directory: str | Path) -> str:
    """xxh3-128, as hex, of the names and contents of a tokenizer's files: the same wherever the directory lies."""
    state = xxhash.xxh3_128()
    for name in _TOKENIZER_FILES:
        path = Path(directory) / name
        if path.is_file():
            state.update(f"{name} {path.stat().st_size}\n".encode())
            state.update(path.read_bytes())
    return str(state.hexdigest())


def check_identity(extra: Mapping[str, Any], path: str | Path, **expected: str) -> None:
    """Compares what a checkpoint was saved with: ``extra["identity"]``, a mapping of names to digests.

    Args: extra: of `Checkpointer.load`. path: the checkpoint, for the message. expected: name -> digest in this run.
    Raises: UserError naming the first that differs. What the checkpoint does not state is not compared.
    """
    saved = extra.get("identity", {})
    for name, value in expected.items():
        if name in saved and saved[name] != value:
            raise UserError(
                f"{path}: saved with another {name} (digest {saved[name]}) than this run has ({value}): "
                f"use the {name} that it was saved with"
            )
