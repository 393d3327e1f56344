"""A checkpoint without a run: find it, open its index, read one tensor. No torch in here."""

from __future__ import annotations

import io
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hpc_rl.errors import UserError
from hpc_rl.storage import index as index_file
from hpc_rl.storage import manifest
from hpc_rl.storage.index import Index
from hpc_rl.storage.manifest import DamagedCheckpoint, Manifest
from hpc_rl.storage.plan import Box
from hpc_rl.storage.restore import Reader, meeting, reads, row_major
from hpc_rl.storage.tensor_io import bits, digest, values
from hpc_rl.tensors.shardmap import Piece, intersect


def resolve(path: str | Path) -> Path:
    """The checkpoint directory that ``path`` names: itself, or the newest with all its files of a run directory.

    Raises: UserError where there is none.
    """
    path = Path(path)
    if (path / "manifest.json").exists():
        return path
    for _, candidate in reversed(manifest.complete(path / "checkpoints") + manifest.complete(path)):
        try:
            manifest.check(candidate)
            return candidate
        except DamagedCheckpoint:
            continue
    raise UserError(f"{path}: no whole checkpoint there: give a run directory or a checkpoint_STEP_complete directory")


def load_index(path: Path, content: Manifest) -> Index:
    """The index of a checkpoint, its digest verified. Raises DamagedCheckpoint."""
    image, digests = (checked_bytes(path, name, content) for name in (index_file.NAME, index_file.DIGESTS_NAME))
    return index_file.read(io.BytesIO(image), digests, path / index_file.NAME)


def checked_bytes(path: Path, name: str, content: Manifest) -> bytes:
    """A small file of the checkpoint, its digest verified. Raises DamagedCheckpoint."""
    try:
        data = (path / name).read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{path / name}: {error.strerror}: use an older checkpoint") from error
    if digest(data).hex() != content.files[name].digest:
        raise DamagedCheckpoint(f"{path / name}: its digest is not the manifest's: use an older checkpoint")
    return data


def open_checkpoint(path: str | Path) -> tuple[Path, Manifest, Index]:
    """(directory, manifest, index) of a checkpoint, or of a run's newest."""
    directory = resolve(path)
    content = manifest.read(directory)
    return directory, content, load_index(directory, content)


def read_tensor(
    path: str | Path, name: str, box: Box | None = None, *, raw: bool = False, verify: bool = True
) -> np.ndarray[Any, Any]:
    """One canonical tensor of a checkpoint, or the ``box`` (start, shape) of it.

    Returns: its numbers (bfloat16 as float32); with ``raw`` its bits (bfloat16 as uint16).
    Raises: UserError where it has no such tensor, DamagedCheckpoint where a digest does not match.
    """
    directory, _, index = open_checkpoint(path)
    return tensor_from(directory, index, name, box, raw=raw, verify=verify)


def tensor_from(
    directory: Path, index: Index, name: str, box: Box | None = None, *, raw: bool = False, verify: bool = True
) -> np.ndarray[Any, Any]:
    """`read_tensor` of an open checkpoint."""
    if name not in index.specs:
        raise UserError(f"{directory}: no tensor {name}: `hpc-rl inspect` lists the {len(index.specs)} there are")
    spec = index.specs[name]
    start, shape = box or ((0,) * len(spec.shape), spec.shape)
    if any(s < 0 or s + n > size for s, n, size in zip(start, shape, spec.shape, strict=True)):
        raise UserError(f"{name} is {list(spec.shape)}: the box {list(start)} + {list(shape)} is not inside")
    out = np.empty(shape, dtype=bits(spec.dtype))
    wanted = Piece(name, tuple(start), tuple(shape), "", 0, row_major(shape))

    def use(row: int, data: memoryview) -> None:
        stored_start, stored_shape = index.box(row)
        pair = intersect(Piece(name, stored_start, stored_shape, "", 0, row_major(stored_shape)), wanted)
        assert pair is not None, "rows that do not meet the box are not read"
        source = np.frombuffer(data, dtype=out.dtype).reshape(stored_shape)
        out[window(pair[1], start)] = source[window(pair[0], stored_start)]

    rows = meeting(index, index.rows([name])[name], wanted) if prod(shape) else []
    Reader(directory, index, verify).each(reads(index, rows), use)
    return out if raw else values(out, spec.dtype)


def window(piece: Piece, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices of the piece's box, counted from ``origin``."""
    return tuple(slice(s - o, s - o + n) for s, o, n in zip(piece.start, origin, piece.shape, strict=True))
