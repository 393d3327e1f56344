"""Prints a report (plain data, as ``--json`` shows it) as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table


def render(report: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Prints the plain values of ``report`` as one table, and each list of rows or nested mapping as one of its own."""
    console = Console(file=stream, highlight=False, markup=False)
    values = {name: value for name, value in report.items() if not _is_rows(value) and not isinstance(value, Mapping)}
    if values:
        console.print(_table("", [{"": name, "value": value} for name, value in values.items()]))
    for name, value in report.items():
        if _is_rows(value):
            console.print(_table(name, value))
        elif isinstance(value, Mapping):
            console.print(_table(name, [{"": key, "value": item} for key, item in value.items()]))


def _is_rows(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    numeric = {name for name in names if all(isinstance(row.get(name, 0), int | float) for row in rows)}
    table = Table(title=title or None, title_justify="left")
    for name in names:
        table.add_column(name, justify="right" if name in numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_text(row.get(name, "")) for name in names))
    return table


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping | list | tuple):
        return ", ".join(f"{k}: {_text(v)}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)
    return "-" if value is None else str(value)
