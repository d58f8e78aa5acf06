"""Streaming reads without Spark around them: offsets, limits, what appears and what is gone."""

from __future__ import annotations

import json
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from millstream.client import Outgoing
from millstream.config import Settings
from millstream.errors import InvalidArgument, OffsetOutOfRange
from millstream.spark import stream as module
from millstream.testing.broker import BrokerForTests
from tests.spark.reading import Query
from tests.spark.world import World


def numbers(first: int, until: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, until)]


def values(batches: list[list[dict[str, Any]]]) -> list[bytes]:
    return [row["value"] for rows in batches for row in rows]


# --- exactly the rest, whatever happened ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["options", "in_files"])
def test_a_query_goes_on_where_its_checkpoint_says(world: World, way: str) -> None:
    topic = world.topic(2)
    options = getattr(world, way)(topic, startingOffsets="earliest", maxOffsetsPerTrigger=30)
    query = Query(options)
    seen: list[bytes] = []
    for start in range(0, 300, 100):
        world.publish(topic, numbers(start, start + 100))
        seen += values([query.batch() or [], query.batch() or []])
        # The driver is gone, with everything but the checkpoint, in the middle of a batch: the next one does it again.
        end = query.plan()
        assert end is not None
        half_done = query.rows(end)
        query = Query(options, query.checkpoint)
        assert query.rows(end) == half_done
    seen += values(query.drain())
    assert sorted(seen) == sorted(numbers(0, 300))


@pytest.mark.parametrize("available_now", [False, True])
@pytest.mark.parametrize("config", [{"fsync": "never"}, {"fsync": "interval"}], ids=str)
def test_a_checkpoint_names_no_offset_that_a_power_cut_can_give_to_another_message(
    world: World, config: dict[str, str], available_now: bool
) -> None:
    topic = world.topic(2, **config)
    world.publish(topic, numbers(0, 10))
    query = Query(world.options(topic, startingOffsets="earliest"), available_now=available_now)
    end = query.plan()
    assert end is not None
    durable = {str(part.partition): part.durable_offset for part in world.client.topic(topic).partitions}
    planned = json.loads(end)[topic]
    assert {number: planned[number] for number in durable} == durable, "everything, on disk before it is on record"
    assert sorted(values(query.drain())) == sorted(numbers(0, 10))


def test_a_stream_begins_at_the_end_unless_it_is_told(world: World) -> None:
    topic = world.topic()
    world.publish(topic, numbers(0, 5))
    query = Query(world.options(topic))
    assert query.batch() == []
    assert query.plan() is None
    world.publish(topic, numbers(5, 8))
    assert values(query.drain()) == numbers(5, 8)


#: How a query is told to begin at the end of the first partition.
AT_THE_END: list[Any] = [
    lambda _: {},
    lambda topic: {"startingOffsets": json.dumps({topic: {"0": -1, "1": -2}})},
    lambda _: {"startingTimestamp": str(2**50), "startingOffsetsByTimestampStrategy": "latest"},
]


@pytest.mark.parametrize("begin", AT_THE_END, ids=["latest", "offsets", "time"])
@pytest.mark.parametrize("way", ["options", "in_files"])
def test_what_comes_while_spark_asks_where_to_begin_is_read(world: World, way: str, begin: Any) -> None:
    topic = world.topic(2)
    in_first = [Outgoing(value=value, partition=0) for value in numbers(0, 9)]
    world.publish(topic, in_first[:3])
    query = Query(getattr(world, way)(topic, **begin(topic)))
    assert json.loads(query.start)[topic]["0"] == 3
    world.publish(topic, in_first[3:6])
    end = query.plan()
    assert end is not None
    assert json.loads(end)[topic]["0"] == 3, "where it begins is on record before any of it is read"
    world.publish(topic, in_first[6:])
    assert query.rows(end) == []
    query.checkpoint = end
    assert values(query.drain()) == numbers(3, 9)


