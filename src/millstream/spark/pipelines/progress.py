"""How a pipeline is: what Spark says about its batches, made into the few numbers that people look at.  Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from millstream.wire.pipeline_calls import PipelineState, ReportPipeline

__all__ = ["BatchDone", "Standing", "batch_of", "lag_of"]

#: What a report says of an error at most.
_ERROR_MAX: Final = 1000


@dataclass(frozen=True)
class BatchDone:
    """A batch that is done."""

    query: str
    batch: int
    #: Rows that were read.
    rows: int
    rows_per_s: float
    #: Messages that are there and not read yet; -1 = not known.
    lag: int
    took_ms: int
    at: str
    watermark: str = ""

    def document(self) -> dict[str, Any]:
        return asdict(self)


def batch_of(query: str, progress: Mapping[str, Any], *, reads: int = 1) -> BatchDone | None:
    """What Spark's progress says; None when it only says that nothing was done.  `reads`: how often a row is read."""
    durations = progress.get("durationMs") or {}
    if "addBatch" not in durations:
        return None
    sources = progress.get("sources") or []
    rows = sum(_rows_of(source, reads) for source in sources)
    took_ms = int(durations.get("triggerExecution") or progress.get("batchDuration") or 0)
    return BatchDone(
        query=query,
        batch=int(progress.get("batchId", -1)),
        rows=rows,
        rows_per_s=round(rows * 1000 / took_ms, 1) if took_ms else 0.0,
        lag=lag_of(progress),
        took_ms=took_ms,
        at=str(progress.get("timestamp", "")),
        watermark=str((progress.get("eventTime") or {}).get("watermark", "")),
    )


def _rows_of(source: Mapping[str, Any], reads: int) -> int:
    """By offsets where there are some, but not for the first batch.  Spark counts a row as often as it is read."""
    start, end = _offsets(source.get("startOffset")), _offsets(source.get("endOffset"))
    if start and end:
        return sum(max(0, until - start.get(place, until)) for place, until in end.items())
    return int(source.get("numInputRows") or 0) // reads


def lag_of(progress: Mapping[str, Any]) -> int:
    """How far the sources of a query are ahead of it; -1 if none of them says so."""
    lags = []
    for source in progress.get("sources") or []:
        latest, end = _offsets(source.get("latestOffset")), _offsets(source.get("endOffset"))
        if latest and end:
            lags.append(sum(max(0, until - end.get(place, 0)) for place, until in latest.items()))
    return sum(lags) if lags else -1


def _offsets(document: Any) -> dict[tuple[str, str], int]:
    """The offsets of a Millstream source, by topic and partition; empty for other sources."""
    if isinstance(document, str):  # Spark has them as the text that is in its checkpoint
        try:
            document = json.loads(document)
        except ValueError:
            return {}
    if not isinstance(document, Mapping):
        return {}
    found: dict[tuple[str, str], int] = {}
    for topic, partitions in document.items():
        if not isinstance(partitions, Mapping) or not all(isinstance(offset, int) for offset in partitions.values()):
            return {}
        numbered = ((str(partition), offset) for partition, offset in partitions.items())
        found.update({(str(topic), number): offset for number, offset in numbered if number.isdecimal()})
    return found


@dataclass
class Standing:
    """A run of a pipeline, from its start to its end.  One thread changes it, another may look at it."""

    name: str
    run: str
    state: PipelineState = "starting"
    sources: list[str] = field(default_factory=list)
    sinks: list[str] = field(default_factory=list)
    definition: dict[str, Any] = field(default_factory=dict)
    host: str = ""
    pid: int = 0
    started_ms: int = 0
    rows: int = 0
    restarts: int = 0
    error: str = ""
    #: The last batch of each query.
    latest: dict[str, BatchDone] = field(default_factory=dict)
    #: The lag of each query, which is known more often.
    lags: dict[str, int] = field(default_factory=dict)
    #: Queries that have nothing to do.
    idle: set[str] = field(default_factory=set)

    def take(self, done: BatchDone) -> None:
        self.latest[done.query] = done
        self.lags[done.query] = done.lag
        self.rows += done.rows

    @property
    def rows_per_s(self) -> float:
        return round(sum(each.rows_per_s for name, each in list(self.latest.items()) if name not in self.idle), 1)

    @property
    def lag(self) -> int:
        """The lag of the query that is furthest behind; not the sum, since queries may read the same messages."""
        return max(list(self.lags.values()), default=-1)

    @property
    def batch(self) -> int:
        return max((each.batch for each in list(self.latest.values())), default=-1)

    @property
    def batch_ms(self) -> int:
        return max((each.took_ms for each in list(self.latest.values())), default=0)

    def report(self) -> ReportPipeline:
        return ReportPipeline(
            name=self.name,
            run=self.run,
            state=self.state,
            sources=self.sources,
            sinks=self.sinks,
            batch=self.batch,
            rows=self.rows,
            rows_per_s=self.rows_per_s,
            lag=self.lag,
            batch_ms=self.batch_ms,
            restarts=self.restarts,
            error=self.error[:_ERROR_MAX],
            definition=self.definition,
            host=self.host,
            pid=self.pid,
            started_ms=self.started_ms,
        )
