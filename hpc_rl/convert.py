"""`hpc-rl convert`: parameters between this checkpoint format, Hugging Face directories and torch DCP. One process."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hpc_rl.config import CheckpointConfig
from hpc_rl.config_check import read_hf_config_file
from hpc_rl.errors import UserError
from hpc_rl.export import export_checkpoint, open_source
from hpc_rl.storage.checkpoint import Checkpointer
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.hf import check_names, load_into, open_hf
from hpc_rl.tensors.hf_export import copy_tokenizer
from hpc_rl.tensors.shardmap import ShardMap, TensorSpec, whole_piece

Format = Literal["hpc_rl", "hf", "dcp"]


def convert(
    source: str | Path, out: str | Path, to: str, *, role: str = "actor", model: str | Path | None = None
) -> dict[str, Any]:
    """Writes the parameters of ``source`` in another format; all of them are in memory at a time.

    Args:
        source: a checkpoint or run directory of this system, an HF directory with safetensors, or a DCP directory.
        out: directory to make. ``hpc_rl``: a run directory with one checkpoint (step 0), without optimizer.
        to: ``hpc_rl``, ``hf`` or ``dcp``.
        role: ``actor`` or ``critic``.
        model: HF directory with config.json and tokenizer: needed from DCP, which holds neither.

    Returns: what was written. Raises: UserError for what does not fit, before anything is written.
    """
    source, out = Path(source), Path(out)
    if to not in get_args(Format):
        raise UserError(f"--to {to}: must be one of {', '.join(get_args(Format))}")
    if out.exists():
        raise UserError(f"{out} exists: choose another directory, or remove it")
    kind = format_of(source)
    if (kind == "hpc_rl") == (to == "hpc_rl"):
        raise UserError(
            f"{source} is {kind}: it converts to {'hf or dcp' if kind == 'hpc_rl' else 'hpc_rl'}, not to {to}"
        )
    if kind == "hpc_rl" and to == "hf":
        return export_checkpoint(source, out, role=role, model=model)
    if kind == "hpc_rl":
        opened = open_source(source, role, model)
        return write_dcp(out, opened.read(list(opened.spec.tensors())))
    folder = source if kind == "hf" else Path(model) if model is not None else None
    if folder is None:
        raise UserError(f"{source}: DCP has no config.json: give the model's HF directory with --model")
    spec = ModelSpec.from_hf_config(read_hf_config_file("--model", str(folder))).with_role(
        "critic" if role == "critic" else "actor"
    )
    tensors = read_hf(source, spec) if kind == "hf" else read_dcp(source, spec)
    return write_checkpoint(out, role, tensors, folder)


def format_of(path: Path) -> Format:
    """What a directory holds. Raises UserError for anything else."""
    if any(path.glob("*.safetensors")):
        return "hf"
    if (path / ".metadata").is_file():
        return "dcp"
    if (path / "manifest.json").is_file() or (path / "checkpoints").is_dir():
        return "hpc_rl"
    raise UserError(f"{path}: neither safetensors, nor torch DCP (.metadata), nor a checkpoint or run directory")


def whole_map(tensors: Mapping[str, Tensor], prefix: str = "") -> ShardMap:
    """The map of whole tensors by canonical name."""
    specs = {prefix + n: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
    return ShardMap(specs, tuple(whole_piece(n, s.shape, n.removeprefix(prefix)) for n, s in specs.items()))


def read_hf(source: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Every tensor of the model, in the dtype that it is stored in."""
    directory = open_hf(source)
    check_names(directory, spec)
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, directory.dtype(name))) for name, shape in spec.tensors().items()
    }
    load_into(whole_map(tensors), tensors, directory)
    return tensors


def read_dcp(source: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Every tensor of the model. Its names may stand behind a prefix (``model.``, ``module.``, ``app.``)."""
    found = {
        name: data
        for name, data in dcp.FileSystemReader(source).read_metadata().state_dict_metadata.items()
        if isinstance(data, TensorStorageMetadata)
    }
    shapes = spec.tensors()
    first = next(iter(shapes))
    prefix = min((name.removesuffix(first) for name in found if name.endswith(first)), key=len, default="")
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        data = found.get(prefix + name)
        if data is None or tuple(data.size) != shape:
            has = "is missing" if data is None else f"is {list(data.size)}"
            raise UserError(f"{source}: {prefix + name} {has}, but the model needs {list(shape)}: give its own --model")
        tensors[prefix + name] = torch.empty(shape, dtype=data.properties.dtype)
    dcp.load(tensors, checkpoint_id=source, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def write_dcp(out: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A DCP directory of whole tensors by canonical name; it has its name only when it is complete."""
    partial = out.with_name(out.name + ".partial")
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(partial), no_dist=True)
    partial.rename(out)
    return {"dcp": str(out), "tensors": len(tensors), "num_params": sum(t.numel() for t in tensors.values())}


def write_checkpoint(out: Path, role: str, tensors: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    """A run directory with a checkpoint of the parameters, and the model's config.json and tokenizer."""
    (out / "model").mkdir(parents=True)
    shutil.copyfile(folder / "config.json", out / "model" / "config.json")
    copy_tokenizer(folder, out / "model")
    checkpointer = Checkpointer(out, CheckpointConfig())
    try:
        checkpointer.save(
            0, {role: (whole_map(tensors, "param/"), tensors)}, {"step": 0, "converted_from": str(folder)}
        )
        checkpointer.wait()
        path = checkpointer.latest()
    finally:
        checkpointer.close()
    return {"checkpoint": str(path), "tensors": len(tensors), "num_params": sum(t.numel() for t in tensors.values())}
