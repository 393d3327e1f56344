"""Reads rollouts journals: while they are written, after a kill, or complete. No torch in here."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import xxhash

from hpc_rl.errors import UserError
from hpc_rl.storage.h5_snapshot import snapshot

if TYPE_CHECKING:
    from hpc_rl.rollout.protocol import Request, Sample

ATTEMPTS = 5
logger = logging.getLogger(__name__)
TOKENS = {"input_ids": "<i8", "rollout_log_probs": "<f4"}  # written as sequences finish
ROW = np.dtype(
    [
        ("prompt_ids", "<i8"), ("group_ids", "<i8"), ("sample_ids", "<i8"), ("seeds", "<u8"), ("versions", "<i8"),
        ("finished", "|u1"), ("scores", "<f8"), ("seconds", "<f8"), ("prompt_tokens", "<i8"),
        ("prompt_text_bytes", "<i8"), ("token_end", "<i8"), ("text_end", "<i8"), ("digest", "<u8"),
    ]
)  # fmt: skip


def rollout_file(run_dir: str | Path, step: int, rank: int) -> Path:
    """Path of one rank's journal of one step."""
    return Path(run_dir) / "rollouts" / f"step_{step:06d}" / f"rank_{rank:05d}.h5"


@dataclass(frozen=True, slots=True)
class Record:
    """One finished sequence. ``row``: [1] of `ROW`; ``texts``: of the prompt and of the response."""

    prompt_ids: np.ndarray[Any, Any]
    response_ids: np.ndarray[Any, Any]
    log_probs: np.ndarray[Any, Any]
    texts: tuple[str, str]
    row: np.ndarray[Any, Any]

    @property
    def key(self) -> tuple[int, int]:
        """(prompt id, sample id)."""
        return int(self.row["prompt_ids"][0]), int(self.row["sample_ids"][0])

    @property
    def score(self) -> float:
        """Raw score; NaN where it was not known yet."""
        return float(self.row["scores"][0])

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def sample(self, request: Request) -> Sample | None:
        """As the sampler returned it; None if it answers another request (other prompt or seed)."""
        from hpc_rl.rollout.protocol import Sample

        row = self.row[0]
        same = tuple(self.prompt_ids.tolist()) == tuple(request.prompt.input_ids) and int(row["seeds"]) == request.seed
        if not same:
            return None
        return Sample(
            request, tuple(self.response_ids.tolist()), tuple(self.log_probs.tolist()), bool(row["finished"]),
            int(row["versions"]), self.texts[1], float(row["seconds"]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """One journal in memory. ``num_damaged``: rows whose digest does not match; they are left out."""

    attributes: Mapping[str, Any]
    records: tuple[Record, ...]
    num_damaged: int
    fields: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)  # added when the step was complete

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def cu_seqlens(self) -> np.ndarray[Any, Any]:
        """int64 [B + 1]."""
        return np.concatenate([[0], np.cumsum([record.num_tokens for record in self.records])]).astype(np.int64)

    @property
    def response_mask(self) -> np.ndarray[Any, Any]:
        """bool [N]."""
        parts = [np.arange(r.num_tokens) >= len(r.prompt_ids) for r in self.records]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=bool)


def record_digest(row: np.ndarray[Any, Any], data: Mapping[str, np.ndarray[Any, Any]]) -> int:
    """xxh3-64 of a sequence: its row (with digest 0), then its arrays."""
    state = xxhash.xxh3_64(row.tobytes())
    for name in (*TOKENS, "text"):
        state.update(np.ascontiguousarray(data[name]).tobytes())
    return int(state.intdigest())


def read_file(path: str | Path) -> RolloutFile:
    """All finished sequences of a journal, even while it is written. Raises UserError where it is no journal."""
    for attempt in range(ATTEMPTS):
        try:
            attributes, rows, arrays = read_arrays(path)
            break
        except OSError as error:
            if attempt == ATTEMPTS - 1:
                raise UserError(f"{path}: cannot be read ({error})") from error
            time.sleep(0.02)  # its writer may have been in the middle of a change
    if attributes.get("format") != "hpc_rl rollouts":
        raise UserError(f"{path}: not a rollouts file of hpc_rl")
    records, num_damaged = [], 0
    token_begin = text_begin = 0
    for i in range(len(rows)):
        row = rows[i : i + 1]
        spans = {"text": slice(text_begin, int(row["text_end"][0]))}
        spans |= {name: slice(token_begin, int(row["token_end"][0])) for name in TOKENS}
        record = parse(row, {name: arrays[name][span] for name, span in spans.items()})
        if record is None:
            num_damaged += 1
        else:
            records.append(record)
        token_begin, text_begin = int(row["token_end"][0]), int(row["text_end"][0])
    fields = {name: value for name, value in arrays.items() if name not in (*TOKENS, "text")}
    return RolloutFile(attributes, tuple(records), num_damaged, fields)


def read_arrays(path: str | Path) -> tuple[dict[str, Any], np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
    """(attributes, rows, arrays) of a journal as it is now. Raises OSError, whatever is wrong with its bytes."""
    image = snapshot(path)
    try:
        with h5py.File(image, "r") as file:
            rows = file["sequences"][()].astype(ROW, copy=False)
            return dict(file.attrs), rows, {name: file[name][()] for name in file if name != "sequences"}
    except (KeyError, RuntimeError, ValueError, TypeError) as error:
        raise OSError(str(error)) from error


def parse(row: np.ndarray[Any, Any], data: Mapping[str, np.ndarray[Any, Any]]) -> Record | None:
    """A row with its arrays; None if the digest does not match."""
    bare = row.copy()
    bare["digest"] = 0
    if record_digest(bare, data) != int(row["digest"][0]):
        return None
    count, text_bytes = int(row["prompt_tokens"][0]), int(row["prompt_text_bytes"][0])
    ids, text = data["input_ids"], data["text"].tobytes()
    texts = (text[:text_bytes].decode(errors="surrogatepass"), text[text_bytes:].decode(errors="surrogatepass"))
    return Record(ids[:count], ids[count:], data["rollout_log_probs"][count:], texts, bare)


class RolloutReader:
    """All journals of one step, whichever ranks wrote them."""

    def __init__(self, run_dir: str | Path, step: int) -> None:
        self.paths = sorted(rollout_file(run_dir, step, 0).parent.glob("rank_*.h5"))

    def files(self) -> Iterator[RolloutFile]:
        return (read_file(path) for path in self.paths)

    def __iter__(self) -> Iterator[Record]:
        return (record for file in self.files() for record in file)


def finished_samples(run_dir: str | Path, step: int, key: str = "") -> dict[tuple[int, int], Record]:
    """(prompt id, sample id) -> finished sequence, of all ranks' journals that were written under the same ``key``."""
    found: dict[tuple[int, int], Record] = {}
    for path in RolloutReader(run_dir, step).paths:
        try:
            file = read_file(path)
        except UserError as error:
            logger.warning("its rollouts are generated again: %s", error)
            continue
        if file.attributes.get("key") == key:
            found |= {record.key: record for record in file}
    return found