@pytest.mark.parametrize("available_now", [False, True])
@pytest.mark.parametrize("begin", AT_THE_END, ids=["latest", "offsets", "time"])
def test_a_first_batch_that_is_done_again_begins_where_it_did(world: World, available_now: bool, begin: Any) -> None:
    topic = world.topic(2)
    in_first = [Outgoing(value=value, partition=0) for value in numbers(0, 9)]
    world.publish(topic, in_first[:3])
    options = world.options(topic, **begin(topic))
    query = Query(options)
    assert json.loads(query.start)[topic]["0"] == 3
    world.publish(topic, in_first[3:5])
    end = query.plan()  # and then the driver is gone, before anything is committed
    assert end is not None
    world.publish(topic, in_first[5:6])
    again = Query(options, available_now=available_now)
    assert again.rows(end) == []
    again.checkpoint = end
    world.publish(topic, in_first[6:])
    expected = numbers(3, 6) if available_now else numbers(3, 9)
    assert values(again.drain()) == expected


def test_a_first_batch_reads_what_does_not_begin_at_the_end(world: World) -> None:
    topic = world.topic(2)
    world.client.publish_many(topic, [Outgoing(value=b"%d" % n, partition=n % 2) for n in range(10)])
    query = Query(world.options(topic, startingOffsets=json.dumps({topic: {"0": 1, "1": -1}})))
    assert values([query.batch() or []]) == [b"2", b"4", b"6", b"8"]
    world.client.publish_many(topic, [Outgoing(value=b"new", partition=1)])
    assert values(query.drain()) == [b"new"]


def test_offsets_are_sorted_text(world: World) -> None:
    topics = sorted((world.topic(12), world.topic(1)), reverse=True)
    query = Query(world.options(",".join(topics), startingOffsets="earliest"))
    assert list(json.loads(query.start)) == sorted(topics)
    wide = max(json.loads(query.start).values(), key=len)
    assert list(wide) == [*(str(number) for number in range(12)), "uid"]


def test_readers_travel_to_executors(world: World) -> None:
    topic = world.topic()
    world.publish(topic, numbers(0, 3))
    query = Query(world.options(topic, startingOffsets="earliest"))
    end = query.plan()
    assert end is not None
    parts = query.tasks(end)
    reader, parts = pickle.loads(pickle.dumps((query.reader, parts)))
    assert [row["value"] for part in parts for batch in reader.read(part) for row in batch.to_pylist()] == numbers(0, 3)


# --- limits --------------------------------------------------------------------------------------------------------


def test_a_micro_batch_takes_no_more_than_it_may(world: World) -> None:
    topic = world.topic(3)
    world.publish(topic, numbers(0, 100))
    batches = Query(world.options(topic, startingOffsets="earliest", maxOffsetsPerTrigger=30)).drain()
    assert sorted(values(batches)) == sorted(numbers(0, 100))
    assert len(batches) >= 4
    assert all(0 < len(rows) <= 30 for rows in batches)


def test_a_micro_batch_takes_about_so_many_bytes(world: World) -> None:
    topic = world.topic()
    world.publish(topic, [bytes(1000)] * 1000)
    batches = Query(world.options(topic, startingOffsets="earliest", maxBytesPerTrigger="100k")).drain()
    assert sum(map(len, batches)) == 1000
    assert all(50 <= len(rows) <= 110 for rows in batches[:-1])


def test_everything_means_everything_even_with_a_limit(world: World) -> None:
    topic = world.topic()
    world.publish(topic, numbers(0, 100))
    query = Query(world.options(topic, startingOffsets="earliest", maxOffsetsPerTrigger=30, minOffsetsPerTrigger=500))
    assert len(query.batch(everything=True) or ()) == 100  # as Trigger.Once asks


def test_a_micro_batch_waits_for_enough_but_not_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    slept: list[float] = []
    monkeypatch.setattr(module, "monotonic", lambda: now_s)
    monkeypatch.setattr(module, "sleep", slept.append)
    topic = world.topic()
    query = Query(
        world.options(
            topic, startingOffsets="earliest", minOffsetsPerTrigger=10, maxTriggerDelay="5m", maxOffsetsPerTrigger=15
        )
    )
    world.publish(topic, numbers(0, 3))
    assert len(query.batch() or ()) == 3  # the first one has waited long enough
    world.publish(topic, numbers(3, 8))
    assert query.plan() is None
    now_s += 299
    assert query.plan() is None
    assert len(slept) == 2, "Spark asks again at once"
    now_s += 1
    assert values([query.batch() or []]) == numbers(3, 8)
    world.publish(topic, numbers(8, 48))
    assert [len(rows) for rows in query.drain()] == [15, 15, 10]


