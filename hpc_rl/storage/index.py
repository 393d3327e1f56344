"""index.h5: each canonical tensor whole, as a virtual dataset over the shards, and the table for our own reader."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5p, h5s

from hpc_rl.errors import UserError
from hpc_rl.storage.plan import Extent, Region, state_name
from hpc_rl.storage.shards import Member, Report
from hpc_rl.storage.tensor_io import h5_type, itemsize
from hpc_rl.tensors.shardmap import TensorSpec

NAME, DIGESTS_NAME = "index.h5", "digests.bin"  # in the checkpoint directory
TABLE = "_layout"  # group of the reader's table


@dataclass(frozen=True, slots=True)
class Index:
    """The table. Row e of the arrays is one extent; ``start`` and ``shape`` [E, D] are padded with 0 and 1.

    ``name``, ``file``: positions in ``names`` and ``files``. ``offset``, ``nbytes``: of the extent in its file.
    ``digest`` [E, 16]: xxh3-128; they are in a file of their own, so that index.h5 is the same at each save of a run.
    ``layouts`` [world size]: digest of what each rank held, as hex.
    """

    names: list[str]
    specs: dict[str, TensorSpec]
    files: list[str]
    layouts: list[str]
    name: np.ndarray[Any, Any]
    file: np.ndarray[Any, Any]
    offset: np.ndarray[Any, Any]
    nbytes: np.ndarray[Any, Any]
    start: np.ndarray[Any, Any]
    shape: np.ndarray[Any, Any]
    digest: np.ndarray[Any, Any]

    def rows(self, names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Rows of each of ``names``."""
        wanted = {name: i for i, name in enumerate(self.names)}
        order = np.argsort(self.name, kind="stable")
        ids = self.name[order]
        out = {}
        for name in names:
            i = wanted.get(name, -1)
            out[name] = order[np.searchsorted(ids, i) : np.searchsorted(ids, i, side="right")] if i >= 0 else order[:0]
        return out

    def box(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(start, shape) of an extent."""
        dims = len(self.specs[self.names[self.name[row]]].shape)
        return tuple(self.start[row, :dims].tolist()), tuple(self.shape[row, :dims].tolist())


class Image(io.BytesIO):
    """Bytes in memory that HDF5 may also lengthen by truncating them to a larger size."""

    def truncate(self, size: int | None = None) -> int:
        if size is not None and size > len(self.getbuffer()):
            position = self.seek(0, io.SEEK_END)
            self.write(bytes(size - position))
            return size
        return super().truncate(size)


def build(specs: Mapping[str, TensorSpec], members: Sequence[Member], reports: Mapping[int, Report],
          layouts: Sequence[str], page_bytes: int) -> bytes:  # fmt: skip
    """The whole file index.h5, as bytes."""
    image = Image()
    paging = {"fs_strategy": "page", "fs_page_size": page_bytes} if page_bytes else {}
    with h5py.File(image, "w", libver=("earliest", "v110"), **paging) as file:
        add_table(file, specs, members, reports, layouts)
        add_virtual(file, specs, members, reports)
    return image.getvalue()


def add_table(file: h5py.File, specs: Mapping[str, TensorSpec], members: Sequence[Member],
              reports: Mapping[int, Report], layouts: Sequence[str]) -> None:  # fmt: skip
    """The group that `read` reads."""
    extents = [extent for member in members for extent in member.all_extents()]
    names = sorted({extent.name for extent in extents} | set(specs))
    position = {name: i for i, name in enumerate(names)}
    files = sorted({reports[member.rank].file for member in members})
    dims = max([1, *(len(spec.shape) for spec in specs.values())])
    group = file.create_group(TABLE)
    group.create_dataset("names.json", data=np.bytes_(json.dumps(names)))
    known = {**specs, **{state_name(m.rank): TensorSpec((m.state_bytes,), "uint8") for m in members if m.state_bytes}}
    group.create_dataset("specs.json", data=np.bytes_(json.dumps({n: [s.shape, s.dtype] for n, s in known.items()})))
    group.create_dataset("files.json", data=np.bytes_(json.dumps(files)))
    group.create_dataset("layouts.json", data=np.bytes_(json.dumps(list(layouts))))
    group["name"] = np.array([position[extent.name] for extent in extents], dtype=np.int64)
    group["file"] = np.array([files.index(reports[m.rank].file) for m in members for _ in m.all_extents()], np.int64)
    group["offset"] = np.array([o for m in members for o in reports[m.rank].offsets], dtype=np.int64)
    group["nbytes"] = np.array([extent.nbytes for extent in extents], dtype=np.int64)
    for key, fill in (("start", 0), ("shape", 1)):
        rows = [getattr(extent, key) + (fill,) * (dims - len(extent.shape)) for extent in extents]
        group[key] = np.array(rows, dtype=np.int64).reshape(-1, dims)


def add_virtual(file: h5py.File, specs: Mapping[str, TensorSpec], members: Sequence[Member],
                reports: Mapping[int, Report]) -> None:  # fmt: skip
    """One virtual dataset per canonical tensor. Source paths are relative to index.h5."""
    parts: dict[str, list[tuple[str, Region, Extent]]] = defaultdict(list)
    for member in members:
        of_dtype = {region.dtype: region for region in reversed(member.regions())}
        for extent in member.extents:
            parts[extent.name].append((reports[member.rank].file, of_dtype[extent.dtype], extent))
    links = h5p.create(h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    for name, spec in specs.items():
        shape = spec.shape or (1,)
        plist = h5p.create(h5p.DATASET_CREATE)
        if parts[name]:
            plist.set_layout(h5d.VIRTUAL)
        for source, region, extent in sorted(parts[name], key=lambda part: part[2].start):
            space = h5s.create_simple(shape)
            space.select_hyperslab(extent.start or (0,), extent.shape or (1,))
            flat = h5s.create_simple((region.nbytes // itemsize(region.dtype),))
            flat.select_hyperslab((extent.begin,), (extent.numel,))
            plist.set_virtual(space, source.encode(), region.dataset.encode(), flat)
        dataset = h5d.create(file.id, name.encode(), h5_type(spec.dtype), h5s.create_simple(shape), plist, links)
        h5py.Dataset(dataset).attrs["dtype"] = spec.dtype


def digests(members: Sequence[Member], reports: Mapping[int, Report]) -> bytes:
    """The content of the digests' file: 16 bytes an extent, in the order of the table."""
    return bytes.fromhex("".join(d for member in members for d in reports[member.rank].digests))


def read(image: io.BytesIO, digests: bytes, path: str | Path = "index.h5") -> Index:
    """The table in the bytes of ``index.h5``; ``path`` is for the message. Raises UserError if unreadable."""
    try:
        with h5py.File(image, "r") as file:
            group = file[TABLE]
            names, specs, files, layouts = (
                json.loads(bytes(group[f"{key}.json"][()])) for key in ("names", "specs", "files", "layouts")
            )
            keys = ("name", "file", "offset", "nbytes", "start", "shape")
            arrays = {key: group[key][()] for key in keys}
        arrays["digest"] = np.frombuffer(digests, dtype=np.uint8).reshape(len(arrays["name"]), 16)
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{path}: not a readable checkpoint index ({error}): use an older checkpoint") from error
    return Index(names, {n: TensorSpec(tuple(s), d) for n, (s, d) in specs.items()}, files, layouts, **arrays)
