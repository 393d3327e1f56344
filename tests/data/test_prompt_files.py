from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_rl.data.prompt_files import read_records
from tests.config.refusal import refused

GOOD: dict[str, Any] = {"prompt_id": 1, "text": "1+1=", "answer": "2", "level": {"n": [1]}}


def write_jsonl(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_jsonl(tmp_path: Path) -> None:
    chat = {"prompt_id": 7, "messages": [{"role": "user", "content": "hi"}]}
    first = write_jsonl(tmp_path / "a.jsonl", GOOD, "", chat)
    second = write_jsonl(tmp_path / "b.ndjson", {"prompt_id": 0, "text": "é", "messages": None})
    records = read_records([first, second], required=())
    assert [r.prompt_id for r in records] == [1, 7, 0]
    assert records[0].text == "1+1="
    assert records[0].fields == {"answer": "2", "level": {"n": [1]}}
    assert records[1].messages == chat["messages"]
    assert records[1].where == f"{first} line 3", "an empty line counts"
    assert (records[2].text, records[2].messages, records[2].fields) == ("é", None, {})


def test_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert read_records(str(tmp_path / "a.jsonl"))[0].prompt_id == 1


def test_parquet_says_the_same_as_jsonl(tmp_path: Path) -> None:
    chat = {"prompt_id": 2, "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    rows = [GOOD, chat | {"answer": "x"}, {"prompt_id": 3, "text": "z", "answer": "y"}]
    pq.write_table(
        pa.Table.from_pylist([{k: r.get(k) for k in (*GOOD, "messages")} for r in rows]), tmp_path / "p.parquet"
    )
    from_parquet = read_records(str(tmp_path / "p.parquet"))
    from_jsonl = read_records(write_jsonl(tmp_path / "p.jsonl", *rows))
    strip = [(r.prompt_id, r.text, r.messages, r.fields) for r in from_parquet]
    assert strip == [(r.prompt_id, r.text, r.messages, r.fields) for r in from_jsonl]
    assert from_parquet[1].where == f"{tmp_path / 'p.parquet'} row 2"


def test_format_overrides_the_suffix(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "prompts.txt", GOOD)
    assert len(read_records(path, "jsonl")) == 1


@pytest.mark.parametrize(
    ("line", "value", "rule", "fix"),
    [
        ("{not json}", "line 2: '{not json}'", "is not JSON", "correct that line"),
        ('{"prompt_id": 2, "text": "a"', "line 2", "is not JSON", "correct that line"),
        ("[1, 2", "line 2", "is not JSON", "one object a line"),
        ("[1, 2]", "line 2: holds a list", "must be an object", '"prompt_id": 1'),
        ("3", "line 2: holds a int", "must be an object", '"prompt_id": 1'),
        ({"text": "a"}, "line 2", "field prompt_id is missing (fields: text)", "add a unique integer prompt_id"),
        ({}, "line 2", "field prompt_id is missing (fields: none)", "add"),
        ({"prompt_id": "x1", "text": "a"}, "prompt_id = 'x1'", "must be an integer", "number the prompts"),
        ({"prompt_id": True, "text": "a"}, "prompt_id = True", "must be an integer", "number the prompts"),
        ({"prompt_id": -1, "text": "a"}, "prompt_id = -1", "from 0", "number the prompts"),
        ({"prompt_id": 1 << 63, "text": "a"}, f"prompt_id = {1 << 63}", "to 2^63 - 1", "number the prompts"),
        (
            {"prompt_id": 1, "text": "a", "answer": "x"},
            "line 2: prompt_id 1",
            "line 1 already, but must be unique",
            "another number",
        ),
        (
            {"prompt_id": 2, "answer": "a"},
            "prompt_id 2",
            "has neither text nor messages (fields: prompt_id, answer)",
            "add",
        ),
        ({"prompt_id": 2, "text": "a", "messages": [{}]}, "prompt_id 2", "both text and messages", "remove one"),
        ({"prompt_id": 2, "text": ""}, "text = ''", "must be a string that is not empty", "write the prompt"),
        ({"prompt_id": 2, "text": 5}, "text = 5", "must be a string", "write the prompt"),
        ({"prompt_id": 2, "messages": []}, "messages = '[]'", "not empty", "at least one message"),
        ({"prompt_id": 2, "messages": "hi"}, "messages = 'hi'", "must be a list", "at least one message"),
        ({"prompt_id": 2, "messages": [{"role": "user"}]}, "message 1", "no string content", "add content"),
        ({"prompt_id": 2, "messages": [{"content": "a", "role": 1}]}, "message 1", "no string role", "add role"),
        ({"prompt_id": 2, "messages": ["a"]}, "message 1", "no string role", "add role"),
        ({"prompt_id": 2, "text": "a", "answer": None}, "line 2", "answer is missing", "add it"),
        ({"prompt_id": 2, "text": "a"}, "line 2", "field answer is missing", "add it"),
    ],
)
def test_bad_lines(tmp_path: Path, line: Any, value: str, rule: str, fix: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", GOOD, line)
    with refused(value, rule, fix):
        read_records(path, required=("answer",))


def test_bad_files(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", GOOD)
    with refused("no.jsonl", "no such file", "correct data.prompts"):
        read_records([good, str(tmp_path / "no.jsonl")])
    with refused(str(tmp_path), "is a directory", "list its files"):
        read_records(str(tmp_path))
    with refused("'.csv'", "none of .jsonl", "set data.format"):
        read_records(write_jsonl(tmp_path / "a.csv", GOOD))
    with refused("empty.jsonl", "holds 0 prompts, but needs at least 1", "add prompts"):
        read_records(write_jsonl(tmp_path / "empty.jsonl", "", " "))
    with refused("twice.jsonl line 1: prompt_id 1", "good.jsonl line 1 already", "another number"):
        read_records([good, write_jsonl(tmp_path / "twice.jsonl", GOOD)])
    (tmp_path / "latin.jsonl").write_bytes(json.dumps(GOOD).encode() + b'\n{"text": "\xe9"}\n')
    with refused("latin.jsonl line 2: byte 10", "is not UTF-8", "save the file as UTF-8"):
        read_records(str(tmp_path / "latin.jsonl"))
    half = '{"prompt_id": 2, "text": "\\ud83d"}'
    with refused("half.jsonl line 2: holds '\\ud83d'", "half of a surrogate pair", "write the whole pair"):
        read_records(write_jsonl(tmp_path / "half.jsonl", GOOD, half))
    whole = half.replace("ud83d", "ud83d\\ude00")
    assert read_records(write_jsonl(tmp_path / "whole.jsonl", whole))[0].text == "\U0001f600"
    (tmp_path / "a.parquet").write_text("PAR1 or not")
    with refused("a.parquet", "not a readable Parquet file", "write it again"):
        read_records(str(tmp_path / "a.parquet"))
    pq.write_table(pa.table({"prompt_id": [5, None], "text": ["a", "b"]}), tmp_path / "b.parquet")
    with refused("b.parquet row 2", "field prompt_id is missing (fields: text)", "add"):
        read_records(str(tmp_path / "b.parquet"))
    pq.write_table(pa.table({"prompt_id": pa.array([], pa.int64())}), tmp_path / "c.parquet")
    with refused("c.parquet", "holds 0 prompts", "add prompts"):
        read_records(str(tmp_path / "c.parquet"))