def test_tasks_of_a_micro_batch_share_its_work(world: World) -> None:
    topic = world.topic()
    world.publish(topic, numbers(0, 100))
    query = Query(world.options(topic, startingOffsets="earliest", minPartitions=4))
    end = query.plan()
    assert end is not None
    assert len(query.tasks(end)) == 4
    assert values([query.rows(end)]) == numbers(0, 100)


# --- what is available now -----------------------------------------------------------------------------------------


def test_available_now_reads_what_was_there_and_ends(world: World) -> None:
    topic = world.topic(2)
    world.publish(topic, numbers(0, 100))
    options = world.options(topic, startingOffsets="earliest", maxOffsetsPerTrigger=30, minOffsetsPerTrigger=1000)
    query = Query(options, available_now=True)
    batches = [query.batch()]
    world.publish(topic, numbers(100, 150))
    world.client.alter_topic(topic, partitions=3)
    batches += query.drain()
    assert sorted(values([rows or [] for rows in batches])) == sorted(numbers(0, 100))
    assert sorted(values(Query(options, query.checkpoint, available_now=True).drain())) == sorted(numbers(100, 150))


def test_available_now_reads_topics_that_came_since_the_checkpoint(world: World) -> None:
    prefix = world.topic()
    options = {**world.options(), "subscribePattern": rf"{prefix}(\..*)?", "startingOffsets": "earliest"}
    query = Query(options, available_now=True)
    assert query.drain() == [[]]
    world.client.create_topic(f"{prefix}.new")
    world.publish(f"{prefix}.new", numbers(0, 3))
    assert values(Query(options, query.checkpoint, available_now=True).drain()) == numbers(0, 3)


# --- what appears --------------------------------------------------------------------------------------------------


