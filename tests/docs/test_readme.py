"""The README says what is so."""

from __future__ import annotations

from pathlib import Path

from hpc_rl.config_load import config_table

ROOT = Path(__file__).parents[2]


def test_configuration_table_is_current() -> None:
    text = (ROOT / "README.md").read_text()
    table = text.split("--table -->\n", 1)[1].split("<!-- end of config table -->", 1)[0]
    assert table.strip() == config_table().strip(), "run: python -m hpc_rl.config_load --table, and paste it"


def test_ci_runs_the_tests_that_the_readme_names() -> None:
    command = ".venv/bin/python -m pytest -n 2 --dist loadfile tests"
    assert command in (ROOT / "README.md").read_text()
    assert command in (ROOT / ".ci" / "run").read_text()
