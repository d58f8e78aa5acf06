"""Plots as SVG that stands in a page: no script, no picture from elsewhere, colours by the names of the page.

Each says in words what it shows, and what is under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

__all__ = ["Bar", "bars", "buckets", "lines", "midnight", "short", "sparkline", "stacked"]

#: Names of colours, in the order in which they are used; the last one is for everything else.
COLOURS: Final = ("one", "two", "three", "four", "five", "six", "rest")
_WIDTH, _HEIGHT = 920, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 10, 12, 26
_COLUMN_WIDTH_MAX: Final = 64
#: How long a column of a plot over time can be.
_STEPS_S: Final = (1, 5, 15, 60, 300, 900, 3600, 3 * 3600, 6 * 3600, 86_400, 7 * 86_400)
_COLUMNS_MAX: Final = 72

Bar = tuple[str, float, str]


def buckets(first: datetime, last: datetime) -> tuple[int, list[datetime]]:
    """Seconds per column, and where each column begins, for everything from the first moment to the last."""
    begin_s, end_s = first.timestamp(), last.timestamp()
    step = next(
        (step for step in _STEPS_S if (end_s - begin_s) / step <= _COLUMNS_MAX),
        math.ceil((end_s - begin_s) / _COLUMNS_MAX / 86_400) * 86_400,
    )
    start = int(begin_s // step * step)
    count = int((end_s - start) // step) + 1
    return step, [datetime.fromtimestamp(start + number * step, UTC) for number in range(count)]


def midnight(text: str) -> datetime | None:
    """When a day began, as Spark writes it; None for what no plot has room for.  A producer that takes milliseconds for
    seconds is in the year 58000.
    """
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        return None


def stacked(times: Sequence[datetime], series: Mapping[str, Sequence[float]], *, what: str) -> str:
    """Columns over time, one part for each series."""
    totals = [sum(values) for values in zip(*series.values(), strict=True)] or [0.0]
    top = _nice(max(totals))
    step = (_WIDTH - _LEFT - _RIGHT) / max(len(times), 1)
    gap = max(min(2.0, step * 0.2), step - _COLUMN_WIDTH_MAX)
    marks = []
    for at, time in enumerate(times):
        y: float = _HEIGHT - _BOTTOM
        said = [f"{_moment(times, time)}: {short(totals[at])}"]
        rects = []
        for number, (name, values) in enumerate(series.items()):
            if not values[at]:
                continue
            said.append(f"{name}: {short(values[at])}")
            height = values[at] / top * (_HEIGHT - _TOP - _BOTTOM)
            y -= height
            rects.append(
                f'<rect x="{_LEFT + at * step + gap / 2:.1f}" y="{y:.1f}" width="{max(step - gap, 0.5):.1f}" '
                f'height="{height:.1f}" class="{_colour(number, len(series), name)}"/>'
            )
        if rects:
            marks.append(f"<g><title>{escape(chr(10).join(said))}</title>{''.join(rects)}</g>")
    inside = "".join(marks)
    return _legend(list(series)) + _frame(times, step / 2, top, inside, f"{what}, {short(sum(totals))} in all")


def lines(times: Sequence[datetime], series: Mapping[str, Sequence[float | None]], *, what: str, unit: str) -> str:
    """A line over time for each series; where nothing is known there is a gap."""
    top = _nice(max((value for values in series.values() for value in values if value is not None), default=1.0))
    step = (_WIDTH - _LEFT - _RIGHT) / max(len(times), 1)
    marks = []
    for number, (name, values) in enumerate(series.items()):
        colour = _colour(number, len(series), name)
        path, pen_is_up = [], True
        for at, value in enumerate(values):
            if value is None:
                pen_is_up = True
                continue
            x = _LEFT + (at + 0.5) * step
            y = _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)
            path.append(f"{'M' if pen_is_up else 'L'}{x:.1f} {y:.1f}")
            pen_is_up = False
            said = escape(f"{name}, {_moment(times, times[at])}: {short(value)} {unit}")
            marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="{colour}"><title>{said}</title></circle>')
        marks.append(f'<path d="{" ".join(path)}" class="line {colour}"/>')
    return _legend(list(series)) + _frame(times, step / 2, top, "".join(marks), what, unit)


def bars(rows: Sequence[Bar], *, what: str, colour: str = "one", numbers: bool = True) -> str:
    """A bar with its name, its number and a note for each row; where the note says it all, without the number."""
    top = max((value for _, value, _ in rows), default=0) or 1
    drawn = "".join(
        f"<div class='bar'><span class='name' title='{escape(name, quote=True)}'>{escape(name)}</span>"
        f"<svg viewBox='0 0 100 10' preserveAspectRatio='none' aria-hidden='true'>"
        f"<rect width='{max(value / top * 100, 0.6):.2f}' height='10' class='{colour}'/></svg>"
        f"<span class='number'>{short(value) if numbers else ''} <i>{escape(note)}</i></span></div>"
        for name, value, note in rows
    )
    return f"<div class='bars' role='img' aria-label='{escape(what, quote=True)}'>{drawn}</div>"


def sparkline(values: Sequence[float], *, what: str) -> str:
    """A plot as large as a word."""
    top = max(values, default=0) or 1
    width = 120 / max(len(values), 1)
    drawn = "".join(
        f'<rect x="{at * width:.1f}" y="{24 - value / top * 24:.1f}" width="{max(width - 0.6, 0.6):.1f}" '
        f'height="{value / top * 24:.1f}" class="one"/>'
        for at, value in enumerate(values)
        if value
    )
    label = escape(what, quote=True)
    frame = f'class="spark" viewBox="0 0 120 24" preserveAspectRatio="none" role="img" aria-label="{label}"'
    return f"<svg {frame}>{drawn}</svg>"


def short(value: float) -> str:
    """A number as people write it: 950, 12,300, 4.2 M."""
    for limit, unit in ((1e9, " G"), (1e6, " M")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{unit}"
    if value == int(value) or abs(value) >= 1000:
        return f"{round(value):,}"
    return f"{value:.3g}"


def _frame(times: Sequence[datetime], middle: float, top: float, inside: str, what: str, unit: str = "") -> str:
    """Axes around a plot."""
    ground = _HEIGHT - _BOTTOM
    drawn = []
    for part in range(5):
        y = ground - part / 4 * (ground - _TOP)
        drawn.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        label = short(top * part / 4) + (f" {unit}" if unit else "")
        drawn.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" class="axis end">{label}</text>')
    step = (_WIDTH - _LEFT - _RIGHT) / max(len(times), 1)
    every = max(1, math.ceil(len(times) / 9))
    for at in range(0, len(times), every):
        x = _LEFT + at * step + middle
        drawn.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" class="axis">{_moment(times, times[at])}</text>')
    label = escape(what, quote=True)
    return (
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(drawn)}{inside}</svg>"
    )


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    each = "".join(
        f"<span><i class='{_colour(number, len(names), name)}'></i>{escape(name)}</span>"
        for number, name in enumerate(names)
    )
    return f"<div class='legend'>{each}</div>"


def _colour(number: int, count: int, name: str) -> str:
    return "rest" if name == "others" and number == count - 1 else COLOURS[min(number, len(COLOURS) - 1)]


def _moment(times: Sequence[datetime], time: datetime) -> str:
    """As exact as the distance between columns asks for."""
    step_s = (times[1] - times[0]).total_seconds() if len(times) > 1 else 1
    if step_s >= 86_400:
        return time.strftime("%d %b")
    span_s = (times[-1] - times[0]).total_seconds()
    if span_s >= 86_400:
        return time.strftime("%d %b %H:%M")
    return time.strftime("%H:%M" if step_s >= 60 else "%H:%M:%S")


def _nice(value: float) -> float:
    """The next number that can be divided by four without looking odd."""
    if value <= 0:
        return 1
    if value <= 4:
        return 4 if value > 1 else 1
    power: float = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * power >= value)
