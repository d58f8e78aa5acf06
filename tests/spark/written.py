"""Writers of the data source called as Spark calls them, without Spark."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pytest

from millstream.spark import writing
from millstream.spark.writing import Task
from tests.spark.reading import schema_of, source


def batch_of(values: Iterable[Any], **columns: Sequence[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary()), **columns})


class Writing:
    """One write: its tasks, and what the driver does with what they say."""

    def __init__(
        self, patch: pytest.MonkeyPatch, options: dict[str, str], *, ddl: str = "value binary", stream: bool = True
    ) -> None:
        made = source(options)
        self._patch = patch
        self._stream = stream
        self._writer: Any = (made.streamWriter if stream else made.writer)(schema_of(ddl), False)

    def task(
        self, batches: Iterable[pa.RecordBatch], *, query: str = "", batch: int = 0, number: int = 0, attempt: int = 0
    ) -> Any:
        """What a task says to the driver; everything travels on the way, as it does in Spark."""
        writer = pickle.loads(pickle.dumps(self._writer))
        self._patch.setattr(writing, "task_now", lambda: Task(number, attempt, query, batch))
        return pickle.loads(pickle.dumps(writer.write(iter(batches))))

    def commit(self, messages: list[Any]) -> None:
        self._writer.commit(messages, 0) if self._stream else self._writer.commit(messages)

    def abort(self, messages: list[Any]) -> None:
        self._writer.abort(messages, 0) if self._stream else self._writer.abort(messages)
