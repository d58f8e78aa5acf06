"""Streaming reads that are consumers of a queue group, without Spark around them."""

from __future__ import annotations

import json
import pickle

import pytest

from millstream.errors import InvalidArgument
from millstream.spark import claiming
from millstream.testing.broker import BrokerForTests
from tests.spark.claimed import Query, numbers, state
from tests.spark.world import World

# --- a batch -------------------------------------------------------------------------------------------------------


def test_messages_are_claimed_for_a_batch_and_acked_when_it_is_done(world: World, queries: list[Query]) -> None:
    topic = world.topic(2)
    world.publish(topic, numbers(100))
    query = Query(world.options(topic, maxOffsetsPerTrigger=60))
    queries.append(query)
    assert query.begin()
    assert state(world.client, topic) == (40, 60, 0)
    first = query.run()
    query.done = len(query.offsets)
    assert query.begin()
    assert state(world.client, topic) == (0, 40, 60)
    second = query.run()
    query.done = len(query.offsets)
    assert not query.begin()
    assert state(world.client, topic) == (0, 0, 100)
    assert (len(first), len(second)) == (60, 40)
    assert sorted(first + second, key=int) == numbers(100)


def test_a_task_that_is_tried_again_reads_the_same(world: World, queries: list[Query]) -> None:
    topic = world.topic(2)
    world.publish(topic, numbers(1000))
    query = Query(world.options(topic, minPartitions=5))
    queries.append(query)
    assert query.begin()
    reader, tasks = pickle.loads(pickle.dumps((query.reader, query.tasks())))
    assert len(tasks) >= 5
    read = [[row for batch in reader.read(task) for row in batch.to_pylist()] for task in tasks]
    again = [[row for batch in reader.read(task) for row in batch.to_pylist()] for task in reversed(tasks)]
    assert read == again[::-1]
    assert sorted((row["value"] for rows in read for row in rows), key=int) == numbers(1000)


def test_a_batch_that_is_planned_twice_claims_once(world: World, queries: list[Query]) -> None:
    topic = world.topic()
    world.publish(topic, numbers(10))
    query = Query(world.options(topic, maxOffsetsPerTrigger=5))
    queries.append(query)
    start = json.loads(query.offsets[0])
    limit = query.reader.getDefaultReadLimit()
    assert query.reader.latestOffset(start, limit) == query.reader.latestOffset(start, limit)
    assert state(world.client, topic) == (5, 5, 0)


def test_only_what_was_claimed_is_read_between_what_others_have(world: World, queries: list[Query]) -> None:
    topic = world.topic()
    world.publish(topic, numbers(3000))
    with world.client.queue(topic, group="workers", prefetch=3000, timeout_s=5) as others:
        held = others.lease(3000)
        while len(held) < 3000:
            held += others.lease(3000 - len(held))
        back = [message for message in held if message.offset % 3 == 0 or message.offset >= 2900]
        others.ack([message for message in held if message not in back])
        others.nack(back, retry_after=0)
        others.close()
    for schema in (None, "value binary"):
        query = Query(world.options(topic, maxOffsetsPerTrigger=500, minPartitions=3), schema=schema)
        queries.append(query)
        values = query.batch()
        assert values is not None
        assert len(values) == 500
        assert all(int(value) % 3 == 0 or int(value) >= 2900 for value in values)
        query.begin()
        query.crash()
    assert state(world.client, topic)[2] == 1933 + 1000


def test_every_topic_has_its_turn(world: World, queries: list[Query]) -> None:
    topics = [world.topic(), world.topic()]
    for topic in topics:
        world.publish(topic, numbers(20))
    query = Query(world.options(",".join([*topics, "not-there-yet"]), maxOffsetsPerTrigger=15))
    queries.append(query)
    batches = [query.batch() for _ in range(3)]
    assert [len(values or ()) for values in batches] == [15, 15, 10]
    assert query.batch() is None
    assert [state(world.client, topic) for topic in topics] == [(0, 0, 20)] * 2


def test_a_query_with_a_pattern_works_on_topics_that_appear_later(queries: list[Query]) -> None:
    with BrokerForTests() as broker:
        client = broker.connect()
        query = Query({"bootstrap.servers": broker.address, "subscribePattern": r"orders\..*"})
        queries.append(query)
        assert query.batch() is None
        client.publish("orders.eu", "1")
        query.reader._log = None  # topics are looked for once a second
        assert query.batch() == [b"1"]


