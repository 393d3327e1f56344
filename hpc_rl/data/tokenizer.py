"""The tokenizer of a run: loaded whole, or only looked at (which takes no import of transformers)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.config import Config
from hpc_rl.errors import UserError


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What must fit the model: token -> id, added tokens included, and the token that ends a response."""

    vocab: Mapping[str, int]
    eos_token: str | None

    @property
    def num_ids(self) -> int:
        """The largest id, plus one."""
        return max(self.vocab.values(), default=-1) + 1


def tokenizer_path(config: Config) -> tuple[str, str]:
    """The key that names the tokenizer's directory, and that directory."""
    if config.model.tokenizer is not None:
        return "model.tokenizer", config.model.tokenizer
    assert config.model.path is not None, "cross_check refuses a configuration without a tokenizer"
    return "model.path", config.model.path


def load_tokenizer(config: Config) -> Any:
    """The run's HF tokenizer, from local files alone. Raises UserError if it cannot be loaded or has no EOS token."""
    key, directory = tokenizer_path(config)
    tokenizer = _load(key, directory)
    if tokenizer.eos_token_id is None:
        raise _no_eos(key, directory)
    return tokenizer


def tokenizer_facts(key: str, directory: str) -> TokenizerFacts:
    """Looks at the tokenizer that ``key`` names, in a fraction of a second if it has a tokenizer.json.

    Raises:
        UserError: no tokenizer there, not readable, or without an EOS token of its vocabulary.
    """
    path = Path(directory) / "tokenizer.json"
    if path.is_file():
        vocab, eos_token = _fast_vocab(key, path), _eos_token(Path(directory))
    else:
        tokenizer = _load(key, directory)
        vocab, eos_token = tokenizer.get_vocab(), tokenizer.eos_token
    if eos_token is None:
        raise _no_eos(key, directory)
    if eos_token not in vocab:
        raise UserError(
            f"{key} = {directory}: the tokenizer's eos_token is {eos_token!r}, which is not in its vocabulary: name "
            "one of its tokens in tokenizer_config.json"
        )
    return TokenizerFacts(vocab, eos_token)


def _fast_vocab(key: str, path: Path) -> dict[str, int]:
    from tokenizers import Tokenizer  # 0.03 s, where transformers takes 5

    try:
        vocab: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{key}: {path} is not a tokenizer ({_reason(error)}): fetch the model again") from None
    return vocab


def _eos_token(directory: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        if path.is_file():
            try:
                token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError) as error:
                raise UserError(f"{path}: is no JSON object ({_reason(error)}): fetch the model again") from None
            if token is not None:
                return str(token["content"] if isinstance(token, dict) else token)
    return None


def _load(key: str, directory: str) -> Any:
    if not Path(directory).is_dir():
        raise UserError(f"{key} = {directory}: no such directory (seen from {Path.cwd()}): correct {key}")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # whatever its many loaders raise
        raise UserError(
            f"{key} = {directory}: holds no tokenizer that can be loaded ({_reason(error)}): copy the model's "
            "tokenizer.json and tokenizer_config.json there, or set model.tokenizer"
        ) from None


def _no_eos(key: str, directory: str) -> UserError:
    return UserError(
        f"{key} = {directory}: the tokenizer has no eos_token, but a response must be able to end: set eos_token in "
        "its tokenizer_config.json"
    )


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
