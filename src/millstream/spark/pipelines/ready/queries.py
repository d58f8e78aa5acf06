"""Ready pipelines as queries, so that they are run, watched, reported and restarted like all others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from millstream.spark.pipelines.compiling import CompiledQuery
from millstream.spark.pipelines.graph import Query
from millstream.spark.pipelines.loading import Checked
from millstream.spark.pipelines.ready.kinds import ReadyDefinition
from millstream.spark.pipelines.ready.work import ReadyJob, ReadyStream, Work
from millstream.spark.session import register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["ReadyQuery"]


class ReadyQuery(CompiledQuery):
    """The one query that a ready pipeline has."""

    def __init__(self, spark: SparkSession, checked: Checked) -> None:
        definition = checked.definition
        assert isinstance(definition, ReadyDefinition)
        self._options = definition.options
        self._checked = checked
        self._spark = spark.newSession()
        register(self._spark)
        # Days and hours are the same wherever a pipeline runs.
        self._spark.conf.set("spark.sql.session.timeZone", "UTC")
        self._spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        self._spark.conf.set("spark.sql.sources.partitionColumnTypeInference.enabled", "false")
        self.query = Query(definition.ready, "parquet", "append", isinstance(self._options, ReadyStream))
        self.checkpoint = f"{checked.place(definition.checkpoint or '')}/{definition.ready}"

    def start(self, trigger: dict[str, Any]) -> StreamingQuery:
        assert isinstance(self._options, ReadyStream)
        writer = self._options.stream(self._work()).queryName(self.name).option("checkpointLocation", self.checkpoint)
        return (writer.trigger(**trigger) if trigger else writer).start()

    def run_once(self, run: str, stopped: Callable[[], bool]) -> int:  # noqa: ARG002 - what writes knows how far it is
        assert isinstance(self._options, ReadyJob)
        return self._options.work(self._work(stopped))

    def _work(self, stopped: Callable[[], bool] = lambda: False) -> Work:
        return Work(self._spark, self._checked, datetime.now(UTC), stopped)