def test_a_message_that_is_claimed_again_makes_another_offset(queries: list[Query]) -> None:
    """Two offsets that look the same are, to Spark, no news."""
    with BrokerForTests() as broker:
        client = broker.connect()
        client.publish("jobs", "1")
        client.queue("jobs", group="workers", policy={"retry": "simple"}).close()
        query = Query({"bootstrap.servers": broker.address, "subscribe": "jobs"})
        queries.append(query)
        assert query.batch() == [b"1"]
        broker.clock.advance("31s")
        with client.queue("jobs", group="workers", timeout_s=5) as other:
            (message,) = other.lease(1, wait="5s")
            assert query.batch() is None
            message.nack(retry_after=0)
        assert query.batch() == [b"1"]


# --- restarts ------------------------------------------------------------------------------------------------------


def test_a_driver_that_dies_in_a_batch_does_the_same_batch_again(world: World, queries: list[Query]) -> None:
    topic = world.topic(3)
    world.publish(topic, numbers(90))
    options = world.options(topic, maxOffsetsPerTrigger=50)
    query = Query(options)
    assert query.begin()
    half_done = query.run()
    query.crash()
    assert state(world.client, topic) == (90, 0, 0)
    query = query.restarted(options)
    queries.append(query)
    again = query.run()
    assert sorted(again) == sorted(half_done)
    assert state(world.client, topic) == (40, 50, 0)
    query.done = len(query.offsets)
    assert sorted(again + query.drain(), key=int) == numbers(90)
    assert state(world.client, topic) == (0, 0, 90)


def test_a_batch_that_was_done_when_the_driver_died_is_acked_and_not_read_again(
    world: World, queries: list[Query]
) -> None:
    topic = world.topic()
    world.publish(topic, numbers(10))
    options = world.options(topic, maxOffsetsPerTrigger=6)
    query = Query(options)
    done = query.batch()
    assert done is not None
    query.crash()
    query = query.restarted(options)
    queries.append(query)
    assert sorted(done + query.drain(), key=int) == numbers(10)
    assert state(world.client, topic) == (0, 0, 10)


def remade(world: World, topic: str, messages: list[bytes]) -> None:
    world.client.delete_topic(topic)
    world.client.create_topic(topic)
    world.publish(topic, messages)


def test_messages_of_a_topic_that_was_made_again_are_not_acked_for_those_of_the_old_one(
    world: World, queries: list[Query]
) -> None:
    topic = world.topic()
    world.publish(topic, numbers(10))
    query = Query(world.options(topic))
    queries.append(query)
    assert query.drain() == numbers(10)
    query.reader.stop()
    remade(world, topic, numbers(12, 100))
    again = query.restarted(world.options(topic))
    queries.append(again)
    assert again.drain() == numbers(12, 100)


def remade_group(world: World, topic: str) -> None:
    """As somebody does who wants everything once more."""
    world.client.queues.delete(topic, group="workers", force=True)
    world.client.queue(topic, group="workers", prefetch=1, start="earliest").close()


def test_messages_of_a_group_that_was_made_again_are_not_acked_for_those_of_the_old_one(
    world: World, queries: list[Query]
) -> None:
    topic = world.topic()
    world.publish(topic, numbers(10))
    query = Query(world.options(topic))
    queries.append(query)
    assert query.drain() == numbers(10)
    query.reader.stop()
    remade_group(world, topic)
    again = query.restarted(world.options(topic))
    queries.append(again)
    assert again.drain() == numbers(10)


def test_a_batch_that_is_done_when_its_group_was_made_again_is_still_to_do_for_the_new_one(
    world: World, queries: list[Query]
) -> None:
    topic = world.topic()
    world.publish(topic, numbers(10))
    query = Query(world.options(topic))
    queries.append(query)
    assert query.batch() == numbers(10)
    remade_group(world, topic)
    assert query.reader._claims is not None
    query.reader._claims.extend()  # which finds that they are gone
    assert query.batch() == numbers(10)
    assert query.batch() is None
    assert state(world.client, topic) == (0, 0, 10)


