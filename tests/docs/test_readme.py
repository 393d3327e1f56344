"""The README says what is so: its commands, its table, its files, its Python."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import ROOT, python_env
from tests.cli.test_help import COMMANDS
from tests.docs.readme import README, code_blocks, with_current_table

TEXT = README.read_text()


def test_table_of_keys_is_current() -> None:
    assert with_current_table(TEXT) == TEXT, "run `python -m tests.docs.readme`"


def test_it_is_short() -> None:
    assert len([line for line in TEXT.splitlines() if not line.startswith("| `")]) < 250


def test_the_two_commands() -> None:
    """The test command is the very one that CI runs, and the set-up command is what CI sets up with."""
    setup, tests = code_blocks("bash")[:2]
    assert setup == "bash launch/setup_env.sh && .venv/bin/hpc-rl train configs/quickstart.yaml\n"
    ci = (ROOT / ".ci/run").read_text()
    assert tests in ci
    assert "bash launch/setup_env.sh --cpu --with smollm2\n" in ci


def test_files_that_it_names_are_there() -> None:
    named = set(re.findall(r"\b(?:configs|slurm|launch|requirements|benchmarks|hpc_rl)/[\w./]+\w", TEXT))
    named |= set(re.findall(r"\]\((?!http)([^)]+)\)", TEXT))
    assert len(named) > 8
    assert not {name for name in named if not (ROOT / name).exists()}


def test_commands_that_it_names_exist() -> None:
    lines = re.findall(r"^(?:\| `)?(hpc-rl [^\n`]*)", TEXT, re.MULTILINE)  # of code blocks and of the table
    assert {shlex.split(line)[1] for line in lines} == set(COMMANDS)
    assert set(re.findall(r"hpc-rl (\w+)", TEXT)) <= set(COMMANDS)
    for line in lines:
        words = shlex.split(line.split("[")[0], comments=True)[1:]
        COMMANDS[words[0]].make_context(words[0], words[1:], resilient_parsing=False)


@pytest.mark.xdist_group("api")
def test_its_python_runs(tmp_path: Path) -> None:
    (reward, example) = code_blocks("python")
    (tmp_path / "my_module.py").write_text(reward)
    for name in ("configs", "hpc_rl", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    use = "from my_module import score\nassert score('', ' 46', {'answer': '46'}, bonus=0.5) == 1.5\n"
    done = subprocess.run(
        [sys.executable, "-c", use + example], cwd=tmp_path, env=python_env(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1.0"
    assert (tmp_path / "runs/python/hf/model.safetensors").is_file()
