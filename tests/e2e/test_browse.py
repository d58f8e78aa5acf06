"""Looking at messages without consuming them, through the SDK."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import millstream
from millstream import aio
from millstream.client import Client, Outgoing
from millstream.errors import InvalidArgument, MessageNotFound, PartitionNotFound, TopicNotFound
from millstream.testing.broker import BrokerForTests
from millstream.wire.message_calls import BrowseMessages, MessagePage


@pytest.fixture
def client(broker: BrokerForTests) -> Iterator[Client]:
    with millstream.connect(broker.address) as client:
        yield client


def values(messages: list[object]) -> list[bytes]:
    return [message.value for message in messages]  # type: ignore[attr-defined]


def test_messages_are_shown_in_the_order_they_were_stored_and_the_other_way_round(client: Client) -> None:
    client.create_topic("orders", partitions=3)
    for number in range(30):
        client.publish("orders", str(number), partition=number % 3)
    assert values(client.browse("orders")) == [b"%d" % number for number in range(30)]
    assert values(client.browse("orders", newest_first=True, limit=4)) == [b"29", b"28", b"27", b"26"]
    assert values(client.browse("orders", partition=1, limit=2)) == [b"1", b"4"]
    assert values(client.browse("orders", partition=1, offset=8)) == [b"25", b"28"]


def test_pages_meet_without_a_gap_or_a_repetition(client: Client) -> None:
    client.create_topic("orders", partitions=3)
    for first in range(0, 60, 5):  # batches of five, so that pages end inside of them
        client.publish_many(
            "orders", [Outgoing(value=str(number), partition=first // 5 % 3) for number in range(first, first + 5)]
        )
    for newest_first in (False, True):
        seen: list[bytes] = []
        call = BrowseMessages(topic="orders", limit=7, newest_first=newest_first)
        while True:
            page = client.call(call, MessagePage)
            seen += values(page.messages)
            if not page.after:
                break
            call.after = page.after
        assert sorted(seen, key=int) == [b"%d" % number for number in range(60)]
        # Batches as a whole come by the time they were stored; within a batch by offset.
        assert [int(value) // 5 for value in seen] == sorted((int(value) // 5 for value in seen), reverse=newest_first)


def test_conditions_must_all_hold(broker: BrokerForTests, client: Client) -> None:
    client.publish("orders", "plain")
    client.publish("orders", "with key", key="a", headers={"region": "eu"})
    broker.clock.advance("1m")
    noon_ms = broker.broker.now_us() // 1000
    client.publish("orders", "late with key", key="a", headers={"region": "us"})
    client.publish("orders", b"\xff\x00 late", key="b", headers={"region": "eu=1"})
    assert values(client.browse("orders", key="a")) == [b"with key", b"late with key"]
    assert values(client.browse("orders", key=b"")) == []
    assert values(client.browse("orders", header="region=eu")) == [b"with key"]
    assert values(client.browse("orders", header="region=eu=1")) == [b"\xff\x00 late"]
    assert len(client.browse("orders", header="region")) == 3
    assert values(client.browse("orders", header="regio")) == []
    assert values(client.browse("orders", text="late")) == [b"late with key", b"\xff\x00 late"]
    assert values(client.browse("orders", text="late", key="a")) == [b"late with key"]
    assert values(client.browse("orders", since=noon_ms / 1000)) == [b"late with key", b"\xff\x00 late"]
    assert values(client.browse("orders", until=noon_ms / 1000, newest_first=True)) == [b"with key", b"plain"]
    assert values(client.browse("orders", since=noon_ms / 1000, newest_first=True, limit=1)) == [b"\xff\x00 late"]


def test_values_are_cut_where_asked_and_their_size_is_told(client: Client) -> None:
    client.publish("orders", "x" * 1000, priority="high", ttl="1h")
    [message] = client.browse("orders", value_bytes=10)
    assert (message.value, message.size, message.priority) == (b"x" * 10, 1000, 1)
    assert message.expiry_ms > message.timestamp_ms
    [message] = client.browse("orders")
    assert message.value == b"x" * 1000


def test_looking_makes_no_files_and_says_what_is_not_there(client: Client) -> None:
    client.create_topic("empty", partitions=2)
    assert client.browse("empty") == []
    assert all(partition.segments == 0 for partition in client.topic("empty").partitions)
    with pytest.raises(TopicNotFound):
        client.browse("nowhere")
    with pytest.raises(PartitionNotFound):
        client.browse("empty", partition=2)
    with pytest.raises(InvalidArgument, match="limit"):
        client.browse("empty", limit=0)
    for after in ("x", "0:1:2", "-1:0", "7:0", "0:" + "9" * 40):
        with pytest.raises(InvalidArgument, match="after"):
            client.call(BrowseMessages(topic="empty", after=after), MessagePage)


def test_large_batches_of_large_messages_are_found_from_the_end(client: Client) -> None:
    """More than one window, and windows that are smaller than a batch."""
    client.create_topic("blobs")
    for batch in range(6):
        client.publish_many("blobs", [bytes([batch]) * 200_000 for _ in range(4)])
    client.publish_many("blobs", [b"small"] * 3000)
    found = client.browse("blobs", newest_first=True, limit=3010, value_bytes=5)
    assert len(found) == 3010
    assert [message.offset for message in found] == list(range(3023, 13, -1))
    found = client.browse("blobs", newest_first=True, text="\x00\x00", limit=2, value_bytes=1)
    assert [message.offset for message in found] == [3, 2]


def test_what_an_earlier_process_wrote_is_found(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker, millstream.connect(broker.address) as client:
        client.create_topic("orders", config={"segment_bytes": 4096})
        receipts = [client.publish("orders", f"{number} " + "x" * 500) for number in range(40)]
    with BrokerForTests(tmp_path) as broker, millstream.connect(broker.address) as client:
        assert client.find(receipts[3].id).value == b"3 " + b"x" * 500
        assert [message.offset for message in client.browse("orders")] == list(range(40))
        assert [message.offset for message in client.browse("orders", newest_first=True)] == list(range(39, -1, -1))


def test_an_id_finds_its_message(client: Client) -> None:
    client.create_topic("orders", partitions=2)
    receipts = client.publish_many("orders", ["a", Outgoing(value="b", key="k", headers={"h": "1"}), "c"])
    found = client.find(receipts[1].id)
    assert (found.value, found.key, found.headers) == (b"b", b"k", [("h", b"1")])
    assert (found.topic, found.partition, found.offset) == ("orders", receipts[1].partition, receipts[1].offset)
    assert client.find(receipts[1].id.lower()).id == receipts[1].id
    with pytest.raises(InvalidArgument):
        client.find("nonsense")
    for wrong in ("00000000000000000000000000", "7ZZZZZZZZZZZZZZZZZZZZZZZZZ", "00000" + receipts[1].id[5:]):
        with pytest.raises(MessageNotFound):
            client.find(wrong)


def test_an_id_of_a_scheduled_message_finds_it_before_and_after_it_is_due(
    broker: BrokerForTests, client: Client
) -> None:
    receipt = client.publish("orders", "later", delay="1m", key="k")
    cancelled = client.publish("orders", "never", delay="1m")
    client.schedules.cancel(cancelled.id)
    with pytest.raises(MessageNotFound, match="cancelled"):
        client.find(cancelled.id)
    waiting = client.find(receipt.id)
    assert (waiting.value, waiting.key, waiting.topic) == (b"later", b"k", "orders")
    assert waiting.deliver_at_ms > waiting.append_time_ms
    assert client.browse("orders") == []
    broker.clock.advance("2m")
    there = client.find(receipt.id)
    assert (there.value, there.deliver_at_ms) == (b"later", 0)
    assert there.id == client.browse("orders")[0].id
    cancelled = client.publish("orders", "never", delay="1h")
    client.schedules.cancel(cancelled.id)
    with pytest.raises(MessageNotFound, match="cancelled"):
        client.find(cancelled.id)


@pytest.mark.parametrize("delay", ["1m", "2h"])
def test_an_id_of_a_scheduled_message_finds_it_also_if_it_was_moved(
    broker: BrokerForTests, client: Client, delay: str
) -> None:
    receipt = client.publish("orders", "moved", delay="1h")
    client.publish("orders", "before")
    client.schedules.move(receipt.id, delay=delay)
    broker.clock.advance(delay)
    broker.clock.advance("1m")
    client.publish("orders", "after")
    assert client.find(receipt.id).value == b"moved"


def test_another_namespace_sees_nothing(broker: BrokerForTests, client: Client) -> None:
    receipt = client.publish("orders", "secret")
    client.create_namespace("other")
    with millstream.connect(broker.address, namespace="other") as other, pytest.raises(MessageNotFound):
        other.find(receipt.id)


def test_the_asynchronous_client_has_the_same_words(broker: BrokerForTests) -> None:
    async def look() -> None:
        async with aio.connect(broker.address) as client:
            receipt = await client.publish("orders", "hello", key="k")
            [message] = await client.browse("orders", key="k")
            assert message == await client.find(receipt.id)

    asyncio.run(look())


def test_a_call_can_wait_for_what_comes(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("orders", partitions=2)
    client.publish("orders", "old", partition=0)
    page = client.call(BrowseMessages(topic="orders"), MessagePage)
    with millstream.connect(broker.address) as other:
        call = BrowseMessages(topic="orders", after=page.tail, wait_ms=30_000, text="wanted")
        threading.Timer(0.1, lambda: other.publish_many("orders", ["no", "wanted"])).start()
        page = client.call(call, MessagePage)
        assert values(page.messages) == [b"wanted"]
    page = client.call(BrowseMessages(topic="orders", after=page.tail, wait_ms=20), MessagePage)
    assert page.messages == []
    with pytest.raises(InvalidArgument, match="wait_ms"):
        client.call(BrowseMessages(topic="orders", newest_first=True, wait_ms=20), MessagePage)