def test_partitions_and_topics_that_appear_are_read_from_their_beginning(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.spark.broker_reader._DISCOVERY_S", 0.0)
    prefix = world.topic()
    query = Query({**world.options(), "subscribePattern": rf"{prefix}(\..*)?"})
    assert query.batch() == []
    world.publish(prefix, numbers(0, 2))
    assert values(query.drain()) == numbers(0, 2)
    world.client.alter_topic(prefix, partitions=2)
    world.client.publish_many(prefix, [Outgoing(value=value, partition=1) for value in numbers(2, 4)])
    assert values(query.drain()) == numbers(2, 4)
    world.client.create_topic(f"{prefix}.new")
    world.publish(f"{prefix}.new", numbers(4, 6))
    first = query.batch()
    assert first == []  # where it begins is on record before any of it is read
    restarted = Query({**world.options(), "subscribePattern": rf"{prefix}(\..*)?"}, query.checkpoint)
    assert values(restarted.drain()) == numbers(4, 6)


@pytest.mark.parametrize("way", ["options", "in_files"])
def test_a_topic_may_appear_after_the_query(world: World, way: str) -> None:
    topic = f"of-the-future-{way}"
    query = Query(getattr(world, way)(topic))
    assert query.batch() == []
    assert query.plan() is None
    world.client.create_topic(topic)
    world.publish(topic, numbers(0, 3))
    assert values(query.drain()) == numbers(0, 3)


# --- what is gone --------------------------------------------------------------------------------------------------


def test_retention_past_the_checkpoint_is_an_error_that_names_the_ranges(tmp_path: Path) -> None:
    settings = {"server": {"heartbeat_ms": 3_600_000, "heartbeat_misses": 100}}
    with BrokerForTests(tmp_path, settings=Settings.model_validate(settings)) as broker:
        world = World(broker, tmp_path)
        topic = world.topic(segment_bytes=4096, retention_messages=50)
        world.publish(topic, numbers(0, 10))
        options = world.options(topic, startingOffsets="earliest")
        query = Query(options)
        planned = query.plan()
        assert planned is not None
        task = query.tasks(planned)[0]
        for start in range(10, 510, 10):
            world.publish(topic, [b"%0100d" % number for number in range(start, start + 10)])
        broker.clock.advance("1h")
        start = world.client.offsets(topic, "earliest")[0]
        assert start > 10
        with pytest.raises(OffsetOutOfRange, match=rf"{topic}\[0\] 0\.\.{start - 1};.*failOnDataLoss"):
            query.batch()
        with pytest.raises(OffsetOutOfRange, match=rf"{topic}\[0\] 0\.\.9"):
            query.rows(planned)
        with pytest.raises(OffsetOutOfRange, match=rf"{topic}\[0\] 0\.\.9"):
            list(query.reader.read(task))  # planned before, tried after
        tolerant = Query({**options, "failOnDataLoss": "false"}, query.start)
        assert tolerant.rows(planned) == []
        assert list(tolerant.reader.read(task)) == []
        longer = task.value._replace(until=510)
        survivors = [row["offset"] for batch in tolerant.reader.read(type(task)(longer)) for row in batch.to_pylist()]
        assert survivors == list(range(start, 510))
        assert [row["offset"] for rows in tolerant.drain() for row in rows] == list(range(start, 510))


def test_a_topic_that_is_gone_is_data_loss(world: World) -> None:
    topic = world.topic()
    world.publish(topic, numbers(0, 5))
    options = world.options(topic, startingOffsets="earliest")
    query = Query(options)
    end = query.plan()
    assert end is not None
    world.client.delete_topic(topic)
    with pytest.raises(OffsetOutOfRange, match=rf"{topic}\[0\] 0\.\.4"):
        query.rows(end)
    with pytest.raises(OffsetOutOfRange, match=rf"{topic}\[0\]"):
        query.plan()
    tolerant = Query({**options, "failOnDataLoss": "false"}, query.start)
    assert tolerant.rows(end) == []
    assert tolerant.plan() is None


def test_a_topic_that_the_pattern_leaves_out_now_is_not_gone(world: World) -> None:
    topic = world.topic()
    world.publish(topic, numbers(0, 5))
    options = {**world.options(topic, startingOffsets="earliest"), "subscribePattern": f"{topic}.*"}
    del options["subscribe"]
    world.client.create_topic(f"{topic}.dlq")
    world.publish(f"{topic}.dlq", numbers(10, 15))
    query = Query(options)
    end = query.plan()
    assert end is not None
    narrowed = Query({**options, "subscribePattern": f"(?!.*dlq){topic}.*"}, query.start)
    assert sorted(row["value"] for row in narrowed.rows(end)) == numbers(0, 5)
    narrowed = Query({**options, "subscribePattern": f"(?!.*dlq){topic}.*"}, end)
    world.publish(topic, numbers(5, 8))
    assert values(narrowed.drain()) == numbers(5, 8)


@pytest.mark.parametrize("by", ["subscribe", "assign"])
def test_what_is_not_chosen_any_more_is_not_gone_and_can_be_chosen_again(world: World, by: str) -> None:
    kept, left = world.topic(), world.topic(2)

    def options(**partitions: list[int]) -> dict[str, str]:
        chosen = ",".join(partitions) if by == "subscribe" else json.dumps(partitions)
        return {**world.options(startingOffsets="earliest"), by: chosen}

    fewer = options(**{kept: [0]}) if by == "subscribe" else options(**{kept: [0], left: [1]})
    world.publish(kept, numbers(0, 5))
    world.client.publish_many(left, [Outgoing(value=b"left", partition=0)])
    query = Query(options(**{kept: [0], left: [0, 1]}))
    end = query.plan()
    assert end is not None
    assert values([Query(fewer, query.start).rows(end)]) == numbers(0, 5)
    without = Query(fewer, end)
    world.publish(kept, numbers(5, 8))
    world.client.publish_many(left, [Outgoing(value=b"later", partition=0)])
    assert values(without.drain()) == numbers(5, 8)
    assert values(Query(options(**{kept: [0], left: [0, 1]}), without.checkpoint).drain()) == [b"later"]


def remade(world: World, topic: str, messages: list[bytes]) -> None:
    world.client.delete_topic(topic)
    world.client.create_topic(topic)
    world.publish(topic, messages)


@pytest.mark.parametrize("until", [52, 55, 60], ids=["shorter", "as-long", "longer"])
@pytest.mark.parametrize("way", ["options", "in_files"])
def test_a_topic_that_was_made_anew_is_data_loss_and_then_read_from_its_beginning(
    world: World, way: str, until: int
) -> None:
    topic = world.topic()
    world.publish(topic, numbers(0, 5))
    options = getattr(world, way)(topic, startingOffsets="earliest")
    query = Query(options)
    query.drain()
    remade(world, topic, numbers(50, until))
    with pytest.raises(OffsetOutOfRange, match=rf"{topic}\[0\] 5\.\.5"):
        query.plan()
    with pytest.raises(OffsetOutOfRange, match=rf"{topic}\[0\] 5\.\.5"):
        Query(options, query.checkpoint, available_now=True).plan()
    tolerant = {**options, "failOnDataLoss": "false"}
    assert values(Query(tolerant, query.checkpoint).drain()) == numbers(50, until)
    assert values(Query(tolerant, query.checkpoint, available_now=True).drain()) == numbers(50, until)


def test_a_batch_whose_topic_was_made_anew_before_it_was_done_again_reads_nothing_of_the_new_one(world: World) -> None:
    topic = world.topic()
    world.publish(topic, numbers(0, 5))
    options = world.options(topic, startingOffsets="earliest")
    query = Query(options)
    end = query.plan()
    assert end is not None
    remade(world, topic, numbers(50, 60))
    with pytest.raises(OffsetOutOfRange, match=rf"{topic}\[0\] 0\.\.4"):
        Query(options, query.start).rows(end)
    tolerant = {**options, "failOnDataLoss": "false"}
    assert Query(tolerant, query.start).rows(end) == []
    assert values(Query(tolerant, end).drain()) == numbers(50, 60)


def test_the_checkpoint_of_a_query_that_claims_is_refused(world: World) -> None:
    with pytest.raises(InvalidArgument, match="the checkpoint is one of a query with option claim"):
        Query(world.options(world.topic()), json.dumps({"claim": 3, "ranges": {}})).plan()


def test_a_checkpoint_that_does_not_say_which_topic_it_means_is_gone_on_from(world: World) -> None:
    topic = world.topic()
    world.publish(topic, numbers(0, 5))
    options = world.options(topic, startingOffsets="earliest")
    query = Query(options, json.dumps({topic: {"0": 3}}))
    assert values(query.drain()) == numbers(3, 5)
    remade(world, topic, numbers(50, 60))
    with pytest.raises(OffsetOutOfRange, match=rf"{topic}\[0\] 5\.\.5"):
        query.plan()
    remade(world, topic, numbers(50, 52))
    with pytest.raises(OffsetOutOfRange, match=rf"{topic}\[0\] 2\.\.4"):
        Query(options, json.dumps({topic: {"0": 5}})).plan()
    tolerant = {**options, "failOnDataLoss": "false"}
    assert values(Query(tolerant, json.dumps({topic: {"0": 5}})).drain()) == numbers(50, 52)


@pytest.mark.parametrize("new", [3, 5, 8], ids=["fewer", "as-many", "more"])
def test_a_topic_in_memory_is_another_one_after_the_broker_has_restarted(tmp_path: Path, new: int) -> None:
    with BrokerForTests(tmp_path) as broker:
        client = broker.connect()
        client.create_topic("readings", config={"mode": "ephemeral"})
        client.publish_many("readings", numbers(0, 5))
        options = {"bootstrap.servers": broker.address, "subscribe": "readings", "startingOffsets": "earliest"}
        query = Query(options)
        assert values(query.drain()) == numbers(0, 5)
    port = int(broker.address.rpartition(":")[2])
    with BrokerForTests(tmp_path, port=port) as broker:
        broker.connect().publish_many("readings", numbers(50, 50 + new))
        with pytest.raises(OffsetOutOfRange, match="messages that were to be read are gone: readings"):
            Query(options, query.checkpoint).plan()
        tolerant = {**options, "failOnDataLoss": "false"}
        assert values(Query(tolerant, query.checkpoint).drain()) == numbers(50, 50 + new)


def test_available_now_from_the_end_reads_nothing_and_is_no_loss(world: World) -> None:
    topic = world.topic()
    world.publish(topic, numbers(0, 5))
    query = Query(world.options(topic), available_now=True)
    world.publish(topic, numbers(5, 9))
    assert json.loads(query.start)[topic]["0"] == 9, "Spark asks for it after it has pinned the ends"
    assert query.drain() == [[]]


# --- waiting and progress ------------------------------------------------------------------------------------------


def test_waiting_for_more_ends_as_soon_as_there_is_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 30.0)
    topic = world.topic(3)
    query = Query(world.options(topic))
    assert query.batch() == []
    publishing = threading.Timer(0.2, world.client.publish, (topic, b"news"))
    publishing.start()
    began_s = time.monotonic()
    assert values([query.batch() or []]) == [b"news"]
    assert time.monotonic() - began_s < 20
    publishing.join()


