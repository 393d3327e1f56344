"""A line chart as SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Line = Sequence[tuple[float, float]]
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf", "#7f7f7f", "#bcbd22")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 60, 44, 190, 64


def line_chart(title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[Line]], note: str = "") -> str:
    """Several lines of one colour for each name in ``series``; axes from 0 to a little above the largest value."""
    points = [point for lines in series.values() for line in lines for point in line]
    x_max = max(x for x, _ in points) or 1.0
    y_max = min(1.0, 1.1 * max(y for _, y in points)) or 1.0

    def place(x: float, y: float) -> str:
        across, up = (WIDTH - LEFT - RIGHT) * x / x_max, (HEIGHT - TOP - BOTTOM) * y / y_max
        return f"{LEFT + across:.1f},{HEIGHT - BOTTOM - up:.1f}"

    parts = [_text(LEFT, 24, title, size=15), _text(LEFT, HEIGHT - 8, note, size=10)]
    parts += [_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 28, x_label), _text(6, TOP - 8, y_label)]
    for i in range(6):
        y, x = y_max * i / 5, x_max * i / 5
        parts.append(_polyline([place(0, y), place(x_max, y)], "#dddddd", 1))
        parts.append(_text(LEFT - 34, float(place(0, y).split(",")[1]) + 4, f"{y:.2f}"))
        parts.append(_text(float(place(x, 0).split(",")[0]) - 6, HEIGHT - BOTTOM + 16, f"{x:.3g}"))
    for i, (name, lines) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        parts += [_polyline([place(*point) for point in line], colour, 2) for line in lines]
        parts.append(_text(WIDTH - RIGHT + 14, TOP + 12 + 20 * i, name, colour))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _polyline(points: Sequence[str], colour: str, width: int) -> str:
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, colour: str = "#222222", size: int = 12) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" font-size="{size}">{escape(text)}</text>'
