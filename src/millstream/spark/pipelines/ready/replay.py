"""`replay`: what is in an archive, or in a topic, sent to a topic again, no faster than it should be.

All messages are first put in their order, in files of what may go out at a time.  These are sent one after the other,
each under a number of its own, so a replay that was interrupted goes on where it was, and nothing is sent twice.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TextIO

from pydantic import Field

from millstream.errors import ConfigInvalid, MillstreamError
from millstream.names import check_topic
from millstream.spark.pipelines.definition import Names, Sink, Source
from millstream.spark.pipelines.delta import DeltaTable
from millstream.spark.pipelines.ready.archive import dated
from millstream.spark.pipelines.ready.page import Figure, Page, card, shown_time
from millstream.spark.pipelines.ready.plots import buckets, short, stacked
from millstream.spark.pipelines.ready.shelves import ParquetShelf
from millstream.spark.pipelines.ready.work import Moment, ReadyJob, Work
from millstream.spark.pipelines.sql import SqlBroken, check_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Replay"]

#: Messages that go out at a time: a second's worth, but not so few that Spark has more to do with the files.
_BURST_MIN: Final = 100
_BURST: Final = 200_000
_SENT: Final = ("key", "value", "headers", "priority")
_SLEEP_S: Final = 0.05
_NUMBERED: Final = re.compile(r"part-(\d+)-.*-c(\d+)\.")
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"


class Replay(ReadyJob):
    ABOUT: ClassVar = "sends an archive, or some time of a topic, to a topic again, at a rate that it can bear"
    NEEDS_CHECKPOINT: ClassVar = True
    LOCAL: ClassVar = ("report", "archive", "checkpoint")

    #: A directory that `archive` has written.
    archive: str | None = None
    #: Or topics, as they are now.
    topics: Names | None = None
    #: Only messages from this time on, by the times of the messages.
    since: Moment | None = None
    #: Only messages before this time.
    until: Moment | None = None
    #: A further condition, in SQL.
    where: str | None = None
    #: The topic to send to. Without it, each message goes to the topic that it came from.
    to: str | None = None
    #: Messages per second. Without it, as fast as it goes.
    rate: int | None = Field(default=None, ge=1)
    #: `keep` the times that messages had, or give them those of the replay (`now`).
    timestamps: Literal["keep", "now"] = "keep"
    #: An HTML file about what was sent.
    report: str | None = None

    def sources(self) -> dict[str, Source]:
        if self.archive is not None:
            return {"messages": Source(parquet=self.archive)}
        # From its beginning: the broker finds messages by when it got them, which may be before the time they have.
        options = dict.fromkeys(("includeHeaders", "includePriority"), "true")
        return {"messages": Source(topics=self.topics, stream=False, options=options)}

    def sinks(self) -> list[Sink]:
        return [] if self.to is None else [Sink(topic=self.to)]

    def mistakes(self) -> list[tuple[tuple[str, ...], str]]:
        found: list[tuple[tuple[str, ...], str]] = []
        if (self.archive is None) == (self.topics is None):
            found.append((("archive",), "say what to send by `archive` or by `topics`"))
        if self.topics is not None and self.to is None:
            found.append((("to",), "say where to: the topic would get its own messages again"))
        try:
            if self.to is not None:
                check_topic(self.to)
            if self.where is not None:
                check_sql(self.where)
        except MillstreamError as problem:
            found.append((("to",), str(problem)))
        except SqlBroken as problem:
            found.append((("where",), str(problem)))
        return found

    @property
    def burst(self) -> int:
        return _BURST if self.rate is None else max(self.rate, _BURST_MIN)

    # --- work --------------------------------------------------------------------------------------------------------

    def work(self, work: Work) -> int:
        directory = Path(work.place(work.checked.definition.checkpoint or "").removeprefix("file:")) / "replay"
        plan = _Plan(directory)
        if not plan.made:
            plan.make(self._rows(work), self.burst)
        options = work.checked.sink_options(None) | ({} if self.to is None else {"topic": self.to})
        sent = 0
        # A burst is visible when Spark is done with it, so the next one may begin that much earlier; but Spark is slow
        # with the first one only.
        shortest_s = math.inf
        for number, file, rows in plan.left():
            if work.stopped():
                break
            began_s = time.monotonic()
            with _as_batch(work.spark, plan.run, number):
                self._messages(work.spark.read.parquet(str(file))).write.format("millstream").options(
                    **options, transactionalId=f"replay-{work.checked.definition.name}"
                ).mode("append").save()
            plan.note(number, rows, time.time())
            sent += rows
            if self.rate is not None:
                now_s = time.monotonic()
                shortest_s = min(shortest_s, now_s - began_s) if sent > rows else math.inf
                until_s = now_s + rows / self.rate - (0.0 if shortest_s == math.inf else 0.9 * shortest_s)
                _wait_until(until_s, work.stopped)
        if self.report is not None:
            work.write(self.report, self._page(work, plan).html())
        return sent

    def _rows(self, work: Work) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812

        source = work.checked.definition.sources["messages"]
        if self.archive is not None:
            rows = _archived(work.spark, work.place(self.archive))
        else:
            rows = work.spark.read.format("millstream").options(**work.checked.source_options(source)).load()
        if self.since is not None:
            rows = rows.filter(F.col("timestamp") >= F.lit(self.since))
            if "date" in rows.columns:
                late = F.col("date").startswith("+")  # beyond the year 9999
                rows = rows.filter((F.col("date") >= _day(self.since)) | late)
        if self.until is not None:
            rows = rows.filter(F.col("timestamp") < F.lit(self.until))
            if "date" in rows.columns:
                rows = rows.filter(F.col("date") <= _day(self.until))
        if self.where is not None:
            rows = rows.filter(F.expr(self.where))
        return rows.orderBy("timestamp", "topic", "partition", "offset")

    def _messages(self, rows: DataFrame) -> DataFrame:
        columns = [*_SENT, *(["timestamp"] if self.timestamps == "keep" else []), *([] if self.to else ["topic"])]
        return rows.select(*columns).coalesce(1)  # in their order

    def _page(self, work: Work, plan: _Plan) -> Page:
        """What went out, second by second."""
        moments = [(datetime.fromtimestamp(at, UTC), rows) for _, rows, at in plan.sent]
        total = sum(rows for _, rows in moments)
        to = self.to or "the topics they came from"
        page = Page(f"Replay: {work.checked.definition.name}", f"{short(total)} messages sent to {to} again.", work.now)
        if not moments:
            return page
        first, last = min(at for at, _ in moments), max(at for at, _ in moments)  # clocks are set back
        step_s, times = buckets(first, last)
        counts = [0.0] * len(times)
        for at, rows in moments:
            counts[int((at - times[0]).total_seconds() // step_s)] += rows
        took_s = (last - first).total_seconds()
        rest = total - moments[0][1]
        page.figures(
            [
                Figure("Messages", short(total), f"in {len(moments)} bursts of at most {short(self.burst)}"),
                Figure("Rate", f"{short(rest / took_s)}/s" if took_s else "", f"limit: {self.rate or 'none'}"),
                Figure("From", shown_time(first)[11:], shown_time(first)[:10]),
                Figure("Until", shown_time(last)[11:], shown_time(last)[:10]),
            ]
        )
        page.section("Messages sent", card(stacked(times, {"sent": counts}, what="Messages sent over time")))
        return page


def _archived(spark: SparkSession, place: str) -> DataFrame:
    local = place.removeprefix("file:")
    table = DeltaTable(local)
    if table.is_there and (files := table.files()):
        return dated(spark.read.parquet(*files))  # files that are named one by one are in no directory of a date
    if table.is_there or not any(Path(local).rglob("*.parquet")):
        raise ConfigInvalid(f"there is no archive in {place}")
    with ParquetShelf(local, 0, 0).settled():  # Spark makes its list of files here
        return spark.read.parquet(place)


def _day(moment: datetime) -> str:
    """As an archive names it, wherever the clock stands that said the moment."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d")


