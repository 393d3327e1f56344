"""The set-up script's refusals, the pins, and who may read a launcher's variables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch.cluster import ROOT

LISTS = sorted((ROOT / "requirements").glob("*.txt"))


def setup(*argv: str, root: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(root / "launch/setup_env.sh"), *argv]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=60, check=False)


def test_old_python_is_refused(tmp_path: Path) -> None:
    """A Python that says no to the version check, as 3.9 would."""
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" != -V ] || { echo Python 3.9.2; exit; }\nexit 1\n')
    old.chmod(0o755)
    done = setup(PYTHON=str(old))
    assert done.returncode == 1
    assert "Python 3.11, 3.12 or 3.13 is needed, but" in done.stderr
    assert "is Python 3.9.2; install one of them" in done.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--gpus"], "unknown option --gpus"), (["--with", "nothing"], "there is no requirements/nothing.txt")],
)
def test_wrong_option_is_refused(argv: list[str], message: str) -> None:
    done = setup(*argv)
    assert done.returncode == 1
    assert message in done.stderr


def test_unreachable_index_is_explained(tmp_path: Path) -> None:
    """With no package to be had anywhere, one line says so, and what to do."""
    for name in ("launch", "requirements", "hpc_rl"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "requirements/cpu.txt").write_text("torch==2.13.0\n")
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "PIP_CONFIG_FILE": os.devnull}
    done = setup("--cpu", root=tmp_path, PIP_EXTRA_INDEX_URL="", PIP_FIND_LINKS="", **nowhere)
    assert done.returncode == 1
    assert "no package index could be reached" in done.stderr
    assert not (tmp_path / ".venv/.setup_done").exists()


@pytest.mark.parametrize("path", LISTS, ids=lambda p: p.stem)
def test_every_requirement_is_pinned(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[^\s=]+", line)] == []
    names = [line.split("==")[0].lower() for line in lines]
    assert len(names) == len(set(names))
    if path.stem == "cpu":
        assert not {"torchvision", "torchaudio", "torchcodec"} & set(names)


def test_one_reader_of_the_launchers_variables() -> None:
    pattern = re.compile(r"""environ(?:\.get\(|\[)["'](RANK|WORLD_SIZE|LOCAL_|SLURM_|OMPI_|PMI_)""")
    sources = [p for name in ("hpc_rl", "launch") for p in (ROOT / name).rglob("*.py")]
    readers = [str(p.relative_to(ROOT)) for p in sources if pattern.search(p.read_text())]
    assert set(readers) <= {"launch/env.py"}
