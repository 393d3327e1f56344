"""The README's parts that follow from the code. ``python -m tests.docs.readme`` writes its table of keys anew."""

from __future__ import annotations

import re
from pathlib import Path

from hpc_rl.config_load import config_table

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BEGIN = "<!-- config table: python -m hpc_rl.config_load --table -->\n"
END = "<!-- end of config table -->\n"


def with_current_table(text: str) -> str:
    """The README with the table of keys as the configuration classes have it now."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{config_table()}{END}{after}"


def code_blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


if __name__ == "__main__":
    README.write_text(with_current_table(README.read_text()))