def test_waiting_takes_a_tenth_of_a_second_at_most_and_asks_the_broker_for_nothing_new(world: World) -> None:
    topic = world.topic(5)
    query = Query(world.options(topic))
    assert query.batch() == []
    assert query.plan() is None
    fetches = query.reader._log._watches  # type: ignore[attr-defined]
    watching = dict(fetches)
    assert len(watching) == 5
    began_s = time.monotonic()
    assert query.plan() is None
    assert time.monotonic() - began_s < 5
    assert fetches == watching


def test_waiting_takes_its_time_where_a_failed_partition_shows_what_is_not_on_disk(tmp_path: Path) -> None:
    """A fetch behind what is on disk was answered at once, again and again, with what no checkpoint may name."""
    settings = Settings.model_validate({"storage": {"fsync_interval_ms": 3_600_000}})
    with BrokerForTests(tmp_path, settings=settings) as broker:
        client = broker.connect()
        client.create_topic("orders", 2, config={"fsync": "never"})
        client.publish("orders", b"read", partition=0)
        options = {"bootstrap.servers": broker.address, "subscribe": "orders", "startingOffsets": "earliest"}
        query = Query(options)
        assert values(query.drain()) == [b"read"]
        client.publish("orders", b"visible", partition=0)

        async def fail() -> None:
            broker.broker.topics.partition("default", "orders", 0).fail("the disk failed to sync")

        broker.run(fail())
        began_s = time.monotonic()
        assert [query.plan(), query.plan(), query.plan()] == [None, None, None]
        assert time.monotonic() - began_s >= 3 * module._POLL_S * 0.9
        client.publish("orders", b"elsewhere", partition=1)
        assert values(query.drain()) == [b"elsewhere"]


