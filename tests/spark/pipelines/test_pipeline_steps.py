"""The ready steps, on rows of a real Spark session."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from millstream.errors import InvalidArgument
from millstream.spark.pipelines import steps
from millstream.spark.pipelines.definition import (
    Aggregate,
    Convert,
    DeadLetters,
    Enrich,
    Redact,
    Route,
    Split,
)

MESSAGE = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key:string,value:binary>>"
)


def messages(spark: Any, *values: bytes | None, topic: str = "orders") -> Any:
    from datetime import UTC, datetime

    rows = [
        (b"k", value, topic, 0, offset, datetime(2026, 1, 1, 0, 0, offset, tzinfo=UTC), [("shop", bytearray(b"eu"))])
        for offset, value in enumerate(values)
    ]
    return spark.createDataFrame(rows, MESSAGE)


def values_of(rows: Any) -> list[bytes | None]:
    return [None if row.value is None else bytes(row.value) for row in rows.select("value").collect()]


def failed(rows: Any) -> list[tuple[bytes, str]]:
    return [(bytes(row.value), row[steps.ERROR]) for row in rows.filter(f"{steps.ERROR} IS NOT NULL").collect()]


def test_enrich_adds_constants_and_replaces_headers(spark: Any) -> None:
    how = Enrich(columns={"region": "eu", "level": 3, "live": True}, headers={"shop": "de", "by": "me"})
    (row,) = steps.enrich(messages(spark, b"1"), how).collect()
    assert (row.region, row.level, row.live) == ("eu", 3, True)
    assert {header.key: bytes(header.value) for header in row.headers} == {"shop": b"de", "by": b"me"}


def test_enrich_makes_headers_where_there_are_none(spark: Any) -> None:
    rows = messages(spark, b"1").drop("headers")
    (row,) = steps.enrich(rows, Enrich(headers={"by": "me"})).collect()
    assert [(header.key, bytes(header.value)) for header in row.headers] == [("by", b"me")]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [("keep", [("DE", "Germany", None), ("XX", None, None)]), ("drop", [("DE", "Germany", None)])],
)
def test_a_lookup_adds_one_row_of_another_table_at_most(spark: Any, missing: str, expected: list[Any]) -> None:
    rows = spark.createDataFrame([("DE",), ("XX",)], "country string")
    other = spark.createDataFrame([("DE", "Germany"), ("DE", "Germany")], "code string, name string")
    lookup = {"from": "countries", "match": {"country": "code"}, "missing": missing}
    found = steps.enrich(rows, Enrich.model_validate({"lookup": lookup}), other).collect()
    assert sorted((row.country, row["name"], None) for row in found) == expected


def test_of_several_rows_with_one_key_a_lookup_takes_the_newest(spark: Any) -> None:
    rows = spark.createDataFrame([("DE",), ("FR",)], "country string")
    found = [(code, age, f"{code} {age}") for age in (3, 0, 7, 1, 5) for code in ("FR", "DE")]
    for age in ("offset bigint", "timestamp bigint"):
        other = spark.createDataFrame(found, f"code string, {age}, name string")
        lookup = {"from": "countries", "match": {"country": "code"}, "columns": ["name"]}
        joined = steps.enrich(rows, Enrich.model_validate({"lookup": lookup}), other).collect()
        assert sorted((row.country, row["name"]) for row in joined) == [("DE", "DE 7"), ("FR", "FR 7")]


def test_rows_of_which_a_lookup_knows_nothing_can_fail(spark: Any) -> None:
    rows = spark.createDataFrame([("DE",), ("XX",)], "code string")
    other = spark.createDataFrame([("DE", "Germany")], "code string, name string")
    lookup = {"from": "countries", "match": "code", "columns": ["name"], "missing": "fail"}
    found = steps.enrich(rows, Enrich.model_validate({"lookup": lookup}), other)
    assert [row.code for row in steps.survivors(found).collect()] == ["DE"]
    with pytest.raises(InvalidArgument, match="there is no column 'nme'; did you mean 'name'"):
        steps.enrich(rows, Enrich.model_validate({"lookup": lookup | {"columns": ["nme"]}}), other)


def test_filter_keeps_what_a_condition_holds_for(spark: Any) -> None:
    assert values_of(steps.keep(messages(spark, b"a", b"b", None), "cast(value as string) = 'a'")) == [b"a"]


def test_redact_leaves_the_rest_of_a_row_and_marks_what_is_no_json(spark: Any) -> None:
    rows = steps.redact(messages(spark, b'{"a":1,"b":2}', b"broken", None), Redact(fields={"a": "mask"}))
    assert values_of(steps.survivors(rows)) == [b'{"a":"***","b":2}', None]
    ((value, error),) = failed(rows)
    assert value == b"broken"
    assert error.startswith("the value is not JSON")
    assert steps.survivors(rows).first().headers[0].key == "shop"


def test_split_makes_a_message_of_each_element(spark: Any) -> None:
    rows = steps.split(messages(spark, b'{"i":[1,{"x":2}]}', b'{"i":[]}', b'{"j":1}'), Split(path="i"))
    good = steps.survivors(rows).select("value", "offset", "key").collect()
    assert [(bytes(row.value), row.offset, bytes(row.key)) for row in good] == [(b"1", 0, b"k"), (b'{"x":2}', 0, b"k")]
    assert failed(rows) == [(b'{"j":1}', "there is no field 'i'")]


@pytest.mark.parametrize(
    ("how", "given", "expected"),
    [
        ({"from": "json", "to": "csv"}, b'{"id":1,"name":"a,b"}', b'1,"a,b"'),
        ({"from": "csv", "to": "json"}, b'1,"a,b"', b'{"id":1,"name":"a,b"}'),
        ({"from": "csv", "to": "json", "separator": ";"}, b"1;a", b'{"id":1,"name":"a"}'),
    ],
)
def test_values_are_converted(spark: Any, how: dict[str, Any], given: bytes, expected: bytes) -> None:
    convert = Convert.model_validate({**how, "schema": "id bigint, name string"})
    rows = steps.convert(messages(spark, given, b"x,y,z" if how["from"] == "csv" else b'{"id":"x"}', None), convert)
    assert values_of(steps.survivors(rows)) == [expected, None]
    ((value, error),) = failed(rows)
    assert error == f"the value is not {how['from'].upper()} of the schema"
    assert value in (b"x,y,z", b'{"id":"x"}')


def test_json_becomes_columns_and_columns_become_json(spark: Any) -> None:
    schema = {"schema": "id bigint, name string"}
    there = steps.convert(
        messages(spark, b'{"id":1,"name":"a"}', b"", b"[]", b"5"),
        Convert.model_validate({"from": "json", "to": "columns", **schema}),
    )
    good = steps.survivors(there)
    assert [(row.id, row["name"], row.offset) for row in good.collect()] == [(1, "a", 0)]
    assert len(failed(there)) == 3
    changed = good.withColumn("id", good.id + 1)
    back = steps.convert(changed, Convert.model_validate({"from": "columns", "to": "json", **schema}))
    assert values_of(back) == [b'{"id":2,"name":"a"}']


def test_columns_that_are_there_already_are_not_overwritten(spark: Any) -> None:
    how = Convert.model_validate({"from": "json", "to": "columns", "schema": "offset bigint"})
    with pytest.raises(InvalidArgument, match="the rows have a column 'offset' already"):
        steps.convert(messages(spark, b"{}"), how)


@pytest.mark.slow
def test_avro_is_read_and_written(spark: Any) -> None:
    pytest.importorskip("fastavro", reason="Avro needs fastavro")
    fields = [{"name": "id", "type": "long"}, {"name": "n", "type": ["null", "string"]}]
    schema = {"type": "record", "name": "Order", "fields": fields}
    rows = messages(spark, b'{"id":1,"n":null}', b"{}", None)
    to_avro = Convert.model_validate({"from": "json", "to": "avro"})
    there = steps.convert(rows, to_avro, schema)
    assert failed(there)[0][0] == b"{}"
    back = steps.convert(steps.survivors(there), Convert.model_validate({"from": "avro", "to": "json"}), schema)
    assert values_of(back) == [b'{"id":1,"n":null}', None]
    columns = steps.convert(steps.survivors(there), Convert.model_validate({"from": "avro", "to": "columns"}), schema)
    assert [row.id for row in columns.collect()] == [1, None]
    broken = steps.convert(messages(spark, b"x"), Convert.model_validate({"from": "avro", "to": "columns"}), schema)
    assert failed(broken)[0][0] == b"x"


def test_aggregate_counts_by_column_and_window(spark: Any) -> None:
    rows = messages(spark, b"a", b"b", b"c")
    how = Aggregate.model_validate(
        {
            "by": "topic",
            "window": {"size": "2s"},
            "watermark": "1s",
            "measures": {"n": "count(*)", "last": "max(offset)"},
        }
    )
    found = steps.aggregate(rows, how).orderBy("window_start").collect()
    assert [(row.topic, row.window_start.second, row.window_end.second, row.n, row["last"]) for row in found] == [
        ("orders", 0, 2, 2, 1),
        ("orders", 2, 4, 1, 2),
    ]


def test_route_takes_the_first_topic_whose_condition_holds(spark: Any) -> None:
    rows = messages(spark, b"a", b"b", b"c")
    topics = {"one": "offset = 0", "two": "offset < 2"}

    def routed(otherwise: str | None) -> list[str]:
        return [
            row.route for row in steps.survivors(steps.route(rows, Route(topics=topics, otherwise=otherwise))).collect()
        ]

    assert routed("rest") == ["one", "two", "rest"]
    assert routed("drop") == routed(None) == ["one", "two"]
    assert failed(steps.route(rows, Route(topics=topics))) == [(b"c", "no route takes this row")]


def test_rows_that_are_computed_once_stay_in_the_order_of_their_partition_whoever_has_read_them(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspark.SparkContext.defaultParallelism", 3)
    columns = ("'orders' AS topic", "cast(id div 15000 AS int) AS partition", "id AS offset", "map('a', id) AS more")
    rows = spark.range(0, 30_000, 1, 12).selectExpr(*columns)
    found = steps.once(rows).collect()
    for partition in (0, 1):
        offsets = [row.offset for row in found if row.partition == partition]
        assert offsets == list(range(15_000 * partition, 15_000 * (partition + 1)))
    assert all(row.more == {"a": row.offset} for row in found)
    others = steps.once(rows.drop("offset"))
    assert others.count() == 30_000


def test_a_row_that_fails_without_dead_letters_fails_everything_and_says_where_it_is(spark: Any) -> None:
    rows = steps.redact(messages(spark, b"{}", b"broken"), Redact(fields={"a": "drop"}))
    with pytest.raises(Exception, match=r"a row fails in step 2: the value is not JSON.*; it is orders\[0\] at 1"):
        steps.insist(rows, "step 2").collect()


def test_dead_letters_are_the_message_with_its_error_and_its_place(spark: Any) -> None:
    rows = steps.mark(messages(spark, b"good", b"bad"), DeadLetters(when="offset = 1", error="too late"))
    assert values_of(steps.survivors(rows)) == [b"good"]
    (letter,) = steps.dead_letters(rows, DeadLetters(), "clean").collect()
    headers = {header.key.removeprefix("millstream-dead-"): bytes(header.value) for header in letter.headers}
    assert (letter.topic, bytes(letter.value), bytes(letter.key)) == ("orders.dlq", b"bad", b"k")
    assert headers.pop("time-ms").isdigit()
    assert headers == {
        "shop": b"eu",
        "reason": b"REJECTED",
        "error": b"too late",
        "group": b"clean",
        "deliveries": b"1",
        "failures": b"1",
        "topic": b"orders",
        "partition": b"0",
        "offset": b"1",
    }


def test_dead_letters_of_rows_that_are_no_messages_need_a_topic_and_become_json(spark: Any) -> None:
    rows = steps.mark(spark.createDataFrame([(1, "a")], "id int, name string"), DeadLetters(when="id = 1"))
    with pytest.raises(InvalidArgument, match="give dead letters a `topic`"):
        steps.dead_letters(rows, DeadLetters(), "clean")
    (letter,) = steps.dead_letters(rows, DeadLetters(topic="bad"), "clean").collect()
    assert json.loads(letter.value) == {"id": 1, "name": "a"}


@pytest.mark.slow
def test_a_delta_table_gets_each_batch_once(spark: Any, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="Delta needs deltalake")
    from millstream.spark.pipelines.delta import DeltaTable

    table = DeltaTable(str(tmp_path / "table"), ("day",))
    rows = spark.createDataFrame([(1, "mon"), (2, "tue"), (3, None)], "id int, day string")
    spark.sparkContext.setLocalProperty("sql.streaming.queryId", "some-query")
    try:
        for batch in (0, 0, 1):
            table.append(rows, batch)
    finally:
        spark.sparkContext.setLocalProperty("sql.streaming.queryId", None)
    stored = deltalake.DeltaTable(table.path)
    assert stored.version() == 2  # made, and two batches
    assert sorted((row["id"], row["day"]) for row in stored.to_pyarrow_table().to_pylist() if row["day"]) == [
        (1, "mon"), (1, "mon"), (2, "tue"), (2, "tue"),
    ]  # fmt: skip
    table.append(rows, None)
    assert deltalake.DeltaTable(table.path).to_pyarrow_table().num_rows == 9


def test_files_of_a_delta_table_are_found_whatever_they_are_called(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="Delta needs deltalake")
    from millstream.spark.pipelines.delta import DeltaTable

    table = DeltaTable(str(tmp_path / "die Mühle"))
    rows = pa.table({"id": [1, 2, 3], "day": ["x y:z", "ü", "50%"]})
    deltalake.write_deltalake(table.path, rows, partition_by=["day"])
    found = table.files()
    assert len(found) == 3
    assert all(Path(file).is_file() for file in found), found


def test_files_of_a_delta_table_are_looked_for_where_spark_has_written_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from millstream.spark.pipelines import delta

    asked: list[str] = []
    systems = SimpleNamespace(from_uri=lambda uri: (asked.append(uri), (None, "bucket/table/"))[1])
    monkeypatch.setattr(delta.pyarrow.fs, "FileSystem", systems)
    assert delta._file_system("s3a://bucket/table/")[1] == "bucket/table"
    delta._file_system("s3://bucket/table")
    delta._file_system("gs://bucket/table")
    assert asked == ["s3://bucket/table/", "s3://bucket/table", "gs://bucket/table"]
