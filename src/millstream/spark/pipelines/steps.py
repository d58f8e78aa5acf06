"""The ready steps: functions from DataFrame to DataFrame.

A step in which a single row can fail says so in the column `_error` of that row and leaves the rest of it as it was.
What becomes of such rows is decided elsewhere: they are taken out as dead letters, or they fail the batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, StructType

from millstream.dead_letters import DEAD_LETTER_SUFFIX, REJECTED
from millstream.errors import InvalidArgument
from millstream.spark.columns import suggestion
from millstream.spark.pipelines.avro import avro_columns, make_decoder, make_encoder
from millstream.spark.pipelines.definition import (
    MESSAGE_COLUMNS,
    Aggregate,
    Convert,
    DeadLetters,
    Enrich,
    Lookup,
    Redact,
    Route,
    Split,
)
from millstream.spark.pipelines.ordering import TASK, in_order
from millstream.spark.pipelines.values import ValueBroken, make_redactor, make_splitter

__all__ = [
    "ERROR",
    "ROUTE",
    "aggregate",
    "convert",
    "dead_letters",
    "enrich",
    "insist",
    "keep",
    "mark",
    "need",
    "once",
    "redact",
    "route",
    "split",
    "survivors",
]

#: What failed has a sentence here.
ERROR: Final = "_error"
ROUTE: Final = "route"
_PARSED: Final = "_parsed"
_MADE: Final = "_made"
_WITH_NULLS: Final = {"ignoreNullFields": "false"}
_ARROW_TYPES: Final = {"binary": pa.binary(), "array<binary>": pa.list_(pa.field("element", pa.binary()))}
_CORRUPT: Final = "_corrupt_record"
_HEADERS: Final = "array<struct<key:string,value:binary>>"
_ERROR_MAX: Final = 1024
#: Columns of a row that was read from a topic and that say where it was.
_PLACE: Final = ("topic", "partition", "offset")


# --- enrich, filter --------------------------------------------------------------------------------------------------


def enrich(rows: DataFrame, how: Enrich, other: DataFrame | None = None) -> DataFrame:
    """Adds constants, headers, and columns of another table."""
    for name, constant in how.columns.items():
        rows = rows.withColumn(name, F.lit(constant))
    if how.headers:
        rows = _with_headers(rows, {name: F.lit(text) for name, text in how.headers.items()})
    if how.lookup is not None:
        assert other is not None
        rows = _looked_up(rows, how.lookup, other)
    return rows


def _looked_up(rows: DataFrame, how: Lookup, other: DataFrame) -> DataFrame:
    for name in how.match:
        need(rows, name)
    added = [name for name in other.columns if name not in how.match.values()] if how.columns is None else how.columns
    for name in (*how.match.values(), *added):
        need(other, name)
    twice = [name for name in added if name in rows.columns]
    if twice:
        raise InvalidArgument(f"the rows have a column {twice[0]!r} already: say in `columns` which to add")
    keys = {mine: f"_match_{number}" for number, mine in enumerate(how.match)}
    chosen = _newest(other, {keys[mine]: theirs for mine, theirs in how.match.items()}, added)
    chosen = chosen.withColumn("_found", F.lit(True))
    condition = [F.col(_quoted(mine)).eqNullSafe(F.col(theirs)) for mine, theirs in keys.items()]
    on = condition[0]
    for each in condition[1:]:
        on = on & each
    joined = rows.join(F.broadcast(chosen), on, "inner" if how.missing == "drop" else "left").drop(*keys.values())
    if how.missing == "fail":
        joined = joined.withColumn(
            ERROR, F.when(F.col("_found").isNull(), F.lit("the lookup knows nothing of this row"))
        )
    return joined.drop("_found")


def _newest(other: DataFrame, keys: Mapping[str, str], added: list[str]) -> DataFrame:
    """One row for each key, so that one row stays one row: the newest, if there is a time or an offset to tell."""
    matched = [F.col(_quoted(theirs)).alias(name) for name, theirs in keys.items()]
    content = [F.col(_quoted(name)) for name in added]
    age = [F.col(name) for name in ("timestamp", "offset") if name in other.columns]
    if not (age and content):
        return other.select(*matched, *content).dropDuplicates(list(keys))
    newest = other.groupBy(*matched).agg(F.max_by(F.struct(*content), F.struct(*age)).alias(_MADE))
    return newest.select(*keys, f"{_MADE}.*")


def keep(rows: DataFrame, condition: str) -> DataFrame:
    """Rows for which a condition holds."""
    return rows.filter(F.expr(condition))


# --- redact, split: value by value -----------------------------------------------------------------------------------


def redact(rows: DataFrame, how: Redact) -> DataFrame:
    """Drops, masks or hashes fields of JSON values."""
    salt = os.environ[how.salt_variable].encode() if how.salt_variable else None
    fields = dict(how.fields)
    return _changed(rows, lambda: make_redactor(fields, salt))


def split(rows: DataFrame, how: Split) -> DataFrame:
    """A row for each element of an array; the other columns are the same in all of them."""
    need(rows, "value")
    path = how.path
    rows = rows.drop(ERROR).withColumn(_MADE, _each(lambda: make_splitter(path), "array<binary>")(_bytes("value")))
    whole = F.when(F.col(_MADE).isNull() | F.col(f"{_MADE}.error").isNotNull(), F.array(_bytes("value")))
    parts = F.explode(F.coalesce(whole, F.col(f"{_MADE}.made")))
    others = [F.col(_quoted(name)) for name in rows.columns if name not in ("value", _MADE)]
    made = rows.select(*others, parts.alias("value"), F.col(f"{_MADE}.error").alias(ERROR))
    return made.select(*[_quoted(name) for name in rows.columns if name != _MADE], ERROR)


def _changed(rows: DataFrame, make: Callable[[], Callable[[bytes], bytes]]) -> DataFrame:
    """Replaces each value by what a function makes of it; one that fails stays, and so does a null."""
    need(rows, "value")
    rows = rows.drop(ERROR).withColumn(_MADE, _each(make, "binary")(_bytes("value")))
    failed = F.col(f"{_MADE}.error").isNotNull()
    value = F.when(failed, _bytes("value")).otherwise(F.col(f"{_MADE}.made"))
    return rows.withColumn("value", value).withColumn(ERROR, F.col(f"{_MADE}.error")).drop(_MADE)


def _each(make: Callable[[], Callable[[bytes], Any]], kind: str) -> Callable[[Column], Column]:
    """A function for Spark that gives `made` or `error` for each value.  What makes it is made where it works."""

    def work(values: pa.Array) -> pa.Array:
        change = make()
        made: list[Any] = []
        errors: list[str | None] = []
        for value in values.to_pylist():
            outcome, error = None, None
            if value is not None:
                try:
                    outcome = change(value)
                except ValueBroken as problem:
                    error = str(problem)
            made.append(outcome)
            errors.append(error)
        columns = [pa.array(made, _ARROW_TYPES[kind]), pa.array(errors, pa.string())]
        return pa.StructArray.from_arrays(columns, ["made", "error"], mask=values.is_null())

    work.__annotations__ = {"values": pa.Array, "return": pa.Array}  # Spark reads them, and texts are none to it
    functions: Any = F  # its stubs are older than it
    function: Callable[[Column], Column] = functions.arrow_udf(work, f"struct<made:{kind},error:string>")
    return function


def _bytes(name: str) -> Column:
    return F.col(_quoted(name)).cast("binary")


# --- convert ---------------------------------------------------------------------------------------------------------


def convert(rows: DataFrame, how: Convert, avro_schema: Mapping[str, Any] | None = None) -> DataFrame:
    """Turns values from one form into another."""
    rows = rows.drop(ERROR).withColumn(ERROR, F.lit(None).cast("string"))
    columns = how.columns or (avro_columns(avro_schema) if avro_schema is not None else "")
    if how.source == "columns":
        chosen = _declared(rows, columns) if columns else [name for name in rows.columns if not _is_of_message(name)]
        for name in chosen:
            need(rows, name)
        if not chosen:
            raise InvalidArgument("there are no columns to make a value of beside those of the message")
        rows = rows.withColumn(_PARSED, F.struct(*[F.col(_quoted(name)) for name in chosen]))
    else:
        need(rows, "value")
        rows = _parsed(rows, how, columns, avro_schema)
    return _written(rows, how, avro_schema)


def _parsed(rows: DataFrame, how: Convert, columns: str, avro_schema: Mapping[str, Any] | None) -> DataFrame:
    """The value as a struct, in a column of its own."""
    text = F.col("value").cast("string")
    if how.source == "avro":
        assert avro_schema is not None
        schema = dict(avro_schema)
        rows = rows.withColumn(_MADE, _each(lambda: make_decoder(schema), "binary")(_bytes("value")))
        rows = rows.withColumn(ERROR, F.col(f"{_MADE}.error"))
        text = F.col(f"{_MADE}.made").cast("string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    declared = f"{columns}, `{_CORRUPT}` string"
    if how.source == "csv":
        parsed = F.from_csv(text, declared, {**options, "sep": how.separator})
    else:
        parsed = F.from_json(text, declared, options)
    rows = rows.withColumn(_PARSED, parsed)
    name = {"json": "JSON", "csv": "CSV", "avro": "Avro"}[how.source]
    broken = text.isNotNull() & (F.col(_PARSED).isNull() | F.col(f"{_PARSED}.{_CORRUPT}").isNotNull())
    said = F.when(broken, F.lit(f"the value is not {name} of the schema"))
    rows = rows.withColumn(ERROR, F.coalesce(F.col(ERROR), said)).drop(_MADE)
    return rows.withColumn(_PARSED, F.when(F.col("value").isNotNull(), F.col(_PARSED).dropFields(_CORRUPT)))


def _written(rows: DataFrame, how: Convert, avro_schema: Mapping[str, Any] | None) -> DataFrame:
    if how.to == "columns":
        inside = rows.schema[_PARSED].dataType
        assert isinstance(inside, StructType)
        twice = [name for name in inside.names if name in rows.columns]
        if twice:
            raise InvalidArgument(
                f"the rows have a column {twice[0]!r} already: rename it with SQL first, or leave it out of the schema"
            )
        chosen = [F.col(f"{_PARSED}.{_quoted(name)}").alias(name) for name in inside.names]
        return rows.select(*[F.col(_quoted(name)) for name in rows.columns if name != _PARSED], *chosen)
    failed = F.col(ERROR).isNotNull()
    original = _bytes("value") if "value" in rows.columns else F.lit(None).cast("binary")
    if how.to != "avro":
        parsed = F.col(_PARSED)
        text = F.to_csv(parsed, {"sep": how.separator}) if how.to == "csv" else F.to_json(parsed, _WITH_NULLS)
        return rows.withColumn("value", F.when(failed, original).otherwise(text.cast("binary"))).drop(_PARSED)
    assert avro_schema is not None
    schema = dict(avro_schema)
    text = F.when(~failed, F.to_json(F.col(_PARSED), _WITH_NULLS)).cast("binary")
    rows = rows.withColumn(_MADE, _each(lambda: make_encoder(schema), "binary")(text))
    error = F.coalesce(F.col(ERROR), F.col(f"{_MADE}.error"))
    value = F.when(error.isNotNull(), original).otherwise(F.col(f"{_MADE}.made"))
    return rows.withColumn("value", value).withColumn(ERROR, error).drop(_PARSED, _MADE)


def _declared(rows: DataFrame, columns: str) -> list[str]:
    """The names in `id bigint, total double`; Spark reads them."""
    return list(rows.sparkSession.createDataFrame([], columns).columns)


def _is_of_message(name: str) -> bool:
    return name in MESSAGE_COLUMNS or name in (*_PLACE, "timestampType", ERROR, ROUTE)


# --- aggregate, route ------------------------------------------------------------------------------------------------


def aggregate(rows: DataFrame, how: Aggregate) -> DataFrame:
    """One row for each group and window, with `window_start` and `window_end`."""
    groups = []
    for name in how.by:
        need(rows, name)
        groups.append(F.col(_quoted(name)))
    window = how.window
    if window is not None:
        need(rows, window.column)
        if how.watermark is not None:
            rows = rows.withWatermark(window.column, f"{how.watermark} milliseconds")
        size, slide = f"{window.size} milliseconds", f"{window.slide or window.size} milliseconds"
        groups.append(F.window(F.col(_quoted(window.column)), size, slide).alias("_window"))
    measures = [F.expr(measure).alias(name) for name, measure in how.measures.items()]
    counted = rows.groupBy(*groups).agg(*measures)
    if window is None:
        return counted
    return counted.select(
        *[F.col(_quoted(name)) for name in how.by],
        F.col("_window.start").alias("window_start"),
        F.col("_window.end").alias("window_end"),
        *[F.col(_quoted(name)) for name in how.measures],
    )


def route(rows: DataFrame, how: Route) -> DataFrame:
    """Puts the topic of each row into the column `route`, which a sink then reads."""
    if ROUTE in rows.columns:
        raise InvalidArgument(f"the rows have a column {ROUTE!r} already: rename it with SQL first")
    target: Column = F.lit(None).cast("string") if how.otherwise in (None, "drop") else F.lit(how.otherwise)
    for topic, condition in reversed(how.topics.items()):
        target = F.when(F.expr(condition), F.lit(topic)).otherwise(target)
    rows = rows.withColumn(ROUTE, target)
    if how.otherwise == "drop":
        return rows.filter(F.col(ROUTE).isNotNull())
    if how.otherwise is None:
        rows = rows.drop(ERROR).withColumn(ERROR, F.when(F.col(ROUTE).isNull(), F.lit("no route takes this row")))
    return rows


# --- rows that failed ------------------------------------------------------------------------------------------------


def mark(rows: DataFrame, how: DeadLetters) -> DataFrame:
    """Rows for which a condition holds have failed."""
    if how.when is None:
        need(rows, ERROR)
        return rows
    said = F.lit(how.error or f"it was refused because {how.when}")
    return rows.drop(ERROR).withColumn(ERROR, F.when(F.expr(how.when), said))


def once(rows: DataFrame) -> DataFrame:
    """The same rows, which Spark computes once in a batch for all who read them, and not once for each.

    Spark reuses a shuffle that two of them read, if it is the same: if nobody's filters and choice of columns have
    moved below it.  They do not move through a function that takes whole rows and might be any.  The rows of a
    partition stay together, in their order, also if several tasks have read them; Spark itself sorts no stream.
    """
    parts = rows.sparkSession.sparkContext.defaultParallelism
    log = [F.col(name) for name in ("topic", "partition") if name in rows.columns]
    by = log if len(log) == 2 else [F.spark_partition_id()]
    functions: Any = F  # its stubs are older than it
    same = functions.arrow_udf(_in_order, rows.schema).asNondeterministic()
    whole = F.struct(*[F.col(_quoted(name)) for name in (*rows.columns, TASK)])
    rows = rows.withColumn(TASK, F.spark_partition_id()).repartition(parts, *by)
    return rows.select(same(whole).alias(_MADE)).select(f"{_MADE}.*")


def _in_order(rows: Iterator[pa.Array]) -> Iterator[pa.Array]:
    return (batch.to_struct_array() for batch in in_order(map(pa.RecordBatch.from_struct_array, rows)))


# Spark reads them, and texts are none to it.
_in_order.__annotations__ = {"rows": Iterator[pa.Array], "return": Iterator[pa.Array]}


def survivors(rows: DataFrame) -> DataFrame:
    """What did not fail."""
    return rows.filter(F.col(ERROR).isNull()).drop(ERROR) if ERROR in rows.columns else rows


def insist(rows: DataFrame, step: str) -> DataFrame:
    """All rows; the first that failed fails the batch."""
    if ERROR not in rows.columns:
        return rows
    words = [F.lit(f"a row fails in {step}: "), F.col(ERROR)]
    if all(name in rows.columns for name in _PLACE):
        words += [F.lit("; it is "), F.col("topic"), F.lit("["), F.col("partition"), F.lit("] at "), F.col("offset")]
    complaint = F.raise_error(F.concat(*[word.cast("string") for word in words])).cast("boolean")
    return rows.filter(F.when(F.col(ERROR).isNull(), F.lit(True)).otherwise(complaint)).drop(ERROR)


def dead_letters(rows: DataFrame, how: DeadLetters, pipeline: str) -> DataFrame:
    """What failed, as messages for dead letter topics, as the tools for dead letters know them."""
    if ERROR not in rows.columns:
        raise InvalidArgument(f"nothing here can fail: a step with dead letters puts a sentence into column {ERROR!r}")
    if how.topic is not None:
        topic: Column = F.lit(how.topic)
    elif "topic" in rows.columns:
        topic = F.concat(F.col("topic"), F.lit(DEAD_LETTER_SUFFIX))
    else:
        raise InvalidArgument("the rows do not say which topic they are from: give dead letters a `topic`")
    failed = rows.filter(F.col(ERROR).isNotNull())
    told = {
        "millstream-dead-reason": F.lit(REJECTED),
        "millstream-dead-error": F.substring(F.col(ERROR), 1, _ERROR_MAX),
        "millstream-dead-group": F.lit(pipeline),
        "millstream-dead-time-ms": F.unix_millis(F.current_timestamp()),
        "millstream-dead-deliveries": F.lit(1),
        "millstream-dead-failures": F.lit(1),
        **{f"millstream-dead-{name}": F.col(name) for name in _PLACE if name in rows.columns},
    }
    failed = _with_headers(failed, told)
    if "value" not in failed.columns:
        inside = [F.col(_quoted(name)) for name in failed.columns if not _is_of_message(name)]
        failed = failed.withColumn("value", F.to_json(F.struct(*inside)) if inside else F.lit(None).cast("string"))
    chosen = [F.col(name) for name in MESSAGE_COLUMNS if name in failed.columns and name != "deliverAt"]
    return failed.select(*chosen, topic.alias("topic"))


# --- pieces ----------------------------------------------------------------------------------------------------------


def _with_headers(rows: DataFrame, headers: Mapping[str, Column]) -> DataFrame:
    """Headers in place of those of the same name."""
    added = F.array(
        *[
            F.struct(F.lit(name).alias("key"), value.cast("string").cast(BinaryType()).alias("value"))
            for name, value in headers.items()
        ]
    ).cast(_HEADERS)
    if "headers" not in rows.columns:
        return rows.withColumn("headers", added)
    names = list(headers)
    others = F.filter(F.col("headers"), lambda header: ~header["key"].isin(names))
    return rows.withColumn("headers", F.concat(F.coalesce(others, F.array().cast(_HEADERS)), added))


def need(rows: DataFrame, name: str) -> None:
    if name.lower() not in (known.lower() for known in rows.columns):
        raise InvalidArgument(f"there is no column {name!r}{suggestion(name, rows.columns)}")


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
