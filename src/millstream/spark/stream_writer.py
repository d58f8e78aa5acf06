"""Streaming writes: every micro-batch exactly once, also when Spark repeats it after a crash."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from millstream.errors import InternalError
from millstream.spark import writing
from millstream.spark.options import SinkOptions
from millstream.spark.outlets import Identity

__all__ = ["StreamWriter"]


class StreamWriter(DataSourceStreamArrowWriter):
    """One writes in the tasks and another commits in the driver, so all that the driver must know is in their messages.

    A query has the id that is in its checkpoint.  A new checkpoint is a new query, whatever `transactionalId` says: its
    batches are counted from 0 again, and must not be taken for those that were published before.
    """

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        writing.check_schema(options, schema)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = writing.task_now()
        return writing.write(self._options, self._identity(task), task, iterator)

    def _identity(self, task: writing.Task) -> Identity | None:
        if not self._options.exactly_once:
            return None
        if not task.query:
            raise InternalError("Spark does not say which query this is, so its batches cannot be told from others")
        name = self._options.transactional_id
        return Identity(f"{name}@{task.query}" if name else task.query, task.batch)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        writing.publish(self._options, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        writing.abort(self._options, messages)
