"""Depth limits, throttling and modes, over real sockets.  Time that only has to pass is skipped."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.client import Client
from millstream.config import Settings
from millstream.errors import MillstreamError, QueueFull, ReadOnly, Throttled
from millstream.records import Batch
from millstream.testing.broker import BrokerForTests
from millstream.wire.frames import FrameType, encode_frame
from tests.native import NativeClient


@pytest.fixture
def client(broker: BrokerForTests) -> Iterator[Client]:
    with millstream.connect(broker.address, timeout_s=5) as connected:
        yield connected


# --- depth -------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_until_something_is_settled(client: Client) -> None:
    client.create_topic("jobs", config={"max_depth": 3})
    with client.queue("jobs", prefetch=1) as queue, NativeClient(client._target.address) as native:
        client.publish_many("jobs", ["a", "b", "c"])
        with pytest.raises(QueueFull, match="max_depth is 3"):
            native.publish("jobs", [b"d"])
        message = queue.next(5)
        assert message is not None
        message.ack(wait=True)
        native.publish("jobs", [b"d"])
        with pytest.raises(QueueFull):
            native.publish("jobs", [b"e"])


def test_a_publisher_waits_for_room_as_long_as_it_may(client: Client) -> None:
    """QueueFull is passing: the SDK tries again, so a consumer that is at work is enough."""
    client.create_topic("jobs", config={"max_depth": 10})
    with (
        client.queue("jobs", timeout_s=10) as queue,
        client.producer("jobs", linger_ms=1, batch_messages=5) as producer,
    ):
        for number in range(100):
            producer.send(b"%d" % number)
        got = []
        for message in queue:
            got.append(int(message.text))
            message.ack()
            if len(got) == 100:
                break
        producer.flush()
    assert got == list(range(100))


def test_a_batch_larger_than_the_queue_is_taken_when_nothing_waits(client: Client) -> None:
    """Or it never would be: a producer that batches does not know how small the queue is."""
    client.create_topic("jobs", config={"max_depth": 3})
    with client.queue("jobs", timeout_s=5) as queue, client.producer("jobs", linger_ms=5000) as producer:
        for number in range(20):
            producer.send(b"%d" % number)
        producer.flush()
        with NativeClient(client._target.address) as native, pytest.raises(QueueFull):
            native.publish("jobs", [b"one more"])
        got = []
        for message in queue:
            got.append(int(message.text))
            message.ack()
            if len(got) == 20:
                break
    assert got == list(range(20))


def test_what_is_on_its_way_to_the_disk_counts(broker: BrokerForTests) -> None:
    with NativeClient(broker.address) as native:
        native.call("topic.create", name="jobs", config={"max_depth": 5})
        native.call("queue.open", topic="jobs")
        for _ in range(12):
            native.send_publish("jobs", [b"x"])
        answers = [native.receive()[2] for _ in range(12)]  # refusals come first: nothing has to be stored for them
        assert sum(answer[:2] == b"\x00\x00" for answer in answers) == 5


def test_an_overflowing_queue_can_give_up_its_oldest(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("jobs", config={"max_depth": 3, "overflow": "evict"})
    client.queue("jobs").close()
    for number in range(10):
        client.publish("jobs", str(number))
    with client.queue("jobs", timeout_s=1) as queue:
        assert [message.text for message in queue] == ["7", "8", "9"]
    assert broker.broker.metrics.messages_evicted == 7


# --- throttling --------------------------------------------------------------------------------------------------


def test_publishers_are_slowed_down_while_consumers_are_behind_and_released_after(
    broker: BrokerForTests, client: Client
) -> None:
    client.create_topic("jobs", config={"throttle_lag_ms": 5_000})
    client.create_topic("other")
    queue = client.queue("jobs", prefetch=1)
    queue.close()
    client.publish("jobs", "first")
    broker.clock.advance(10)
    seen = client.flow("jobs")
    assert (seen.level, seen.advice, seen.depth) == ("critical", "moderate", 1)
    assert seen.lag_ms >= 10_000
    assert seen.delay_ms > 50
    delay_s = seen.delay_ms / 1000

    with client.producer("jobs", linger_ms=0) as producer:
        started_s = time.monotonic()
        for _ in range(3):
            producer.send(b"slowly")
            producer.flush()
        assert time.monotonic() - started_s >= 3 * delay_s, "each confirmation was delayed"
        assert producer.stats.flow_level == "critical"
        assert producer.stats.throttled_ms > 0
    throttled = broker.broker.metrics.publishes_throttled
    assert throttled >= 3
    client.publish("other", b"quickly")
    assert broker.broker.metrics.publishes_throttled == throttled, "another topic is not slowed down"

    with client.queue("jobs", timeout_s=10) as consumer:
        for message in islice(consumer, 4):
            message.ack()
    broker.clock.advance(60)
    assert (client.flow("jobs").level, client.flow("jobs").delay_ms) == ("normal", 0)
    client.publish("jobs", b"quickly again")
    assert broker.broker.metrics.publishes_throttled == throttled


def test_an_overloaded_topic_refuses_low_priorities_only(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("jobs", config={"throttle_depth": 10})
    client.queue("jobs").close()
    client.publish_many("jobs", ["x"] * 100)
    broker.clock.advance(20)
    assert client.flow("jobs").level == "overloaded"
    with NativeClient(broker.address) as native:
        for priority in (3, 4):
            with pytest.raises(Throttled, match="overloaded"):
                native.publish("jobs", [b"x"], priorities=[priority])
    for priority in ("normal", "critical"):
        publishing = threading.Thread(target=client.publish, args=("jobs", "x"), kwargs={"priority": priority})
        publishing.start()
        while publishing.is_alive():  # it is slowed down, and that time can be skipped
            broker.clock.advance("1s")
            publishing.join(0.01)
    assert client.offsets("jobs") == {0: 102}


def test_who_publishes_is_told_and_told_again_when_it_is_over(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("jobs", config={"throttle_depth": 10})
    queue = client.queue("jobs")
    queue.close()
    with NativeClient(broker.address) as native, NativeClient(broker.address) as stranger:
        native.publish("jobs", [b"x"] * 15)
        broker.clock.advance(5)
        with client.queue("jobs", timeout_s=10) as consumer:
            for message in islice(consumer, 15):
                message.ack()
        broker.clock.advance(60)
        notices = receive_notices(native)
        assert notices[0]["level"] == "warning"
        assert {notice["topic"] for notice in notices} == {"jobs"}
        assert "critical" in {notice["level"] for notice in notices}
        assert (notices[-1]["level"], notices[-1]["delay_ms"]) == ("normal", 0)
        assert max(notice["delay_ms"] for notice in notices) > 0
        assert receive_notices(stranger) == []


def test_a_publisher_that_was_silent_meanwhile_is_told_when_it_is_over(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("jobs", config={"throttle_depth": 10})
    client.queue("jobs").close()
    with NativeClient(broker.address) as native, NativeClient(broker.address) as busy:
        native.publish("jobs", [b"x"] * 15)
        broker.clock.advance(5)
        assert receive_notices(native)[-1]["level"] == "critical"
        broker.clock.advance(70)
        busy.publish("jobs", [b"x"])  # the topic is not forgotten
        broker.clock.advance(5)
        assert receive_notices(native) == []
        with client.queue("jobs", timeout_s=10) as consumer:
            for message in islice(consumer, 16):
                message.ack()
        broker.clock.advance(60)
        assert [(notice["level"], notice["delay_ms"]) for notice in receive_notices(native)] == [("normal", 0)]


def test_a_publisher_that_was_silent_for_long_is_told_how_it_is_now(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("jobs", config={"throttle_depth": 10})
    client.queue("jobs").close()
    with NativeClient(broker.address) as native:
        native.publish("jobs", [b"x"] * 15)
        broker.clock.advance(70)
        receive_notices(native)
        native.send_publish("jobs", [b"x"])
        assert [notice["level"] for notice in receive_notices(native)] == ["critical"]


def test_a_backlog_without_limits_slows_down_nobody(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("jobs")
    client.queue("jobs").close()
    client.publish_many("jobs", ["x"] * 10_000)
    broker.clock.advance(600)
    assert client.flow("jobs").level == "normal"
    assert broker.broker.metrics.publishes_throttled == 0


def test_async_producers_are_slowed_down_as_well(broker: BrokerForTests) -> None:
    async def run() -> None:
        async with millstream.aio.connect(broker.address) as client:
            await client.create_topic("jobs", config={"throttle_depth": 10})
            await (await client.queue("jobs")).close()
            await client.publish_many("jobs", ["x"] * 15)
            await asyncio.to_thread(broker.clock.advance, 5)
            async with client.producer("jobs", linger_ms=0) as producer:
                for _ in range(3):
                    await producer.send(b"slowly")
                    await producer.flush()
                assert producer.stats.throttled_ms > 0
            started_s = time.monotonic()
            await client.publish("jobs", b"x")
            assert time.monotonic() - started_s > 0.01

    asyncio.run(run())


# --- modes -------------------------------------------------------------------------------------------------------


def test_maintenance_is_for_administration_only(broker: BrokerForTests, client: Client) -> None:
    client.publish("orders", b"before")
    answer = client.set_mode("maintenance", "new disk")
    assert (answer.mode, client.broker()["mode"], client.broker()["reason"]) == ("maintenance",) * 2 + ("new disk",)
    with NativeClient(broker.address) as native, pytest.raises(ReadOnly, match="new disk"):
        native.publish("orders", [b"x"])
    with NativeClient(broker.address) as native, pytest.raises(ReadOnly, match="maintenance"):
        native.fetch("orders", 0)
    assert client.topics("#")[0].name == "orders"
    client.set_mode("normal")
    client.publish("orders", b"after")
    stored = islice(client.stream("orders", timeout_s=10), 2)
    assert [message.value for message in stored] == [b"before", b"after"]


def test_scarce_memory_slows_publishers_down_then_stops_them(tmp_path: Path) -> None:
    limits = {"memory_bytes_warning": "1GiB", "memory_bytes_critical": "2GiB"}
    settings = Settings.model_validate({"server": limits})
    with (
        BrokerForTests(tmp_path / "data", settings=settings) as broker,
        millstream.connect(broker.address, timeout_s=2) as client,
        NativeClient(broker.address) as native,
        NativeClient(broker.address) as ears,
    ):
        modes = broker.broker.modes

        def use(gibibytes: float) -> None:
            modes.memory_bytes = lambda: int(gibibytes * 2**30)
            for _ in range(2):
                broker.run(modes.watch())

        client.publish("orders", b"quick")
        use(1.5)
        started_s = time.monotonic()
        client.publish("orders", b"slow")
        assert time.monotonic() - started_s >= 0.1
        use(2.5)
        with pytest.raises(ReadOnly, match="emergency"):
            native.publish("orders", [b"x"])
        with pytest.raises(MillstreamError, match="emergency"):
            millstream.connect(broker.address, timeout_s=1)
        assert read(native, "orders") == [b"quick", b"slow"]
        use(0.5)
        assert client.broker()["mode"] == "normal"
        client.publish("orders", b"again")
        levels = [notice["level"] for notice in receive_notices(ears)]
        assert levels == ["warning", "overloaded", "normal"]


def test_memory_is_measured_where_the_system_tells(broker: BrokerForTests, client: Client) -> None:
    broker.run(broker.broker.modes.watch())
    assert 1_000_000 < client.broker()["metrics"]["millstream_memory_bytes"] < 2**34


def receive_notices(native: NativeClient) -> list[dict[str, Any]]:
    """FLOW frames up to the answer of a request sent now."""
    number = native.next_correlation()
    native.socket.sendall(encode_frame(FrameType.CALL, b'{"op":"broker.describe"}', number))
    notices = []
    while True:
        kind, correlation, payload = native.receive()
        if kind == FrameType.FLOW:
            notices.append(json.loads(bytes(payload)))
        elif correlation == number:
            return notices


def read(native: NativeClient, topic: str) -> list[bytes | None]:
    batches = native.fetch(topic, 0).batches
    values: list[bytes | None] = []
    at = 0
    while at < len(batches):
        batch = Batch.parse(batches, at)
        values += batch.values()
        at += batch.header.length
    return values
