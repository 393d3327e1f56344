"""The end of a save, on one rank: all shards durable -> index, manifest, rename, and only then the old ones go."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpc_rl.errors import RunError, UserError
from hpc_rl.storage import index, manifest
from hpc_rl.storage.files import Files, remove_tree, write_file
from hpc_rl.storage.manifest import Entry, Manifest
from hpc_rl.storage.shards import Member, Report
from hpc_rl.storage.tensor_io import digest
from hpc_rl.tensors.shardmap import TensorSpec

MARKERS = "done"  # directory of one small file per rank: its shard is durable, or why not


@dataclass(frozen=True, slots=True)
class Whole:
    """The part of a save's plan that is the same at each save: tensors, and what every rank writes."""

    specs: Mapping[str, TensorSpec]
    members: tuple[Member, ...]
    layouts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """What the finishing rank must know of this save."""

    extra: Mapping[str, Any]
    metrics: Mapping[str, float]
    keep_last: int
    keep_every: int
    keep_best: str | None
    page_bytes: int
    deadline_s: float


def mark(files: Files, partial: Path, rank: int, content: bytes, suffix: str) -> None:
    """Leaves a rank's marker, never seen half-written. Its shard must be durable; the marker itself need not be."""
    directory = partial / MARKERS
    files.makedirs(directory)
    temporary = directory / f"rank_{rank:05d}.tmp"
    write_file(files, temporary, content, durable=False)
    files.rename(temporary, directory / f"rank_{rank:05d}.{suffix}")


def wait_reports(partial: Path, world_size: int, deadline_s: float, aborted: Callable[[], bool]) -> dict[int, Report]:
    """Every rank's report. Raises RunError when a rank failed, when ``aborted``, or at the deadline."""
    reports: dict[int, Report] = {}
    start, pause = time.monotonic(), 0.002
    while True:
        for name in sorted(os.listdir(partial / MARKERS)):
            rank, suffix = int(name[5:10]), name[11:]
            if suffix == "error":
                raise RunError((partial / MARKERS / name).read_text())
            if suffix == "json" and rank not in reports:
                reports[rank] = Report(**json.loads((partial / MARKERS / name).read_bytes()))
        if len(reports) == world_size:
            return reports
        if aborted():
            raise RunError("given up: another rank's write failed")
        if time.monotonic() - start > deadline_s:
            missing = sorted(set(range(world_size)) - set(reports))
            raise RunError(f"{partial}: ranks {missing[:8]} wrote no shard within {deadline_s:.0f} s")
        time.sleep(pause)
        pause = min(1.0, pause * 1.5)


class IndexFile:
    """index.h5 of a run: built at its first save, and the same at all others, so written while the data still is."""

    def __init__(self) -> None:
        self._built_for: dict[int, tuple[str, list[int]]] = {}
        self._image = b""
        self._early: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1)

    def begin(self, files: Files, partial: Path) -> None:
        """Starts to write what the last save had."""
        self._early = self._pool.submit(write_file, files, partial / index.NAME, self._image) if self._image else None

    def end(self, files: Files, partial: Path, whole: Whole, reports: Mapping[int, Report], page_bytes: int) -> bytes:
        """Returns the file's content, which is durable by then."""
        if self._early is not None:
            self._early.result()
        wanted = {rank: (report.file, report.offsets) for rank, report in reports.items()}
        if self._early is None or wanted != self._built_for:
            self._image = index.build(whole.specs, whole.members, reports, whole.layouts, page_bytes)
            self._built_for = wanted
            write_file(files, partial / index.NAME, self._image)
        return self._image


def finish(
    files: Files, partial: Path, final: Path, step: int, whole: Whole, job: Finish, aborted: Callable[[], bool],
    index_file: IndexFile,
) -> None:  # fmt: skip
    """Makes the checkpoint whole and gives it its final name."""
    reports = wait_reports(partial, len(whole.members), job.deadline_s, aborted)
    image = index_file.end(files, partial, whole, reports, job.page_bytes)
    digests = index.digests(whole.members, reports)
    write_file(files, partial / index.DIGESTS_NAME, digests)
    entries = {name: Entry(len(d), digest(d).hex()) for name, d in ((index.NAME, image), (index.DIGESTS_NAME, digests))}
    entries |= shard_entries(whole.members, reports)
    remove_tree(files, partial / MARKERS)
    for directory in sorted({(partial / name).parent.parent for name in entries} - {partial.parent}, reverse=True):
        files.fsync_dir(directory)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    content = Manifest(step, len(whole.members), created, entries, job.extra, job.metrics)
    write_file(files, partial / "manifest.json", manifest.encode(content))
    files.fsync_dir(partial)
    publish(files, partial, final, step)


def shard_entries(members: Sequence[Member], reports: Mapping[int, Report]) -> dict[str, Entry]:
    """Size and digest of each shard file."""
    by_file: dict[str, list[Report]] = {}
    for member in members:
        by_file.setdefault(reports[member.rank].file, []).append(reports[member.rank])
    out = {}
    for name, parts in by_file.items():
        pairs = sorted((o, d) for part in parts for o, d in zip(part.offsets, part.digests, strict=True))
        out[name] = Entry(parts[0].nbytes, manifest.shard_digest(parts[0].gap_digest, [d for _, d in pairs]))
    return out


def publish(files: Files, partial: Path, final: Path, step: int) -> None:
    """Renames to the final name. Whole checkpoints of later steps are of a future that was given up: renamed away."""
    root = final.parent
    for later, path in manifest.complete(root):
        if later > step:
            set_aside(files, path)
    if final.exists() and files.exchange(partial, final):
        files.fsync_dir(root)
        remove_tree(files, partial)
        return
    if final.exists():
        set_aside(files, final)
    files.rename(partial, final)
    files.fsync_dir(root)


def set_aside(files: Files, path: Path) -> None:
    """Takes a whole checkpoint out of the line of the run without removing it."""
    files.rename(path, path.with_name(f"{path.name.removesuffix('_complete')}_superseded_{uuid.uuid4().hex[:6]}"))


def partial_name(step: int, run: str, serial: int) -> str:
    """Directory name of an unfinished checkpoint: the serial'th save of a run's process."""
    return f"checkpoint_{step}_partial_{run}_{serial}"


def sweep(files: Files, root: Path, current: Path) -> None:
    """Removes what killed saves left behind: every partial directory but ``current`` and those begun after it.

    Only the holder of the run's lock may call this.
    """
    run, _, serial = current.name.partition("_partial_")[2].rpartition("_")
    for path in sorted(root.glob("checkpoint_*_partial_*")):
        other_run, _, other_serial = path.name.partition("_partial_")[2].rpartition("_")
        if other_run != run or int(other_serial) < int(serial):
            remove_tree(files, path)


def prune(files: Files, root: Path, job: Finish) -> None:
    """Removes old checkpoints by policy; each loses its final name before its first file."""
    known: dict[int, Mapping[str, float]] = {}
    for step, path in manifest.complete(root):
        try:
            known[step] = manifest.read(path).metrics
        except UserError:
            continue  # damaged: neither counted nor removed
    for step in manifest.to_prune(known, job.keep_last, job.keep_every, job.keep_best):
        trash = root / partial_name(step, "trash", 0)
        files.rename(root / manifest.complete_name(step), trash)
        remove_tree(files, trash)
