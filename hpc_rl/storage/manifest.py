"""manifest.json, the last file of a checkpoint, and the directory of checkpoints: which are whole, which may go."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.storage.tensor_io import digest

SCHEMA = 1
_COMPLETE = re.compile(r"checkpoint_(\d+)_complete")


class DamagedCheckpoint(UserError):
    """A checkpoint that is not what was saved; an older one may still be whole."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the checkpoint: its size, and the digest of its content (see `shard_digest` for shards)."""

    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds. ``extra``: the caller's small values. ``metrics``: for keeping the best."""

    step: int
    world_size: int
    created: str
    files: Mapping[str, Entry]
    extra: Mapping[str, Any]
    metrics: Mapping[str, float]


def complete_name(step: int) -> str:
    """Directory name of a whole checkpoint."""
    return f"checkpoint_{step}_complete"


def shard_digest(gap_digest: str, extent_digests: Iterable[str]) -> str:
    """Digest of a shard file: of (digest of all bytes outside the extents, then the extents' digests in file order)."""
    return digest(bytes.fromhex(gap_digest + "".join(extent_digests))).hex()


def encode(manifest: Manifest) -> bytes:
    """The text of manifest.json; its last line holds the digest of all lines before."""
    body = {
        "format": "hpc_rl checkpoint",
        "schema": SCHEMA,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "created": manifest.created,
        "metrics": dict(manifest.metrics),
        "extra": manifest.extra,
        "files": {name: {"bytes": e.nbytes, "digest": e.digest} for name, e in manifest.files.items()},
    }
    text = json.dumps(body, indent=1)[: -len("\n}")]
    return f'{text},\n "digest": "{digest(text.encode()).hex()}"\n}}\n'.encode()


def read(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory. Raises DamagedCheckpoint, or UserError for a newer schema."""
    path = directory / "manifest.json"
    try:
        raw = path.read_bytes()
        body = json.loads(raw)
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}: cannot be read ({error}): use an older checkpoint") from error
    text, _, _ = raw.rpartition(b',\n "digest": ')
    if not isinstance(body, dict) or body.get("format") != "hpc_rl checkpoint":
        raise DamagedCheckpoint(f"{path}: not a manifest of hpc_rl: give a checkpoint_STEP_complete directory")
    if body.get("digest") != digest(text).hex() or not raw.endswith(b'"\n}\n'):
        raise DamagedCheckpoint(f"{path}: its digest does not match its content: use an older checkpoint")
    if body["schema"] > SCHEMA:
        raise UserError(f"{path}: schema {body['schema']}, but this version reads up to {SCHEMA}: update hpc_rl")
    files = {name: Entry(entry["bytes"], entry["digest"]) for name, entry in body["files"].items()}
    return Manifest(body["step"], body["world_size"], body["created"], files, body["extra"], body["metrics"])


def check(directory: Path) -> Manifest:
    """The manifest, after looking that every file is there with its size. Raises DamagedCheckpoint."""
    manifest = read(directory)
    for name, entry in manifest.files.items():
        path = directory / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DamagedCheckpoint(f"{path}: missing ({error.strerror}): use an older checkpoint") from error
        if size != entry.nbytes:
            raise DamagedCheckpoint(f"{path}: {size} bytes, but {entry.nbytes} were saved: use an older checkpoint")
    return manifest


def complete(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of everything in ``root`` that has the name of a whole checkpoint, oldest first."""
    if not root.is_dir():
        return []
    found = ((_COMPLETE.fullmatch(path.name), path) for path in root.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def to_prune(
    checkpoints: Mapping[int, Mapping[str, float]], keep_last: int, keep_every: int, keep_best: str | None
) -> list[int]:
    """Steps that may go. Args: checkpoints: step -> its metrics. keep_best: metric whose highest value is also kept."""
    steps = sorted(checkpoints)
    keep = set(steps[-keep_last:])
    keep |= {step for step in steps if keep_every and step % keep_every == 0}
    scored = [(checkpoints[step][keep_best], step) for step in steps if keep_best and keep_best in checkpoints[step]]
    scored = [(value, step) for value, step in scored if value == value]  # NaN is no best, and would hide the others
    if scored:
        keep.add(max(scored)[1])
    return [step for step in steps if step not in keep]
