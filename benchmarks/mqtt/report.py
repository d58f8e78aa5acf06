"""Tables, raw figures and a plot of what was measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.page import publish_plot

__all__ = ["Case", "Measured", "Results", "Target", "print_tables", "publish_results", "write_results"]

_OURS: Final = ("Millstream, stored", "Millstream")
_PEERS: Final = ("Mosquitto", "amqtt")
_RATE_COLUMNS: Final = ("broker", "an answer means", "per second", "min..max", "x Mosquitto", "x amqtt")
_COST_COLUMNS: Final = ("broker us", "x Mosquitto's", "load us", "load busy")


class Target(NamedTuple):
    """At least so many times the rate of a peer."""

    peer: str
    times: float


class Case(NamedTuple):
    name: str
    title: str
    unit: str = "messages"
    #: Whether it makes a difference to Millstream if messages are stored.
    by_topic: bool = True
    targets: tuple[Target, ...] = ()
    #: What it may be at most.
    most: float | None = None

    @property
    def is_memory(self) -> bool:
        return self.unit == "KB"


class Measured(NamedTuple):
    """One window.  The value is a rate, or an amount of memory."""

    value: float
    broker_cpu_us: float = 0.0
    own_cpu_us: float = 0.0
    own_share: float = 0.0


@dataclass(slots=True)
class Results:
    machine: Mapping[str, str]
    runs: int
    idle_connections: int
    cases: Sequence[Case]
    versions: Mapping[str, str]
    promises: Mapping[str, str]
    measured: dict[tuple[str, str], list[Measured]] = field(default_factory=dict)
    problems: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, case: Case, name: str, measured: Measured) -> None:
        self.measured.setdefault((case.name, name), []).append(measured)

    def names(self, case: Case) -> list[str]:
        known = [*self.promises, *self.versions] if case.by_topic else list(self.versions)
        return [name for name in dict.fromkeys(known) if (case.name, name) in {*self.measured, *self.problems}]

    def median(self, case: Case, name: str) -> Measured | None:
        windows = self.measured.get((case.name, name))
        return Measured(*map(statistics.median, zip(*windows, strict=True))) if windows else None

    def ratio(self, case: Case, name: str, peer: str) -> float | None:
        """How many times as much as a peer; the windows of each round by themselves, for they met the same machine."""
        ours, theirs = (self.measured.get((case.name, one), []) for one in (name, peer))
        return (
            statistics.median(a.value / b.value for a, b in zip(ours, theirs, strict=False))
            if ours and theirs
            else None
        )

    def verdicts(self) -> Iterator[tuple[str, str, str, bool]]:
        """What was set as a target: what it is, the figure, the target, and whether it was reached."""
        for case in self.cases:
            ours = next((name for name in _OURS if (case.name, name) in self.measured), None)
            if ours is None:
                continue
            for peer, times in case.targets:
                if (ratio := self.ratio(case, ours, peer)) is not None:
                    yield f"{case.title}, {ours}, against {peer}", f"{ratio:.2f}x", f">= {times:g}x", ratio >= times
            if case.most is not None and (found := self.median(case, ours)) is not None:
                yield case.title, f"{found.value:.1f} {case.unit}", f"< {case.most:g}", found.value < case.most

    def tables(self) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
        for case in self.cases:
            names = self.names(case)
            if not names:
                continue
            if case.is_memory:
                columns: tuple[str, ...] = ("broker", "KB", "min..max")
                title = f"{case.title}, {self.idle_connections:,} of them (amqtt: 1,000)"
            else:
                columns, title = (*_RATE_COLUMNS, *_COST_COLUMNS), f"{case.title} ({case.unit})"
            yield title, columns, [self._row(case, name, len(columns)) for name in names]

    def _row(self, case: Case, name: str, width: int) -> list[str]:
        found = self.median(case, name)
        head = [name] if case.is_memory else [name, self.promises.get(name, "") if case.by_topic else ""]
        if found is None:
            return [*head, self.problems[case.name, name], *[""] * (width - len(head) - 1)]
        values = [one.value for one in self.measured[case.name, name]]
        digits = 1 if case.is_memory else 0
        cells = [f"{found.value:,.{digits}f}", f"{min(values):,.{digits}f}..{max(values):,.{digits}f}"]
        if not case.is_memory:
            cells += [_times(self.ratio(case, name, peer)) for peer in _PEERS]
            yardstick = self.median(case, _PEERS[0])
            share = found.broker_cpu_us / yardstick.broker_cpu_us if yardstick and yardstick.broker_cpu_us else None
            cells += [f"{found.broker_cpu_us:.2f}", _times(share), f"{found.own_cpu_us:.2f}", f"{found.own_share:.0%}"]
        return head + cells


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def print_tables(results: Results, console: Console) -> None:
    for title, columns, rows in results.tables():
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row, style="bold" if row[0].startswith("Millstream") else None)
        console.print(table)
    for what, figure, target, met in results.verdicts():
        console.print(f"{what}: {figure}, target {target}: {'yes' if met else 'NO'}")


def write_results(results: Results, directory: Path) -> None:
    """Write `mqtt.json`, `mqtt.md` and `mqtt.svg`, replacing those of the last run."""
    raw: dict[str, Any] = {
        "machine": dict(results.machine),
        "versions": dict(results.versions),
        "runs": results.runs,
        "idle connections": results.idle_connections,
        "measured": [
            {"case": case, "contestant": name, "windows": [one._asdict() for one in windows]}
            for (case, name), windows in results.measured.items()
        ],
        "problems": [{"case": case, "contestant": name, "why": why} for (case, name), why in results.problems.items()],
    }
    (directory / "mqtt.json").write_text(json.dumps(raw, indent=1) + "\n")
    (directory / "mqtt.md").write_text(_markdown(results))
    _plot(results, directory / "mqtt.svg")


def publish_results(directory: Path, page: Path) -> None:
    """Copy the tables of the last run between the marks in a documentation page, and its plot beside it."""
    publish_plot(page, "mqtt", directory, "The same figures as bars")


def _markdown(results: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    lines = [f"{versions}; median of {results.runs}; load of the machine {results.machine['load when started']}.", ""]
    lines += ["| Set as a target | measured | target | |", "|---|---:|---:|---|"]
    lines += [
        f"| {what} | {figure} | {target} | {'' if met else 'missed'} |"
        for what, figure, target, met in results.verdicts()
    ]
    for title, columns, rows in results.tables():
        marks = ["---", *["---:" if column not in ("broker", "an answer means") else "---" for column in columns[1:]]]
        lines += ["", f"#### {title}", "", _line(columns), _line(marks), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plot(results: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    cases = [case for case in results.cases if any(results.median(case, name) for name in results.names(case))]
    if not cases:
        return
    rows = -(-len(cases) // 2)
    figure, places = pyplot.subplots(rows, 2, figsize=(12, 1.9 * rows), squeeze=False)
    for axes in places.flat[len(cases) :]:
        axes.set_visible(False)
    for case, axes in zip(cases, places.flat, strict=False):
        bars = {name: found.value for name in results.names(case) if (found := results.median(case, name))}
        colours = ["tab:orange" if name.startswith("Millstream") else "tab:gray" for name in bars]
        axes.barh(list(bars), list(bars.values()), color=colours)
        digits = 1 if case.is_memory else 0
        axes.bar_label(axes.containers[0], [f"{value:,.{digits}f}" for value in bars.values()], padding=3, fontsize=7)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(
            f"{case.title} ({'KB, less is better' if case.is_memory else case.unit + ' a second'})", fontsize=9
        )
        axes.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