def test_progress_shows_as_that_of_a_group(world: World) -> None:
    topic = world.topic(2)
    world.publish(topic, numbers(0, 40))
    query = Query(world.options(topic, startingOffsets="earliest", groupId="spark-job", maxOffsetsPerTrigger=10))
    query.batch()
    query.plan()  # Spark wants more, so it is done with that
    lag = {entry.partition: entry.lag for entry in world.client.group("spark-job").lag if entry.topic == topic}
    assert sum(lag.values()) == 30
    latest = query.reader.reportLatestOffset()
    assert latest is not None
    assert sum(latest[topic].values()) == 40
    query.drain()
    assert all(entry.lag == 0 for entry in world.client.group("spark-job").lag if entry.topic == topic)


def test_progress_is_shown_although_one_of_the_topics_is_gone(world: World) -> None:
    topic, gone, remake = world.topic(), world.topic(), world.topic()
    for each in (topic, gone, remake):
        world.publish(each, numbers(0, 4))
    options = world.options(",".join((topic, gone, remake)), groupId="spark-rest", startingOffsets="earliest")
    query = Query({**options, "failOnDataLoss": "false"})
    query.drain()
    world.client.delete_topic(gone)
    remade(world, remake, [])
    for first in (4, 8):
        world.publish(topic, numbers(first, first + 4))
        query.drain()
        committed = {entry.topic: entry.committed for entry in world.client.group("spark-rest").lag}
        assert committed == {topic: first + 4, remake: 0}


def test_progress_that_cannot_be_shown_does_not_stop_a_query(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    topic = world.topic()
    world.publish(topic, numbers(0, 4))
    with world.client.stream(topic, group="taken", timeout_s=0):
        query = Query(world.options(topic, startingOffsets="earliest", groupId="taken", maxOffsetsPerTrigger=2))
        assert values(query.drain()) == numbers(0, 4)
    assert capfd.readouterr().err.count("the progress of group 'taken' is not shown") == 1
