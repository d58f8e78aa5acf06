"""What takes long is done in turns: nobody else waits for it, and what its client says next comes behind it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.broker.mqtt import reading
from millstream.broker.mqtt.reading import Position
from millstream.broker.mqtt.session import Session
from millstream.broker.mqtt.subscribing import Subscribing
from millstream.broker.mqtt.subscription import Subscription
from millstream.broker.mqtt.world import World
from millstream.mqtt.packets import V4, V5, Filter, Pingreq, Pingresp, Puback, Publish, Suback, Subscribe, Unsubscribe
from millstream.mqtt.writer import encode
from millstream.records import Codec, encode_batch
from tests.e2e.mqtt.support import REFERENCE, Millstream, Wires, session_of
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(bool(REFERENCE), reason=f"{REFERENCE} has turns of its own")


@pytest.fixture(scope="module")
def server() -> Iterator[Millstream]:
    running = Millstream()
    yield running
    running.stop()


class Turns:
    """Counts the turns of a broker's event loop, and in which of them something happens."""

    def __init__(self, server: Millstream) -> None:
        self._server = server
        self._now = 0
        self._counts = False
        self.noted: list[int] = []

    def __enter__(self) -> Turns:
        self._counts = True
        self._server.broker.run(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        self._counts = False

    async def _begin(self) -> None:
        self._count()

    def _count(self) -> None:
        self._now += 1
        if self._counts:
            asyncio.get_running_loop().call_soon(self._count)

    def note(self, of: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.noted.append(self._now)
            return of(*arguments)

        return call


# --- many partitions -------------------------------------------------------------------------------------------------


NAMES = [f"room{number}/light" for number in range(20)]


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[Millstream]:
    """A broker that has not opened any of its topics yet."""
    server = Millstream(tmp_path)
    wires = Wires(server)
    reader, writer = wires.durable(client_id="before"), wires.connect()
    reader.subscribe("+/light", qos=1)
    for name in NAMES:
        writer.publish(name, b"old", 1)
    wires.close()
    server.stop()
    server = Millstream(tmp_path)
    yield server
    server.stop()


def test_who_subscribes_to_many_topics_after_a_start_lets_others_have_their_turn(
    restarted: Millstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics, wires = restarted.broker.broker.topics, Wires(restarted)
    reader = wires.durable(client_id="new")
    with Turns(restarted) as turns:
        monkeypatch.setattr(topics, "_open", turns.note(topics._open))
        assert reader.subscribe("+/light", qos=1) == (1,)
    assert len(set(turns.noted)) == len(turns.noted) == 20, "some were opened in the same turn"
    reader.nothing()
    wires.close()


def test_what_a_client_says_behind_a_subscription_that_takes_its_time_comes_behind_it(restarted: Millstream) -> None:
    wires = Wires(restarted)
    wire = wires.durable(client_id="new")
    wire.send(
        Subscribe(2, (Filter("+/light", 1),)),
        *(Publish(name, b"after", 1, packet_id=packet_id) for packet_id, name in enumerate(NAMES[:15], 3)),
        Subscribe(50, (Filter("+/light", 1), Filter("+/heat", 1))),
        Pingreq(),
    )
    assert wire.receive(Suback).packet_id == 2
    assert wire.receive(Suback).packet_id == 50
    wire.receive(Pingresp)
    assert [wire.receive(Puback).packet_id for _ in range(15)] == list(range(3, 18))
    assert wire.payloads(15) == [b"after"] * 15
    wire.nothing()
    wires.close()


def test_who_is_gone_before_a_subscription_holds_has_none(restarted: Millstream) -> None:
    wires = Wires(restarted)
    wire, writer = wires.durable(client_id="new"), wires.connect()
    session = session_of(restarted, "new")
    client = session.client
    assert client is not None
    before = asyncio.Event()

    async def take_a_turn() -> None:
        client._in_turn(before.wait())  # type: ignore[arg-type]

    async def end_it() -> None:
        before.set()

    restarted.broker.run(take_a_turn())
    wire.send(Subscribe(2, (Filter("+/light", 1),)), Publish(NAMES[0], b"unheard", 1, packet_id=1))
    eventually(client.is_full)
    again = wires.durable(client_id="new")
    restarted.broker.run(end_it())
    writer.publish(NAMES[0], b"nobody's", 1)
    again.nothing()
    assert not session.subscriptions
    assert again.subscribe("+/light", qos=1) == (1,)
    writer.publish(NAMES[0], b"mine", 1)
    assert again.message().payload == b"mine"
    wires.close()


def test_what_is_published_while_somebody_subscribes_is_for_it_from_the_end_that_was_taken(
    mqtt: Wires, server: Millstream, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.broker.mqtt.world._LOOKED_AT_A_TIME", 1)
    names = [f"{topic}/{number}" for number in range(5)]
    others, reader, writer = mqtt.durable(), mqtt.durable(), mqtt.connect()
    others.subscribe(f"{topic}/#", qos=1)
    for name in names:
        writer.publish(name, b"old", 1)
    session = session_of(server, reader.client_id)
    steps = session.world.subscribe(session, [Subscription(f"{topic}/#", 1)])

    async def go_on(positions: int) -> None:
        for _ in steps:
            if len(session.positions) >= positions:
                break

    server.broker.run(go_on(3))
    assert not session.subscriptions
    writer.publish(names[0], b"meanwhile", 1)
    server.broker.run(go_on(1_000))
    assert reader.message().payload == b"meanwhile", "although nothing came there since"
    reader.nothing()


# --- many packets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lasts", [False, True])
def test_of_the_subscriptions_of_one_read_only_some_are_made_in_one_turn(
    mqtt: Wires, server: Millstream, topic: str, lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = mqtt.durable() if lasts else mqtt.connect()
    count = 2_000
    with Turns(server) as turns:
        monkeypatch.setattr(Subscribing, "begin", turns.note(Subscribing.begin))
        packets = [encode(Subscribe(packet_id, (Filter(topic, 1),)), V5) for packet_id in range(1, count + 1)]
        wire.send_bytes(b"".join(packets) + encode(Publish(topic, b"behind", 1, packet_id=1), V5))
        assert [wire.receive(Suback).packet_id for _ in range(count)] == list(range(1, count + 1))
    assert len(turns.noted) == count
    assert max(turns.noted.count(turn) for turn in set(turns.noted)) <= 100
    assert wire.message().payload == b"behind"


def test_who_says_again_what_it_is_subscribed_to_makes_nobody_look_through_all_topics(
    mqtt: Wires, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    look = World._partitions_of

    def note(*arguments: Any) -> Iterator[Any]:
        looked.append(arguments)
        return look(*arguments)

    monkeypatch.setattr(World, "_partitions_of", note)
    wire = mqtt.durable()
    wire.ping()
    looked.clear()
    for qos in (0, 1, 2, 1, 0):
        assert wire.subscribe(f"{topic}/#", qos=qos) == (qos,)
    assert len(looked) == 3, "the first time, when there is something to read from the log, and to see what is left"


def test_who_unsubscribes_from_many_topics_lets_others_have_their_turn(
    mqtt: Wires, server: Millstream, topic: str
) -> None:
    wire = mqtt.durable()
    wire.subscribe(f"{topic}/#", f"{topic}/kept", qos=1)
    session = session_of(server, wire.client_id)
    name = topic.replace("/", ".")
    count = 1_000

    async def pretend() -> int:
        for number in range(count):
            session.positions[number + 10**9] = Position(f"{name}.{number}", 0, number + 10**9, 0)
        ended = session.world.end(session, [f"{topic}/#"])
        return sum(1 for _ in session.world.forget_positions(session, ended))

    assert server.broker.run(pretend()) >= count // 200
    assert not [position for position in session.positions.values() if position.topic.startswith(name)]
    wire.send(
        Unsubscribe(1, (f"{topic}/kept",)),
        Subscribe(2, (Filter(f"{topic}/kept", 1),)),
        Publish(f"{topic}/kept", b"x", 1, packet_id=3),
    )
    assert wire.message().payload == b"x"


# --- large batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_who_catches_up_with_a_large_batch_has_it_read_and_unpacked_once(
    mqtt: Wires, server: Millstream, topic: str, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = mqtt.durable(receive_maximum=20)
    reader.subscribe(topic, qos=1)
    mqtt.connect().publish(topic, b"first", 1)
    assert reader.message().payload == b"first"
    reader.disconnect()
    values = [b"%d" % number + bytes(100) for number in range(2_000)]
    partition = server.broker.broker.topics.partition("default", topic.replace("/", "."), 0)
    server.broker.run(partition.append_durably(encode_batch(values, base_timestamp_us=1, codec=codec)))
    fetched, made = [], []
    fetch, message_of = partition.fetch, reading.message_of
    monkeypatch.setattr(partition, "fetch", lambda *how: (fetched.append(how[0]), fetch(*how))[1])
    monkeypatch.setattr(reading, "message_of", lambda *what: (made.append(what[0]), message_of(*what))[1])
    again = mqtt.durable(client_id=reader.client_id, receive_maximum=20)
    assert again.payloads(2_000) == values
    again.nothing()
    assert len(fetched) < 10, "without a pause of a second, once"
    assert len(made) < 2 * len(values)


def test_messages_that_nobody_gets_are_stepped_over_in_turns(
    mqtt: Wires, server: Millstream, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = mqtt.durable()
    reader.subscribe(topic, qos=1)
    mqtt.connect().publish(topic, b"first", 1)
    assert reader.message().payload == b"first"
    reader.disconnect()
    values, last = [b"%d" % number for number in range(20_000)], encode_batch([b"last"], base_timestamp_us=1)
    partition = server.broker.broker.topics.partition("default", topic.replace("/", "."), 0)
    expired = encode_batch(values, base_timestamp_us=1, expiry_us=[1] * len(values))
    server.broker.run(partition.append_durably(expired))
    server.broker.run(partition.append_durably(last))
    with Turns(server) as turns:
        monkeypatch.setattr(Session, "passed", turns.note(Session.passed))
        assert mqtt.durable(client_id=reader.client_id).message().payload == b"last"
    assert len(turns.noted) >= len(values)
    assert max(turns.noted.count(turn) for turn in set(turns.noted)) <= 1_001


# --- much to store ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1])
def test_who_publishes_faster_than_it_can_be_stored_is_not_read_from(
    mqtt: Wires, server: Millstream, topic: str, qos: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = server.broker.broker
    writer, other = mqtt.connect(V4), mqtt.connect()
    keeper = mqtt.durable()
    keeper.subscribe(topic, qos=1)
    writer.publish(topic, b"first", 1)
    monkeypatch.setattr(broker.mqtt, "held_bytes_max", 200_000)
    fast = mqtt.connect(V4)
    waiting: list[tuple[Any, ...]] = []
    publish = broker.publish
    monkeypatch.setattr(broker, "publish", lambda *what: waiting.append(what))
    count, size = 300, 10_000
    packets = [Publish(topic, bytes(size), qos, packet_id=number * qos) for number in range(1, count + 1)]
    sending = threading.Thread(target=fast.send, args=packets)
    sending.start()
    eventually(lambda: sum(len(request.batch) for _, request, _ in waiting) >= 200_000)
    for _ in range(50):
        other.ping()
    assert sum(len(request.batch) for _, request, _ in waiting) < 200_000 + 256 * 1024 + 10 * size

    async def store() -> None:
        monkeypatch.setattr(broker, "publish", publish)
        for what in waiting:
            publish(*what)
        broker.flush()

    server.broker.run(store())
    sending.join()
    assert len(keeper.messages(count + 1)) == count + 1
    fast.ping()