def test_a_batch_that_is_done_again_is_without_what_went_with_its_topic(world: World, queries: list[Query]) -> None:
    topic = world.topic()
    world.publish(topic, numbers(10))
    query = Query(world.options(topic))
    queries.append(query)
    assert query.begin()
    query.crash()
    remade(world, topic, numbers(12, 100))
    again = query.restarted(world.options(topic))
    queries.append(again)
    assert again.run() == []
    again.done = len(again.offsets)
    assert again.drain() == numbers(12, 100)


def test_a_checkpoint_that_does_not_say_which_topics_it_means_is_gone_on_from(
    world: World, queries: list[Query]
) -> None:
    topic = world.topic()
    world.publish(topic, numbers(10))
    query = Query(world.options(topic))
    queries.append(query)
    assert query.begin()
    query.crash()
    query.offsets = [json.dumps({k: v for k, v in json.loads(text).items() if k != "uids"}) for text in query.offsets]
    again = query.restarted(world.options(topic))
    queries.append(again)
    assert again.run() == numbers(10)


def test_what_was_claimed_and_not_written_down_comes_back(world: World, queries: list[Query]) -> None:
    topic = world.topic()
    world.publish(topic, numbers(10))
    options = world.options(topic)
    query = Query(options)
    query.reader.latestOffset(json.loads(query.offsets[0]), query.reader.getDefaultReadLimit())
    query.crash()
    query = query.restarted(options)
    queries.append(query)
    assert query.drain() == numbers(10)


def test_when_a_query_stops_what_it_has_not_done_is_for_others(world: World) -> None:
    topic = world.topic()
    world.publish(topic, numbers(10))
    query = Query(world.options(topic))
    assert query.begin()
    query.reader.stop()
    with world.client.queue(topic, group="workers", timeout_s=5) as others:
        assert len(others.lease(10, wait="5s")) == 10


def test_a_batch_that_is_done_again_is_without_what_others_have_done(world: World, queries: list[Query]) -> None:
    topic = world.topic()
    world.publish(topic, numbers(10))
    options = world.options(topic)
    query = Query(options)
    assert query.begin()
    query.crash()
    with world.client.queue(topic, group="workers", timeout_s=5, prefetch=3) as others:
        done, held, back = others.lease(3, wait="5s")
        done.ack()
        back.nack(retry_after=0)
        query = query.restarted(options)
        queries.append(query)
        assert sorted(query.run()) == sorted(set(numbers(10)) - {done.value, held.value})
        query.done = len(query.offsets)
        query.begin()
        held.ack()
    assert state(world.client, topic) == (0, 0, 10)


def test_a_batch_that_is_done_again_and_planned_twice_is_both_times_without_what_others_have(
    world: World, queries: list[Query]
) -> None:
    topic = world.topic()
    world.publish(topic, numbers(10))
    query = Query(world.options(topic))
    assert query.begin()
    query.crash()
    with world.client.queue(topic, group="workers", timeout_s=5, prefetch=3) as others:
        taken = others.lease(3, wait="5s")
        query = query.restarted(world.options(topic))
        queries.append(query)
        rest = sorted(set(numbers(10)) - {message.value for message in taken})
        assert [sorted(query.run()) for _ in range(2)] == [rest, rest]
        others.ack(taken)


