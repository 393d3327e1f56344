"""Reads every byte of a checkpoint and names what is not as it was saved. No torch in here."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.storage import manifest
from hpc_rl.storage.access import load_index
from hpc_rl.storage.index import Index
from hpc_rl.storage.restore import Reader, reads
from hpc_rl.storage.shards import gap_digest


def verify(directory: Path, files: Collection[str] | None = None) -> list[str]:
    """One line for each damage found, in all files of the checkpoint or in some of its shards. Empty: it is whole."""
    try:
        content = manifest.check(directory)
        index = load_index(directory, content)
    except UserError as error:
        return [str(error)]
    problems: list[str] = []
    names = [name for name in index.files if files is None or name in files]
    wanted = {index.files.index(name) for name in names}
    rows = [row for row in range(len(index.name)) if int(index.file[row]) in wanted]
    reader = Reader(directory, index, verify=True, on_damage=lambda error: problems.append(str(error)))
    try:
        reader.each(reads(index, rows), lambda row, data: None)
    except UserError as error:
        problems.append(str(error))
    for name in names:
        if shard_file_digest(directory, index, name) != content.files[name].digest:
            problems.append(
                f"{directory / name}: its HDF5 structure is not as saved: h5py may misread it; loading does not use it"
            )
    return problems


def shard_file_digest(directory: Path, index: Index, name: str) -> str:
    """The digest of a shard file as the manifest defines it, from its bytes outside the extents and the index."""
    number = index.files.index(name)
    rows = sorted((row for row in range(len(index.name)) if index.file[row] == number), key=index.offset.__getitem__)
    gaps = gap_digest(directory / name, [(int(index.offset[row]), int(index.nbytes[row])) for row in rows])
    return manifest.shard_digest(gaps.hex(), [index.digest[row].tobytes().hex() for row in rows])
