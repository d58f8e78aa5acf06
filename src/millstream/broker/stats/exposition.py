"""Metrics as Prometheus reads them, in its text format or as OpenMetrics.

The numbers are collected on the event loop, in one pass, and written in a thread.  They are written by hand:
prometheus_client makes an object of every sample and looks at every label anew, which takes a quarter of a second for a
thousand topics.  It does the rest: which format a scraper wants, and what there is to say about the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from millstream.broker.latency import Latencies
from millstream.broker.pipelines import PipelineRow
from millstream.broker.stats import families
from millstream.broker.stats.families import BUCKETS_SHOWN, Family
from millstream.broker.stats.survey import QueueRow, StreamRow, Survey, TopicRow
from millstream.topics import LANES

__all__ = ["OTHER", "Collected", "Exposition", "fold"]

Row = TypeVar("Row", TopicRow, QueueRow, StreamRow)

#: What stands for the topic of everything that has no series of its own; no topic can have this name's meaning: its
#: namespace is empty.
OTHER: Final = "_other"
#: Of several these are the largest and not the sum.
_LARGEST: Final = frozenset(("oldest_ms", "throttle_ms", "paused", "rebalancing"))
_LE: Final = [(bucket, repr((1 << bucket) / 1e6)) for bucket in BUCKETS_SHOWN]


@dataclass(frozen=True, slots=True)
class Collected:
    """What the broker was like when somebody asked; nothing here changes any more."""

    version: str
    node: str
    mode: str
    #: Connections, by door.
    doors: Mapping[str, int]
    #: By the sources of families.BROKER.
    numbers: Mapping[str, int]
    survey: Survey
    #: Counts per bucket and the sum, by family and value of its label, if it has one.
    histograms: Mapping[str, Mapping[str, tuple[list[int], int]]]
    pipelines: Sequence[PipelineRow] = ()


def histograms_of(latency: Latencies) -> dict[str, dict[str, tuple[list[int], int]]]:
    """A copy of all histograms, by the source of their family."""
    found: dict[str, dict[str, tuple[list[int], int]]] = {}
    for entry in fields(latency):
        value = getattr(latency, entry.name)
        if isinstance(value, dict):
            found[entry.name] = {name: (list(some.counts), some.sum_us) for name, some in sorted(value.items())}
        elif entry.name.startswith("to_"):
            found.setdefault("to_", {})[entry.name.removeprefix("to_")] = (list(value.counts), value.sum_us)
        else:
            found[entry.name] = {"": (list(value.counts), value.sum_us)}
    return found


class Exposition:
    """Writes metrics.  Remembers only what keeps a sum over changing parts from going back."""

    def __init__(self, series_max: int) -> None:
        self._series_max = series_max
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        PlatformCollector(registry=self._process)
        GCCollector(registry=self._process)
        #: The last value of each counter of `_other`; of a counter by priority, of each.
        self._others: dict[tuple[str, int], float] = {}

    def write(self, collected: Collected, accept: str) -> tuple[bytes, str]:
        """The text, and its media type.  May run in a thread, one call at a time."""
        encode, media_type = choose_encoder(accept)
        is_open = media_type.startswith("application/openmetrics-text")
        lines: list[str] = []
        for family, samples in self._families(collected):
            if samples:
                lines += _head(family, is_open)
                lines += samples
        # The end of the process's own part is the end that OpenMetrics wants.
        return "".join(lines).encode() + encode(self._process), media_type

    def _families(self, collected: Collected) -> Iterator[tuple[Family, list[str]]]:
        build, mode = families.BUILD, families.MODE
        labels = _labels(build.labels, (collected.version, collected.node))
        yield build, [_line(build.name, labels, 1)]
        yield (
            mode,
            [_line(mode.name, _labels(mode.labels, (name,)), int(name == collected.mode)) for name in families.MODES],
        )
        doors = families.CONNECTIONS
        yield doors, [_line(doors.name, _labels(doors.labels, (door,)), n) for door, n in collected.doors.items()]
        for family in families.BROKER:
            yield family, [_line(family.name, "", collected.numbers[family.source] * family.scale)]
        survey = collected.survey
        topics, topics_folded = fold(survey.topics, self._series_max)
        queues, queues_folded = fold(survey.queues, self._series_max)
        streams, streams_folded = fold(survey.streams, self._series_max)
        yield from self._rows(families.TOPICS, topics)
        yield from self._rows(families.QUEUES, queues)
        yield from self._lanes(queues)
        yield from self._rows(families.STREAMS, streams)
        pipelines = collected.pipelines[: self._series_max]  # sums of these would say nothing
        yield from self._rows(families.PIPELINES, pipelines)
        folded = {"topics": topics_folded, "queues": queues_folded, "groups": streams_folded}
        folded["pipelines"] = len(collected.pipelines) - len(pipelines)
        name = families.FOLDED.name
        yield (
            families.FOLDED,
            [_line(name, _labels(families.FOLDED.labels, (of,)), count) for of, count in folded.items()],
        )
        for family in families.HISTOGRAMS:
            yield family, list(_histogram(family, collected.histograms.get(family.source, {})))

    def _rows(self, all_of: Sequence[Family], rows: Sequence[Any]) -> Iterator[tuple[Family, list[str]]]:
        labels = [_labels(all_of[0].labels, [getattr(row, name) for name in all_of[0].labels]) for row in rows]
        for family in all_of:
            values = [getattr(row, family.source) * family.scale for row in rows]
            if family.kind == "counter" and rows and rows[-1].topic == OTHER:
                values[-1] = self._kept(family, values[-1])
            name = family.name
            yield family, [f"{name}{{{label}}} {value}\n" for label, value in zip(labels, values, strict=True)]

    def _lanes(self, rows: Sequence[QueueRow]) -> Iterator[tuple[Family, list[str]]]:
        for family in families.LANES:
            lines = []
            for row in rows:
                for lane in row.lanes:
                    value = getattr(lane, family.source)
                    if family.kind == "counter" and row.topic == OTHER:
                        value = self._kept(family, value, lane.lane)
                    labels = _labels(family.labels, (row.namespace, row.topic, row.group, str(lane.lane)))
                    lines.append(_line(family.name, labels, value))
            yield family, lines

    def _kept(self, family: Family, value: float, lane: int = 0) -> float:
        """A counter of `_other`: at least what it was."""
        at = (family.name, lane)
        self._others[at] = max(value, self._others.get(at, 0))
        return self._others[at]


def fold(rows: Sequence[Row], most: int) -> tuple[list[Row], int]:
    """At most so many rows, and one more with the sums of the others if there are any; and how many these are.

    The first ones stay, as they are the oldest: a series that comes and goes with the traffic would be no use.
    """
    if len(rows) <= most:
        return list(rows), 0
    kept, others = list(rows[:most]), rows[most:]
    kind = type(rows[0])
    names = [entry.name for entry in fields(kind)]
    sums: dict[str, Any] = {"namespace": "", "topic": OTHER, "group": OTHER}
    for name in names:
        if name == "lanes":
            sums[name] = _lane_sums(others)
        elif name not in sums:
            sums[name] = (max if name in _LARGEST else sum)(getattr(row, name) for row in others)
    kept.append(kind(**{name: sums[name] for name in names}))
    return kept, len(others)


def _lane_sums(rows: Iterable[Any]) -> list[Any]:
    by_lane: list[Any] = [None] * LANES
    for row in rows:
        for lane in row.lanes:
            before = by_lane[lane.lane]
            by_lane[lane.lane] = (
                lane
                if before is None
                else before._replace(
                    ready=before.ready + lane.ready,
                    leased=before.leased + lane.leased,
                    served=before.served + lane.served,
                )
            )
    return [lane for lane in by_lane if lane is not None]


def _head(family: Family, is_open: bool) -> tuple[str, str]:
    name = family.base_name if is_open else family.name
    return f"# HELP {name} {family.help}\n", f"# TYPE {name} {family.kind}\n"


def _line(name: str, labels: str, value: float) -> str:
    return f"{name}{{{labels}}} {value}\n" if labels else f"{name} {value}\n"


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _histogram(family: Family, by_label: Mapping[str, tuple[list[int], int]]) -> Iterator[str]:
    name = family.name
    for value, (counts, sum_us) in by_label.items():
        labels = _labels(family.labels, (value,)) if family.labels else ""
        before = f"{labels}," if labels else ""
        seen = sum(counts[: BUCKETS_SHOWN.start])
        for bucket, bound in _LE:
            seen += counts[bucket]
            yield f'{name}_bucket{{{before}le="{bound}"}} {seen}\n'
        total = sum(counts)
        yield f'{name}_bucket{{{before}le="+Inf"}} {total}\n'
        yield _line(f"{name}_count", labels, total)
        yield _line(f"{name}_sum", labels, sum_us / 1e6)
