"""`archive`: a topic as Parquet or Delta by date, one row per offset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pydantic import Field

from millstream.spark.pipelines.definition import Names, Option, Sink, Source
from millstream.spark.pipelines.ready.catalogue import catalogue
from millstream.spark.pipelines.ready.shelves import DeltaShelf, ParquetShelf, Shelf
from millstream.spark.pipelines.ready.work import ReadyStream, Work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = ["COLUMNS", "Archive"]

#: What is kept of a message.
COLUMNS: Final = ("topic", "partition", "offset", "timestamp", "key", "value", "headers", "priority", "id")
_MEGABYTE: Final = 1_000_000


class Archive(ReadyStream):
    ABOUT: ClassVar = (
        "keeps topics as Parquet or Delta by date, with one row per offset, and makes small files into large ones"
    )
    LOCAL: ClassVar = ("report", "to")

    #: The topics to archive, by name.
    topics: Names | None = None
    #: Or a regular expression for their names; topics that are created later are included.
    pattern: str | None = None
    #: The directory to write to, which driver and executors share.
    to: str
    #: The format of the files.
    format: Literal["parquet", "delta"] = "parquet"
    #: When a date has this many files smaller than half of `file_mb`, they are made into fewer; 0 = never.
    compact_files: int = Field(default=16, ge=0)
    #: How large these files become, in MB.
    file_mb: int = Field(default=128, ge=1, le=4096)
    #: Where a new archive begins.
    start: Literal["earliest", "latest"] = "earliest"
    #: An HTML file about what is in the archive, written anew with each batch.
    report: str | None = None
    #: Options of the data source, such as `maxOffsetsPerTrigger` and `groupId`.
    source: dict[str, Option] = Field(default={})

    def sources(self) -> dict[str, Source]:
        included = dict.fromkeys(("includeHeaders", "includePriority", "includeId"), "true")
        options = {"startingOffsets": self.start, "maxOffsetsPerTrigger": "1000000", **self.source, **included}
        return {"messages": Source(topics=self.topics, pattern=self.pattern, options=options)}

    def sinks(self) -> list[Sink]:
        return [Sink(parquet=self.to) if self.format == "parquet" else Sink(delta=self.to)]

    def mistakes(self) -> list[tuple[tuple[str, ...], str]]:
        found: list[tuple[tuple[str, ...], str]] = []
        if (self.topics is None) == (self.pattern is None):
            found.append((("topics",), "say what to keep by `topics` or by `pattern`"))
        claim = next((name for name in self.source if name.lower() == "claim"), None)
        if claim is not None:  # what comes after higher offsets would be taken for what is here already
            text = "leave this out: an archive keeps one row per offset, in order, and a queue hands out messages in "
            found.append((("source", claim), f"{text}another one; `groupId` shows how far the archive is"))
        return found

    def stream(self, work: Work) -> DataStreamWriter:
        source = work.checked.definition.sources["messages"]
        rows = work.spark.readStream.format("millstream").options(**work.checked.source_options(source)).load()
        shelf = self.shelf(work)
        counted: dict[Path, int] = {}

        def add(batch_rows: DataFrame, batch: int) -> None:
            shelf.add(batch_rows, batch)
            if self.report is not None:
                work.write(self.report, catalogue(work.checked.definition.name, shelf, counted).html())

        return dated(rows).writeStream.foreachBatch(add)

    def shelf(self, work: Work) -> Shelf:
        kind: Any = ParquetShelf if self.format == "parquet" else DeltaShelf
        shelf: Shelf = kind(work.place(self.to).removeprefix("file:"), self.compact_files, self.file_mb * _MEGABYTE)
        return shelf


def dated(rows: DataFrame) -> DataFrame:
    """Rows as they are kept: the columns of a message, and the day of its time in UTC."""
    from pyspark.sql import functions as F  # noqa: N812

    return rows.select(*COLUMNS, F.date_format("timestamp", "yyyy-MM-dd").alias("date"))
