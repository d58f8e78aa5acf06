"""Turns outcomes into a terminal table, a Markdown page, raw JSON and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.limits import Limit, Limits, limits_of, median_limits
from benchmarks.page import publish_section
from benchmarks.plot import plot_results
from benchmarks.workloads import Outcome, Workload

__all__ = ["Entry", "Results", "print_tables", "publish_results", "write_results"]

#: Our rows, as the summary calls them.
_OURS = {"group": "Millstream", "written": "Millstream written", "interval": "Millstream interval"}


@dataclass(frozen=True, slots=True)
class Entry:
    """All runs of one workload and body size on one contestant; no outcomes if it cannot or failed."""

    contestant: str
    client: str
    workload: str
    size: int
    promise: str
    outcomes: list[Outcome]
    problem: str = ""

    @property
    def per_second(self) -> float:
        return statistics.median(outcome.per_second for outcome in self.outcomes)

    def latency_us(self, point: str) -> float:
        return statistics.median(outcome.latency_us[point] for outcome in self.outcomes)

    @property
    def ours(self) -> bool:
        return self.contestant.startswith("Millstream")


@dataclass(slots=True)
class Results:
    machine: Mapping[str, str]
    workloads: Sequence[Workload]
    sizes: Sequence[int]
    runs: int
    versions: Mapping[str, str]
    skipped: Mapping[str, str]
    limits: list[Limits] = field(default_factory=list)  # of the machine, one for each round
    entries: list[Entry] = field(default_factory=list)

    def entries_of(self, workload: Workload, size: int) -> list[Entry]:
        return [entry for entry in self.entries if (entry.workload, entry.size) == (workload.name, size)]

    def limits_of(self, workload: Workload, size: int) -> list[Limit]:
        """What of the machine's limits concerns a workload; nothing if they were not measured."""
        return limits_of(workload.name, size, median_limits(self.limits)) if self.limits else []

    def tables(self) -> Iterator[_Table]:
        for workload in self.workloads:
            for size in self.sizes:
                if entries := self.entries_of(workload, size):
                    best, limits = _best_peer(entries, workload), self.limits_of(workload, size)
                    yield _Table(
                        f"{workload.name} {workload.title}, {size} B",
                        f"Limit: {'; '.join(map(str, limits))}." if limits else "",
                        _columns(workload, limits),
                        [_row(entry, workload, best, limits) for entry in entries],
                    )

    def limit_rows(self) -> list[list[str]]:
        """The machine's limits: what, the median, and all rounds if there are several."""
        if not self.limits:
            return []
        rounds = zip(*(limits.rows() for limits in self.limits), strict=True)
        return [
            [name, value, "; ".join(figure for _, figure in figures) if len(figures) > 1 else ""]
            for (name, value), figures in zip(median_limits(self.limits).rows(), rounds, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Table:
    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]


def print_tables(results: Results, console: Console) -> None:
    limits = Table(title="What the machine can do", title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    for row in results.limit_rows():
        limits.add_row(*row[:2])
    console.print(limits)
    for figures in results.tables():
        title = f"{figures.title}\n{figures.note}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for index, column in enumerate(figures.columns):
            table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
        for row in figures.rows:
            table.add_row(*row, style="bold" if row[0].startswith("Millstream") else None)
        console.print(table)


def write_results(results: Results, directory: Path) -> None:
    """Write JSON, Markdown and a plot (`results.*`, and the short `summary.md`), replacing those of the last run."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = {
        "machine": dict(results.machine),
        "runs": results.runs,
        "versions": dict(results.versions),
        "skipped": dict(results.skipped),
        "limits": [asdict(limits) for limits in results.limits],
        "limits_median": asdict(median_limits(results.limits)) if results.limits else {},
        "ratios": _ratios(results),
        "entries": [asdict(entry) for entry in results.entries],
    }
    (directory / "results.json").write_text(json.dumps(raw, indent=1) + "\n")
    (directory / "results.md").write_text(_markdown(results))
    (directory / "summary.md").write_text(_summary(results))
    plot_results(results, directory / "results.svg")


def publish_results(directory: Path, page: Path) -> None:
    """Copy summary and tables of the last run between their marks in a documentation page; plot and data beside it."""
    tables = (directory / "results.md").read_text()
    publish_section(page, "results", f"\n![The same figures as bars]({page.stem}.svg)\n\n{tables}\n")
    publish_section(page, "summary", (directory / "summary.md").read_text())
    page.with_suffix(".json").write_bytes((directory / "results.json").read_bytes())
    page.with_suffix(".svg").write_bytes((directory / "results.svg").read_bytes())


def _best_peer(entries: Iterable[Entry], workload: Workload) -> Entry | None:
    peers = [entry for entry in entries if entry.outcomes and not entry.ours]
    if workload.name == "W4":
        return min(peers, key=lambda entry: entry.latency_us("p99"), default=None)
    return max(peers, key=lambda entry: entry.per_second, default=None)


def _columns(workload: Workload, limits: Sequence[Limit]) -> list[str]:
    figures = ["p50 us", "p99 us", "p99.9 us", "msg/s"] if workload.name == "W4" else ["msg/s", "min..max"]
    costs = ["producer ns/msg", "broker ns/msg", "consumer ns/msg", "broker RSS MB"]
    return [
        "contestant (client)",
        "a confirmation means",
        *figures,
        "x best peer",
        *(limit.column for limit in limits),
        *costs,
    ]


def _row(entry: Entry, workload: Workload, best: Entry | None, limits: Sequence[Limit]) -> list[str]:
    head = [f"{entry.contestant} ({entry.client})", entry.promise]
    if not entry.outcomes:
        return [*head, entry.problem, *[""] * (len(_columns(workload, limits)) - 3)]
    rates = [outcome.per_second for outcome in entry.outcomes]
    if workload.name == "W4":
        figures = [f"{entry.latency_us(point):,.0f}" for point in ("p50", "p99", "p99.9")]
        figures.append(f"{entry.per_second:,.0f}")
    else:
        figures = [f"{entry.per_second:,.0f}", f"{min(rates):,.0f}..{max(rates):,.0f}"]
    rss = statistics.median(outcome.rss_bytes for outcome in entry.outcomes) / 1e6
    ratio = f"{_times(entry, best, workload):.2f}" if best else ""
    shares = [_share(entry, limit) for limit in limits]
    return [*head, *figures, ratio, *shares, *_costs(entry), f"{rss:,.0f}"]


def _against(entry: Entry, limit: Limit) -> float:
    return (entry.latency_us("p99") if limit.latency else entry.per_second) / limit.value


def _share(entry: Entry, limit: Limit) -> str:
    ratio = _against(entry, limit)
    return f"{100 * ratio:.1f} %" if limit.column.startswith("of ") else f"{ratio:.1f}"


def _ratios(results: Results) -> list[dict[str, object]]:
    """Each row of Millstream's against the limits that concern it."""
    return [
        {"contestant": entry.contestant, "workload": workload.name, "size": size}
        | {limit.name: _against(entry, limit) for limit in results.limits_of(workload, size)}
        for workload in results.workloads
        for size in results.sizes
        for entry in results.entries_of(workload, size)
        if entry.ours and entry.outcomes
    ]


def _costs(entry: Entry) -> list[str]:
    cells = []
    for side in ("producer_cpu_ns", "broker_cpu_ns", "consumer_cpu_ns"):
        spent = [getattr(outcome, side) for outcome in entry.outcomes]
        if None in spent:
            cells.append("")
        else:
            each = (cpu_ns / outcome.count for cpu_ns, outcome in zip(spent, entry.outcomes, strict=True))
            cells.append(f"{statistics.median(each):,.0f}")
    return cells


def _markdown(results: Results) -> str:
    lines = ["Machine: " + "; ".join(f"{name} {value}" for name, value in results.machine.items()) + ".", ""]
    lines += [f"{_rounds(results)}.", ""]
    lines += [
        "Versions: " + ", ".join(f"{name} {value}" for name, value in results.versions.items()) + ".",
        "",
    ]
    lines += [f"Not run: {name} (missing: `{how}`)." for name, how in results.skipped.items()]
    if rows := results.limit_rows():
        lines += ["", "### Limits of the machine in this run", ""]
        lines += _markdown_table(["limit", "median", "rounds"], rows, texts=1)
    for table in results.tables():
        lines += ["", f"### {table.title}", ""]
        lines += [table.note, ""] if table.note else []
        lines += _markdown_table(table.columns, table.rows, texts=2)
    return "\n".join(lines) + "\n"


def _summary(results: Results) -> str:
    """One line for each workload and size: the rows of Millstream's against the best peer and the limit."""
    ratios_of = [f"{name} x" for name in _OURS]
    columns = ["workload", "size", *_OURS, "best peer", *ratios_of, "group against the limit"]
    rows = []
    for workload in results.workloads:
        for size in results.sizes:
            entries = results.entries_of(workload, size)
            best, limits = _best_peer(entries, workload), results.limits_of(workload, size)
            ours = [next((e for e in entries if e.contestant == name and e.outcomes), None) for name in _OURS.values()]
            if ours[0] is None:
                continue
            title = f"{workload.name} {workload.title}" + (", p99 us" if workload.name == "W4" else "")
            figures = [_headline(entry, workload) if entry else "" for entry in ours]
            peer = f"{best.contestant} ({best.promise.partition(' (')[0]}): {_headline(best, workload)}" if best else ""
            ratios = [f"{_times(entry, best, workload):.2f}" if entry and best else "" for entry in ours]
            shares = ", ".join(f"{limit.column}: {_share(ours[0], limit)}" for limit in limits)
            rows.append([title, f"{size:,} B", *figures, peer, *ratios, shares])
    lines = [f"{_rounds(results)}, on {results.machine['processor']}; messages a second.", ""]
    return "\n".join([*lines, *_markdown_table(columns, rows, texts=1)]) + "\n"


def _rounds(results: Results) -> str:
    return f"Median of {results.runs} run{'s' if results.runs != 1 else ''}"


def _headline(entry: Entry, workload: Workload) -> str:
    return f"{entry.latency_us('p99') if workload.name == 'W4' else entry.per_second:,.0f}"


def _times(entry: Entry, best: Entry, workload: Workload) -> float:
    if workload.name == "W4":
        return entry.latency_us("p99") / best.latency_us("p99")
    return entry.per_second / best.per_second


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int) -> list[str]:
    """A table whose first columns are texts and the others figures."""
    rule = ["---"] * texts + ["---:"] * (len(columns) - texts)
    return [_markdown_row(columns), _markdown_row(rule), *map(_markdown_row, rows)]


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
