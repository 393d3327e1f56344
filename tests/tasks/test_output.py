"""Directories and files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_rl.data.tasks.output import require_packages, whole_directory, write_whole
from hpc_rl.errors import UserError


def test_a_directory_appears_when_the_block_ends(tmp_path: Path) -> None:
    with whole_directory(tmp_path / "a/b") as scratch:
        (scratch / "f").write_text("1")
        assert not (tmp_path / "a/b").exists()
    assert (tmp_path / "a/b/f").read_text() == "1"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"], "no scratch is left"


def test_it_replaces_an_older_one(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with whole_directory(tmp_path / "d") as scratch:
            (scratch / text).write_text(text)
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/old").write_text("old")

    def fail() -> None:
        with whole_directory(tmp_path / "d") as scratch:
            (scratch / "new").write_text("new")
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        fail()
    assert (tmp_path / "d/old").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_private_files_become_readable(tmp_path: Path) -> None:
    with whole_directory(tmp_path / "d") as scratch:
        (scratch / "f").write_text("1")
        (scratch / "f").chmod(0o600)
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o777 & ~mask
    assert (tmp_path / "d/f").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "p/f.jsonl", "one\n")
    write_whole(tmp_path / "p/f.jsonl", "two\n")
    assert (tmp_path / "p/f.jsonl").read_text() == "two\n"
    assert len(list((tmp_path / "p").iterdir())) == 1


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/d: cannot be written"):
        write_whole(tmp_path / "file/d", "")


def test_missing_packages_are_named_with_the_command() -> None:
    require_packages("nothing", {"json": "json"})
    with pytest.raises(UserError, match=r"thing needs no-such==1, not installed.*pip install --no-deps no-such==1"):
        require_packages("thing", {"json": "json", "no_such_module": "no-such==1"})
