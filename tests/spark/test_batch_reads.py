"""Batch reads, through the broker and from its files, without Spark around them."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual, Not

from millstream.client import Outgoing
from millstream.errors import (
    ConnectionLost,
    DataDamaged,
    InvalidArgument,
    OffsetOutOfRange,
    PartitionNotFound,
    TopicNotFound,
)
from millstream.spark.batch import FilteringBatchReader
from millstream.spark.broker_reader import BrokerReader
from millstream.spark.columns import columns_of
from millstream.spark.offsets import Range
from millstream.spark.options import SourceOptions
from millstream.testing.broker import BrokerForTests
from millstream.wire.messages import FetchRequest, FetchResult
from tests.spark.reading import batch_reader, read, rows_of, values
from tests.spark.stored_rows import stored_batch
from tests.spark.world import World

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


def mixed() -> list[Outgoing]:
    return [
        Outgoing(
            value=None if number % 5 == 0 else b"value %d" % number,
            key=None if number % 3 == 0 else b"key %d" % (number % 4),
            headers=None if number % 2 else {"n": str(number), "who": "Zoë"},
            priority=number % 5,
            timestamp=MOMENT + timedelta(microseconds=number),
        )
        for number in range(300)
    ]


def everything(options: dict[str, str]) -> list[dict[str, Any]]:
    rows = read({**options, "includeHeaders": "true", "includePriority": "true", "includeId": "true"})
    return sorted(rows, key=lambda row: (row["topic"], row["partition"], row["offset"]))


def test_both_ways_in_give_the_same_rows_and_all_of_them(world: World) -> None:
    topic = world.topic(3)
    for message in mixed():  # many batches of one message, then a large one
        world.publish(topic, [message])
    world.publish(topic, mixed())
    through_broker = everything(world.options(topic))
    assert through_broker == everything(world.in_files(topic))
    with world.client.stream(topic, start="earliest", timeout_s=30) as stream:
        stored = {(message.partition, message.offset): message for message in islice(stream, 600)}
    assert len(stored) == len(through_broker) == 600
    for row in through_broker:
        message = stored[row["partition"], row["offset"]]
        assert (row["key"], row["value"], row["topic"]) == (message.key, message.value, topic)
        assert (row["timestamp"], row["timestampType"], row["id"]) == (message.timestamp, 0, message.id)
        headers = {header["key"]: header["value"].decode() for header in row["headers"] or ()}
        assert headers == dict(message.headers)
    assert Counter(row["priority"] for row in through_broker) == dict.fromkeys(range(5), 120)


@pytest.mark.parametrize("way", ["options", "in_files"])
def test_nothing_and_one_message(world: World, way: str) -> None:
    topic = world.topic(2)
    options = getattr(world, way)(topic)
    assert read(options) == []
    world.publish(topic, [b"one"])
    assert values(options) == [b"one"]


def test_only_the_columns_of_the_schema_are_read_and_in_its_order(world: World) -> None:
    topic = world.topic()
    world.publish(topic, [b"a", b"b"])
    rows = read(world.options(topic), "offset bigint not null, value binary")
    assert rows == [{"offset": 0, "value": b"a"}, {"offset": 1, "value": b"b"}]
    assert list(rows[0]) == ["offset", "value"]
    reader = batch_reader(world.options(topic), "partition int")  # declared as one that may be null, as DDL does
    (batch,) = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert batch.schema.field("partition").nullable


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ("ofset bigint", "did you mean 'offset'"),
        ("offset int", "column 'offset' is bigint, not int"),
        ("value binary not null", "'value' can be null"),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused(world: World, schema: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        batch_reader(world.options("any"), schema)


# --- from where to where -------------------------------------------------------------------------------------------


def at(topic: str, **offsets: int) -> str:
    return json.dumps({topic: {name.removeprefix("p"): offset for name, offset in offsets.items()}})


@pytest.mark.parametrize("way", ["options", "in_files"])
def test_a_read_goes_from_offset_to_offset(world: World, way: str) -> None:
    topic = world.topic()
    for start in range(0, 30, 10):
        world.publish(topic, [b"%d" % number for number in range(start, start + 10)])
    options = getattr(world, way)(topic)
    for first, until in ((0, 30), (3, 4), (9, 21), (30, 30), (5, 5)):
        wanted = {**options, "startingOffsets": at(topic, p0=first), "endingOffsets": at(topic, p0=until)}
        assert values(wanted) == [b"%d" % number for number in range(first, until)]
    assert len(values({**options, "startingOffsets": at(topic, p0=-2), "endingOffsets": at(topic, p0=-1)})) == 30
    assert values({**options, "startingOffsets": at(topic, p0=-1)}) == []


def test_offsets_must_name_all_partitions_and_lie_in_the_log(world: World) -> None:
    topic = world.topic(2)
    world.publish(topic, [b"x"] * 10)
    with pytest.raises(InvalidArgument, match=rf"says nothing about {topic}\[1\]"):
        read(world.options(topic, startingOffsets=at(topic, p0=0)))
    with pytest.raises(InvalidArgument, match=r"names other\[0\]"):
        read(world.options(topic, startingOffsets=at("other", p0=0)))
    beyond = world.options(topic, startingOffsets=at(topic, p0=-2, p1=99))
    with pytest.raises(OffsetOutOfRange, match=rf"{topic}\[1\] at 99"):
        read(beyond)
    assert read({**beyond, "failOnDataLoss": "false"}) == read(world.options(assign=json.dumps({topic: [0]})))


@pytest.mark.parametrize("way", ["options", "in_files"])
def test_a_read_goes_from_time_to_time(way: str, tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker:
        world = World(broker, tmp_path)
        topic = world.topic()
        moments = []
        for number in range(3):
            broker.clock.advance("1m")
            world.publish(topic, [b"%d" % number] * 2)
            moments.append(broker.clock.now_us() // 1000)
        options = getattr(world, way)(topic)
        assert values({**options, "startingTimestamp": str(moments[0] + 1)}) == [b"1", b"1", b"2", b"2"]
        assert values({**options, "endingTimestamp": str(moments[0] + 1)}) == [b"0", b"0"]
        span = {"startingTimestamp": str(moments[0] + 1), "endingTimestamp": str(moments[1] + 1)}
        assert values({**options, **span}) == [b"1", b"1"]
        by_partition = json.dumps({topic: {"0": moments[1] + 1}})
        assert values({**options, "startingOffsetsByTimestamp": by_partition}) == [b"2", b"2"]
        assert values({**options, "endingOffsetsByTimestamp": by_partition}) == [b"0", b"0", b"1", b"1"]
        late = {**options, "startingTimestamp": str(moments[2] + 60_000)}
        with pytest.raises(OffsetOutOfRange, match=rf"nothing was appended to {topic}\[0\]"):
            read(late)
        assert read({**late, "startingOffsetsByTimestampStrategy": "latest"}) == []


# --- what ----------------------------------------------------------------------------------------------------------


def test_topics_are_chosen_by_name_by_pattern_and_by_partition(world: World) -> None:
    for name in ("shop.a", "shop.b", "shopping"):
        world.client.create_topic(name, 2, config={})
        world.client.publish(name, name, partition=0)
        world.client.publish(name, f"{name}/1", partition=1)
    assert set(values(world.options("shop.a,shopping"))) == {b"shop.a", b"shop.a/1", b"shopping", b"shopping/1"}
    for way in (world.options, world.in_files):
        pattern = {**way("x"), "subscribePattern": r"shop\..*"}
        del pattern["subscribe"]
        assert set(values(pattern)) == {b"shop.a", b"shop.a/1", b"shop.b", b"shop.b/1"}
    assert values(world.options(assign='{"shop.b":[1]}')) == [b"shop.b/1"]


@pytest.mark.parametrize("way", ["options", "in_files"])
def test_a_topic_or_partition_that_is_not_there_is_an_error(world: World, way: str) -> None:
    with pytest.raises(TopicNotFound, match="'missing'"):
        read(getattr(world, way)("missing"))
    topic = world.topic()
    options = getattr(world, way)(topic, assign=json.dumps({topic: [7]}))
    del options["subscribe"]
    with pytest.raises(PartitionNotFound, match=rf"{topic}\[7\]"):
        read(options)


def test_namespaces_are_apart(world: World) -> None:
    world.client.create_namespace("shop")
    with world.broker.connect(namespace="shop") as client:
        client.create_topic("orders")
        client.publish("orders", b"of the shop")
    for way in (world.options, world.in_files):
        assert values(way("orders", namespace="shop")) == [b"of the shop"]


# --- tasks ---------------------------------------------------------------------------------------------------------


def test_tasks_share_the_work_and_read_the_same_when_tried_again(world: World) -> None:
    topic = world.topic(2)
    world.publish(topic, [b"%d" % number for number in range(1000)])
    reader = batch_reader(world.options(topic, minPartitions=5, maxRecordsPerPartition=150))
    parts = reader.partitions()
    assert len(parts) >= 7
    world.publish(topic, [b"later"] * 50)
    # As Spark sends them to its workers.
    again = pickle.loads(pickle.dumps((reader, parts)))
    first, second = (
        [[batch.to_pylist() for batch in who.read(part)] for part in which] for who, which in ((reader, parts), again)
    )
    assert first == second
    rows = [row for task in first for batch in task for row in batch]
    assert sorted(row["value"] for row in rows) == sorted(b"%d" % number for number in range(1000))
    assert max(sum(map(len, task)) for task in first) <= 150


def test_a_reader_that_is_given_up_disturbs_nobody(world: World) -> None:
    """LIMIT ends a task in the middle, while an answer is on its way; the worker's connection serves the next one."""
    topic = world.topic()
    world.publish(topic, [bytes(1000)] * 2000)
    reader = batch_reader(world.options(topic, **{"fetch.max.bytes": "64k"}))
    (part,) = reader.partitions()
    for _ in range(3):
        rows = reader.read(part)
        next(rows)
        rows.close()
    assert len(read(world.options(topic))) == 2000


