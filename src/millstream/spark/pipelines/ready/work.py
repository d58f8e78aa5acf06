"""What all ready pipelines have in common: options of a file, and what they need to do their work."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator

from millstream.errors import ConfigInvalid, MillstreamError
from millstream.spark.connection import BrokerConnection, connect
from millstream.spark.options import SinkOptions, SourceOptions
from millstream.spark.pipelines.connecting import DEFAULT_BROKER
from millstream.spark.pipelines.definition import Millis, Names, Part, Sink, Source
from millstream.spark.pipelines.ready.page import Page

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from millstream.spark.pipelines.loading import Checked

__all__ = ["Moment", "Ready", "ReadyJob", "ReadyStream", "Reporting", "TopicReporting", "Work", "since_ms"]


def _moment(value: Any) -> Any:
    """`2026-11-16`, `2026-11-16 08:30`, as YAML makes dates of them or not; UTC unless it says otherwise."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a time: write one such as 2026-11-16T08:30:00Z") from None
    if not isinstance(value, datetime) and hasattr(value, "year"):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        raise ValueError("use a time such as 2026-11-16T08:30:00Z")
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)


Moment = Annotated[datetime, BeforeValidator(_moment)]


@dataclass
class Work:
    """A run: the session, the file, the time, and whether somebody wants it to end."""

    spark: SparkSession
    checked: Checked
    now: datetime
    stopped: Callable[[], bool]

    def place(self, path: str) -> str:
        return self.checked.place(path)

    @property
    def connection(self) -> BrokerConnection:
        return connect(SinkOptions.of(self.checked.sink_options(None)).target)

    def read(self, name: str, **options: str) -> DataFrame:
        """One of the sources that the pipeline has, with further options."""
        source = self.checked.definition.sources[name]
        given = {**self.checked.source_options(source), **options}
        return self.spark.read.format("millstream").options(**given).load()

    def other(self, columns: str | None = None, /, **options: str) -> DataFrame:
        """Something else of the same broker; of messages only these columns, so that no others travel to Spark."""
        given = {**self.checked.sink_options(None), **options}
        reader = self.spark.read.format("millstream").options(**given)
        return (reader if columns is None else reader.schema(columns)).load()

    def write(self, path: str, text: str) -> None:
        """A file that is there whole or not at all."""
        place = Path(self.place(path).removeprefix("file:"))
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            beside = place.with_name(f".{place.name}.{os.getpid()}")
            beside.write_text(text, encoding="utf-8")
            beside.replace(place)
        except OSError as problem:
            raise ConfigInvalid(f"{place} cannot be written: {problem.strerror or problem}") from None


class Ready(Part):
    """The options of a ready pipeline, and what follows from them."""

    #: In one sentence.
    ABOUT: ClassVar[str]
    #: Whether it has to remember how far it is.
    NEEDS_CHECKPOINT: ClassVar[bool] = False
    #: Options that are paths of this machine, because it is not Spark that reads or writes there.
    LOCAL: ClassVar[tuple[str, ...]] = ("report", "json_file")

    @abstractmethod
    def sources(self) -> dict[str, Source]:
        """What it reads."""

    def sinks(self) -> list[Sink]:
        """Where it writes, beside reports."""
        return []

    def mistakes(self) -> list[tuple[tuple[str, ...], str]]:
        """What is wrong with options that are right one by one: which one, and a sentence."""
        return []


class ReadyJob(Ready):
    """One that comes to an end by itself."""

    @abstractmethod
    def work(self, work: Work) -> int:
        """Do it.  Returns how many rows were looked at."""


class ReadyStream(Ready):
    """One that goes on until it is stopped, from where its checkpoint says."""

    NEEDS_CHECKPOINT: ClassVar[bool] = True

    @abstractmethod
    def stream(self, work: Work) -> DataStreamWriter:
        """What is to be started: everything but its name, its checkpoint and its trigger."""


class Reporting(ReadyJob):
    """One that ends in a page for people and, if wanted, the same as JSON for programs."""

    #: The HTML file to write.
    report: str
    #: A JSON file with the same facts, for programs.
    json_file: str | None = None

    def publish(self, work: Work, page: Page, facts: Mapping[str, Any]) -> None:
        work.write(self.report, page.html())
        if self.json_file is not None:
            work.write(self.json_file, json.dumps(facts, indent=2, default=_plain) + "\n")


class TopicReporting(Reporting):
    """A report about messages of some time in some topics."""

    #: Topics by name. Without this and `pattern`, all topics of the namespace.
    topics: Names | None = None
    #: Or a regular expression for their names.
    pattern: str | None = None
    #: How far to look back, such as `7d`. Without it, as far as there is something.
    last: Millis | None = None

    def mistakes(self) -> list[tuple[tuple[str, ...], str]]:
        if self.topics is not None and self.pattern is not None:
            return [(("pattern",), "say which topics by `topics` or by `pattern`, not by both")]
        if self.topics is not None or self.pattern is not None:
            try:
                options = {"bootstrap.servers": DEFAULT_BROKER, **self.chosen(datetime.now(UTC))}
                SourceOptions.of(options, streaming=False)
            except MillstreamError as problem:
                return [(("pattern" if self.topics is None else "topics",), str(problem))]
        return []

    def chosen(self, now: datetime) -> dict[str, str]:
        """As options of the data source."""
        options = {"subscribe": ",".join(self.topics)} if self.topics else {}
        if self.pattern is not None:
            options["subscribePattern"] = self.pattern
        if self.last is not None:
            options["startingTimestamp"] = str(since_ms(now, self.last))
        return options

    @property
    def scope(self) -> str:
        """For people."""
        if self.topics is not None:
            return f"topic {self.topics[0]}" if len(self.topics) == 1 else f"topics {', '.join(self.topics)}"
        return "all topics" if self.pattern is None else f"topics that match {self.pattern}"


def since_ms(now: datetime, last_ms: int) -> int:
    """So long ago, in ms since 1970: the broker knows nothing from before."""
    return max(0, int(now.timestamp() * 1000) - last_ms)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    raise TypeError(type(value).__name__)
