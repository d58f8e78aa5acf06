"""Publishing the same thing twice, over real sockets and over restarts."""

from __future__ import annotations

import asyncio
from itertools import islice
from pathlib import Path

import pytest

import millstream
from millstream.client import Client
from millstream.config import Settings
from millstream.errors import InvalidArgument
from millstream.options import DEDUP_ID
from millstream.records import encode_headers, encode_parts
from millstream.testing.broker import BrokerForTests
from millstream.wire.messages import decode_publish_result, response_body
from tests.native import NativeClient

HOUR = {"dedup_window_ms": 3_600_000}


def values(client: Client, topic: str) -> list[str]:
    stored = sum(client.offsets(topic).values())
    return sorted(message.text for message in islice(client.stream(topic, timeout_s=10), stored))


def test_a_repeated_publish_is_stored_once_and_answered_with_the_original(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("orders", partitions=4, config=HOUR)
        first = client.publish("orders", "a", dedup_id="order-1")
        other = client.publish("orders", "b", dedup_id="order-2")
        again = client.publish("orders", "a again", dedup_id="order-1")
        assert (again.id, again.offset, again.duplicate) == (first.id, first.offset, True)
        assert not first.duplicate
        assert not other.duplicate
        assert values(client, "orders") == ["a", "b"]
        assert broker.broker.metrics.duplicates == 1


def test_the_publisher_goes_on_after_a_repetition(broker: BrokerForTests) -> None:
    """The number of the batch that was not stored is used up: the next one must not look out of sequence."""
    with millstream.connect(broker.address) as client:
        client.create_topic("orders", config=HOUR)
        for number in range(50):
            client.publish("orders", str(number), dedup_id=str(number % 10))
        with client.producer("orders") as producer:
            for number in range(200):
                producer.send(f"p{number}", dedup_id=f"p{number % 20}")
                producer.send(f"plain{number}".encode())
        assert producer.stats.messages_failed == 0
        assert producer.stats.messages_confirmed == 400
        expected = [str(number) for number in range(10)] + [f"p{number}" for number in range(20)]
        assert values(client, "orders") == sorted(expected + [f"plain{number}" for number in range(200)])


def test_the_number_of_a_repetition_is_used_up(broker: BrokerForTests) -> None:
    """Without the SDK, which would find a way around: batches 0 to 3 of a producer, two of them repetitions."""
    with NativeClient(broker.address) as native:
        native.call("topic.create", name="orders", config=HOUR)
        producer = native.call("producer.new")["producer_id"] << 16
        ids = ["a", "a", "b", "a"]
        numbers = [
            native.send_batch("orders", one("x", dedup_id=dedup_id, producer=producer, first_sequence=sequence))
            for sequence, dedup_id in enumerate(ids)
        ]
        results = [decode_publish_result(native.receive()[2]) for _ in numbers]
        assert sorted((result.base_offset, result.duplicate) for result in results) == [
            (0, False), (0, True), (0, True), (1, False),
        ]  # fmt: skip


def test_repetitions_that_arrive_together_are_recognised(broker: BrokerForTests) -> None:
    """Both are in the same read of the socket: the first has no offset yet when the second is looked at."""
    with NativeClient(broker.address) as native:
        native.call("topic.create", name="orders", config=HOUR)
        numbers = [native.send_batch("orders", one("x", dedup_id="same")) for _ in range(3)]
        results = [native.answer(number) for number in numbers]
        assert [bytes(result[4:12]) for result in results] == [bytes(8)] * 3, "all of them have offset 0"
        assert native.call("topic.describe", name="orders")["partitions"][0]["next_offset"] == 1


def test_without_a_window_an_id_is_refused_and_the_publisher_goes_on(broker: BrokerForTests) -> None:
    """Whoever gives an id relies on it; ignored without a word, it would be missed when it is needed."""
    with millstream.connect(broker.address) as client:
        client.create_topic("orders")
        with pytest.raises(InvalidArgument, match=r"no dedup window.*topic alter TOPIC -c dedup_window_ms="):
            client.publish("orders", "a", dedup_id="order-1")
        with pytest.raises(InvalidArgument, match="no dedup window"):
            client.publish("orders", "a", dedup_id="order-1", delay="1h")
        client.publish("orders", "plain", max_retries=3)
        client.publish_many("orders", [millstream.Outgoing(value=b"more", max_retries=3)] * 2)
        client.alter_topic("orders", config=HOUR)
        client.publish("orders", "a", dedup_id="order-1")
        assert client.publish("orders", "a", dedup_id="order-1").duplicate
        assert values(client, "orders") == ["a", "more", "more", "plain"]


def test_nothing_gives_way_to_a_message_that_is_refused_for_its_id(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("orders", config={"max_depth": 2, "overflow": "evict"})
        with client.queue("orders", group="workers", start="earliest"):
            client.publish_many("orders", ["a", "b"])
            with pytest.raises(InvalidArgument, match="no dedup window"):
                client.publish("orders", "c", dedup_id="order-1")
        waiting = client.queue("orders", group="workers", timeout_s=1)
        assert sorted(message.text for message in waiting) == ["a", "b"]


def test_a_window_that_is_taken_away_and_given_back_knows_what_came_before(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("orders", config=HOUR)
        client.publish("orders", "a", dedup_id="order-1")
        client.alter_topic("orders", config={"dedup_window_ms": 0})
        with pytest.raises(InvalidArgument, match="no dedup window"):
            client.publish("orders", "a", dedup_id="order-1")
        client.alter_topic("orders", config=HOUR)
        assert client.publish("orders", "a", dedup_id="order-1").duplicate


def test_a_message_with_an_id_travels_alone(broker: BrokerForTests) -> None:
    with NativeClient(broker.address) as native:
        native.call("topic.create", name="orders", config=HOUR)
        number = native.send_batch("orders", one("x", "y", dedup_id="same"))
        with pytest.raises(InvalidArgument, match="the only one of its batch"):
            response_body(native.answer(number))


@pytest.mark.parametrize("segment_bytes", [64 * 1024 * 1024, 4096])
def test_ids_survive_a_restart(tmp_path: Path, segment_bytes: int) -> None:
    """They are read from the log again, also from segments that nobody has read since."""
    settings = Settings.model_validate({"storage": {"segment_bytes": segment_bytes}})
    with BrokerForTests(tmp_path / "data", settings=settings) as first, millstream.connect(first.address) as client:
        client.create_topic("orders", config=HOUR)
        receipts = [client.publish("orders", "x" * 100, dedup_id=str(number)) for number in range(100)]
        client.publish_many("orders", ["plain"] * 10)
    with BrokerForTests(tmp_path / "data", settings=settings) as second, millstream.connect(second.address) as client:
        for number in (0, 99, 50):
            again = client.publish("orders", "x", dedup_id=str(number))
            assert (again.id, again.duplicate) == (receipts[number].id, True)
        assert not client.publish("orders", "x", dedup_id="new").duplicate


def test_async_publishing_recognises_repetitions(broker: BrokerForTests) -> None:
    async def run() -> None:
        async with millstream.aio.connect(broker.address) as client:
            await client.create_topic("orders", partitions=3, config=HOUR)
            receipts = await asyncio.gather(
                *(client.publish("orders", str(number), dedup_id=str(number % 5)) for number in range(40))
            )
            assert len({receipt.id for receipt in receipts}) == 5
            assert sum(receipt.duplicate for receipt in receipts) == 35

    asyncio.run(run())


def one(*values: str, dedup_id: str, **numbers: int) -> bytes:
    headers = [encode_headers({DEDUP_ID: dedup_id})] * len(values)
    contents = [value.encode() for value in values]
    return b"".join(encode_parts(contents, headers=headers, options=True, base_timestamp_us=1, **numbers))
