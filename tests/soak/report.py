"""What is written about a run: JSON for programs, Markdown for people, and a picture."""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from tests.soak.audit import Finding, Verdict
from tests.soak.faults import Happened
from tests.soak.memory import Comparison, compare_memory
from tests.soak.plot import Line, draw
from tests.soak.run import Sample, Soak

__all__ = ["Report", "write_report"]

#: How much of the time line one point of the plot stands for.
_POINTS: Final = 360
#: What there is to say before the figures.
_PAGE: Final = Path(__file__).with_name("page.md")


@dataclass
class Report:
    """Everything about a run that is worth keeping."""

    seed: int
    seconds: float
    spark: bool
    spark_batches: int
    ended: str
    machine: str
    load: float
    broker_starts: int
    broker_processor_s: float
    findings: list[dict[str, Any]]
    counts: dict[str, int]
    explained: list[tuple[str, str, int]]
    memory: list[Comparison]
    faults: list[Happened]
    samples: list[Sample] = field(repr=False)
    begin_s: float = 0.0

    @classmethod
    def of(cls, run: Soak, verdict: Verdict) -> Self:
        findings = [*verdict.findings, *(Finding("run", text) for text in run.findings)]
        memory = compare_memory(run.samples)
        findings += [Finding("memory", describe(each)) for each in memory if not each.flat]
        used: dict[int, float] = {}
        for sample in run.samples:
            used[sample.life] = max(used.get(sample.life, 0.0), sample.processor_s)
        return cls(
            seed=run.seed,
            seconds=run.seconds,
            spark=run.spark,
            spark_batches=run.copy.batches if run.copy is not None else 0,
            ended=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            machine=f"{os.cpu_count()} processors, {platform.system()}, Python {platform.python_version()}",
            load=statistics.fmean(sample.load for sample in run.samples) if run.samples else 0.0,
            broker_starts=run.broker.starts,
            broker_processor_s=sum(used.values()),
            findings=[asdict(finding) for finding in findings],
            counts=dict(verdict.counts),
            explained=[(what, why, count) for (what, why), count in verdict.explained.most_common()],
            memory=memory,
            faults=run.faults,
            samples=run.samples,
            begin_s=run.begin_s,
        )

    def sentence(self) -> str:
        lost = sum(finding["count"] for finding in self.findings if finding["rule"] == "lost")
        repeated = sum(count for *_, count in self.explained)
        return (
            f"{self.confirmed:,} messages confirmed and {self.delivered:,} delivered through "
            f"{len(self.faults)} faults: {lost} lost, {repeated:,} repetitions explained, {len(self.findings)} findings"
        )

    @property
    def confirmed(self) -> int:
        return sum(count for name, count in self.counts.items() if name.endswith(": confirmed"))

    @property
    def delivered(self) -> int:
        return sum(count for name, count in self.counts.items() if name.endswith((": deliveries", "by Spark")))

    def rates(self, what: str) -> Line:
        """Messages per second, over stretches of time."""
        step = max(1, len(self.samples) // _POINTS)
        points: list[tuple[float, float | None]] = []
        chosen = self.samples[::step]
        for before, after in itertools.pairwise(chosen):
            rate = (getattr(after, what) - getattr(before, what)) / max(after.at_s - before.at_s, 0.001)
            points.append((after.at_s - self.begin_s, max(rate, 0.0)))
        return points

    def memory_line(self) -> Line:
        points: list[tuple[float, float | None]] = []
        life = 0
        step = max(1, len(self.samples) // (4 * _POINTS))
        for sample in self.samples[::step]:
            if sample.life != life:
                points.append((sample.at_s - self.begin_s, None))
                life = sample.life
            points.append((sample.at_s - self.begin_s, sample.resident_mb))
        return points

    def picture(self) -> str:
        faults = [(each.kind, each.begin_s - self.begin_s, each.end_s - self.begin_s) for each in self.faults]
        return draw(self.rates("confirmed"), self.rates("received"), self.memory_line(), faults, self.seconds)


def describe(comparison: Comparison) -> str:
    return (
        f"{comparison.what}: {comparison.first_mb:.0f} MB, then {comparison.last_mb:.0f} MB "
        f"({comparison.growth_mb:+.1f} MB)"
    )


def markdown(report: Report, picture: str) -> Iterator[str]:
    """The figures as sections of a page; `picture` is where the plot is."""
    yield f"**{report.sentence()}.**"
    yield ""
    spark = f", Spark with {report.spark_batches:,} batches" if report.spark else ""
    yield (
        f"{report.seconds / 60:.0f} minutes{spark}, seed {report.seed}, ended {report.ended}; {report.machine}; load "
        f"{report.load:.1f} on average; {report.broker_starts} starts of the broker, which used "
        f"{report.broker_processor_s:.0f} s of processor time."
    )
    yield f"\n![Rates, memory and faults on a time line]({picture})\n"
    yield "| Fault | Times |\n|---|---|"
    for kind, count in Counter(fault.kind for fault in report.faults).most_common():
        yield f"| {kind} | {count} |"
    yield "\n| Traffic | Messages |\n|---|---|"
    for name, count in report.counts.items():
        yield f"| {name} | {count:,} |"
    yield "\n| Came again | because of | Times |\n|---|---|---|"
    for what, why, count in report.explained:
        yield f"| {what} | {why} | {count:,} |"
    yield "\n| Memory of the broker, medians | First third | Last third | Growth |\n|---|---|---|---|"
    for each in report.memory:
        figures = f"{each.first_mb:.0f} MB | {each.last_mb:.0f} MB | {each.growth_mb:+.1f} MB"
        yield f"| {each.what} ({each.seconds:.0f} s) | {figures} |"
    yield "\n| Finding | |\n|---|---|"
    for finding in report.findings:
        yield f"| {finding['rule']} ({finding['count']}) | {finding['text']} |"
    if not report.findings:
        yield "| none | |"


def write_report(report: Report, folder: Path) -> Path:
    """Returns the page for people; it and its picture are where docs/ has them."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "images" / "soak.svg").write_text(report.picture())
    (folder / "soak.json").write_text(json.dumps(asdict(report), indent=1) + "\n")
    page = folder / "soak.md"
    page.write_text(_PAGE.read_text() + "\n".join(markdown(report, "images/soak.svg")) + "\n")
    return page
