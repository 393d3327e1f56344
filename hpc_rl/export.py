"""`hpc-rl export`: a checkpoint's weights as a Hugging Face directory, read file by file on one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_rl.config import CheckpointConfig
from hpc_rl.config_check import read_hf_config_file
from hpc_rl.errors import UserError
from hpc_rl.run_dir import find_run_checkpoint
from hpc_rl.storage import manifest
from hpc_rl.storage.checkpoint import Checkpointer, load_index
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.hf_export import MAX_FILE_BYTES, begin_export, files_of, finish_export, write_file
from hpc_rl.tensors.shardmap import ShardMap, TensorSpec, whole_piece

ROLES = ("actor", "critic")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Source:
    """One model of a checkpoint. ``stored``: full name (``actor/param/N``) -> spec, of all in the checkpoint."""

    checkpoint: Path
    role: str
    spec: ModelSpec
    stored: Mapping[str, TensorSpec]
    hf_config: Mapping[str, Any]
    folder: Path  # of the tokenizer, if there is one

    @property
    def dtype(self) -> str:
        """Of the weights, as the run computed with them."""
        return self.stored[f"{self.role}/param/{next(iter(self.spec.tensors()))}"].dtype

    def read(self, names: list[str], dtype: str | None = None) -> dict[str, Tensor]:
        """Whole tensors by canonical name, digests verified, as ``dtype`` (None: as stored).

        float32 of a bfloat16 run are the optimizer's main weights, which know more digits than the model's.
        """
        main = [f"{self.role}/main/{name}" in self.stored for name in names]
        kind = "main" if dtype == "float32" and all(main) else "param"
        specs = {f"{kind}/{name}": self.stored[f"{self.role}/{kind}/{name}"] for name in names}
        tensors = {name: torch.empty(s.shape, dtype=getattr(torch, s.dtype)) for name, s in specs.items()}
        wanted = ShardMap(specs, tuple(whole_piece(name, s.shape, name) for name, s in specs.items()))
        reader = Checkpointer(self.checkpoint.parent.parent, CheckpointConfig())
        reader.load(self.checkpoint, {self.role: (wanted, tensors)})
        return {name.removeprefix(f"{kind}/"): _cast(t, dtype) for name, t in tensors.items()}


def _cast(tensor: Tensor, dtype: str | None) -> Tensor:
    return tensor if dtype is None else tensor.to(getattr(torch, dtype))


def open_source(path: str | Path, role: str = "actor", model: str | Path | None = None) -> Source:
    """The model ``role`` of a checkpoint, or of a run's newest one.

    Args:
        path: checkpoint or run directory.
        role: ``actor`` or ``critic``.
        model: HF directory with config.json and tokenizer; None: the run's own ``model/``.

    Raises:
        UserError: no checkpoint, no such role in it, no config.json, or one that does not fit the tensors.
    """
    if role not in ROLES:
        raise UserError(f"--role {role}: must be {' or '.join(ROLES)}")
    checkpoint = find_run_checkpoint(path)
    content = manifest.check(checkpoint)
    stored = load_index(checkpoint, content).specs
    roles = sorted({name.split("/")[0] for name in stored} & set(ROLES))
    if role not in roles:
        raise UserError(f"{checkpoint}: holds no {role}, only {', '.join(roles) or 'other things'}: change --role")
    folder = Path(model) if model is not None else checkpoint.parent.parent / "model"
    own = folder / role if model is None and (folder / role).is_dir() else folder
    if not (own / "config.json").is_file():
        raise UserError(
            f"{own / 'config.json'}: not there, but the model's sizes and names come from it: give the directory of "
            "the model that the run started from with --model"
        )
    hf_config = read_hf_config_file("--model", str(own))
    spec = ModelSpec.from_hf_config(hf_config).with_role("critic" if role == "critic" else "actor")
    _check_shapes(checkpoint, role, spec, stored, own)
    return Source(checkpoint, role, spec, stored, hf_config, folder)


def _check_shapes(
    checkpoint: Path, role: str, spec: ModelSpec, stored: Mapping[str, TensorSpec], folder: Path
) -> None:
    for name, shape in spec.tensors().items():
        found = stored.get(f"{role}/param/{name}")
        if found is None or tuple(found.shape) != shape:
            has = "has no such tensor" if found is None else f"has {list(found.shape)}"
            raise UserError(
                f"{folder / 'config.json'}: needs {name} {list(shape)}, but {checkpoint} {has}: give the model that "
                "the run started from with --model"
            )


def has_tokenizer(folder: Path) -> bool:
    """Whether a directory holds a tokenizer's files."""
    return any(folder.glob("tokenizer*"))


def export_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    role: str = "actor",
    dtype: str | None = None,
    model: str | Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> dict[str, Any]:
    """Writes a Hugging Face directory. At most one file's tensors are in memory at a time.

    Args:
        source: a checkpoint, or a run directory (its newest checkpoint).
        out: directory to make: safetensors, config.json, tokenizer.
        role: ``actor`` (a causal LM) or ``critic`` (a sequence classifier with one label).
        dtype: of the written weights; None: as the run computed with them.
        model: HF directory of config.json and tokenizer, for a checkpoint that lies outside its run.
        max_file_bytes: size of a safetensors file.

    Returns: what was written: ``checkpoint``, ``hf``, ``role``, ``dtype``, ``num_params``, ``files``, ``tokenizer``.
    Raises: UserError, before anything is written, for what does not fit.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}")
    opened, partial = open_source(source, role, model), begin_export(out)
    dtype = dtype or opened.dtype
    files = files_of(opened.spec, dtype, max_file_bytes)
    for file, names in files.items():
        write_file(partial, file, opened.read(names, dtype))
    tokenizer = opened.folder if has_tokenizer(opened.folder) else None
    finish_export(out, opened.spec, files, opened.hf_config, dtype, tokenizer)
    return {
        "checkpoint": str(opened.checkpoint),
        "hf": str(out),
        "role": role,
        "dtype": dtype,
        "num_params": opened.spec.num_params,
        "files": len(files),
        "tokenizer": tokenizer is not None,
    }
