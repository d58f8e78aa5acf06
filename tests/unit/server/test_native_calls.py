"""Many calls on one connection: none piles up its answers in the broker's memory, and none waits for another."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from millstream.broker.broker import Broker, Session
from millstream.config import Settings
from millstream.server.calling import AnswerSizes
from millstream.server.tcp import NativeConnection
from millstream.testing.broker import BrokerForTests
from millstream.wire.calls import ListTopics
from millstream.wire.frames import FrameType, encode_frame
from millstream.wire.message_calls import BrowseMessages
from millstream.wire.messages import response_body
from tests.forgetful import forget_to_pause
from tests.native import NativeClient

MEMORY_BYTES = 1024 * 1024
SETTINGS = Settings.model_validate(
    {
        "server": {"connection_memory_bytes": MEMORY_BYTES, "frame_bytes_max": MEMORY_BYTES},
        "topics": {"max_message_bytes": MEMORY_BYTES // 4},
    }
)


class Watch:
    """How much waits in the broker for a client to read it, at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most_bytes = 0
        self.paused = threading.Event()
        write, pause_writing = NativeConnection._write, NativeConnection.pause_writing

        def noted(connection: NativeConnection, *data: bytes) -> None:
            write(connection, *data)
            waiting_bytes = connection._outgoing_bytes + connection._transport.get_write_buffer_size()
            self.most_bytes = max(self.most_bytes, waiting_bytes)

        def pausing(connection: NativeConnection) -> None:
            pause_writing(connection)
            self.paused.set()

        monkeypatch.setattr(NativeConnection, "_write", noted)
        monkeypatch.setattr(NativeConnection, "pause_writing", pausing)


def send_calls(client: NativeClient, number: int, op: str, **fields: object) -> list[int]:
    """So many of them at once; returns their correlation ids."""
    asked = [client.next_correlation() for _ in range(number)]
    body = json.dumps({"op": op, **fields}).encode()
    client.socket.sendall(b"".join(encode_frame(FrameType.CALL, body, correlation) for correlation in asked))
    return asked


@pytest.mark.parametrize("asyncio_forgets", [False, True])
def test_answers_to_many_calls_do_not_pile_up_for_a_client_that_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asyncio_forgets: bool
) -> None:
    """A few kilobytes of requests took hundreds of megabytes, whatever `server.connection_memory_bytes` said."""
    if asyncio_forgets:
        forget_to_pause(monkeypatch)
    watch = Watch(monkeypatch)
    with BrokerForTests(tmp_path, settings=SETTINGS) as broker, NativeClient(broker.address) as client:
        for number in range(20):
            client.call("topic.create", name=f"topic-{number}")
        asked = send_calls(client, 3000, "topic.list")
        assert watch.paused.wait(10)
        with NativeClient(broker.address) as other:
            other.call("topic.list")  # nobody else minds
        answered: list[int | None] = []
        size = 0
        while len(answered) < len(asked):
            kind, correlation, payload = client.receive()
            if kind == FrameType.RESPONSE:
                assert len(json.loads(bytes(response_body(payload)))) == 20
                size += len(payload)
                answered.append(correlation)
        assert answered == asked, "all of them, in their order"
        assert size > 20 * MEMORY_BYTES
        assert watch.most_bytes <= MEMORY_BYTES


def test_calls_that_take_a_while_are_begun_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds were begun before the first of them was answered, and each of them gathered its answer in memory."""
    under_way, most = 0, 0
    call = Broker.call

    async def counted(broker: Broker, session: Session, asked: object) -> object:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await call(broker, session, asked)
        finally:
            under_way -= 1

    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        client.call("topic.create", name="jobs")
        client.call("queue.open", topic="jobs")
        client.publish("jobs", [b"job"] * 40)
        monkeypatch.setattr(Broker, "call", counted)
        asked = send_calls(client, 300, "queue.peek", topic="jobs", limit=40)  # others go first before each message
        assert {client.receive()[1] for _ in asked} == set(asked)
    assert 1 < most <= 16


def test_a_call_does_not_wait_for_those_that_wait_for_messages(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        client.call("topic.create", name="jobs")
        waiting = send_calls(client, 200, "queue.lease", topic="jobs", wait_ms=60_000)
        assert client.call("topic.list")
        with NativeClient(broker.address) as other:
            for _ in waiting:
                other.publish("jobs", [b"job"])
        assert {client.receive()[1] for _ in waiting} == set(waiting)


def test_calls_that_take_a_while_and_bring_much_do_not_fill_the_memory_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that had begun while there was room were answered when there was none."""
    call = Broker.call

    async def slow(broker: Broker, session: Session, asked: object) -> object:
        for _ in range(50):
            await asyncio.sleep(0)
        return await call(broker, session, asked)

    watch = Watch(monkeypatch)
    with BrokerForTests(tmp_path, settings=SETTINGS) as broker, NativeClient(broker.address) as client:
        client.call("topic.create", name="orders")
        for _ in range(3):
            client.publish("orders", [bytes(MEMORY_BYTES // 5)])
        monkeypatch.setattr(Broker, "call", slow)
        asked = send_calls(client, 40, "message.browse", topic="orders", limit=3, value_bytes=MEMORY_BYTES)
        assert watch.paused.wait(10)
        with NativeClient(broker.address) as other:
            other.call("topic.list")  # nobody else minds
        answered = {client.receive()[1] for _ in asked}
        assert answered == set(asked)
    assert watch.most_bytes <= MEMORY_BYTES


def test_what_a_kind_of_call_has_brought_is_expected_of_the_next_ones() -> None:
    expected = AnswerSizes()
    assert expected.of(ListTopics()) == 0
    expected.note(ListTopics(), 3_000_000)
    expected.note(ListTopics(), 100)
    assert expected.of(ListTopics()) == 3_000_000
    assert expected.of(BrowseMessages(topic="orders")) > 4 * 1024 * 1024, "also if nobody has asked before"


def test_fetches_that_waited_for_the_same_messages_do_not_fill_the_memory_when_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    with BrokerForTests(tmp_path, settings=SETTINGS) as broker, NativeClient(broker.address) as client:
        client.call("topic.create", name="orders")
        asked = [client.send_fetch("orders", 0, wait_ms=60_000) for _ in range(200)]
        client.call("topic.list")  # they are waiting
        with NativeClient(broker.address) as other:
            other.publish("orders", [bytes(MEMORY_BYTES // 5)])
            assert watch.paused.wait(10)
            other.call("topic.list")  # nobody else minds
        assert {client.receive()[1] for _ in asked} == set(asked)
    assert watch.most_bytes <= MEMORY_BYTES
