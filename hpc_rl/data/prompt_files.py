"""Reads prompt files, JSONL or Parquet, and checks each line. Imports no torch: checking them early is cheap.

One record: ``{"prompt_id": 1, "text": "..."}``, or ``"messages": [{"role": "user", "content": "..."}]`` in place of the
text; all other fields are handed to the reward function as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpc_rl.errors import UserError

Format = Literal["auto", "jsonl", "parquet"]
_SUFFIXES: Mapping[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_RESERVED = ("prompt_id", "text", "messages")
_INT64_LIMIT = 1 << 63
_PARQUET_ROWS = 4096  # rows converted at once: bounds the memory


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt as its file has it: either ``text`` or ``messages`` is set."""

    prompt_id: int
    text: str | None
    messages: Sequence[Mapping[str, Any]] | None
    fields: Mapping[str, Any]
    where: str  # file and line, for messages


def read_records(
    paths: str | Sequence[str],
    file_format: Format = "auto",
    required: Sequence[str] = (),
    needed_by: str = "reward.function",
) -> list[Record]:
    """All prompts of ``paths``, in file order.

    Args:
        paths: one file or several.
        file_format: ``auto``: by each file's suffix.
        required: fields that every record must have.
        needed_by: the key of the configuration that asks for them.

    Raises:
        UserError: missing file, bad line (with its number), missing field, prompt_id given twice, no record at all.
    """
    files = [paths] if isinstance(paths, str) else list(paths)
    records: list[Record] = []
    seen: dict[int, str] = {}
    for file in files:
        for where, values in _read_file(Path(file), file_format):
            record = _record(where, values, required, needed_by)
            if record.prompt_id in seen:
                raise UserError(
                    f"{where}: prompt_id {record.prompt_id} was used at {seen[record.prompt_id]} already, but must be "
                    "unique over all prompt files: give it another number"
                )
            seen[record.prompt_id] = where
            records.append(record)
    if not records:
        raise UserError(
            f"{', '.join(files) or 'data.prompts'}: holds 0 prompts, but needs at least 1: add prompts, or name "
            "another file"
        )
    return records


def _read_file(path: Path, file_format: Format) -> Iterator[tuple[str, Any]]:
    if not path.exists():
        raise UserError(f"prompt file {path}: no such file (seen from {Path.cwd()}): correct data.prompts")
    if path.is_dir():
        raise UserError(f"prompt file {path}: is a directory, but must be a file: list its files in data.prompts")
    if file_format == "auto":
        if path.suffix not in _SUFFIXES:
            raise UserError(
                f"prompt file {path}: suffix {path.suffix!r} is none of {', '.join(_SUFFIXES)}: rename it, or set "
                "data.format to jsonl or parquet"
            )
        file_format = _SUFFIXES[path.suffix]
    return _read_jsonl(path) if file_format == "jsonl" else _read_parquet(path)


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path} line {number}", _parse_line(path, number, line)
    except OSError as error:
        raise UserError(f"prompt file {path}: cannot be read ({error.strerror}): correct its permissions") from None


def _parse_line(path: Path, number: int, line: bytes) -> Any:
    try:
        values = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        if b"\\u" in line:  # JSON can name what is no character, which no tokenizer takes
            json.dumps(values, ensure_ascii=False).encode()
        return values
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UserError(
            f"{path} line {number}: holds {half!a}, half of a surrogate pair, which is no character: write the whole "
            "pair, or leave it out"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} line {number}: byte {error.start} is not UTF-8: save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        excerpt = line.decode("utf-8", "replace").strip()[:60]
        hint = "a JSON array must be split into one object a line" if excerpt[:1] == "[" else "correct that line"
        raise UserError(f"{path} line {number}: {excerpt!r} is not JSON ({error}): {hint}") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"prompt file {path}: Parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            row = 0
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for values in batch.to_pylist():
                    row += 1
                    # A column that other rows need is null here: as if the field were absent.
                    yield f"{path} row {row}", {k: v for k, v in values.items() if v is not None}
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"prompt file {path}: is not a readable Parquet file ({str(error).splitlines()[0]}): write it again"
        ) from None


def _record(where: str, values: Any, required: Sequence[str], needed_by: str) -> Record:
    if not isinstance(values, dict):
        raise UserError(
            f'{where}: holds a {type(values).__name__}, but must be an object: {{"prompt_id": 1, "text": "..."}}'
        )
    prompt_id = values.get("prompt_id")
    if prompt_id is None:
        raise UserError(
            f"{where}: the field prompt_id is missing (fields: {_names(values)}): add a unique integer prompt_id"
        )
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, int) or not 0 <= prompt_id < _INT64_LIMIT:
        raise UserError(f"{where}: prompt_id = {prompt_id!r} must be an integer from 0 to 2^63 - 1: number the prompts")
    text, messages = values.get("text"), values.get("messages")
    if text is not None and messages is not None:
        raise UserError(
            f"{where}: prompt_id {prompt_id} has both text and messages, but must have one of them: remove one"
        )
    if text is None and messages is None:
        raise UserError(
            f"{where}: prompt_id {prompt_id} has neither text nor messages (fields: {_names(values)}): add one of them"
        )
    if text is not None and (not isinstance(text, str) or not text):
        raise UserError(f"{where}: text = {text!r} must be a string that is not empty: write the prompt there")
    if messages is not None:
        _check_messages(where, messages)
    fields = {name: value for name, value in values.items() if name not in _RESERVED}
    for name in required:
        if fields.get(name) is None:
            raise UserError(
                f"{where}: the field {name} is missing (fields: {_names(values)}), but {needed_by} needs it: add it, "
                f"or set another {needed_by}"
            )
    return Record(prompt_id, text, messages, fields, where)


def _check_messages(where: str, messages: Any) -> None:
    rule = 'must be a list of {"role": "...", "content": "..."}'
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages = {str(messages)[:60]!r} {rule}, not empty: write at least one message")
    for number, message in enumerate(messages, 1):
        for name in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(name), str):
                raise UserError(
                    f"{where}: message {number} has no string {name}, but messages {rule}: add {name} to it"
                )


def _names(values: Mapping[str, Any]) -> str:
    return ", ".join(map(str, values)) or "none"
