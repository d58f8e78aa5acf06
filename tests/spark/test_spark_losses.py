"""What is little, damaged or gone, read and copied by a real Spark session as a batch and as a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from millstream import connect
from millstream.client import Outgoing
from millstream.testing.broker import BrokerForTests, BrokerProcess
from tests.spark.copying import contents, until
from tests.spark.reading import values
from tests.spark.world import World


@contextmanager
def own_world(data: Path) -> Iterator[World]:
    with BrokerForTests(data) as broker:
        yield World(broker, data)


def copy_by_stream(spark: Any, options: dict[str, str], topic: str, checkpoint: Path) -> None:
    """Copy what there is after the checkpoint.  Raises what went wrong."""
    rows = spark.readStream.format("millstream").options(**options, includeHeaders="true").load()
    writing = rows.select("key", "value", "headers").writeStream.format("millstream").trigger(availableNow=True)
    writing = writing.options(**{"bootstrap.servers": options["bootstrap.servers"], "topic": topic})
    query = writing.option("checkpointLocation", str(checkpoint)).start()
    try:
        assert query.awaitTermination(100)
    finally:
        query.stop()


def copy_by_batch(spark: Any, options: dict[str, str], topic: str) -> None:
    rows = spark.read.format("millstream").options(**options, includeHeaders="true").load()
    writing = rows.select("key", "value", "headers").write.format("millstream").mode("append")
    writing.options(**{"bootstrap.servers": options["bootstrap.servers"], "topic": topic}).save()


ONE = [
    Outgoing(value=None, headers={"alone": b"1"}),
    Outgoing(value=b"", key=b""),
    Outgoing(value=None, key=b"k", headers=[("n", b"1"), ("n", b"2")]),
    Outgoing(value=b"v", headers={"empty": b""}),
]


def test_nothing_and_single_messages_of_every_kind_are_copied_as_they_are(
    spark: Any, world: World, tmp_path: Path
) -> None:
    source, batches, streams = world.topic(2), world.topic(2), world.topic(2)
    address = world.broker.address
    options = world.options(source, startingOffsets="earliest")
    copy_by_batch(spark, options, batches)
    copy_by_stream(spark, options, streams, tmp_path / "checkpoint")
    assert contents(address, batches) == contents(address, streams) == {}
    for messages, total in ((ONE[:1], 1), (ONE[1:], len(ONE))):
        world.publish(source, messages)
        copy_by_stream(spark, options, streams, tmp_path / "checkpoint")
        assert contents(address, streams) == contents(address, source)
        assert contents(address, streams).total() == total
    copy_by_stream(spark, options, streams, tmp_path / "checkpoint")
    copy_by_batch(spark, options, batches)
    assert contents(address, batches) == contents(address, streams) == contents(address, source)
    assert contents(address, source) == {
        (None, None, (("alone", b"1"),)): 1,
        (b"", b"", ()): 1,
        (b"k", None, (("n", b"1"), ("n", b"2"))): 1,
        (None, b"v", (("empty", b""),)): 1,
    }


def test_a_damaged_segment_fails_a_batch_and_a_stream_unless_they_are_told_to_go_on(spark: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with own_world(data) as world:
        source, target = world.topic(segment_bytes=65536), world.topic()
        for number in range(100):
            world.publish(source, [b"%03d" % number * 400] * 5)
    first, *_ = sorted((data / "topics" / "default" / source / "0").glob("*.log"))
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    with own_world(data) as world:
        options = world.options(source, startingOffsets="earliest", maxOffsetsPerTrigger=200)
        tolerant = {**options, "failOnDataLoss": "false"}
        with pytest.raises(Exception, match="damaged"):
            spark.read.format("millstream").options(**options).load().collect()
        rows = spark.read.format("millstream").options(**tolerant).load().select("offset").collect()
        offsets = sorted(row["offset"] for row in rows)
        assert len(offsets) == 495
        assert sum(after != offset + 1 for offset, after in pairwise(offsets)) == 1
        for _ in range(2):  # however often it is tried
            with pytest.raises(Exception, match="damaged"):
                copy_by_stream(spark, options, target, tmp_path / "checkpoint")
        copy_by_stream(spark, tolerant, target, tmp_path / "checkpoint")
        assert Counter(values(world.options(target))) == Counter(values(tolerant))


def test_what_retention_took_before_a_stream_came_to_it_is_an_error_unless_it_is_told_to_go_on(
    spark: Any, tmp_path: Path
) -> None:
    with own_world(tmp_path / "data") as world:
        source, target = world.topic(segment_bytes=4096, retention_messages=50), world.topic()
        world.publish(source, [b"%d" % number for number in range(10)])
        options = world.options(source, startingOffsets="earliest")
        copy_by_stream(spark, options, target, tmp_path / "checkpoint")
        for start in range(10, 510, 10):
            world.publish(source, [b"%0100d" % number for number in range(start, start + 10)])
        world.broker.clock.advance("1h")
        begins = world.client.offsets(source, "earliest")[0]
        assert begins > 10
        with pytest.raises(Exception, match=rf"{source}\[0\] 10\.\.{begins - 1};.*failOnDataLoss"):
            copy_by_stream(spark, options, target, tmp_path / "checkpoint")
        copy_by_stream(spark, {**options, "failOnDataLoss": "false"}, target, tmp_path / "checkpoint")
        copied = sorted(int(value) for _, value, _ in contents(world.broker.address, target).elements())
        assert copied == [*range(10), *range(begins, 510)]


@pytest.mark.slow
def test_a_broker_that_is_killed_under_a_query_is_waited_for_and_loses_and_doubles_nothing(
    spark: Any, tmp_path: Path
) -> None:
    """tests/spark/test_spark_kill_nine.py kills more, and everybody."""
    broker = BrokerProcess(tmp_path / "data").start()
    address, port = broker.address, int(broker.address.rpartition(":")[2])
    numbers = [b"%d" % number for number in range(300)]
    try:
        with connect(address) as client:
            client.create_topic("source", 2)
            client.create_topic("target", 2)
            client.publish_many("source", numbers[:100])
        options = {"bootstrap.servers": address, "subscribe": "source", "startingOffsets": "earliest"}
        rows = spark.readStream.format("millstream").options(**options, maxOffsetsPerTrigger="20").load()
        writing = rows.select("value").writeStream.format("millstream").option("bootstrap.servers", address)
        query = writing.option("topic", "target").option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        try:
            for some in (numbers[100:200], numbers[200:]):
                until(lambda: query.lastProgress is not None and query.lastProgress["numInputRows"], "a batch")
                broker.kill()
                broker = BrokerProcess(tmp_path / "data", port=port).start()
                with connect(address) as client:
                    client.publish_many("source", some)
            with connect(address) as client:
                until(lambda: not query.isActive or sum(client.offsets("target").values()) >= 300, "the last batch")
            assert query.isActive, query.exception()
        finally:
            query.stop()
        assert sorted(values({"bootstrap.servers": address, "subscribe": "target"})) == sorted(numbers)
    finally:
        broker.kill()
