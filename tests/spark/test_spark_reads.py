"""Reads with a real Spark session and a real broker."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from millstream.client import Outgoing
from tests.spark.world import World

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


def frame(spark: Any, options: dict[str, str]) -> Any:
    return spark.read.format("millstream").options(**options).load()


def collected(spark: Any, options: dict[str, str]) -> list[tuple[Any, ...]]:
    """All rows, each of plain Python objects, in an order that both ways have."""
    return sorted(
        (tuple(map(plain, row)) for row in frame(spark, options).collect()), key=lambda row: (row[2], row[3], row[4])
    )


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [(header["key"], bytes(header["value"])) for header in value]
    return bytes(value) if isinstance(value, bytearray) else value


# --- batch ---------------------------------------------------------------------------------------------------------


def test_both_ways_in_give_spark_the_same_rows(spark: Any, world: World) -> None:
    topic = world.topic(3)
    messages = [
        Outgoing(
            value=None if number % 5 == 0 else b"value %d" % number,
            key=None if number % 3 == 0 else b"key %d" % (number % 4),
            headers=None if number % 2 else {"n": str(number)},
            timestamp=MOMENT + timedelta(microseconds=number),
        )
        for number in range(500)
    ]
    world.publish(topic, messages)
    more = {"includeHeaders": "true", "includePriority": "true", "includeId": "true"}
    rows = collected(spark, world.options(topic, **more))
    assert rows == collected(spark, world.in_files(topic, **more))
    assert len(rows) == 500
    found = Counter((row[1], row[0], row[5].replace(tzinfo=UTC), tuple(row[7] or ())) for row in rows)
    assert found == Counter(
        (
            message.value,
            message.key,
            message.timestamp,
            tuple((k, v.encode()) for k, v in (message.headers or {}).items()),
        )
        for message in messages
    )


def test_no_rows_and_one_row(spark: Any, world: World) -> None:
    topic = world.topic(2)
    for options in (world.options(topic), world.in_files(topic)):
        assert frame(spark, options).count() == 0
        assert frame(spark, options).collect() == []
    world.publish(topic, [b"0"])
    assert [bytes(row["value"]) for row in frame(spark, world.options(topic)).collect()] == [b"0"]


@pytest.mark.slow
def test_two_hundred_thousand_rows(spark: Any, world: World) -> None:
    topic = world.topic(2)
    world.publish(topic, [b"0"])
    with world.client.producer(topic) as producer:
        for number in range(1, 200_000):
            producer.send(b"%d" % number, key=b"%d" % (number % 100))
    for options in (world.options(topic, minPartitions=4), world.in_files(topic)):
        (sums,) = (
            frame(spark, options)
            .selectExpr(
                "count(*)",
                "sum(cast(cast(value as string) as bigint))",
                "count(distinct partition, offset)",
                "count(key)",
                "sum(offset)",
            )
            .collect()
        )
        ends = world.client.offsets(topic)
        numbers = sum(end * (end - 1) // 2 for end in ends.values())
        assert tuple(sums) == (200_000, 200_000 * 199_999 // 2, 200_000, 199_999, numbers)


def test_a_schema_prunes_columns(spark: Any, world: World) -> None:
    topic = world.topic()
    world.publish(topic, [b"a", b"b"])
    reader = spark.read.format("millstream").options(**world.options(topic))
    assert reader.schema("offset bigint not null, value binary").load().collect() == [(0, b"a"), (1, b"b")]
    assert reader.schema("partition int, headers array<struct<key:string,value:binary>>").load().count() == 2


def test_conditions_are_pushed_down(spark: Any, world: World) -> None:
    topic = world.topic(2)
    for partition in range(2):
        world.client.publish_many(
            topic,
            [
                Outgoing(value=b"x", partition=partition, timestamp=MOMENT + timedelta(hours=number))
                for number in range(50)
            ],
        )

    def where(condition: str) -> tuple[int, int]:
        """How many rows match, and how many tasks look for them."""
        narrow = frame(spark, world.options(topic, pushdown="true")).where(condition)
        return narrow.count(), narrow.rdd.getNumPartitions()

    assert where("partition = 1 and offset >= 10 and offset < 20") == (10, 1)
    assert where("timestamp >= timestamp'2026-01-01 10:00:00' and partition in (0)") == (40, 1)
    assert where("offset = 3") == (2, 2)
    assert where("key is null") == (100, 2)


@pytest.mark.xfail(strict=True, reason="Spark 4.3 uses what was pushed down last for every use of a DataFrame")
def test_one_frame_may_be_used_with_and_without_conditions_that_are_pushed_down(spark: Any, world: World) -> None:
    """If this passes, Spark has mended it: the option pushdown needs no warning any more, and can be the default."""
    topic = world.topic()
    world.publish(topic, [b"x"] * 20)
    whole = frame(spark, world.options(topic, pushdown="true"))
    assert whole.where("offset < 10").count() == 10
    assert whole.count() == 20


def test_a_mistake_in_an_option_is_told_with_what_was_meant(spark: Any, world: World) -> None:
    with pytest.raises(Exception, match="did you mean 'startingOffsets'"):
        frame(spark, world.options("any", startingOffset="earliest"))
    with pytest.raises(Exception, match="topic 'missing' does not exist"):
        frame(spark, world.options("missing")).count()


def test_sql_reads_topics_as_tables(spark: Any, world: World) -> None:
    topic = world.topic()
    world.publish(topic, [b"a", b"b", b"a"])
    options = ", ".join(f"'{name}' '{value}'" for name, value in world.options(topic).items())
    spark.sql(f"create temporary view letters using millstream options ({options})")
    counted = spark.sql("select cast(value as string), count(*) from letters group by 1 order by 1").collect()
    assert counted == [("a", 2), ("b", 1)]


# --- streaming -----------------------------------------------------------------------------------------------------


@pytest.fixture
def available(spark: Any, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run a query with Trigger.AvailableNow on this test's checkpoint; returns its progress."""

    def run(options: dict[str, str], into: str = "out") -> list[dict[str, Any]]:
        query = (
            spark.readStream.format("millstream")
            .options(**options)
            .load()
            .writeStream.format("parquet")
            .option("path", str(tmp_path / into))
            .option("checkpointLocation", str(tmp_path / f"{into}.checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(100)
        finally:
            query.stop()
        return [json.loads(progress.json) for progress in query.recentProgress]

    return run


def offsets_in(spark: Any, directory: Path) -> list[tuple[int, int]]:
    return sorted(tuple(row) for row in spark.read.parquet(str(directory)).select("partition", "offset").collect())


@pytest.mark.parametrize("way", ["options", pytest.param("in_files", marks=pytest.mark.slow)])
def test_a_restarted_query_goes_on_exactly_where_it_was(
    spark: Any, world: World, available: Callable[..., Any], tmp_path: Path, way: str
) -> None:
    topic = world.topic(2)
    options = getattr(world, way)(topic, startingOffsets="earliest", maxOffsetsPerTrigger=70)
    for _ in range(2):
        world.publish(topic, [Outgoing(value=b"%d" % number, key=b"%d" % number) for number in range(100)])
        available(options)
    ends = world.client.offsets(topic)
    expected = sorted((partition, offset) for partition, end in ends.items() for offset in range(end))
    assert len(expected) == 200
    assert offsets_in(spark, tmp_path / "out") == expected


def test_progress_and_lag_are_visible(world: World, available: Callable[..., Any]) -> None:
    topic = world.topic(2)
    world.publish(topic, [b"%d" % number for number in range(100)])
    progress = available(world.options(topic, startingOffsets="earliest", maxOffsetsPerTrigger=40, groupId="job"))
    batches = [each for each in progress if each["numInputRows"]]
    assert sum(each["numInputRows"] for each in batches) == 100
    assert max(each["numInputRows"] for each in batches) <= 40
    latest = batches[0]["sources"][0]["latestOffset"]
    assert sum(latest[topic].values()) == 100
    lag = [entry.lag for entry in world.client.group("job").lag if entry.topic == topic]
    assert lag == [0, 0]


def test_a_stream_reads_what_comes_and_topics_that_appear(spark: Any, world: World, tmp_path: Path) -> None:
    prefix = world.topic()
    options = {**world.options(), "subscribePattern": rf"{prefix}(\..*)?", "startingOffsets": "earliest"}
    seen: list[str] = []
    query = (
        spark.readStream.format("millstream")
        .options(**options)
        .load()
        .selectExpr("cast(value as string) value")
        .writeStream.foreachBatch(lambda batch, _: seen.extend(row["value"] for row in batch.collect()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        world.publish(prefix, [b"a", b"b"])
        until(query, lambda: sorted(seen) == ["a", "b"])
        world.client.create_topic(f"{prefix}.new", partitions=2)
        world.publish(f"{prefix}.new", [b"c", b"d", b"e"])
        until(query, lambda: sorted(seen) == ["a", "b", "c", "d", "e"])
    finally:
        query.stop()


def until(query: Any, reached: Callable[[], bool]) -> None:
    """Let the query work until something is so; it has a minute."""
    for _ in range(600):
        if reached():
            return
        assert not query.awaitTermination(0.1), query.exception()
    raise AssertionError("it did not happen within a minute")
