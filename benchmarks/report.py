"""Turns outcomes into a terminal table, a Markdown page, raw JSON and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.workloads import Outcome, Workload

__all__ = ["Entry", "Results", "print_tables", "publish_results", "write_results"]

_BEGIN, _END = "<!-- results begin -->\n", "<!-- results end -->\n"


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
    entries: list[Entry] = field(default_factory=list)

    def tables(self) -> Iterable[tuple[str, list[str], list[list[str]]]]:
        for workload in self.workloads:
            for size in self.sizes:
                entries = [e for e in self.entries if (e.workload, e.size) == (workload.name, size)]
                if entries:
                    title = f"{workload.name} {workload.title}, {size} B"
                    yield (
                        title,
                        _columns(workload),
                        [_row(e, workload, _best_peer(entries, workload)) for e in entries],
                    )


def print_tables(results: Results, console: Console) -> None:
    for title, columns, rows in results.tables():
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row, style="bold" if row[0].startswith("Millstream") else None)
        console.print(table)


def write_results(results: Results, directory: Path) -> None:
    """Write `results.json`, `results.md` and `results.svg`, replacing those of the last run."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = {
        "machine": dict(results.machine),
        "runs": results.runs,
        "versions": dict(results.versions),
        "skipped": dict(results.skipped),
        "entries": [asdict(entry) for entry in results.entries],
    }
    (directory / "results.json").write_text(json.dumps(raw, indent=1) + "\n")
    (directory / "results.md").write_text(_markdown(results))
    _plot(results, directory / "results.svg")


def publish_results(directory: Path, page: Path) -> None:
    """Copy the tables of the last run between the marks in a documentation page, and its plot beside it."""
    before, _, rest = page.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    tables = (directory / "results.md").read_text()
    page.write_text(f"{before}{_BEGIN}\n![The same figures as bars]({page.stem}.svg)\n\n{tables}\n{_END}{after}")
    page.with_suffix(".svg").write_bytes((directory / "results.svg").read_bytes())


def _best_peer(entries: Iterable[Entry], workload: Workload) -> Entry | None:
    peers = [entry for entry in entries if entry.outcomes and not entry.ours]
    if workload.name == "W4":
        return min(peers, key=lambda entry: entry.latency_us("p50"), default=None)
    return max(peers, key=lambda entry: entry.per_second, default=None)


def _columns(workload: Workload) -> list[str]:
    figures = ["p50 us", "p99 us", "p99.9 us", "msg/s"] if workload.name == "W4" else ["msg/s", "min..max"]
    costs = ["producer ns/msg", "broker ns/msg", "consumer ns/msg", "broker RSS MB"]
    return ["contestant (client)", "a confirmation means", *figures, "x best peer", *costs]


def _row(entry: Entry, workload: Workload, best: Entry | None) -> list[str]:
    head = [f"{entry.contestant} ({entry.client})", entry.promise]
    if not entry.outcomes:
        return [*head, entry.problem, *[""] * (len(_columns(workload)) - 3)]
    rates = [outcome.per_second for outcome in entry.outcomes]
    if workload.name == "W4":
        figures = [f"{entry.latency_us(point):,.0f}" for point in ("p50", "p99", "p99.9")]
        figures.append(f"{entry.per_second:,.0f}")
        ratio = entry.latency_us("p50") / best.latency_us("p50") if best else None
    else:
        figures = [f"{entry.per_second:,.0f}", f"{min(rates):,.0f}..{max(rates):,.0f}"]
        ratio = entry.per_second / best.per_second if best else None
    rss = statistics.median(outcome.rss_bytes for outcome in entry.outcomes) / 1e6
    return [*head, *figures, "" if ratio is None else f"{ratio:.2f}", *_costs(entry), f"{rss:,.0f}"]


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
    lines += [f"Median of {results.runs} run{'s' if results.runs != 1 else ''}.", ""]
    lines += [
        "Versions: " + ", ".join(f"{name} {value}" for name, value in results.versions.items()) + ".",
        "",
    ]
    lines += [f"Not run: {name} (missing: `{how}`)." for name, how in results.skipped.items()]
    for title, columns, rows in results.tables():
        lines += ["", f"### {title}", "", _markdown_row(columns)]
        lines.append(_markdown_row(["---", "---", *["---:"] * (len(columns) - 2)]))
        lines += map(_markdown_row, rows)
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plot(results: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    workloads = [w for w in results.workloads if any(e.workload == w.name and e.outcomes for e in results.entries)]
    if not workloads:
        return
    figure, rows = pyplot.subplots(
        len(workloads),
        len(results.sizes),
        figsize=(6 * len(results.sizes), 2.6 * len(workloads)),
        squeeze=False,
    )
    for workload, axes_of_row in zip(workloads, rows, strict=True):
        for size, axes in zip(results.sizes, axes_of_row, strict=True):
            entries = [e for e in results.entries if (e.workload, e.size) == (workload.name, size) and e.outcomes]
            latency = workload.name == "W4"
            values = [e.latency_us("p50") if latency else e.per_second for e in entries]
            axes.barh(
                [e.contestant for e in entries],
                values,
                color=["tab:orange" if e.ours else "tab:gray" for e in entries],
            )
            axes.bar_label(axes.containers[0], labels=[f"{value:,.0f}" for value in values], padding=3, fontsize=7)
            axes.invert_yaxis()
            axes.margins(x=0.15)
            unit = "p50 us, lower is better" if latency else "msg/s"
            axes.set_title(f"{workload.name} {workload.title}, {size} B ({unit})", fontsize=9)
            axes.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
