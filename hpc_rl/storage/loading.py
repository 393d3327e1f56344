"""What one rank does to load: find the newest checkpoint, read what it holds at whatever layout."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hpc_rl.errors import UserError
from hpc_rl.storage import manifest, restore
from hpc_rl.storage.access import load_index
from hpc_rl.storage.host_copy import fill_local
from hpc_rl.storage.manifest import DamagedCheckpoint
from hpc_rl.storage.plan import Holding, holding, state_name
from hpc_rl.storage.tensor_io import digest, unpack
from hpc_rl.tensors.shardmap import ShardMap

logger = logging.getLogger(__name__)


def read_into(
    path: Path, components: Mapping[str, tuple[ShardMap, Mapping[str, Tensor]]], rank: int, world_size: int,
    verify: bool, direct: bool,
) -> tuple[dict[str, Any], dict[str, Any], bool]:  # fmt: skip
    """Fills one rank's local tensors. Returns: ``extra``, the rank's own values, whether it held the same when saved.

    Raises: UserError.
    """
    content = manifest.read(path)
    index = load_index(path, content)
    maps = {name: shard_map for name, (shard_map, _) in components.items()}
    copies = restore.copies(index, maps, path)
    same = content.world_size == world_size and index.layouts[rank] == layout_digest(holding(maps))
    own_rows = index.rows([state_name(rank)])[state_name(rank)].tolist() if same else []
    own: dict[str, Any] = {}

    def use(row: int, data: memoryview) -> None:
        if row in own_rows:
            own.update(unpack(bytes(data)))
        for copy in copies.get(row, ()):
            fill_local(copy, data, index.specs[index.names[index.name[row]]].dtype, components[copy.component][1])

    try:
        restore.Reader(path, index, verify, direct).each(restore.reads(index, [*copies, *own_rows]), use)
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: cannot be read ({error}): use an older checkpoint") from error
    return dict(content.extra), own, same


def newest(root: Path, before: Path | None) -> Path | UserError | None:
    """The newest checkpoint in ``root`` with all its files, older than ``before`` if given.

    Returns: its path; None where there is no checkpoint at all; the last error where there are some, but none whole.
    """
    found: Path | UserError | None = None
    candidates = [path for _, path in manifest.complete(root)]
    for path in reversed(candidates[: candidates.index(before)] if before in candidates else candidates):
        try:
            manifest.check(path)
            return path
        except DamagedCheckpoint as error:
            logger.warning("skipped a damaged checkpoint: %s", error)
            found = error
        except UserError as error:  # of a newer schema: an older checkpoint would silently lose steps
            return error
    if found is None and before is not None:
        return UserError(f"{root}: no checkpoint there is whole: remove them to start afresh")
    return found


def layout_digest(held: Holding) -> str:
    """Digest of what a rank holds."""
    return digest(repr((sorted(held.specs.items()), sorted(held.boxes.items()))).encode()).hex()
