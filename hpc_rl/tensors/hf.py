"""Hugging Face directories: opening one, and filling local tensors from it so that each rank reads only its slices."""

from __future__ import annotations

import json
import struct
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpc_rl.errors import UserError
from hpc_rl.tensors.canonical import OUTPUT, VALUE_HEAD, ModelSpec
from hpc_rl.tensors.shardmap import ShardMap, view

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CLASSIFIER = "score.weight"  # a sequence classifier with one label is a critic
_ALIASES = {CLASSIFIER: VALUE_HEAD}
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # computed, but stored by some old checkpoints
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Stored(NamedTuple):
    """Where a canonical tensor lies: ``key`` of a file, within it index ``lead``, from row ``row`` on."""

    file: str
    key: str
    lead: tuple[int, ...] = ()
    row: int = 0


@dataclass(frozen=True)
class HFDirectory:
    """An open directory: ``config`` as its config.json says, ``stored``: canonical name -> place."""

    path: Path
    config: Mapping[str, Any]
    stored: Mapping[str, Stored]
    _headers: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    _files: dict[str, Any] = field(default_factory=dict, repr=False)

    def spec(self, role: Literal["actor", "critic"] = "actor") -> ModelSpec:
        """The model that config.json describes."""
        return ModelSpec.from_hf_config(self.config, role)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a canonical tensor as stored (of a whole fused tensor's row count, if it is a part of one)."""
        place = self.stored[name]
        return tuple(self._header(place)["shape"][len(place.lead) :])

    def dtype(self, name: str) -> str:
        """Dtype of a canonical tensor as stored."""
        place = self.stored[name]
        kind = self._header(place)["dtype"]
        if kind not in _DTYPES:
            raise UserError(f"{name} in {self.path / place.file} has dtype {kind}: use unquantized weights")
        return _DTYPES[kind]

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The box ``[start, start + shape)`` of a canonical tensor, on the CPU, as stored; reads no more than that."""
        place = self.stored[name]
        try:
            if place.file not in self._files:
                self._files[place.file] = safe_open(self.path / place.file, framework="pt")
            lazy = self._files[place.file].get_slice(place.key)
            box = [slice(s, s + n) for s, n in zip(start, shape, strict=True)]
            if box and place.row:
                box[0] = slice(start[0] + place.row, start[0] + place.row + shape[0])
            value: Tensor = lazy[(*(slice(i, i + 1) for i in place.lead), *box)]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{name} cannot be read from {self.path / place.file}: {error}") from error
        return value.view(shape)

    def _header(self, place: Stored) -> dict[str, Any]:
        if place.file not in self._headers:
            self._headers[place.file] = _header(self.path / place.file)
        if place.key not in self._headers[place.file]:
            raise UserError(f"{self.path / INDEX} says that {place.file} holds {place.key}, which it does not")
        return dict(self._headers[place.file][place.key])


def open_hf(path: str | Path) -> HFDirectory:
    """Opens a directory with config.json and model.safetensors, or an index and its files.

    Raises:
        UserError: naming the file that is missing or broken.
    """
    folder = Path(path)
    config = _json(folder / "config.json")
    if (folder / INDEX).exists():
        keys = dict(_json(folder / INDEX)["weight_map"])
        for file in sorted(set(keys.values())):
            if not (folder / file).exists():
                raise UserError(f"{folder / INDEX} names {file}, which is missing: copy the whole directory")
    elif (folder / SINGLE).exists():
        keys = dict.fromkeys(_header(folder / SINGLE), SINGLE)
    else:
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}: give a directory with safetensors weights")
    stored: dict[str, Stored] = {}
    for key, file in keys.items():
        stored |= _places(folder, key, file)
    return HFDirectory(folder, config, stored)


def check_names(source: HFDirectory, spec: ModelSpec, optional: Collection[str] = ()) -> None:
    """Raises UserError if the directory lacks a tensor of ``spec``, has one of another shape, or one too many."""
    wanted = spec.tensors()
    for name, shape in wanted.items():
        if name not in source.stored:
            if name in optional:
                continue
            raise UserError(f"{name}, of shape {list(shape)}, is missing in {source.path}")
        _check_shape(source, name, shape)
    # An actor's output layer is of no use to a critic, nor the reverse; a tied one repeats the embedding.
    spare = {OUTPUT, VALUE_HEAD}
    for name in source.stored:
        if name not in wanted and name not in spare and not name.endswith(_IGNORED_SUFFIX):
            raise UserError(
                f"{source.path} holds {name}, of shape {list(source.shape(name))}, unknown to {spec.model_type}"
            )


@dataclass
class LoadReport:
    """What ``load_into`` did on this rank. ``casts``: "float32 -> bfloat16" -> boxes; ``missing``: optional tensors."""

    bytes_read: int = 0
    seconds: float = 0.0
    casts: Counter[str] = field(default_factory=Counter)
    missing: list[str] = field(default_factory=list)


@torch.no_grad()
def load_into(
    shard_map: ShardMap, tensors: Mapping[str, Tensor], source: HFDirectory, optional: Collection[str] = ()
) -> LoadReport:
    """Fills this rank's tensors from an HF directory, reading only the boxes the map names; padding becomes zero.

    Args:
        shard_map: of this rank.
        tensors: local name -> contiguous tensor on any device. Values are cast to its dtype, which the report states.
        source: the directory.
        optional: canonical names that may be missing there (a critic's new value head); they are reported.

    Raises:
        UserError: naming a tensor that is missing or has another shape, before anything is written.
    """
    begin, report = time.perf_counter(), LoadReport()
    for name, spec in shard_map.specs.items():
        if name in source.stored:
            _check_shape(source, name, spec.shape)
        elif name in optional:
            report.missing.append(name)
        else:
            raise UserError(f"{name}, of shape {list(spec.shape)}, is missing in {source.path}")
    for local in shard_map.padding:
        tensors[local].zero_()
    for piece in shard_map.pieces:
        if piece.name in source.stored:
            value = source.read(piece.name, piece.start, piece.shape)
            target = view(piece, tensors[piece.local].detach())
            target.copy_(value)
            report.bytes_read += value.numel() * value.element_size()
            if value.dtype != target.dtype:
                report.casts[f"{value.dtype} -> {target.dtype}".replace("torch.", "")] += 1
    report.seconds = time.perf_counter() - begin
    return report


def _check_shape(source: HFDirectory, name: str, shape: tuple[int, ...]) -> None:
    stored = source.shape(name)
    place = source.stored[name]
    if place.key.endswith("gate_up_proj") and stored == (2 * shape[0], *shape[1:]):
        return
    if stored != shape:
        raise UserError(f"{name} is {list(stored)} in {source.path / place.file}, but the model needs {list(shape)}")


def _places(folder: Path, key: str, file: str) -> dict[str, Stored]:
    # Experts saved as one tensor, gate_up_proj [experts, gate | up, hidden] and down_proj [experts, hidden, inner].
    base, _, last = key.rpartition(".experts.")
    if base and last in ("gate_up_proj", "down_proj"):
        experts, rows, _ = _header(folder / file)[key]["shape"]
        if last == "down_proj":
            return {f"{base}.experts.{e}.down_proj.weight": Stored(file, key, (e,)) for e in range(experts)}
        out = {f"{base}.experts.{e}.gate_proj.weight": Stored(file, key, (e,)) for e in range(experts)}
        return out | {f"{base}.experts.{e}.up_proj.weight": Stored(file, key, (e,), rows // 2) for e in range(experts)}
    return {_ALIASES.get(key, key): Stored(file, key)}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    return dict(value)


def _header(path: Path) -> dict[str, Any]:
    # 8 bytes of length, then JSON: name -> dtype, shape, place. The format's own library offers no look at all shapes.
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = dict(json.loads(file.read(size)))
    except (OSError, ValueError, struct.error) as error:
        raise UserError(f"{path} is not a whole safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return header