def test_two_tasks_of_one_process_take_turns(world: World) -> None:
    topic = world.topic(2)
    for partition in range(2):
        world.client.publish_many(topic, [Outgoing(value=b"%d" % partition * 500, partition=partition)] * 3000)
    reader = batch_reader(world.options(topic, **{"fetch.max.bytes": "64k"}))
    readers = [reader.read(part) for part in reader.partitions()]
    counts = [0, 0]
    while readers:
        for rows in list(readers):
            batch = next(rows, None)
            if batch is None:
                readers.remove(rows)
            else:
                (partition,) = set(batch.column("partition").to_pylist())
                assert set(batch.column("value").to_pylist()) == {b"%d" % partition * 500}
                counts[partition] += batch.num_rows
    assert counts == [3000, 3000]


def test_a_small_range_fetches_little_of_what_lies_behind_it(world: World) -> None:
    topic = world.topic()
    for _ in range(50):
        world.publish(topic, [bytes(1000)] * 20)
    (part,) = batch_reader(world.options(topic, endingOffsets=at(topic, p0=10))).partitions()
    log = BrokerReader(SourceOptions.of(world.options(topic), streaming=False))
    assert sum(len(result.batches) for _, result in log._results(part.value)) < 100_000


# --- conditions ----------------------------------------------------------------------------------------------------


