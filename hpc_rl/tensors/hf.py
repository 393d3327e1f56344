"""Hugging Face directories: opening one, and filling local tensors from it so that each rank reads only its slices."""

from __future__ import annotations

import json
import os
import struct
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hpc_rl.errors import UserError
from hpc_rl.tensors.canonical import CLASSIFIER, IGNORED_SUFFIX, OUTPUT, VALUE_HEAD, ModelSpec
from hpc_rl.tensors.shardmap import ShardMap, view

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ALIASES = {CLASSIFIER: VALUE_HEAD}
_READ_BYTES = 1 << 30  # of one call: the system takes no more than 2 GB
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
    _headers: dict[str, tuple[dict[str, Any], int]] = field(default_factory=dict, repr=False)
    _files: dict[str, int] = field(default_factory=dict, repr=False)  # descriptors

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
        """The box ``[start, start + shape)`` of a canonical tensor, on the CPU, as stored.

        Its rows are read whole, in one go: mapped memory would read ahead far beyond them.
        """
        place, whole, dtype = self.stored[name], self.shape(name), getattr(torch, self.dtype(name))
        row_bytes = prod(whole[1:]) * dtype.itemsize
        first = place.row + (start[0] if start else 0)
        rows = shape[0] if shape else 1
        lead = 0
        for index, size in zip(place.lead, self._header(place)["shape"], strict=False):
            lead = lead * size + index
        begin = self._headers[place.file][1] + self._header(place)["data_offsets"][0]
        begin += (lead * (whole[0] if whole else 1) + first) * row_bytes
        data = self._bytes(place.file, begin, rows * row_bytes)
        value = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        box = (slice(None), *(slice(s, s + n) for s, n in zip(start[1:], shape[1:], strict=True)))
        return value.view(rows, *whole[1:])[box] if shape else value.view(())

    def _bytes(self, file: str, begin: int, count: int) -> bytearray:
        try:
            if file not in self._files:
                self._files[file] = os.open(self.path / file, os.O_RDONLY)
                os.posix_fadvise(self._files[file], 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: neighbours are others'
            data, done = bytearray(count), 0
            while done < count:
                got = os.preadv(self._files[file], [memoryview(data)[done : done + _READ_BYTES]], begin + done)
                if got == 0:
                    raise OSError(f"it ends at byte {begin + done}")
                done += got
        except OSError as error:
            raise UserError(f"{self.path / file} cannot be read: {error}") from error
        return data

    def __del__(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def _header(self, place: Stored) -> dict[str, Any]:
        if place.file not in self._headers:
            self._headers[place.file] = _header(self.path / place.file)
        header, _ = self._headers[place.file]
        if place.key not in header:
            raise UserError(f"{self.path / INDEX} says that {place.file} holds {place.key}, which it does not")
        return dict(header[place.key])


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
        keys = dict.fromkeys(_header(folder / SINGLE)[0], SINGLE)
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
        if name not in wanted and name not in spare and not name.endswith(IGNORED_SUFFIX):
            raise UserError(
                f"{source.path} holds {name}, of shape {list(source.shape(name))}, unknown to {spec.model_type}"
            )


@dataclass
class LoadReport:
    """What ``load_into`` did on this rank. ``casts``: "float32 -> bfloat16" -> boxes; ``missing``: optional tensors.

    ``bytes_read``: of the rows that hold its boxes. A slice of columns (o_proj, down_proj under TP) lies in pages that hold
    its neighbours' columns too, so whole rows come from the disk, once a node: its ranks share the page cache.
    """

    bytes_read: int = 0
    seconds: float = 0.0
    casts: Counter[str] = field(default_factory=Counter)
    missing: list[str] = field(default_factory=list)


@torch.no_grad()
def load_into(
    shard_map: ShardMap, tensors: Mapping[str, Tensor], source: HFDirectory, optional: Collection[str] = ()
) -> LoadReport:
    """Fills this rank's tensors from an HF directory, reading only the rows of the map's boxes; padding becomes zero.

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
            rows, row_bytes = piece.numel // piece.shape[-1], source.shape(piece.name)[-1] * value.element_size()
            report.bytes_read += rows * row_bytes if len(piece.shape) > 1 else value.numel() * value.element_size()
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
        experts, rows, _ = _header(folder / file)[0][key]["shape"]
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


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """What a safetensors file declares, and where its data begin: 8 bytes of length, JSON (dtype, shape, place), data."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = dict(json.loads(file.read(size)))
    except (OSError, ValueError, struct.error) as error:
        raise UserError(f"{path} is not a whole safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return header, 8 + size
