"""Whatever comes and goes leaves nothing behind, in the broker or in the SDK, however often it does."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from websockets.sync.client import connect as websocket

import millstream
from millstream import aio
from millstream.client import following, leasing
from millstream.config import Settings
from millstream.mqtt.packets import Publish, Pubrec, Will
from millstream.testing.broker import BrokerForTests
from tests.census import census, grown
from tests.e2e.mqtt.support import Address, Wire, Wires
from tests.native import NativeClient
from tests.waiting import eventually

#: Kept on purpose, so many and not more: docs/limits.md.
LIMITED: Final = frozenset(
    (
        "broker.ages.Ages.",
        "broker.history.",
        "broker.queues.source.",
        "broker.schedules.window.DueWindow._buffer",
        "broker.stages.query.Query",
        "broker.stages.stages.Stages._queries",
        "broker.traces.",
        "client.messages.TopicPartition",
        "client.publishing.Identity.sequences",
        "log.cache.Tail",
        "log.producers.",
        "log.reading.StoredReader._cursors",
        "mqtt.filters.FilterTrie._remembered",
        "broker.mqtt.parcel.Grant",
        "broker.mqtt.world.World._",
        "queues.book.Book._known",
        "queues.endings.",
        "queues.ledger.Ledger._ended",
        "server.http.router.Router._known",
        "traffic.patterns.PatternTrie._remembered",
    )
)


class World:
    """A broker with all its doors, and clients that stay."""

    def __init__(self, broker: BrokerForTests) -> None:
        self.broker = broker
        self.client = broker.connect()
        self.loop = asyncio.new_event_loop()
        self.async_client: aio.Client = self.wait(_opened(broker.address))
        self.http = httpx.Client(base_url=f"{broker.url}/api/v1", timeout=30)
        self.native = NativeClient(broker.address)
        self.client.create_topic("stays", partitions=2)
        self.client.create_topic("queue")
        self.client.create_topic("empty")

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.native.close()
        self.http.close()
        self.wait(self.async_client.close())
        self.loop.close()

    @cached_property
    def mqtt_reader(self) -> Wire:
        """A session that stays, of topics that do not."""
        wire = self.wires().durable(client_id="reader")
        wire.subscribe("come/+", qos=1)
        return wire

    @cached_property
    def stream(self) -> millstream.Stream:
        return self.client.stream("come.*")

    @cached_property
    def queue(self) -> millstream.Queue:
        return self.client.queue("come.*", group="stays")

    def wires(self) -> Wires:
        return Wires(Address("127.0.0.1", self.broker.mqtt_port))

    def count(self) -> Counter[str]:
        async def count() -> Counter[str]:
            return census()

        found: Any = self.broker.run(count())
        assert isinstance(found, Counter)
        return found


async def _opened(address: str) -> aio.Client:
    return await aio.connect(address)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data: Path = tmp_path_factory.mktemp("churn")
    patch = pytest.MonkeyPatch()
    patch.setattr(leasing, "_TOPICS_MAX", 5)
    patch.setattr(following, "_TOPICS_AGE_S", 0.1)
    sections = {
        "server": {"heartbeat_ms": 3_600_000, "heartbeat_misses": 100},
        "storage": {"tail_cache_bytes": 0, "free_bytes_min": 0},
        "webhooks": {"allow_private": True},
    }
    with BrokerForTests(data, settings=Settings.model_validate(sections), http=True, mqtt=True) as broker:
        world = World(broker)
        try:
            yield world
        finally:
            world.close()
            patch.undo()


# --- connections -----------------------------------------------------------------------------------------------------


def a_connection(world: World, number: int) -> None:
    with NativeClient(world.broker.address, client_id=f"client-{number}") as client:
        client.call("broker.describe")


def a_connection_cut_off_in_a_frame(world: World, number: int) -> None:
    with NativeClient(world.broker.address, client_id=f"client-{number}") as client:
        client.socket.sendall(b"\x00\x00\x01\x00ab")


def a_lease_that_nobody_waits_for_any_more(world: World, number: int) -> None:
    with NativeClient(world.broker.address) as client:
        consumer = client.call("queue.open", topic="stays", group="waits")["consumer"]
        client.send_lease(consumer, wait_ms=30_000)


def an_http_request(world: World, number: int) -> None:
    assert world.http.get(f"/topics/none-{number}").status_code == 404
    world.http.post("/topics/queue/messages", json={"value": "x"}).raise_for_status()


def a_stream_of_http_given_up(world: World, number: int) -> None:
    with world.http.stream("GET", "/topics/stays/stream") as answer:
        assert answer.status_code == 200


def a_websocket(world: World, number: int) -> None:
    with websocket(f"{world.broker.url.replace('http', 'ws', 1)}/api/v1/ws") as line:
        assert json.loads(line.recv())["type"] == "welcome"
        line.send(json.dumps({"type": "subscribe", "patterns": [f"other.{number}.#"], "id": 1}))
        line.send(json.dumps({"type": "consume", "topic": "stays", "group": "socket", "id": 2}))
        assert {json.loads(line.recv())["type"] for _ in range(2)} == {"result"}
        if number % 2:
            line.socket.shutdown(socket.SHUT_RDWR)


# --- topics, groups, queues ------------------------------------------------------------------------------------------


def a_topic(world: World, number: int) -> None:
    world.client.create_topic(f"topic-{number}", partitions=2)
    world.client.publish(f"topic-{number}", b"x")
    world.client.publish(f"topic-{number}", b"later", delay="1h")
    world.client.metrics()
    world.client.delete_topic(f"topic-{number}", force=True)


def a_topic_by_the_same_name(world: World, number: int) -> None:
    world.client.publish("again", b"x")
    world.client.delete_topic("again", force=True)


def a_namespace(world: World, number: int) -> None:
    name = f"space-{number}"
    world.client.create_namespace(name)
    world.client.set_quota(name, topics=5)
    with millstream.connect(world.broker.address, namespace=name) as client:
        client.publish("orders", b"x")
        assert client.queues.lease("orders", wait=5)
    world.client.delete_namespace(name, force=True)


def a_stream_group(world: World, number: int) -> None:
    with world.client.stream("stays", group=f"group-{number}") as stream:
        stream.next(0)
    world.client.delete_group(f"group-{number}")


def a_queue_group(world: World, number: int) -> None:
    with world.client.queue("queue", group=f"group-{number}") as queue:
        queue.next(0)
    world.client.queues.delete("queue", f"group-{number}", force=True)


def a_queue_group_and_then_its_topic(world: World, number: int) -> None:
    world.client.publish(f"queue-{number}", b"x")
    assert world.client.queues.lease(f"queue-{number}", wait=5)
    world.client.queues.delete(f"queue-{number}", force=True)
    world.client.delete_topic(f"queue-{number}", force=True)


def a_queue_group_on_a_pattern(world: World, number: int) -> None:
    world.client.publish(f"some.{number}", b"x")
    with world.client.queue("some.*", group=f"group-{number}", start="earliest") as queue:
        message = queue.next(10)
        assert message is not None
        message.ack(wait=True)
    world.client.queues.delete("some.*", f"group-{number}", force=True)
    world.client.delete_topic(f"some.{number}", force=True)


def a_dead_letter(world: World, number: int) -> None:
    world.client.publish(f"fails-{number}", b"x")
    (leased,) = world.client.queues.lease(f"fails-{number}", wait=5)
    world.client.queues.settle("reject", [leased.receipt], reason=f"number {number}")
    eventually(lambda: world.client.dead_letters.purge(everything=True).count, "a dead letter")
    world.client.delete_topic(f"fails-{number}", force=True)
    world.client.delete_topic(f"fails-{number}.dlq", force=True)


def a_subscription(world: World, number: int) -> None:
    with world.client.subscribe(f"sub.{number}.*", "all.#") as subscription:
        subscription.next(0)


def a_schedule(world: World, number: int) -> None:
    now_s = world.broker.clock.now_us() / 1_000_000  # the client lives in another time
    receipt = world.client.publish("queue", b"x", deliver_at=now_s + 60, key=f"key-{number}")
    world.client.schedules.move(receipt, deliver_at=now_s + 120)
    world.client.schedules.cancel_key("queue", f"key-{number}")
    world.client.schedules.repeat(f"daily-{number}", "queue", "0 0 * * *", b"x")
    world.client.schedules.stop(f"daily-{number}")


def a_key(world: World, number: int) -> None:
    created = world.client.keys.create("consume", name=f"key-{number}")
    world.client.keys.rotate(created.info.id, grace="1s")
    world.client.keys.revoke(created.info.id)


def a_webhook(world: World, number: int) -> None:
    created = world.client.webhooks.create("stays", f"http://127.0.0.1:1/{number}", group=f"hook-{number}")
    world.client.webhooks.delete(created.webhook.id)
    world.client.queues.delete("stays", f"hook-{number}", force=True)


def a_stage(world: World, number: int) -> None:
    world.native.call("stage.open", query="query", batch=number)
    world.client.pipelines.abort("query", number)


def a_pipeline(world: World, number: int) -> None:
    world.native.call("pipeline.report", name=f"pipeline-{number}", run="r", state="running")
    world.client.pipelines.forget(f"pipeline-{number}", force=True)


# --- MQTT ------------------------------------------------------------------------------------------------------------


def an_mqtt_client(world: World, number: int) -> None:
    wires = world.wires()
    wire = wires.connect(client_id=f"mqtt{number}")
    wire.subscribe(f"a/{number}/+", f"$share/group{number}/b/#", qos=1)
    wire.publish(f"a/{number}/b", b"x", qos=1)
    assert wire.message().payload == b"x"
    wire.drop() if number % 2 else wire.disconnect()


def an_mqtt_session(world: World, number: int) -> None:
    """With a will that is never published, a message that is retained for a while, and QoS 2 half-way."""
    wires = world.wires()
    will = Will("wills", b"gone", 0, False)
    wire = wires.durable(client_id=f"mqtt{number}", will=will)
    wire.subscribe("stays/#", qos=1)
    wire.publish(f"kept/{number}", b"x", qos=1, retain=True)
    wire.publish(f"kept/{number}", b"", qos=1, retain=True)
    wire.send(Publish("stays", b"x", 2, False, packet_id=wire.packet_id()))
    wire.receive(Pubrec)
    wires.durable(client_id=f"mqtt{number}").drop()  # takes the session over
    world.client.mqtt.forget(f"mqtt{number}")
    wires.close()


def a_topic_that_others_follow(world: World, number: int) -> None:
    """They have been there before, and stay."""
    followers = world.mqtt_reader, world.stream, world.queue
    world.client.publish(f"come.{number}", b"x")
    wire, stream, queue = followers
    assert wire.message().payload == b"x"
    stream.next(0.2)  # it looks for topics ten times a second
    message = queue.next(10)
    assert message is not None
    message.ack(wait=True)
    world.client.delete_topic(f"come.{number}", force=True)


# --- the SDK ---------------------------------------------------------------------------------------------------------


def a_client(world: World, number: int) -> None:
    with millstream.connect(world.broker.address) as client:
        client.publish("stays", b"x")
        with client.producer("stays") as producer:
            producer.send(b"x")
        with client.stream("stays") as stream:
            assert stream.next(10) is not None
        with client.queue("empty", group="sdk") as queue:
            queue.next(0)


def a_client_that_is_dropped(world: World, number: int) -> None:
    client = millstream.connect(world.broker.address)
    client.publish("stays", b"x")
    stream, queue = client.stream("stays"), client.queue("empty", group="sdk")
    assert stream.next(10) is not None
    queue.next(0)


def a_producer_that_is_dropped(world: World, number: int) -> None:
    world.client.producer("stays").send(b"x")


def an_asynchronous_client(world: World, number: int) -> None:
    async def use() -> None:
        async with aio.connect(world.broker.address) as client:
            await client.publish("stays", b"x")
            async with client.producer("stays") as producer:
                await producer.send(b"x")
            async with client.stream("stays") as stream:
                assert await stream.next(10) is not None
            async with client.queue("empty", group="sdk") as queue:
                await queue.next(0)

    world.wait(use())


def what_an_asynchronous_client_opens(world: World, number: int) -> None:
    async def use() -> None:
        async with world.async_client.producer("stays") as producer:
            await producer.send(b"x")
        stream = await world.async_client.stream("stays")
        assert await stream.next(10) is not None  # dropped, as is the queue
        queue = await world.async_client.queue("empty", group="sdk")
        await queue.next(0)

    world.wait(use())


CYCLES: Final[dict[Callable[[World, int], None], int]] = {
    a_connection: 200,
    a_connection_cut_off_in_a_frame: 200,
    a_lease_that_nobody_waits_for_any_more: 100,
    an_http_request: 100,
    a_stream_of_http_given_up: 50,
    a_websocket: 40,
    a_topic: 40,
    a_topic_by_the_same_name: 100,
    a_namespace: 20,
    a_stream_group: 30,
    a_queue_group: 40,
    a_queue_group_and_then_its_topic: 40,
    a_queue_group_on_a_pattern: 20,
    a_dead_letter: 20,
    a_subscription: 40,
    a_schedule: 40,
    a_key: 100,
    a_webhook: 30,
    a_stage: 100,
    a_pipeline: 100,
    an_mqtt_client: 100,
    an_mqtt_session: 40,
    a_topic_that_others_follow: 20,
    a_client: 20,
    a_client_that_is_dropped: 20,
    a_producer_that_is_dropped: 20,
    an_asynchronous_client: 20,
    what_an_asynchronous_client_opens: 20,
}


@pytest.mark.parametrize("cycle", CYCLES, ids=lambda cycle: cycle.__name__)
def test_nothing_is_left_of(world: World, cycle: Callable[[World, int], None]) -> None:
    times = CYCLES[cycle]
    for number in range(times // 4):
        cycle(world, number)
    world.broker.clock.advance("1m")
    before = world.count()
    for number in range(times // 4, times // 4 + times):
        cycle(world, number)

    def leftovers() -> dict[str, int]:
        world.broker.clock.advance("1m")  # what is kept for a while is kept no longer
        return grown(before, world.count(), by=times // 2, but=LIMITED)

    found: dict[str, int] = {}

    def nothing() -> bool:
        nonlocal found
        found = leftovers()
        return not found

    try:
        eventually(nothing, within_s=3)
    except AssertionError:
        pytest.fail(f"after {times} times there are so many more: {found}")
