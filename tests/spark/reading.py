"""Reading as Spark does, without Spark: its reader classes are plain Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from millstream.spark.batch import BatchReader
from millstream.spark.source import MillstreamSource
from millstream.spark.stream import StreamReader


def source(options: Mapping[str, str]) -> MillstreamSource:
    return MillstreamSource(dict(options))


_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
_TYPES: dict[str, DataType] = {
    "binary": BinaryType(),
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "timestamp": TimestampType(),
    "array<struct<key:string,value:binary>>": ArrayType(_HEADER),
}


def schema_of(ddl: str) -> StructType:
    """What Spark makes of a schema; its own reader of them is in Java."""
    fields = []
    for column in ddl.split(", "):
        name, kind, *rest = column.split(" ")
        fields.append(StructField(name, _TYPES[kind], nullable=not rest))
    return StructType(fields)


def batch_reader(options: Mapping[str, str], schema: str | None = None) -> BatchReader:
    made = source(options)
    reader = made.reader(schema_of(schema or made.schema()))
    assert isinstance(reader, BatchReader)
    return reader


def rows_of(reader: DataSourceReader) -> list[dict[str, Any]]:
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def read(options: Mapping[str, str], schema: str | None = None) -> list[dict[str, Any]]:
    return rows_of(batch_reader(options, schema))


def values(options: Mapping[str, str]) -> list[Any]:
    return [row["value"] for row in read(options)]


class Query:
    """A streaming query with its checkpoint: offsets as the text that Spark keeps.

    Where it begins is in no checkpoint: Spark asks for it when it plans the first batch, which there always is, and
    once more when it does it.
    """

    def __init__(
        self, options: Mapping[str, str], checkpoint: str | None = None, *, available_now: bool = False
    ) -> None:
        made = source(options)
        reader = made.streamReader(schema_of(made.schema()))
        assert isinstance(reader, StreamReader)
        self.reader = reader
        if available_now:
            reader.prepareForTriggerAvailableNow()
        #: The end of the last batch that is on record; None before the first one is.
        self.checkpoint = checkpoint
        self._done: str | None = None

    @property
    def start(self) -> str:
        """Where the next batch begins."""
        return json.dumps(self.reader.initialOffset()) if self.checkpoint is None else self.checkpoint

    def plan(self, *, everything: bool = False) -> str | None:
        """The end of the next micro-batch; None if there is nothing to do."""
        limit = ReadAllAvailable() if everything else self.reader.getDefaultReadLimit()
        end = json.dumps(self.reader.latestOffset(json.loads(self.start), limit))
        return None if end == self.checkpoint else end

    def tasks(self, end: str) -> list[InputPartition]:
        return list(self.reader.partitions(json.loads(self.start), json.loads(end)))

    def rows(self, end: str) -> list[dict[str, Any]]:
        return [row for part in self.tasks(end) for batch in self.reader.read(part) for row in batch.to_pylist()]

    def batch(self, **how: bool) -> list[dict[str, Any]] | None:
        """Do the next micro-batch."""
        end = self.plan(**how)
        if end is None:
            return None
        if self._done is not None:
            self.reader.commit(json.loads(self._done))  # as late as Spark says it
        rows = self.rows(end)
        self.checkpoint = self._done = end
        return rows

    def drain(self) -> list[list[dict[str, Any]]]:
        """Micro-batches until there is nothing to do."""
        batches = []
        while (rows := self.batch()) is not None:
            batches.append(rows)
        return batches