def test_conditions_narrow_what_is_read(world: World) -> None:
    topic = world.topic(3)
    for partition in range(3):
        messages = [
            Outgoing(
                value=b"%d/%d" % (partition, number), partition=partition, timestamp=MOMENT + timedelta(hours=number)
            )
            for number in range(10)
        ]
        world.client.publish_many(topic, messages)
    options = world.options(topic)

    def found(*filters: Any) -> tuple[int, list[str]]:
        """How many offsets the tasks go through, and what they find."""
        reader = batch_reader({**options, "pushdown": "true"})
        assert isinstance(reader, FilteringBatchReader)
        assert list(reader.pushFilters(list(filters))) == list(filters)
        scanned = sum(part.value.until - part.value.first for part in reader.partitions())
        return scanned, sorted(row["value"].decode() for row in rows_of(reader))

    offset, partition, timestamp = ("offset",), ("partition",), ("timestamp",)
    assert found(EqualTo(partition, 1))[0] == 10
    assert found(In(partition, (0, 2)), GreaterThanOrEqual(offset, 9)) == (2, ["0/9", "2/9"])
    assert found(GreaterThan(offset, 7), LessThanOrEqual(offset, 8), EqualTo(partition, 0)) == (1, ["0/8"])
    assert found(EqualTo(offset, 3), EqualTo(partition, 2)) == (1, ["2/3"])
    assert found(LessThan(offset, 1), GreaterThan(offset, 5)) == (0, [])
    assert found(EqualTo(("topic",), "other")) == (0, [])
    assert found(Not(EqualTo(partition, 1)))[0] == 30
    # Times are the producers', so all is looked at, but only what matches goes on.
    late = GreaterThan(timestamp, MOMENT + timedelta(hours=7))
    assert found(late, EqualTo(partition, 0)) == (10, ["0/8", "0/9"])
    assert found(late, LessThan(timestamp, MOMENT + timedelta(hours=9)), EqualTo(partition, 0)) == (10, ["0/8"])
    assert found(EqualTo(timestamp, MOMENT), EqualTo(partition, 0)) == (10, ["0/0"])


