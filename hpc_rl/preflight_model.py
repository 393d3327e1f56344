"""Model directories: architecture, weights that are all there, a tokenizer that fits. Reads headers, no weights."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_rl.config import Config
from hpc_rl.config_check import check_model_keys, read_hf_config, read_hf_config_file
from hpc_rl.data.tokenizer import TokenizerFacts, tokenizer_facts, tokenizer_path
from hpc_rl.errors import UserError
from hpc_rl.tensors.canonical import CLASSIFIER, EMBEDDING, IGNORED_SUFFIX, OUTPUT, VALUE_HEAD, ModelSpec

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def check_models(config: Config) -> dict[str, Any]:
    """Checks the actor, and the critic's and the reference's directories where the configuration names them.

    Returns:
        The actor's HF config values.

    Raises:
        UserError: one line with the value, the rule and the fix.
    """
    check_model_keys(config)
    hf_config = read_hf_config(config)
    _check_architecture("model.path" if config.model.path else "model.config", hf_config)
    if config.model.path is not None:
        check_weights("model.path", Path(config.model.path), hf_config)
    key, directory = tokenizer_path(config)
    if not Path(directory).is_dir():
        raise UserError(f"{key} = {directory}: no such directory (seen from {Path.cwd()}): correct {key}")
    facts = tokenizer_facts(key, directory)
    _check_vocab("model.path" if config.model.path else "model.config", hf_config, facts, directory)
    for other in ("critic_path", "reference_path"):
        path = getattr(config.model, other)
        if path is not None and path != config.model.path:
            _check_other(f"model.{other}", path, facts, directory)
    return hf_config


def _check_other(key: str, directory: str, facts: TokenizerFacts, tokenizer_dir: str) -> None:
    """A second model reads the actor's tokens: its vocabulary must be the same."""
    hf_config = read_hf_config_file(key, directory)
    _check_architecture(key, hf_config)
    check_weights(key, Path(directory), hf_config)
    _check_vocab(key, hf_config, facts, tokenizer_dir)
    own, used = (Path(d) / "tokenizer.json" for d in (directory, tokenizer_dir))
    if not own.is_file() or (used.is_file() and own.read_bytes() == used.read_bytes()):
        return
    vocab = tokenizer_facts(key, directory).vocab
    different = sorted(t for t in vocab.keys() | facts.vocab.keys() if vocab.get(t) != facts.vocab.get(t))
    if different:
        token = different[0]
        raise UserError(
            f"{key} = {directory}: its vocabulary is not that of {tokenizer_dir} ({len(different)} tokens differ, "
            f"{token!r} has id {vocab.get(token)} there and {facts.vocab.get(token)} here), but both read the same "
            "tokens: use a model of the same family"
        )


def _check_architecture(key: str, hf_config: Mapping[str, Any]) -> None:
    try:
        ModelSpec.from_hf_config(hf_config)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def _check_vocab(key: str, hf_config: Mapping[str, Any], facts: TokenizerFacts, tokenizer_dir: str) -> None:
    vocab_size = hf_config["vocab_size"]
    if facts.num_ids > vocab_size:
        raise UserError(
            f"{key}: vocab_size is {vocab_size}, but the tokenizer {tokenizer_dir} has ids up to {facts.num_ids - 1}: "
            "use the tokenizer that belongs to the model"
        )


def check_weights(key: str, directory: Path, hf_config: Mapping[str, Any]) -> None:
    """Refuses weights that are missing, cut short, or of another vocabulary than config.json says. Raises UserError."""
    header: dict[str, Any] = {}
    for file in _weight_files(key, directory):
        header.update(_read_header(key, file))
    shape = header.get(EMBEDDING, {}).get("shape")
    expected = [hf_config["vocab_size"], hf_config["hidden_size"]]
    if shape is not None and shape != expected:
        raise UserError(
            f"{key} = {directory}: {EMBEDDING} is {shape}, but config.json says [vocab_size, hidden_size] = "
            f"{expected}: the weights and config.json are of different models: fetch both again"
        )
    _check_names(key, directory, hf_config, header)


def _check_names(key: str, directory: Path, hf_config: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Every tensor of the architecture is there and none beside: what no model reads would be dropped in silence."""
    spec = ModelSpec.from_hf_config(hf_config)
    if spec.moe_layers:  # experts are stored in more than one way
        return
    wanted, spare = spec.tensors(), {OUTPUT, VALUE_HEAD, CLASSIFIER}
    for name in header:
        if name not in wanted and name not in spare and not name.endswith(IGNORED_SUFFIX):
            raise UserError(
                f"{key} = {directory}: holds {name} {header[name]['shape']}, which a {spec.model_type} model with this "
                "config.json does not have: correct config.json (attention_bias, model_type), or take the tensor out"
            )
    for name, shape in wanted.items():
        if name in spare:  # which of the heads is needed depends on the role
            continue
        if name not in header:
            raise UserError(f"{key} = {directory}: has no {name} {list(shape)}: fetch the model again")
        if header[name]["shape"] != list(shape):
            raise UserError(
                f"{key} = {directory}: {name} is {header[name]['shape']}, but config.json asks for {list(shape)}: the "
                "weights and config.json are of different models: fetch both again"
            )


def _weight_files(key: str, directory: Path) -> list[Path]:
    if (directory / _INDEX).is_file():
        try:
            names = sorted(set(json.loads((directory / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{directory / _INDEX}: is no index of safetensors files: fetch the model again") from None
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (directory / name).is_file()]
    if not missing:
        return [directory / name for name in names]
    if any(directory.glob("pytorch_model*.bin")):
        fix = "it has pytorch_model.bin: convert it with transformers' save_pretrained"
    else:
        fix = f"fetch the model again ({len(missing)} of {len(names)} files missing)"
    raise UserError(f"{key} = {directory}: has no {missing[0]}, but weights must be safetensors: {fix}")


def _read_header(key: str, path: Path) -> dict[str, Any]:
    """The tensors that a safetensors file declares; checks that it is as long as they need."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _MAX_HEADER_BYTES):
                raise ValueError("bad header length")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
        pointer = " (a git-lfs pointer: run git lfs pull)" if size < 1024 else ""
        raise UserError(f"{key}: {path} is no safetensors file{pointer}: fetch the model again") from None
    if end != size:
        raise UserError(f"{key}: {os.fspath(path)} has {size} bytes, but its header says {end}: fetch that file again")
    return dict(header)
