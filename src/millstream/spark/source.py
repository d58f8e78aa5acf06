"""The data source `millstream` of Spark: which reader or writer serves which options."""

from __future__ import annotations

import importlib
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from millstream.errors import InvalidArgument
from millstream.spark.batch import BatchReader, FilteringBatchReader
from millstream.spark.columns import COLUMNS, NULLABLE, Columns, columns_of
from millstream.spark.options import SinkOptions, SourceOptions
from millstream.spark.stream import StreamReader
from millstream.spark.workers import keep_quiet, spare_imports

__all__ = ["MillstreamSource"]

# Whoever plans a query loads this.
keep_quiet()
spare_imports()


class MillstreamSource(DataSource):
    """`spark.read.format("millstream")`, and the same for readStream, write and writeStream."""

    @classmethod
    def name(cls) -> str:
        return "millstream"

    def schema(self) -> str:
        options = SourceOptions.of(self.options, streaming=False)  # what does not go with a stream, its reader says
        if options.table is not None:
            ddl: str = _other("tables").table_columns(options)
            return ddl
        return columns_of(headers=options.headers, priority=options.priority, ids=options.ids).ddl

    def reader(self, schema: StructType) -> DataSourceReader:
        options = SourceOptions.of(self.options, streaming=False)
        if options.table is not None:
            tables = _other("tables")
            table: DataSourceReader = (tables.FilteringTableReader if options.pushdown else tables.TableReader)(
                options, schema
            )
            return table
        if options.claim is not None:
            raise InvalidArgument("option claim is for streaming reads: a batch read has nothing to settle")
        return (FilteringBatchReader if options.pushdown else BatchReader)(options, _columns(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        options = SourceOptions.of(self.options, streaming=True)
        if options.table is not None:
            raise InvalidArgument(f"table {options.table!r} is read as a batch: use spark.read")
        if options.claim is not None:
            claiming: DataSourceStreamReader = _other("claiming").ClaimingReader(options, _columns(schema))
            return claiming
        return StreamReader(options, _columns(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        _check_append(overwrite)
        writer: DataSourceWriter = _other("batch_writer").BatchWriter(SinkOptions.of(self.options), schema)
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        _check_append(overwrite)
        writer: DataSourceStreamWriter = _other("stream_writer").StreamWriter(SinkOptions.of(self.options), schema)
        return writer


def _columns(schema: StructType) -> Columns:
    """The columns that Spark wants: ours, or some of them as a user declared them."""
    columns = columns_of(schema.names, nullable=[field.name for field in schema.fields if field.nullable])
    for field in schema.fields:
        wanted, ours = field.dataType.simpleString(), COLUMNS[field.name][0]
        if wanted != ours:
            raise InvalidArgument(f"column {field.name!r} is {ours}, not {wanted}; convert it after reading")
        if field.name in NULLABLE and not field.nullable:
            raise InvalidArgument(f"column {field.name!r} can be null: leave `not null` out of the schema")
    return columns


def _check_append(overwrite: bool) -> None:
    if overwrite:
        raise InvalidArgument("messages are only ever added to a topic: use mode append")


def _other(room: str) -> Any:
    """Loaded when it is used: who reads need not load what writes."""
    return importlib.import_module(f"millstream.spark.{room}")