def test_a_query_waits_for_the_broker_to_notice_that_its_predecessor_is_gone(
    world: World, queries: list[Query], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = world.topic()
    world.publish(topic, numbers(10))
    options = world.options(topic)
    before = Query(options)
    assert before.begin()
    monkeypatch.setattr(claiming, "_PATIENCE_S", 30.0)
    # It goes away the moment that its successor has asked in vain.
    monkeypatch.setattr("millstream.spark.claims.time.sleep", lambda _: before.crash())
    query = before.restarted(options)
    queries.append(query)
    assert query.run() == numbers(10)
    assert state(world.client, topic) == (0, 10, 0)


def test_why_says_who_has_a_claimed_message(world: World, queries: list[Query]) -> None:
    topic = world.topic()
    receipt = world.client.publish(topic, "1")
    query = Query(world.options(topic))
    queries.append(query)
    assert query.begin()
    assert "spark-" in world.client.why(receipt.id).sentence


# --- limits --------------------------------------------------------------------------------------------------------


def test_available_now_ends_with_what_there_was(world: World, queries: list[Query]) -> None:
    topic = world.topic()
    world.publish(topic, numbers(20))
    query = Query(world.options(topic, maxOffsetsPerTrigger=8))
    queries.append(query)
    query.reader.prepareForTriggerAvailableNow()
    found: list[bytes] = []
    while (values := query.batch()) is not None:
        found += values
        world.publish(topic, numbers(5))  # there would be no end
    assert found == numbers(20)
    assert state(world.client, topic)[2] == 20


def test_available_now_takes_what_there_was_of_every_topic(world: World, queries: list[Query]) -> None:
    topics = [world.topic(), world.topic()]
    for topic in topics:
        world.publish(topic, numbers(20))
    query = Query(world.options(",".join(topics), maxOffsetsPerTrigger=8))
    queries.append(query)
    query.reader.prepareForTriggerAvailableNow()
    assert sorted(query.drain()) == sorted(2 * numbers(20))


def test_a_new_group_begins_where_it_is_told(world: World, queries: list[Query]) -> None:
    topic = world.topic()
    world.publish(topic, numbers(5))
    everything = Query(world.options(topic))
    latest = Query(world.options(topic, claim="late", startingOffsets="latest"))
    queries += [everything, latest]
    assert (everything.batch(), latest.batch()) == (numbers(5), None)
    world.publish(topic, [b"new"])
    assert (everything.batch(), latest.batch()) == ([b"new"], [b"new"])


def test_a_topic_that_appears_before_the_first_batch_is_done_is_claimed_from_its_beginning(
    queries: list[Query],
) -> None:
    with BrokerForTests() as broker:
        client = broker.connect()
        options = {"bootstrap.servers": broker.address, "subscribePattern": r"orders\..*", "startingOffsets": "latest"}
        query = Query(options)
        queries.append(query)
        client.publish("orders.eu", "1")
        query.reader._log = None  # topics are looked for once a second
        query.reader.initialOffset()  # Spark asks once more before it does its first batch
        assert query.batch() == [b"1"]


@pytest.mark.parametrize(("start", "expected"), [("earliest", numbers(20)), ("latest", [])])
def test_available_now_begins_a_new_group_where_it_is_told(
    world: World, queries: list[Query], start: str, expected: list[bytes]
) -> None:
    topic = world.topic()
    world.publish(topic, numbers(20))
    query = Query(world.options(topic, startingOffsets=start), [json.dumps(claiming.Batch().as_json())])
    queries.append(query)
    query.reader.prepareForTriggerAvailableNow()
    query.reader.initialOffset()
    assert query.drain() == expected


def test_available_now_claims_all_of_a_topic_that_came_since_the_checkpoint(queries: list[Query]) -> None:
    with BrokerForTests() as broker:
        client = broker.connect()
        options = {"bootstrap.servers": broker.address, "subscribePattern": r"orders\..*", "startingOffsets": "latest"}
        query = Query(options)
        queries.append(query)
        query.reader.prepareForTriggerAvailableNow()
        assert query.batch() is None
        client.publish_many("orders.eu", numbers(5))
        again = query.restarted(options)
        queries.append(again)
        again.reader.prepareForTriggerAvailableNow()
        assert again.drain() == numbers(5)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"groupId": "g"}, "option groupId does not go with claim"),
        ({"maxBytesPerTrigger": "1m"}, "option maxBytesPerTrigger does not go with claim"),
        ({"minOffsetsPerTrigger": "1"}, "option minOffsetsPerTrigger does not go with claim"),
        ({"startingTimestamp": "1"}, "startingOffsets is earliest or latest"),
        ({"maxOffsetsPerTrigger": "1000001"}, "maxOffsetsPerTrigger is at most 1000000"),
        ({"claim": "no good"}, "no good"),
    ],
)
def test_options_that_do_not_go_with_a_claim_are_errors(more: dict[str, str], sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        Query({"bootstrap.servers": "127.0.0.1:1", "subscribe": "orders", **more})


def test_the_checkpoint_of_another_kind_of_query_is_refused(world: World) -> None:
    query = Query(world.options(world.topic()))
    with pytest.raises(InvalidArgument, match="without option claim"):
        query.reader.latestOffset({"orders": {"0": 1}}, query.reader.getDefaultReadLimit())
    query.reader.stop()