# --- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["options", "in_files"])
def test_damage_in_the_range_fails_the_read_unless_it_is_told_to_go_on(way: str, tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker:
        world = World(broker, tmp_path)
        topic = world.topic(segment_bytes=65536)
        for number in range(100):
            world.publish(topic, [b"%03d" % number * 400] * 5)
    first, *_ = sorted((tmp_path / "topics" / "default" / topic / "0").glob("*.log"))
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    with BrokerForTests(tmp_path) as broker:
        world = World(broker, tmp_path)
        options = getattr(world, way)(topic)
        with pytest.raises(DataDamaged, match="damaged"):
            read(options)
        offsets = [row["offset"] for row in read({**options, "failOnDataLoss": "false"})]
        (gap,) = [first for first, after in pairwise(offsets) if after != first + 1]
        assert sorted(set(range(500)) - set(offsets)) == list(range(gap + 1, gap + 6))
        behind = {**options, "startingOffsets": at(topic, p0=gap + 6)}
        assert len(read(behind)) == 500 - gap - 6


def test_what_compaction_joins_to_the_rest_while_it_is_read_is_not_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    before, joined = (memoryview(stored_batch(0, values=[b"x"] * count)) for count in (10, 20))
    answers = {0: FetchResult(10, 20, 0, None, before), 10: FetchResult(20, 20, 0, None, joined)}
    reader = BrokerReader(SourceOptions.of({"bootstrap.servers": "127.0.0.1:1", "subscribe": "t"}, streaming=False))

    def no_answer(_: FetchRequest) -> Any:
        raise ConnectionLost("asked for again")

    connection = SimpleNamespace(fetch=lambda request: answers[request.offset], begin_fetch=no_answer)
    monkeypatch.setattr(reader, "_connection", connection)
    rows = [row for batch in reader.read(Range("t", 0, 0, 20), columns_of()) for row in batch.to_pylist()]
    assert [row["offset"] for row in rows] == list(range(20))
