"""A checkpoint is not resumed with another tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.storage.identity import check_identity, tokenizer_digest


def test_another_tokenizer_is_named(tmp_path: Path) -> None:
    for name, content in (("tokenizer.json", "{}"), ("merges.txt", "a b"), ("README.md", "x")):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_text(content)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    saved = tokenizer_digest(tmp_path / "a")
    (tmp_path / "b" / "README.md").write_text("another text")
    check_identity({"identity": {"tokenizer": saved}}, "c", tokenizer=tokenizer_digest(tmp_path / "b"))
    (tmp_path / "b" / "merges.txt").write_text("a c")
    with pytest.raises(UserError, match="c: saved with another tokenizer .* than this run has"):
        check_identity({"identity": {"tokenizer": saved}}, "c", tokenizer=tokenizer_digest(tmp_path / "b"))
    check_identity({}, "c", tokenizer="x")
