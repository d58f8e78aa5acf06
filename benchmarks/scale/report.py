"""Turns what was measured into tables, raw JSON and a plot for each axis."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.page import publish_plot
from benchmarks.scale.axis import Axis, Figures
from benchmarks.scale.growth import GROWN, Growth, growth_of

__all__ = ["Measured", "print_tables", "publish", "write"]

_MARK = "▲"


@dataclass(slots=True)
class Measured:
    """All runs of all points of all axes."""

    machine: Mapping[str, str]
    runs: int
    axes: Sequence[Axis]
    figures: dict[str, dict[int, list[Figures]]] = field(default_factory=dict)  # by axis, then by point

    def add(self, axis: Axis, point: int, figures: Figures) -> None:
        self.figures.setdefault(axis.name, {}).setdefault(point, []).append(figures)

    def lines(self, axis: Axis) -> Iterator[tuple[str, list[float], Growth]]:
        """Each figure of an axis: its name, its medians along the axis, how it grows."""
        by_point = self.figures.get(axis.name, {})
        points = sorted(by_point)
        if points:
            for name in by_point[points[0]][0]:
                medians = [statistics.median(run[name] for run in by_point[point]) for point in points]
                yield name, medians, growth_of(name, points, medians)

    def points(self, axis: Axis) -> list[int]:
        return sorted(self.figures.get(axis.name, {}))


def print_tables(measured: Measured, console: Console) -> None:
    for axis in measured.axes:
        table = Table(title=axis.title, title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("")
        for point in measured.points(axis):
            table.add_column(f"{point:,}", justify="right")
        table.add_column("growth", justify="right")
        for name, values, growth in measured.lines(axis):
            table.add_row(name, *map(_number, values), _growth(growth), style="bold red" if growth.marked else None)
        console.print(table)


def write(measured: Measured, directory: Path) -> None:
    """Write `scale.json`, `scale.md` and `scale.svg`, replacing those of the last run."""
    directory.mkdir(parents=True, exist_ok=True)
    figures = {
        axis: {point: [_known(run) for run in runs] for point, runs in by_point.items()}
        for axis, by_point in measured.figures.items()
    }
    raw = {"machine": dict(measured.machine), "runs": measured.runs, "figures": figures}
    (directory / "scale.json").write_text(json.dumps(raw, indent=1) + "\n")
    (directory / "scale.md").write_text(_markdown(measured))
    _plot(measured, directory / "scale.svg")


def publish(directory: Path, page: Path) -> None:
    """Copy the tables of the last run between the marks of a documentation page, and the plot beside it."""
    publish_plot(page, "scale", directory, "The same figures as curves")


def _markdown(measured: Measured) -> str:
    machine = "; ".join(f"{name} {value}" for name, value in measured.machine.items())
    lines = [f"Median of {measured.runs}. Machine: {machine}.", ""]
    lines += [f"{_MARK} marks what costs {GROWN:.0f} times as much or more at the end of an axis.", ""]
    for axis in measured.axes:
        points = measured.points(axis)
        lines += [f"### {axis.title}", "", _row(["", *(f"{point:,}" for point in points), "growth"])]
        lines.append(_row(["---", *["---:"] * (len(points) + 1)]))
        for name, values, growth in measured.lines(axis):
            lines.append(_row([name, *map(_number, values), _growth(growth)]))
        lines.append("")
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _known(figures: Figures) -> Figures:
    return {name: value for name, value in figures.items() if not math.isnan(value)}


def _growth(growth: Growth) -> str:
    return f"{growth.text} {_MARK}" if growth.marked else growth.text


def _number(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _plot(measured: Measured, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    axes_measured = [axis for axis in measured.axes if measured.points(axis)]
    figure, rows = pyplot.subplots(len(axes_measured), 2, figsize=(13, 3.6 * len(axes_measured)), squeeze=False)
    for axis, (costs, memory) in zip(axes_measured, rows, strict=True):
        points = measured.points(axis)
        lines = list(measured.lines(axis))
        # By message where the axis is its size; the clients' part is in the table.
        broker = [line for line in lines if "broker us" in line[0] and not line[0].endswith("KB")]
        _curves(costs, points, broker)
        costs.set(yscale="log", title=f"{axis.title}: processor time of the broker, us")
        _curves(memory, points, [line for line in lines if line[0].endswith(("MB", " s"))])
        memory.set(ylim=(0, None), title=f"{axis.title}: memory (MB) and time (s)")
        for plot in (costs, memory):
            if points[0] or len(points) < 2:
                plot.set_xscale("log")
            else:  # there is no logarithm of nothing
                plot.set_xscale("symlog", linthresh=points[1])
                plot.set_xlim(left=0)
            plot.tick_params(labelsize=7)
            plot.title.set_fontsize(9)
            plot.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _curves(plot: Any, points: Sequence[int], lines: Sequence[tuple[str, list[float], Growth]]) -> None:
    for name, values, growth in lines:
        plot.plot(
            points,
            values,
            marker="o",
            markersize=3,
            linewidth=2 if growth.marked else 1,
            label=name.removesuffix(", broker us").removesuffix(", broker us a message"),
        )
    if lines:
        plot.legend(fontsize=6)
