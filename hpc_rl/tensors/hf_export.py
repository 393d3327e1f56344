"""Writing Hugging Face directories: sharded safetensors, their index, config.json and the tokenizer's files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hpc_rl.errors import UserError
from hpc_rl.tensors.canonical import CLASSIFIER, VALUE_HEAD, ModelSpec
from hpc_rl.tensors.dtypes import ITEM_BYTES
from hpc_rl.tensors.hf import INDEX, SINGLE
from hpc_rl.tensors.shardmap import ShardMap, TensorSpec, whole_piece

MAX_FILE_BYTES = 5 * 10**9
_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}  # in transformers
_COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*",
           "generation_config.json", "*.model", "*.jinja")  # fmt: skip


def files_of(spec: ModelSpec, dtype: str, max_file_bytes: int = MAX_FILE_BYTES) -> dict[str, list[str]]:
    """File name -> canonical tensors in it, in model order, each file of at most ``max_file_bytes`` (or one tensor)."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, shape in spec.tensors().items():
        size = prod(shape) * ITEM_BYTES[dtype]
        if groups[-1] and used + size > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups)}


def hf_shard_map(
    spec: ModelSpec, files: Mapping[str, Sequence[str]], rank: int, num_ranks: int, dtype: str
) -> ShardMap:
    """The map of a rank that holds every ``num_ranks``-th file's tensors whole, under their canonical names."""
    shapes = spec.tensors()
    names = [name for file in list(files)[rank::num_ranks] for name in files[file]]
    pieces = tuple(whole_piece(name, shapes[name], name) for name in names)
    return ShardMap({name: TensorSpec(shapes[name], dtype) for name in names}, pieces)


def begin_export(out: str | Path) -> Path:
    """The folder to write into; ``finish_export`` gives it its name, so that a half-written one is never taken.

    Raises:
        UserError: if ``out`` exists.
    """
    target = Path(out)
    if target.exists():
        raise UserError(f"{target} exists: choose another directory, or remove it")
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def write_file(partial: Path, file: str, tensors: Mapping[str, Tensor]) -> None:
    """Writes one safetensors file of whole tensors."""
    values = {_stored_name(name): t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(values, partial / file, metadata={"format": "pt"})


def finish_export(
    out: str | Path,
    spec: ModelSpec,
    files: Mapping[str, Sequence[str]],
    config: Mapping[str, Any],
    dtype: str,
    tokenizer: str | Path | None = None,
) -> None:
    """Adds the index, config.json (with ``dtype``) and a tokenizer's files, then gives the folder its final name.

    Called once, after all files are written.
    """
    target = Path(out)
    partial = target.with_name(target.name + ".partial")
    if missing := [file for file in files if not (partial / file).exists()]:
        raise UserError(f"{partial / missing[0]} was not written: export again")
    if len(files) > 1:
        total = sum(prod(shape) for shape in spec.tensors().values()) * ITEM_BYTES[dtype]
        weight_map = {_stored_name(name): file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    values = {k: v for k, v in config.items() if k not in ("torch_dtype", "dtype")} | _head(config, spec.role)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    (partial / "config.json").write_text(json.dumps(values | {key: dtype}, indent=2, sort_keys=True) + "\n")
    if tokenizer is not None:
        copy_tokenizer(tokenizer, partial)
    partial.rename(target)


def _stored_name(name: str) -> str:
    return CLASSIFIER if name == VALUE_HEAD else name


def _head(config: Mapping[str, Any], role: str) -> dict[str, Any]:
    """What config.json must say of the head: a critic is transformers' sequence classifier with one label."""
    bases = [str(name).partition("For")[0] for name in config.get("architectures") or []]
    bases = bases or [_CLASSES[config["model_type"]]]
    if role == "actor":
        return {"architectures": [f"{base}ForCausalLM" for base in bases]}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [f"{base}ForSequenceClassification" for base in bases], **labels}


def copy_tokenizer(source: str | Path, target: Path) -> None:
    """Copies the files of a tokenizer, chat template and generation_config.json included, into a directory."""
    for pattern in _COPIED:
        for file in Path(source).glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def export_hf(
    out: str | Path,
    spec: ModelSpec,
    read: Callable[[str], Tensor],
    config: Mapping[str, Any],
    dtype: str,
    tokenizer: str | Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Writes a whole directory from one process, one file's tensors in memory at a time.

    Args:
        out: directory to make.
        spec: the model.
        read: canonical name -> whole tensor (of a checkpoint, say), in any dtype.
        config: what config.json shall hold.
        dtype: of the written weights.
        tokenizer: directory whose tokenizer files are copied.
        max_file_bytes: size of a file.

    Raises:
        UserError: if ``out`` exists, or naming a tensor whose shape is not the model's.
    """
    partial = begin_export(out)
    files = files_of(spec, dtype, max_file_bytes)
    for file, names in files.items():
        tensors = {}
        for name in names:
            value = read(name)
            if tuple(value.shape) != spec.tensors()[name]:
                raise UserError(f"{name} is {list(value.shape)}, but the model needs {list(spec.tensors()[name])}")
            tensors[name] = value.to(getattr(torch, dtype))
        write_file(partial, file, tensors)
    finish_export(out, spec, files, config, dtype, tokenizer)
    return Path(out)
