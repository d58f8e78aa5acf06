"""Batch writes: all messages of a job, or none."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from millstream.spark import writing
from millstream.spark.options import SinkOptions
from millstream.spark.outlets import Identity

__all__ = ["BatchWriter"]


class BatchWriter(DataSourceArrowWriter):
    """Goes to all tasks as it is, and so does the name that it draws.

    A job that is given a name (`transactionalId`) is published once, however often it runs.  In `foreachBatch` that
    holds for each micro-batch: there the name tells the writes of one batch apart.
    """

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        writing.check_schema(options, schema)
        self._options = options
        self._drawn = f"spark-{uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = writing.task_now()
        return writing.write(self._options, self._identity(task), task, iterator)

    def _identity(self, task: writing.Task) -> Identity | None:
        name = self._options.transactional_id
        if not self._options.exactly_once:
            return None
        if name is None:
            return Identity(self._drawn, 0)
        return Identity(f"{name}@{task.query}", task.batch) if task.query else Identity(name, 0)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        writing.publish(self._options, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        # What has a name may be a micro-batch, and which one only its tasks know.
        drawn = self._options.exactly_once and self._options.transactional_id is None
        writing.abort(self._options, messages, Identity(self._drawn, 0) if drawn else None)
