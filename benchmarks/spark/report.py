"""Tables, raw figures and a plot of what was measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.page import publish_plot

__all__ = ["BROKER", "EXACTLY_ONCE", "PARQUET", "SEGMENTS", "Latency", "Measured", "Results"]

BROKER: Final = "Scan through the broker"
SEGMENTS: Final = "Scan of the segments, without the broker"
PARQUET: Final = "Scan of the same rows in Parquet, not compressed"
EXACTLY_ONCE: Final = "Write, exactly once"
_COLUMNS: Final = ("", "M rows/s", "min..max", "JVM us", "Python us", "broker us", "all us")


class Measured(NamedTuple):
    """One piece of work: rows a second, and microseconds of processor time per row."""

    per_second: float
    jvm_us: float
    python_us: float
    broker_us: float


class Latency(NamedTuple):
    """Of a steady stream; seconds."""

    per_second: float
    p50: float
    p95: float
    p99: float
    most: float
    batches: int
    #: Which part of the slowest micro-batch took how many milliseconds, by Spark's names.
    slowest: Mapping[str, int]


class Verdict(NamedTuple):
    what: str
    figure: str
    target: str
    met: bool


@dataclass(slots=True)
class Results:
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    runs: int
    rows: int
    rate: int
    #: Rows a second of one scan after the other in a session of its own, for each session.
    jobs: dict[str, list[list[float]]] = field(default_factory=dict)
    measured: dict[str, list[Measured]] = field(default_factory=dict)
    micro_batches: list[float] = field(default_factory=list)
    streams: list[Latency] = field(default_factory=list)

    def add(self, name: str, measured: Measured) -> None:
        self.measured.setdefault(name, []).append(measured)

    def median(self, name: str) -> Measured:
        return Measured(*map(statistics.median, zip(*self.measured[name], strict=True)))

    def share(self, name: str, other: str) -> float:
        """Of the rate of another; the two of each round by themselves, for they met the same machine."""
        pairs = zip(self.measured[name], self.measured[other], strict=True)
        return statistics.median(one.per_second / two.per_second for one, two in pairs)

    def _job_shares(self) -> list[float]:
        """Of Parquet: each scan of a session by itself, as it gets faster."""
        pairs = zip(self.jobs[BROKER], self.jobs[PARQUET], strict=True)
        ratios = [[one / two for one, two in zip(*pair, strict=True)] for pair in pairs]
        return list(map(statistics.median, zip(*ratios, strict=True)))

    def rows_of_jobs(self) -> Iterator[list[str]]:
        for name, sessions in self.jobs.items():
            yield [name, *(f"{statistics.median(rates) / 1e6:.2f}" for rates in zip(*sessions, strict=True))]
        yield ["Through the broker, as a share of Parquet", *(f"{share:.0%}" for share in self._job_shares())]

    @property
    def _job_columns(self) -> list[str]:
        return ["M rows/s, a session of its own; scan", *map(str, range(1, len(self._job_shares()) + 1))]

    def verdicts(self) -> Iterator[Verdict]:
        scanned, written = self.median(BROKER).per_second / 1e6, self.median(EXACTLY_ONCE).per_second / 1e6
        yield Verdict(BROKER, f"{scanned:.2f} M rows/s", ">= 2.5", scanned >= 2.5)
        for what, share, least in (
            ("of the segments, without the broker", self.share(BROKER, SEGMENTS), 0.75),
            ("of Parquet, the first scan of a session", self._job_shares()[0], 0.5),
            ("of Parquet, in a session that has scanned for long", self.share(BROKER, PARQUET), 0.5),
        ):
            yield Verdict(f"… as a share {what}", f"{share:.0%}", f">= {least:.0%}", share >= least)
        yield Verdict(EXACTLY_ONCE, f"{written:.2f} M rows/s", ">= 0.8", written >= 0.8)
        overhead = statistics.median(self.micro_batches)
        yield Verdict("A micro-batch with one message", f"{overhead:.2f} s", "<= 0.3 s", overhead <= 0.3)
        late = statistics.median(stream.p95 for stream in self.streams)
        what = f"{self.rate:,} rows/s, from record to commit, 95 of 100"
        yield Verdict(what, f"{late:.2f} s", "<= 1 s", late <= 1.0)

    def rows_of_table(self) -> Iterator[list[str]]:
        for name, runs in self.measured.items():
            rates = [one.per_second / 1e6 for one in runs]
            rate, *costs = self.median(name)
            cells = [name, f"{rate / 1e6:.2f}", f"{min(rates):.2f}..{max(rates):.2f}"]
            yield [*cells, *(f"{cost:.2f}" for cost in costs), f"{sum(costs):.2f}"]

    def print(self, console: Console) -> None:
        for columns, rows in ((_COLUMNS, self.rows_of_table()), (self._job_columns, self.rows_of_jobs())):
            table = Table(box=box.SIMPLE_HEAD)
            for index, column in enumerate(columns):
                table.add_column(column, justify="right" if index else "left", no_wrap=True)
            for row in rows:
                table.add_row(*row)
            console.print(table)
        console.print(self._stream_sentence())
        for what, figure, target, met in self.verdicts():
            console.print(f"{what}: {figure}, target {target}: {'yes' if met else 'NO'}")

    def write(self, directory: Path) -> None:
        """Write `spark.json`, `spark.md` and `spark.svg`, replacing those of the last run."""
        raw = {
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "runs": self.runs,
            "rows": self.rows,
            "jobs, rows/s": self.jobs,
            "measured": {name: [one._asdict() for one in runs] for name, runs in self.measured.items()},
            "micro-batches, s": self.micro_batches,
            "streams": [one._asdict() for one in self.streams],
        }
        (directory / "spark.json").write_text(json.dumps(raw, indent=1) + "\n")
        (directory / "spark.md").write_text(self._markdown())
        self._plot(directory / "spark.svg")

    def publish(self, directory: Path, page: Path) -> None:
        """Copy the tables between the marks in a documentation page, and the plot beside it."""
        publish_plot(page, "spark", directory, "The same figures as bars")

    def _stream_sentence(self) -> str:
        shortest, longest = min(self.micro_batches), max(self.micro_batches)
        slowest = max((one.slowest for one in self.streams), key=lambda took: took["triggerExecution"])
        *figures, _ = zip(*self.streams, strict=True)
        stream = Latency(*map(statistics.median, figures), slowest)
        return (
            f"Micro-batches with one message took {shortest:.2f} to {longest:.2f} s. At {stream.per_second:,.0f} rows "
            f"a second, from record to commit: {stream.p50:.2f} s for half of them, {stream.p95:.2f} s for 95 of 100, "
            f"{stream.p99:.2f} s for 99 of 100, {stream.most:.2f} s at most, in {stream.batches:.0f} micro-batches. "
            f"The slowest of all took {slowest['triggerExecution'] / 1000:.2f} s: {_longest(slowest)}."
        )

    def _markdown(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        load = self.machine["load when started"]
        lines = [f"{versions}; {self.rows:,} rows, median of {self.runs}; load of the machine {load}.", ""]
        lines += ["| Set as a target | measured | target | |", "|---|---:|---:|---|"]
        lines += [_line((what, figure, goal, "" if met else "missed")) for what, figure, goal, met in self.verdicts()]
        lines += ["", *_table(_COLUMNS, self.rows_of_table())]
        lines += ["", *_table(self._job_columns, self.rows_of_jobs()), "", self._stream_sentence()]
        return "\n".join(lines) + "\n"

    def _plot(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(self.measured) + 1))
        rates = {name: self.median(name).per_second / 1e6 for name in self.measured}
        colours = ["tab:orange" if name in (BROKER, EXACTLY_ONCE) else "tab:gray" for name in rates]
        bars = axes.barh(list(rates), list(rates.values()), color=colours)
        axes.bar_label(bars, [f"{rate:.2f}" for rate in rates.values()], padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title("million rows a second, 100 B", fontsize=9)
        axes.tick_params(labelsize=8)
        figure.tight_layout()
        figure.savefig(path)
        pyplot.close(figure)


def _longest(took: Mapping[str, int]) -> str:
    """The parts of a micro-batch that took longest."""
    parts = sorted(((name, ms) for name, ms in took.items() if name != "triggerExecution"), key=lambda part: -part[1])
    return ", ".join(f"{name} {ms / 1000:.2f} s" for name, ms in parts[:3])


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_line(columns), _line(["---", *["---:"] * (len(columns) - 1)]), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
