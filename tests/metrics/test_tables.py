from __future__ import annotations

import io

from hpc_rl.metrics.tables import render


def test_rows_values_and_mappings_are_all_shown() -> None:
    stream = io.StringIO()
    bars = [{"name": "save [red]x[/red]", "value": 1.23456789, "unit": "GB/s"}, {"name": "load", "value": 3}]
    render({"step": 7, "whole": None, "bars": bars, "layout": {"tp": 2, "sizes": [1, 2]}}, stream)
    text = stream.getvalue()
    for part in (
        "step",
        "7",
        "whole",
        "-",
        "bars",
        "save [red]x[/red]",
        "1.23457",
        "GB/s",
        "load",
        "layout",
        "tp",
        "[1, 2]",
    ):
        assert part in text
