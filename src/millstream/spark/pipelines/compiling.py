"""From a definition to DataFrames and the queries that Spark runs.  Nothing is read or written before `start`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from millstream.errors import ConfigInvalid, MillstreamError
from millstream.spark.pipelines import steps
from millstream.spark.pipelines.avro import read_schema
from millstream.spark.pipelines.definition import MESSAGE_COLUMNS, Sink, Source, Step
from millstream.spark.pipelines.delta import DeltaTable
from millstream.spark.pipelines.failures import sentence_of
from millstream.spark.pipelines.functions import find_function, importing_from, modules_beside
from millstream.spark.pipelines.graph import Query, inputs_of, queries_of
from millstream.spark.pipelines.loading import Checked
from millstream.spark.pipelines.ready.kinds import ReadyDefinition
from millstream.spark.session import register

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = ["CompiledQuery", "compile_pipeline"]

#: What Spark keeps of the past of a query; it is looked at twice a second.
_PROGRESS_KEPT: Final = "32"


@dataclass
class CompiledQuery:
    """A query that can be started."""

    query: Query
    rows: DataFrame
    options: dict[str, str] = field(default_factory=dict)
    path: str | None = None
    partition_by: list[str] = field(default_factory=list)
    checkpoint: str | None = None

    @property
    def name(self) -> str:
        return self.query.name

    def start(self, trigger: dict[str, Any]) -> StreamingQuery:
        """Begin to stream.  `trigger` is what DataStreamWriter.trigger takes."""
        assert self.checkpoint is not None
        writer = self.rows.writeStream.queryName(self.name).outputMode(self.query.mode)
        writer = writer.option("checkpointLocation", self.checkpoint)
        if trigger:
            writer = writer.trigger(**trigger)
        return self._target(writer).start()

    def _target(self, writer: DataStreamWriter) -> DataStreamWriter:
        if self.query.kind == "topics":
            if self.query.mode == "append":
                return writer.format("millstream").options(**self.options)
            return writer.foreachBatch(self._publish)  # Spark lets sinks in Python do nothing but append
        assert self.path is not None
        if self.query.kind == "delta":
            return writer.foreachBatch(DeltaTable(self.path, tuple(self.partition_by)).append)
        writer = writer.format("parquet").options(**self.options).option("path", self.path)
        return writer.partitionBy(*self.partition_by) if self.partition_by else writer

    def _publish(self, rows: DataFrame, _batch: int) -> None:
        """A batch of a stream, which is recognised when it comes again by the id of the query and its number."""
        options = {"transactionalId": self.name, **self.options}
        rows.write.format("millstream").options(**options).mode("append").save()

    def run_once(self, run: str, stopped: Callable[[], bool]) -> int:  # noqa: ARG002 - a single write has no middle
        """Write everything that there is, for what is no stream.  Returns how many rows were written.

        Messages go out once in a run, also if it is not known whether they did and this is called again.  What takes
        long asks from time to time whether it is `stopped`.
        """
        observed = Observation()
        rows = self.rows.observe(observed, F.count(F.lit(1)).alias("rows"))
        if self.query.kind == "topics":
            options = {"transactionalId": f"{self.name}-{run}", **self.options}
            rows.write.format("millstream").options(**options).mode("append").save()
            return int(observed.get["rows"])
        assert self.path is not None
        if self.query.kind == "delta":
            DeltaTable(self.path, tuple(self.partition_by)).append(rows, None)
        else:
            writer = rows.write.options(**self.options).mode("append")
            (writer.partitionBy(*self.partition_by) if self.partition_by else writer).parquet(self.path)
        return int(observed.get["rows"])


def compile_pipeline(spark: SparkSession, checked: Checked) -> list[CompiledQuery]:
    """The queries of a pipeline.  Raises ConfigInvalid where Spark finds a mistake that we could not see."""
    if isinstance(checked.definition, ReadyDefinition):
        from millstream.spark.pipelines.ready.queries import ReadyQuery  # here: it is a query like those of this module

        return [ReadyQuery(spark, checked)]
    return _Compiler(spark, checked).compile()


class _Compiler:
    def __init__(self, spark: SparkSession, checked: Checked) -> None:
        # A session of its own: tables of one pipeline must not be seen by another.
        self._spark = spark.newSession()
        register(self._spark)
        self._spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", _PROGRESS_KEPT)
        self._spark.conf.set("spark.sql.exchange.reuse", "true")  # `steps.once` builds on it
        # Others than Spark read times in this form only.
        self._spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        self._checked = checked
        self._definition = checked.definition
        self._frames: dict[str, DataFrame] = {}
        self._letters: dict[int, DataFrame] = {}

    def compile(self) -> list[CompiledQuery]:
        definition, graph = self._definition, self._checked.graph
        for name, source in definition.sources.items():
            with _blaming(f"source {name!r}"):
                self._define(name, self._read(source))
        for number, step in enumerate(definition.steps):
            name = definition.step_name(number)
            what = f"step {number + 1}" + (f" ({step.name})" if step.name else "")
            with _blaming(what):
                self._define(name, self._do(number, step, what))
        return [self._compiled(query) for query in queries_of(graph)]

    def _define(self, name: str, rows: DataFrame) -> None:
        rows.createOrReplaceTempView(name)
        self._frames[name.lower()] = rows

    # --- sources -----------------------------------------------------------------------------------------------------

    def _read(self, source: Source) -> DataFrame:
        reader = self._spark.readStream if source.is_stream else self._spark.read
        if source.kind != "parquet":
            return reader.format("millstream").options(**self._checked.source_options(source)).load()
        path = self._checked.place(source.parquet or "")
        if source.columns is not None:
            reader = reader.schema(source.columns)
        elif source.is_stream:
            reader = reader.schema(self._spark.read.options(**source.options).parquet(path).schema)
        return reader.options(**source.options).parquet(path)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _do(self, number: int, step: Step, what: str) -> DataFrame:
        made = self._made(number, step)
        if step.dead_letter is None:
            return steps.insist(made, what)
        marked = steps.mark(made, step.dead_letter) if step.kind == "dead_letter" else made
        marked = steps.once(marked)
        self._letters[number] = steps.dead_letters(marked, step.dead_letter, self._definition.name)
        return steps.survivors(marked)

    def _made(self, number: int, step: Step) -> DataFrame:
        if step.sql is not None:
            return self._spark.sql(step.sql)
        inputs = [self._frames[name.lower()] for name in inputs_of(self._definition, number)]
        rows = inputs[0]
        if step.python is not None:
            return self._call(step, inputs)
        if step.enrich is not None:
            return steps.enrich(rows, step.enrich, inputs[1] if step.enrich.lookup is not None else None)
        if step.filter is not None:
            return steps.keep(rows, step.filter)
        if step.redact is not None:
            return steps.redact(rows, step.redact)
        if step.convert is not None:
            schema = step.convert.avro_schema
            avro = None if schema is None else read_schema(schema, self._checked.directory)
            return steps.convert(rows, step.convert, avro)
        if step.split is not None:
            return steps.split(rows, step.split)
        if step.aggregate is not None:
            return steps.aggregate(rows, step.aggregate)
        if step.route is not None:
            return steps.route(rows, step.route)
        return rows

    def _call(self, step: Step, inputs: list[DataFrame]) -> DataFrame:
        arguments = step.arguments or {}
        function = find_function(step.python or "", self._checked.directory, len(inputs), arguments)
        for file in modules_beside(self._checked.directory):
            self._spark.sparkContext.addPyFile(file)
        with importing_from(self._checked.directory):
            made = function(*inputs, **arguments)
        if not isinstance(made, DataFrame):
            raise ConfigInvalid(f"{step.python} returned {type(made).__name__}, not a DataFrame")
        return made

    # --- sinks -------------------------------------------------------------------------------------------------------

    def _compiled(self, query: Query) -> CompiledQuery:
        graph = self._checked.graph
        parts: list[DataFrame] = []
        for sink in query.sinks:
            with _blaming(f"sink {self._definition.sinks.index(sink) + 1}"):
                rows = self._frames[graph.feeds(sink)]
                parts.append(_messages(rows, sink) if query.kind == "topics" else rows)
        parts += [self._letters[number] for number in query.letters]
        with _blaming(f"query {query.name!r}"):
            rows = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), parts)
        compiled = CompiledQuery(query, rows)
        if query.kind == "topics":
            compiled.options = self._checked.sink_options(query.sinks[0] if query.sinks else None)
        else:
            sink = query.sinks[0]
            compiled.options = dict(sink.options)
            compiled.path = self._checked.place(sink.parquet or sink.delta or "")
            compiled.partition_by = list(sink.partition_by)
        if query.is_stream:
            compiled.checkpoint = f"{self._checked.place(self._definition.checkpoint or '')}/{query.name}"
        return compiled


def _messages(rows: DataFrame, sink: Sink) -> DataFrame:
    """Rows as a topic takes them: the columns of a message; without a value, all others as JSON."""
    if sink.topic_column is None:
        topic = F.lit(sink.topic)
    else:
        steps.need(rows, sink.topic_column)
        topic = F.col(f"`{sink.topic_column}`")
    if "value" not in rows.columns:
        inside = [name for name in rows.columns if name not in (*MESSAGE_COLUMNS, sink.topic_column)]
        rows = rows.withColumn("value", F.to_json(F.struct(*[F.col(f"`{name}`") for name in inside])))
    if sink.key is not None:
        steps.need(rows, sink.key)
        rows = rows.withColumn("key", F.col(f"`{sink.key}`").cast("string"))
    casts: dict[str, Callable[[Any], Any]] = {name: lambda column: column.cast("binary") for name in ("key", "value")}
    chosen = [
        casts.get(name, lambda column: column)(F.col(name)).alias(name)
        for name in MESSAGE_COLUMNS
        if name in rows.columns
    ]
    return rows.select(*chosen, topic.alias("topic"))


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Whatever Spark, or a function of the user, has to say is said about a place of the file."""
    try:
        yield
    except PySparkException as problem:
        raise ConfigInvalid(f"{what}: {sentence_of(problem)}") from None
    except MillstreamError as problem:
        raise ConfigInvalid(f"{what}: {problem}") from None
    except Exception as problem:
        raise ConfigInvalid(f"{what} fails: {type(problem).__name__}: {problem}") from problem
