"""Batch reads: ranges of offsets, fixed when the query is planned and read by as many tasks as they need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from millstream.spark.columns import Columns
from millstream.spark.filters import Wanted
from millstream.spark.log_reader import check_existing, open_log, resolve
from millstream.spark.offsets import Range, split
from millstream.spark.options import SourceOptions
from millstream.spark.workers import settle

__all__ = ["BatchReader", "FilteringBatchReader"]


class BatchReader(DataSourceReader):
    """Goes to the executors with every task, so it holds nothing but what it was told."""

    def __init__(self, options: SourceOptions, columns: Columns) -> None:
        self._options = options
        self._columns = columns
        self._wanted = Wanted()

    def partitions(self) -> list[InputPartition]:
        options = self._options
        log = open_log(options)
        extents = log.survey()
        check_existing(options, extents)
        lossless = options.fail_on_data_loss
        starting = resolve(options.starting, "starting", log, extents, fail_on_data_loss=lossless)
        ending = resolve(options.ending, "ending", log, extents, fail_on_data_loss=lossless)
        uids = log.uids(extents) if "id" in self._columns and extents else {}
        ranges = [
            Range(*place, starting[place], ending[place], uids.get(place, 0), extent.message_bytes)
            for place, extent in sorted(extents.items())
        ]
        tasks = split(
            self._wanted.narrowed(ranges),
            at_least=options.partitions_min,
            messages_max=options.records_per_partition_max,
        )
        return [InputPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_range(self._options, self._columns, partition.value, self._wanted)


class FilteringBatchReader(BatchReader):
    """With conditions pushed down.

    A class of its own: Spark refuses readers that could do it wherever `spark.sql.python.filterPushdown.enabled` is
    off, which it is unless somebody says otherwise.  And only for those who ask for it: Spark (4.2, 4.3) takes what was
    pushed down last for all uses of one loaded DataFrame, also for those with other conditions or none.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        self._wanted = Wanted.of(filters)
        return filters  # Spark looks once more: what we leave out is a help, not a promise


def read_range(
    options: SourceOptions, columns: Columns, part: Range | None, wanted: Wanted | None = None
) -> Iterator[pa.RecordBatch]:
    """What a task of either kind of read does.  Without a range, which Spark makes of no ranges at all, nothing."""
    if part is None:
        return
    settle()
    rows = open_log(options).read(part, columns)
    yield from rows if wanted is None else wanted.matching(rows)
