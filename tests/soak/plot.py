"""The run on a time line, as SVG: rates, the broker's memory, and faults."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from tests.soak.faults import KINDS, SPARK_KINDS

__all__ = ["Line", "draw"]

WIDTH, LEFT, RIGHT, PANEL, GAP, ROW = 960, 150, 16, 110, 34, 15
_COLOURS: Final = {"confirmed": "#00796b", "received": "#5c6bc0", "memory": "#c2185b", "fault": "#e65100"}
_STEP_S: Final = 10.0

#: Seconds since the beginning, and a value; None is a gap.
Line = Sequence[tuple[float, float | None]]


def draw(
    confirmed: Line, received: Line, memory: Line, faults: Sequence[tuple[str, float, float]], seconds: float
) -> str:
    """`faults` by kind, with begin and end in seconds."""
    seconds = max(seconds, 1.0)
    rows = [kind for kind in (*KINDS, *SPARK_KINDS) if any(kind == each for each, *_ in faults)]
    height = 2 * (PANEL + GAP) + GAP + ROW * len(rows) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    ]
    top = GAP
    parts += _panel(top, "messages per second", {"confirmed": confirmed, "received": received}, seconds)
    top += PANEL + GAP
    parts += _panel(top, "broker's memory, MB", {"memory": memory}, seconds)
    top += PANEL + GAP
    parts.append(f'<text x="{LEFT}" y="{top - 6}" fill="#333">faults</text>')
    for at, kind in enumerate(rows):
        y = top + at * ROW
        parts.append(f'<text x="{LEFT - 6}" y="{y + 10}" text-anchor="end" fill="#333">{escape(kind)}</text>')
        for each, begin_s, end_s in faults:
            if each == kind:
                x = _x(begin_s, seconds)
                width = max(1.5, _x(end_s, seconds) - x)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{ROW - 4}" fill="{_COLOURS["fault"]}"/>'
                )
    bottom = top + ROW * len(rows) + 14
    unit_s, unit = (60.0, "min") if seconds >= 120 else (1.0, "s")
    for mark in range(7):
        at_s = seconds * mark / 6
        x = _x(at_s, seconds)
        parts.append(
            f'<text x="{x:.0f}" y="{bottom}" text-anchor="middle" fill="#555">{at_s / unit_s:.0f} {unit}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(at_s: float, seconds: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(max(at_s / seconds, 0.0), 1.0)


def _panel(top: float, title: str, lines: dict[str, Line], seconds: float) -> list[str]:
    highest = max((value for line in lines.values() for _, value in line if value is not None), default=1.0) or 1.0
    parts = [
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{PANEL}" fill="#fafafa" stroke="#ddd"/>',
        f'<text x="{LEFT}" y="{top - 6}" fill="#333">{escape(title)}</text>',
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end" fill="#555">{highest:,.0f}</text>',
        f'<text x="{LEFT - 6}" y="{top + PANEL}" text-anchor="end" fill="#555">0</text>',
    ]
    for at, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[name]
        parts += [
            f'<polyline points="{piece}" fill="none" stroke="{colour}" stroke-width="1.2"/>'
            for piece in _pieces(line, top, highest, seconds)
        ]
        if len(lines) > 1:
            x = WIDTH - RIGHT - 80 * (len(lines) - at)
            parts.append(f'<text x="{x}" y="{top - 6}" fill="{colour}">{name}</text>')
    return parts


def _pieces(line: Line, top: float, highest: float, seconds: float) -> list[str]:
    pieces: list[list[str]] = [[]]
    for at_s, value in line:
        if value is None:
            pieces.append([])
        else:
            y = top + PANEL - PANEL * value / highest
            pieces[-1].append(f"{_x(at_s, seconds):.1f},{y:.1f}")
    return [" ".join(piece) for piece in pieces if piece]
