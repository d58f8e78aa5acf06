"""What a publisher said about priority and time to live, whoever reads the message sees, and passes on."""

from __future__ import annotations

import asyncio
from array import array
from datetime import timedelta

import millstream
from millstream import aio
from millstream.client.messages import Message, _Rare
from millstream.testing.broker import BrokerForTests


def plain(message: Message | None) -> tuple[bytes | None, int, bool]:
    assert message is not None
    return message.value, message.priority, message.expiry is not None


def publish_three(client: millstream.Client, topic: str) -> None:
    client.publish_many(
        topic,
        [
            millstream.Outgoing(value=b"a"),
            millstream.Outgoing(value=b"b", priority="critical", ttl="1h"),
            millstream.Outgoing(value=b"c", priority=4),
        ],
    )


THREE = [(b"a", 2, False), (b"b", 0, True), (b"c", 4, False)]


def test_streams_queues_and_subscriptions_show_priority_and_expiry(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client, client.subscribe("t") as subscription:
        client.create_topic("t")
        publish_three(client, "t")
        with client.stream("t", timeout_s=10) as stream:
            read = [stream.next(10) for _ in range(3)]
        assert [plain(message) for message in read] == THREE
        assert read[1] is not None
        assert read[1].expiry is not None
        assert abs(read[1].expiry - read[1].timestamp - timedelta(hours=1)) < timedelta(seconds=5)
        assert read[1].expiry_us == round(read[1].expiry.timestamp() * 1_000_000)
        assert [plain(subscription.next(10)) for _ in range(3)] == THREE
        with client.queue("t") as queue:
            leased = [queue.next(10) for _ in range(3)]
            assert sorted(plain(message) for message in leased) == THREE
        client.publish("plain", b"x")
        assert plain(client.stream("plain").next(10)) == (b"x", 2, False)


def test_a_message_that_is_passed_on_keeps_its_priority_and_its_end(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("t")
        publish_three(client, "t")
        with client.stream("t") as stream:
            read = [message for _ in range(3) if (message := stream.next(10)) is not None]
        client.publish_many("copy", read)
        found = client.browse("copy")
        assert [(one.priority, one.expiry_ms) for one in found] == [(m.priority, m.expiry_us // 1000) for m in read]


def test_the_asynchronous_client_does_the_same(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("t")
        publish_three(client, "t")

    async def scenario() -> None:
        async with await aio.connect(broker.address) as client_too, asyncio.timeout(20):
            async with await client_too.stream("t") as stream:
                read = [message for _ in range(3) if (message := await stream.next(10)) is not None]
            assert [plain(message) for message in read] == THREE
            async with await client_too.queue("t") as queue:
                assert sorted([plain(await queue.next(10)) for _ in range(3)]) == THREE
            await client_too.publish_many("copy", read)
            found = await client_too.browse("copy")
            assert [(one.priority, bool(one.expiry_ms)) for one in found] == [(lane, ends) for _, lane, ends in THREE]

    asyncio.run(scenario())


def test_a_stream_that_begins_inside_a_batch_shows_each_messages_own(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("t")
        publish_three(client, "t")
        with client.stream("t", start=1) as stream:  # in the middle of their batch
            assert [plain(stream.next(10)) for _ in range(2)] == THREE[1:]


def test_columns_are_found_by_offset_where_compaction_has_left_gaps() -> None:
    rare = _Rare([3, 7, 9], bytes([0, 1, 4]), array("q", [0, 5, 6]).tobytes())
    assert [rare.lane(offset) for offset in (3, 7, 9)] == [0, 1, 4]
    assert [rare.expiry_us(offset) for offset in (3, 7, 9)] == [0, 5, 6]
    assert (_Rare([3], b"", b"").lane(3), _Rare([3], b"", b"").expiry_us(3)) == (2, 0)