class _Plan:
    """Messages in their order, in files, and how far the replay is."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._progress = directory / "progress.json"
        lines = self._progress.read_text().split("\n") if self._progress.exists() else ["{}"]
        document: dict[str, Any] = json.loads(lines[0])
        #: Whether another line may be added: not to one that was cut off, nor to a file of an earlier version.
        self._is_whole = not lines.pop()
        self.made = bool(document)
        self.run: str = document.get("run", uuid.uuid4().hex)
        self._rows: list[tuple[str, int]] = [(name, rows) for name, rows in document.get("files", [])]
        #: Number, rows, when.
        self.sent: list[tuple[int, int, float]] = [(*each,) for each in document.get("sent", [])]
        self.sent += [(*json.loads(line),) for line in lines[1:]]

    def make(self, rows: DataFrame, burst: int) -> None:
        import pyarrow.parquet as pq

        place = self._directory / self.run
        rows.write.option("maxRecordsPerFile", burst).parquet(str(place))
        files = sorted(place.glob("*.parquet"), key=_place_of)
        self._rows = [(f"{self.run}/{file.name}", pq.read_metadata(file).num_rows) for file in files]
        self._rows = [(name, count) for name, count in self._rows if count]
        self.made = True
        self._save()

    def left(self) -> Iterator[tuple[int, Path, int]]:
        done = {number for number, _, _ in self.sent}
        for number, (name, rows) in enumerate(self._rows):
            if number not in done:
                yield number, self._directory / name, rows

    def note(self, number: int, rows: int, at: float) -> None:
        self.sent.append((number, rows, at))
        if not self._is_whole:
            self._save()
            return
        with self._progress.open("a") as file:
            _write_line(file, self.sent[-1])

    def _save(self) -> None:
        """All of it as one line; those that are added are bursts."""
        document = {"run": self.run, "files": self._rows, "sent": self.sent}
        beside = self._progress.with_name(".progress.json")
        with beside.open("w") as file:
            _write_line(file, document)
        beside.replace(self._progress)
        self._is_whole = True


def _write_line(file: TextIO, content: object) -> None:
    file.write(f"{json.dumps(content)}\n")
    file.flush()
    os.fsync(file.fileno())


def _place_of(file: Path) -> tuple[int, int]:
    """Spark numbers files in the order of the rows, by tasks and in each; the thousandth has a digit more."""
    match = _NUMBERED.match(file.name)
    assert match is not None
    return int(match[1]), int(match[2])


@contextmanager
def _as_batch(spark: SparkSession, run: str, number: int) -> Iterator[None]:
    """Writes are known to the broker by a query and a number: what goes out twice is recognised, as in a stream."""
    context = spark.sparkContext
    context.setLocalProperty(_QUERY, run)
    context.setLocalProperty(_BATCH, str(number))
    try:
        yield
    finally:
        context.setLocalProperty(_QUERY, None)  # type: ignore[arg-type]
        context.setLocalProperty(_BATCH, None)  # type: ignore[arg-type]


def _wait_until(moment_s: float, stopped: Callable[[], bool]) -> None:
    while not stopped() and (left_s := moment_s - time.monotonic()) > 0:
        time.sleep(min(left_s, _SLEEP_S))
