"""The SDK against the real broker: publishing, producers, administration."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import pytest

import millstream
from millstream import aio
from millstream.errors import (
    GroupNotFound,
    InvalidArgument,
    MillstreamError,
    NamespaceNotEmpty,
    PayloadTooLarge,
    TopicExists,
    TopicNotFound,
)
from millstream.ids import parse_message_id
from millstream.testing.broker import BrokerForTests, BrokerProcess
from millstream.wire.message_calls import FindMessage, MessageInfo
from tests.either import EitherClient


def test_the_first_screen_of_the_readme(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        receipt = client.publish("orders", b"first", key=b"c-17", headers={"a": "b"})
        assert (receipt.partition, receipt.offset, receipt.label) == (0, 0, "disk")
        assert parse_message_id(receipt.id).offset == 0
        with client.producer("orders", linger_ms=5, acks="leader") as producer:
            for number in range(1000):
                producer.send(b"%d" % number, key=b"c-17")
        seen = []
        for message in client.stream("orders", group="audit", start="earliest"):
            seen.append(message)
            if len(seen) == 1001:
                break
        assert seen[0].id == receipt.id
        assert seen[0].headers == {"a": "b"}
        assert [message.value for message in seen[1:]] == [b"%d" % number for number in range(1000)]
        assert [message.offset for message in seen] == list(range(1001))


def test_the_same_asynchronously(broker: BrokerForTests) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), aio.connect(broker.address) as client:
            receipts = await asyncio.gather(*(client.publish("orders", b"%d" % n) for n in range(200)))
            assert [receipt.offset for receipt in receipts] == list(range(200))
            async with client.producer("orders") as producer:
                for number in range(200, 1000):
                    await producer.send(b"%d" % number, b"key")
            seen = []
            async with client.stream("orders", group="audit") as stream:
                async for message in stream:
                    seen.append(message.value)
                    if len(seen) == 1000:
                        break
            assert seen == [b"%d" % number for number in range(1000)]
            assert (await client.committed("audit"))[0].offset == 999

    asyncio.run(main())


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("fsync", ["group", "interval", "always", "never"])
def test_every_codec_and_durability(broker: BrokerForTests, compression: str | None, fsync: str) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("t", partitions=3, config={"fsync": fsync})
        with client.producer("t", compression=compression) as producer:  # type: ignore[arg-type]
            for number in range(3000):
                producer.send(b"value %06d" % number, key=b"%d" % (number % 50), headers={"n": str(number)})
        with client.stream("t", timeout_s=1) as stream:
            seen: dict[bytes | None, list[int]] = {}
            for number, message in enumerate(stream, 1):
                seen.setdefault(message.key, []).append(int(message.headers["n"]))
                if number == 3000:
                    break
        assert {len(numbers) for numbers in seen.values()} == {60}
        assert all(numbers == sorted(numbers) for numbers in seen.values())
        assert client.publish("t", b"x").label == ("disk" if fsync in ("group", "always") else "os")


def test_acks_none_and_all(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        for acks in ("none", "all"):
            with client.producer("t", acks=acks) as producer:  # type: ignore[arg-type]
                for _ in range(500):
                    producer.send(b"x")
        with client.stream("t", timeout_s=1) as stream:
            assert sum(len(messages) for messages in stream.batches()) == 1000


def test_administration(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        assert client.ping() < 5
        assert "software" in client.broker()
        assert client.create_topic("a.b", partitions=2).partition_count == 2
        with pytest.raises(TopicExists):
            client.create_topic("a.b")
        client.create_topic("a.b", if_missing=True)
        client.create_topic("c")
        assert [info.name for info in client.topics()] == ["a.b", "c"]
        assert [info.name for info in client.topics("a.*")] == ["a.b"]
        assert client.alter_topic("a.b", {"retention_ms": 1000}, partitions=3).partition_count == 3
        assert len(client.topic("a.b").partitions) == 3
        client.publish_many("a.b", [millstream.Outgoing(value=b"v", partition=1)] * 5)
        assert client.offsets("a.b") == {0: 0, 1: 5, 2: 0}
        assert client.offsets("a.b", "earliest", [1]) == {1: 0}
        assert client.offsets("a.b", datetime.now(UTC) - timedelta(hours=1)) == {0: 0, 1: 0, 2: 0}
        assert client.offsets("a.b", datetime.now(UTC) + timedelta(hours=1))[1] == 5
        client.commit_offsets("g", {("a.b", 1): 2})
        assert [(entry.partition, entry.offset) for entry in client.committed("g")] == [(1, 2)]
        assert client.reset_group("g", "a.b", "offset", 4, [1], dry_run=True)[0].offset == 4
        assert client.reset_group("g", "a.b", "shift", -1, [1])[0].offset == 1
        assert [group.name for group in client.groups()] == ["g"]
        assert sum(line.lag for line in client.group("g").lag) == 4
        client.delete_group("g")
        with pytest.raises(GroupNotFound):
            client.group("g")
        client.delete_topic("c")
        with pytest.raises(TopicNotFound):
            client.topic("c")
        with pytest.raises(InvalidArgument):
            client.reset_group("g", "a.b", "nowhere")


def test_namespaces_are_worlds_of_their_own(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_namespace("other")
        client.publish("t", b"mine")
        with millstream.connect(broker.address, namespace="other") as other:
            other.publish("t", b"theirs")
            with other.stream("t", timeout_s=10) as stream:
                assert [message.value for message in islice(stream, 1)] == [b"theirs"]
        assert client.namespaces() == ["default", "other"]
        with pytest.raises(NamespaceNotEmpty):
            client.delete_namespace("other")
        client.delete_namespace("other", force=True)


def test_limits_of_a_topic_are_kept(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("small", config={"max_message_bytes": 100})
        client.publish("small", bytes(100))
        with pytest.raises(PayloadTooLarge):
            client.publish("small", bytes(101))
        with client.producer("small") as producer:
            producer.send(bytes(100))
            with pytest.raises(PayloadTooLarge):
                producer.send(bytes(99), b"key")


EIGHT = [millstream.Outgoing(value=b"%d" % number, partition=number % 2) for number in range(8)]


def fill_up(client: millstream.Client) -> None:
    """A queue of which one partition takes no more."""
    client.create_topic("t", partitions=2, config={"max_depth": 5, "overflow": "reject"})
    client.queue("t").close()


def check_confirmed(client: millstream.Client, confirmed: Mapping[int, millstream.Receipt]) -> None:
    """What the error says is what is stored, and the rest is not."""
    stored = {(one.partition, one.offset): one.value for one in client.browse("t")}
    assert 0 < len(confirmed) < 8
    assert {(one.partition, one.offset): EIGHT[at].value for at, one in confirmed.items()} == stored


def test_a_publish_many_that_is_refused_in_the_middle_says_what_is_stored(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address, timeout_s=1) as client:
        fill_up(client)
        with pytest.raises(MillstreamError) as refused:
            client.publish_many("t", EIGHT)
        check_confirmed(client, refused.value.confirmed)
        with pytest.raises(TopicNotFound) as unknown:
            client.topic("none")
        assert unknown.value.confirmed == {}


def test_an_asynchronous_publish_many_says_it_too(broker: BrokerForTests) -> None:
    async def scenario() -> Mapping[int, millstream.Receipt]:
        async with await aio.connect(broker.address, timeout_s=1) as client:
            with pytest.raises(MillstreamError) as refused:
                await client.publish_many("t", EIGHT)
            with pytest.raises(InvalidArgument) as wrong:
                await client.publish_many("t", [b"good", 17])  # type: ignore[list-item]
            assert wrong.value.confirmed == {}
            return refused.value.confirmed

    with millstream.connect(broker.address) as client:
        fill_up(client)
        check_confirmed(client, asyncio.run(scenario()))


def test_large_messages(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("large", config={"max_message_bytes": 8 << 20})
        values = [bytes([number]) * (3 << 20) for number in range(4)]
        with client.producer("large") as producer:
            for value in values:
                producer.send(value)
        with client.stream("large", timeout_s=1) as stream:
            assert [message.value for message in stream] == values


def test_threads_publish_through_one_client(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:

        def work(name: int) -> None:
            for number in range(100):
                client.publish("t", b"%d:%03d" % (name, number))

        threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with client.stream("t", timeout_s=10) as stream:
            values = [message.text for message in islice(stream, 800)]
    assert len(values) == 800
    for name in range(8):
        assert [value for value in values if value.startswith(f"{name}:")] == [f"{name}:{n:03d}" for n in range(100)]


@pytest.mark.parametrize("ending", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_broker_that_ends_under_load_loses_and_repeats_nothing(tmp_path: Path, ending: str) -> None:
    """A producer that is in the middle of it, a broker that dies twice, and a reader that sees every message once."""
    process = BrokerProcess(tmp_path / "data").start()
    port = int(process.address.rsplit(":", 1)[1])
    confirmed = threading.Event()
    try:
        with millstream.connect(process.address) as client:
            client.create_topic("t", partitions=2)
            producer = client.producer("t", linger_ms=1, batch_messages=50)
            single: list[int] = []

            def publish_singly() -> None:
                for number in range(300):
                    single.append(client.publish("singles", b"%05d" % number).offset)
                    if number == 50:
                        confirmed.set()

            thread = threading.Thread(target=publish_singly)
            thread.start()
            confirmed.wait(20)
            for number in range(20_000):
                producer.send(b"%05d" % number, b"key-%d" % (number % 20))
                if number in (7_000, 14_000):
                    process.kill() if ending == "kill" else process.stop()
                    process = BrokerProcess(tmp_path / "data", port=port).start()
            producer.close()
            thread.join(60)
            assert single == list(range(300))
            assert producer.stats.messages_confirmed == 20_000
            seen: dict[bytes | None, list[bytes | None]] = {}
            with client.stream("t", timeout_s=1) as stream:
                for message in stream:
                    seen.setdefault(message.key, []).append(message.value)
            for number in range(20):
                expected = [b"%05d" % value for value in range(number, 20_000, 20)]
                assert seen[b"key-%d" % number] == expected
            with client.stream("singles", timeout_s=1) as stream:
                assert [message.value for message in stream] == [b"%05d" % number for number in range(300)]
    finally:
        process.kill()


@pytest.mark.parametrize(("seconds", "year"), [(1.79e12, 9999), (-1.79e12, 1)])
def test_a_message_of_a_time_beyond_all_calendars_can_be_read(
    broker: BrokerForTests, seconds: float, year: int
) -> None:
    with millstream.connect(broker.address) as client:
        client.publish("t", b"from afar", timestamp=seconds)
        (message,) = client.stream("t", start="earliest", timeout_s=0.2)
    assert message.timestamp_us == seconds * 1_000_000
    assert (message.timestamp.year, message.timestamp.tzinfo) == (year, UTC)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_receipts_of_a_topic_in_memory_name_messages_that_exist_after_a_restart_of_the_broker(
    tmp_path: Path, asynchronous: bool
) -> None:
    """Its partitions are others then, and the client knew those from before."""
    broker = BrokerForTests(tmp_path).start()
    either = EitherClient(broker.address, asynchronous=asynchronous)
    client = either.client
    for name in ("mem", "many", "idle"):
        either.do(client.create_topic(name, config={"mode": "ephemeral"}))
        either.do(client.publish(name, b"old"))
    broker.stop()
    with BrokerForTests(tmp_path, port=int(broker.address.rpartition(":")[2])):
        receipts = [either.do(client.publish("mem", b"first")), either.do(client.publish("mem", b"second"))]
        receipts += either.do(client.publish_many("many", [b"third", b"fourth"]))
        receipts += [either.do(client.publish("idle", b"fifth", key=b"k"))]
        found = [either.do(client.call(FindMessage(id=receipt.id), MessageInfo)) for receipt in receipts]
        assert [(info.topic, info.offset) for info in found] == [(it.topic, it.offset) for it in receipts]
        either.end()
