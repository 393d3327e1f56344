"""Every command explains itself, with an example that its own parser accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer.main

from hpc_rl.cli import app
from tests.cli.command import hpc_rl

GROUP = typer.main.get_command(app)
assert isinstance(GROUP, click.Group) or hasattr(GROUP, "commands")
COMMANDS: dict[str, click.Command] = GROUP.commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_example(name: str) -> None:
    command = COMMANDS[name]
    found = re.search(r"Example: hpc-rl (\S+) (.+)", command.epilog or "")
    assert found is not None and found[1] == name, command.epilog
    context = command.make_context(name, shlex.split(found[2]))  # raises for an option that is not there
    missing = [p.name for p in command.params if p.required and context.params[p.name or ""] is None]
    assert not missing
    assert command.help and all(getattr(p, "help", "") for p in command.params), "an argument without help"


def test_commands_that_print_a_table_have_json() -> None:
    for name in ("inspect", "export", "convert", "bench", "plan", "eval"):
        assert any("--json" in p.opts for p in COMMANDS[name].params), name


def test_the_real_command_prints_its_help_quickly(tmp_path: Path) -> None:
    done = hpc_rl("train", "--help", cwd=tmp_path, env={"COLUMNS": "200"})
    assert done.returncode == 0
    assert "Example: hpc-rl train configs/quickstart.yaml" in done.stdout
    assert done.stderr == ""


def test_no_heavy_import_at_the_command_line(tmp_path: Path) -> None:
    done = hpc_rl("train", "--help", cwd=tmp_path, env={"PYTHONPROFILEIMPORTTIME": "1"})
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hpc_rl.quiet" in loaded
    assert not {"torch", "transformers", "vllm", "h5py"} & loaded
