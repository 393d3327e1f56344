"""The rollouts journal: one HDF5 file per rank and step, appended as sequences finish.

SWMR order: the data of a sequence is flushed before its row of ``sequences``, so a reader during the run, or after a
SIGKILL, sees whole sequences only; the row's digest proves it. Token-flat like `hpc_rl.batch`: sequence i is
``x[cu_seqlens[i]:cu_seqlens[i + 1]]``.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from h5py import h5s

from hpc_rl.errors import UserError
from hpc_rl.storage.files import Files
from hpc_rl.storage.rollout_reader import (
    ROW,
    TOKENS,
    RolloutFile,
    RolloutReader,
    finished_samples,
    read_file,
    record_digest,
    rollout_file,
)

if TYPE_CHECKING:
    from hpc_rl.rollout.protocol import Sample

__all__ = ["RolloutReader", "RolloutWriter", "add_fields", "finished_samples"]
logger = logging.getLogger(__name__)
CHUNK = 16384  # elements
ROOM_BYTES = 1 << 20  # more than the chunks that a sequence begins
KEEP_SIZE, PUNCH_HOLE = 1, 2  # of fallocate
_libc = ctypes.CDLL(None, use_errno=True)


class Journal:
    """The open HDF5 file behind a writer. ``fields``: arrays of a finished step, whole."""

    def __init__(
        self, path: Path, step: int, rank: int, key: str, fields: Mapping[str, np.ndarray[Any, Any]] | None = None
    ) -> None:
        self._room = Room(path)
        self._file = create(path, step, rank, key)
        self._fd = os.open(path, os.O_RDWR)  # for fsync and room, whatever the file is called by then
        self._room.ensure(self._fd, sum(values.nbytes for values in (fields or {}).values()))
        for name, values in (fields or {}).items():
            self._file[name] = values
        self._datasets = {name: self._file[name].id for name in (*TOKENS, "text", "sequences")}
        self._file.swmr_mode = True
        self._tokens = self._text = self._rows = 0

    def copy(self, content: RolloutFile) -> None:
        """Appends all of another journal."""
        for record in content:
            self.append(record.prompt_ids, record.response_ids, record.log_probs, record.texts, record.row)

    def append(
        self, prompt: np.ndarray[Any, Any], response: np.ndarray[Any, Any], log_probs: np.ndarray[Any, Any],
        texts: tuple[str, str], row: np.ndarray[Any, Any],
    ) -> None:  # fmt: skip
        encoded = [text.encode(errors="surrogatepass") for text in texts]
        data = {
            "input_ids": np.concatenate([prompt, response]),
            "rollout_log_probs": np.concatenate([np.zeros(len(prompt), np.float32), log_probs]),
            "text": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        }
        row = row.copy()
        row["prompt_tokens"], row["prompt_text_bytes"] = len(prompt), len(encoded[0])
        row["token_end"] = self._tokens + len(prompt) + len(response)
        row["text_end"] = self._text + len(data["text"])
        row["digest"] = 0
        row["digest"] = record_digest(row, data)
        self._room.ensure(self._fd, sum(values.nbytes for values in data.values()))
        for name, values in data.items():
            self._extend(name, self._text if name == "text" else self._tokens, values)
        self._extend("sequences", self._rows, row)
        self._tokens, self._text, self._rows = int(row["token_end"][0]), int(row["text_end"][0]), self._rows + 1

    def _extend(self, name: str, begin: int, values: np.ndarray[Any, Any]) -> None:
        """Through the low-level interface: six times faster than slicing."""
        dataset, count = self._datasets[name], len(values)
        if count:
            dataset.set_extent((begin + count,))
            space = dataset.get_space()
            space.select_hyperslab((begin,), (count,))
            dataset.write(h5s.create_simple((count,)), space, np.ascontiguousarray(values))
            dataset.flush()

    def sync(self) -> None:
        """Everything so far survives a power loss."""
        self._file.flush()
        os.fsync(self._fd)

    def close(self) -> None:
        """Makes all durable and closes the file."""
        if self._file:
            self._datasets.clear()
            self._file.close()
            self._room.give_back(self._fd)
            os.fsync(self._fd)
            os.close(self._fd)


class Room:
    """Space on the disk that a journal has before HDF5 writes: an HDF5 file that meets a full disk takes the process down.

    Raises: OSError (no space left on device), while the file is still sound.
    """

    def __init__(self, path: Path) -> None:
        self._end = 0
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            self.ensure(fd, 0)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
        self._end = 0  # HDF5 makes the file anew

    def ensure(self, fd: int, nbytes: int) -> None:
        """Takes room for ``nbytes`` more, and for what HDF5 adds: chunks are written whole."""
        wanted = os.fstat(fd).st_size + nbytes + ROOM_BYTES
        if wanted > self._end:
            code = fallocate(fd, KEEP_SIZE, 0, wanted + ROOM_BYTES)
            if code in (errno.ENOSPC, errno.EDQUOT):  # other codes: a file system that cannot
                raise OSError(code, os.strerror(code))
            self._end = wanted + ROOM_BYTES

    def give_back(self, fd: int) -> None:
        """Frees what lies beyond the end of the file."""
        size = os.fstat(fd).st_size
        fallocate(fd, KEEP_SIZE | PUNCH_HOLE, size, max(1, self._end - size))


def fallocate(fd: int, mode: int, offset: int, nbytes: int) -> int:
    """The system call; returns 0 or its errno."""
    done = _libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(nbytes))
    return 0 if done == 0 else ctypes.get_errno()


class RolloutWriter:
    """Appends one rank's finished sequences. ``key``: what they depend on (weights, sampling)."""

    def __init__(self, run_dir: str | Path, step: int, rank: int, key: str = "") -> None:
        self.path = rollout_file(run_dir, step, rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        old = self._killed_run()
        temporary = self.path.with_suffix(".tmp")
        self._journal = Journal(temporary, step, rank, key)
        if old and old.attributes.get("key") == key:  # its file stays until all is copied
            self._journal.copy(old)
        self._journal.sync()
        os.rename(temporary, self.path)
        Files().fsync_dir(self.path.parent)

    def _killed_run(self) -> RolloutFile | None:
        """What an earlier attempt at this step left; an unreadable file is set aside."""
        if not self.path.exists():
            return None
        try:
            return read_file(self.path)
        except UserError as error:
            logger.warning("its rollouts are generated again: %s", error)
            os.rename(self.path, self.path.with_suffix(".damaged"))
            return None

    def append(self, sample: Sample, score: float = float("nan")) -> None:
        """One finished sequence with its raw score (NaN: not scored yet); readable by others when this returns."""
        request = sample.request
        row = np.zeros(1, dtype=ROW)
        row["prompt_ids"], row["group_ids"] = request.prompt.prompt_id, request.group_id
        row["sample_ids"], row["seeds"] = request.sample_id, request.seed
        row["finished"], row["versions"] = sample.finished, sample.version
        row["scores"], row["seconds"] = score, sample.seconds
        self._journal.append(
            np.array(request.prompt.input_ids, dtype=np.int64), np.array(sample.response_ids, dtype=np.int64),
            np.array(sample.log_probs, dtype=np.float32), (request.prompt.text, sample.text), row,
        )  # fmt: skip

    def sync(self) -> None:
        """Everything so far survives a power loss."""
        self._journal.sync()

    def close(self) -> None:
        """Makes all durable and closes the file."""
        self._journal.close()

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create(path: Path, step: int, rank: int, key: str) -> h5py.File:
    """An empty journal. All objects must exist before SWMR mode begins."""
    file = h5py.File(path, "w", libver=("v110", "v110"), locking=False)
    file.attrs.update({"format": "hpc_rl rollouts", "schema": 1, "step": step, "rank": rank, "key": key})
    for name, dtype in {**TOKENS, "text": "u1"}.items():
        file.create_dataset(name, (0,), maxshape=(None,), chunks=(CHUNK,), dtype=dtype)
    file.create_dataset("sequences", (0,), maxshape=(None,), chunks=(256,), dtype=ROW)
    return file


def add_fields(
    run_dir: str | Path, step: int, rank: int, world_size: int, keys: Sequence[tuple[int, int]],
    cu_seqlens: np.ndarray[Any, Any], tokens: Mapping[str, np.ndarray[Any, Any]],
) -> None:  # fmt: skip
    """Adds per-token arrays to the journals of a finished step, ``cu_seqlens`` and ``response_mask`` too.

    Each rank treats every world_size'th file.

    Args:
        keys: (prompt id, sample id) of each sequence of the whole batch.
        cu_seqlens: int64 [B + 1]. tokens: name -> [N].
    """
    place = {key: i for i, key in enumerate(keys)}
    for path in sorted(rollout_file(run_dir, step, 0).parent.glob("rank_*.h5"))[rank::world_size]:
        content = read_file(path)
        rows = [place.get(record.key) for record in content]
        arrays = {"cu_seqlens": content.cu_seqlens, "response_mask": content.response_mask}
        for name, values in tokens.items():
            parts = [
                np.zeros(record.num_tokens, values.dtype) if i is None else values[cu_seqlens[i] : cu_seqlens[i + 1]]
                for record, i in zip(content, rows, strict=True)
            ]
            arrays[name] = np.concatenate(parts) if parts else values[:0]
        rewrite(path, content, arrays)


def rewrite(path: Path, content: RolloutFile, fields: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """The journal again with ``fields`` added; the old file stays until the new one is durable."""
    step, rank, key = (content.attributes[name] for name in ("step", "rank", "key"))
    temporary = path.with_suffix(".tmp")
    journal = Journal(temporary, int(step), int(rank), str(key), fields)
    journal.copy(content)
    journal.close()
    os.rename(temporary, path)
    Files().fsync_dir(path.parent)
