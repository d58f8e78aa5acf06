"""How MQTT clients settle what a queue gave them: by id, by receipt, and what an acknowledgement of MQTT is worth."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from millstream.broker.mqtt.flight import Flight
from millstream.broker.mqtt.rereading import Rereading
from millstream.mqtt.messages import Message
from millstream.mqtt.packets import V4, Properties, Puback, Publish, Pubrec, Pubrel
from millstream.mqtt.reasons import Reason
from tests.e2e.mqtt.queue_words import depth, join, settle, told, user
from tests.e2e.mqtt.support import Millstream, Wires, not_in_reference, session_of, unique
from tests.waiting import eventually

pytestmark = not_in_reference("has no queues")


@pytest.fixture(scope="module")
def server() -> Iterator[Millstream]:
    running = Millstream()
    yield running
    running.stop()


@pytest.fixture
def queue() -> str:
    """The name of a queue that nobody has used."""
    return f"shop/{unique('q')}"


def test_a_puback_of_version_5_settles_nothing_and_an_ack_does(mqtt: Wires, server: Millstream, queue: str) -> None:
    producer, worker = mqtt.connect(), mqtt.connect()
    join(worker, queue)
    producer.publish(f"$queue/{queue}", b"x", 1)
    message = worker.message()
    assert depth(server, queue) == 1
    assert settle(worker, queue, "ack", message_id=told(message)["message-id"]).reason == Reason.SUCCESS
    assert depth(server, queue) == 0


@pytest.mark.parametrize("name", ["message-id", "receipt-handle"])
def test_to_ack_again_is_a_success(mqtt: Wires, server: Millstream, queue: str, name: str) -> None:
    producer, worker = mqtt.connect(), mqtt.connect()
    join(worker, queue)
    producer.publish(f"$queue/{queue}", b"acked", 1)
    said = {name.replace("-", "_"): told(worker.message())[name]}
    assert [settle(worker, queue, "ack", **said).reason for _ in range(3)] == [Reason.SUCCESS] * 3
    assert settle(worker, queue, "nack", **said).reason == Reason.IMPLEMENTATION_SPECIFIC_ERROR
    producer.publish(f"$queue/{queue}", b"rejected", 1)
    said = {name.replace("-", "_"): told(worker.message())[name]}
    assert settle(worker, queue, "reject", **said).reason == Reason.SUCCESS
    assert settle(worker, queue, "ack", **said).reason == Reason.IMPLEMENTATION_SPECIFIC_ERROR
    assert depth(server, queue) == 0


def test_what_is_not_settled_in_time_comes_again(mqtt: Wires, queue: str) -> None:
    producer, worker = mqtt.connect(), mqtt.connect()
    join(worker, queue)
    producer.publish(f"$queue/{queue}", b"x", 1)
    first = worker.message()
    mqtt.skip(31)
    mqtt.skip(30)
    again = worker.message()
    assert told(again)["delivery-count"] == "2"
    assert told(again)["message-id"] == told(first)["message-id"]
    late = settle(worker, queue, "ack", receipt_handle=told(first)["receipt-handle"])
    assert late.reason == Reason.IMPLEMENTATION_SPECIFIC_ERROR
    assert settle(worker, queue, "ack", receipt_handle=told(again)["receipt-handle"]).reason == Reason.SUCCESS


def test_a_nack_says_when_to_try_again(mqtt: Wires, queue: str) -> None:
    producer, worker = mqtt.connect(), mqtt.connect()
    join(worker, queue)
    producer.publish(f"$queue/{queue}", b"x", 1)
    message = worker.message()
    answer = settle(
        worker, queue, "nack", message_id=told(message)["message-id"], retry_after_ms=5_000, reason="no paper"
    )
    assert answer.reason == Reason.SUCCESS
    worker.nothing()
    mqtt.skip(6)
    assert told(worker.message())["delivery-count"] == "2"


def test_a_rejected_message_is_a_dead_letter_that_can_be_consumed(mqtt: Wires, queue: str) -> None:
    producer, worker = mqtt.connect(), mqtt.connect()
    join(worker, queue)
    producer.publish(f"$queue/{queue}", b"bad", 1)
    settle(worker, queue, "reject", message_id=told(worker.message())["message-id"], reason="illegible")
    assert worker.subscribe(f"$queue/dlq/{queue}", qos=1) == (1,)
    letter = worker.message()
    assert (letter.topic, letter.payload) == (f"$queue/dlq/{queue}", b"bad")
    answer = settle(worker, f"dlq/{queue}", "ack", message_id=told(letter)["message-id"])
    assert answer.reason == Reason.SUCCESS
    assert producer.publish(f"$queue/dlq/{queue}", b"x", 1) == Reason.TOPIC_NAME_INVALID


@pytest.mark.parametrize("how", ["ack", "nack", "reject"])
def test_an_unknown_message_cannot_be_settled(mqtt: Wires, server: Millstream, queue: str, how: str) -> None:
    producer, worker, stranger = mqtt.connect(), mqtt.connect(), mqtt.connect()
    join(worker, queue)
    producer.publish(f"$queue/{queue}", b"x", 1)
    message = worker.message()
    for wire, name in (
        (worker, "somebody"),
        (worker, "a:0:0:1:0000000000000000"),
        (stranger, told(message)["message-id"]),
    ):
        answer = settle(wire, queue, how, message_id=name)
        assert answer.reason == Reason.IMPLEMENTATION_SPECIFIC_ERROR
        assert answer.properties.reason_string
    assert settle(worker, queue, how).reason == Reason.IMPLEMENTATION_SPECIFIC_ERROR
    assert depth(server, queue) == 1


def test_whoever_has_the_receipt_may_settle(mqtt: Wires, server: Millstream, queue: str) -> None:
    producer, worker = mqtt.connect(), mqtt.connect()
    join(worker, queue)
    producer.publish(f"$queue/{queue}", b"x", 1)
    receipt = told(worker.message())["receipt-handle"]
    assert settle(producer, queue, "ack", receipt_handle=receipt).reason == Reason.SUCCESS
    assert depth(server, queue) == 0


def test_a_client_is_not_given_more_than_it_takes(mqtt: Wires, queue: str) -> None:
    producer = mqtt.connect()
    for number in range(6):
        producer.publish(f"$queue/{queue}", b"%d" % number, 1)
    worker = mqtt.connect(receive_maximum=2)
    join(worker, queue)
    held = worker.messages(2)
    worker.nothing()
    for message in held:
        settle(worker, queue, "ack", message_id=told(message)["message-id"])
    worker.messages(2)
    worker.nothing()


def test_a_consumer_that_cannot_take_a_large_message_leaves_it_to_others(mqtt: Wires, queue: str) -> None:
    producer, small = mqtt.connect(), mqtt.connect(maximum_packet_bytes=300)
    join(small, queue)
    producer.publish(f"$queue/{queue}", b"x" * 1_000, 1)
    producer.publish(f"$queue/{queue}", b"y", 1)
    assert small.message().payload == b"y"
    large = mqtt.connect()
    join(large, queue)
    small.disconnect()
    mqtt.skip(10)
    assert {len(payload) for payload in large.payloads(2)} == {1, 1_000}


def test_the_puback_of_a_3_1_1_client_settles(mqtt: Wires, server: Millstream, queue: str) -> None:
    producer, worker = mqtt.connect(V4), mqtt.connect(V4, client_id=f"workers-{unique('w')}")
    assert worker.subscribe(f"$queue/{queue}", qos=1) == (1,)
    producer.publish(f"$queue/{queue}", b"x", 1)
    found = worker.receive(Publish)
    assert depth(server, queue) == 1
    worker.send(Puback(found.packet_id))
    worker.ping()
    assert depth(server, queue) == 0


def test_with_qos_2_the_pubrec_of_a_3_1_1_client_settles(mqtt: Wires, server: Millstream, queue: str) -> None:
    producer, worker = mqtt.connect(V4), mqtt.connect(V4, client_id=f"workers-{unique('w')}")
    assert worker.subscribe(f"$queue/{queue}", qos=2) == (2,)
    producer.publish(f"$queue/{queue}", b"x", 2)
    found = worker.receive(Publish)
    assert found.qos == 2
    worker.send(Pubrec(found.packet_id))
    worker.receive(Pubrel)
    assert depth(server, queue) == 0


def test_qos_0_settles_for_a_3_1_1_client_which_has_no_other_way(mqtt: Wires, server: Millstream, queue: str) -> None:
    producer, worker = mqtt.connect(), mqtt.connect(V4, client_id=f"workers-{unique('w')}")
    assert worker.subscribe(f"$queue/{queue}", qos=0) == (0,)
    for number in range(250):  # more than a client may have at a time
        producer.publish(f"$queue/{queue}", b"%d" % number, 1)
    assert len(set(worker.payloads(250))) == 250
    assert depth(server, queue) == 0


def test_qos_0_settles_nothing_for_a_client_of_version_5_which_is_told_ids(
    mqtt: Wires, server: Millstream, queue: str
) -> None:
    producer, worker = mqtt.connect(), mqtt.connect()
    assert join(worker, queue, qos=0) == 0
    producer.publish(f"$queue/{queue}", b"x", 1)
    message = worker.message()
    assert depth(server, queue) == 1
    assert settle(worker, queue, "ack", message_id=told(message)["message-id"]).reason == Reason.SUCCESS
    assert depth(server, queue) == 0


def test_a_3_1_1_client_settles_by_payload_and_is_not_cut_off_for_being_late(
    mqtt: Wires, server: Millstream, queue: str
) -> None:
    producer = mqtt.connect()
    worker = mqtt.connect(V4, client_id=f"workers-{unique('w')}")
    worker.subscribe(f"$queue/{queue}", qos=1)
    producer.publish(f"$queue/{queue}", b"x", 1, properties=user(message_id="mine"))
    assert worker.receive(Publish).qos == 1
    assert depth(server, queue) == 1
    assert worker.publish(f"$queue/{queue}/$ack", b"mine", 1) == 0
    assert depth(server, queue) == 0
    assert worker.publish(f"$queue/{queue}/$ack", b"mine", 1) == 0
    worker.ping()


def test_a_message_that_is_refused_makes_room_for_those_of_other_queues(mqtt: Wires, queue: str) -> None:
    producer, worker = mqtt.connect(), mqtt.connect(receive_maximum=1)
    for name in ("one", "other"):
        worker.subscribe(f"$queue/{queue}/{name}", qos=2)
    producer.publish(f"$queue/{queue}/one", b"refused", 1)
    first = worker.receive(Publish)
    producer.publish(f"$queue/{queue}/other", b"wanted", 1)
    worker.nothing()
    worker.send(Pubrec(first.packet_id, Reason.UNSPECIFIED_ERROR))
    assert worker.message().payload == b"wanted"


def test_a_queue_goes_on_when_what_was_to_be_sent_before_has_expired(
    mqtt: Wires, server: Millstream, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits while the session reads what was in flight; then nothing was sent that would be confirmed."""
    topic = unique("t")
    with server.broker.connect() as client:
        client.create_topic(topic)
    producer, worker = mqtt.connect(), mqtt.durable()
    worker.subscribe(topic, f"$queue/{queue}", qos=1)
    producer.publish(topic, b"short-lived", 1, properties=Properties(message_expiry_s=10))
    assert worker.receive(Publish).payload == b"short-lived"
    session = session_of(server, worker.client_id)
    worker.drop()
    eventually(lambda: session.client is None)
    mqtt.skip(20)
    is_read, message_of = asyncio.Event(), Rereading.message_of

    async def slowly(self: Rereading, flight: Flight) -> Message | None:
        await is_read.wait()
        return await message_of(self, flight)

    async def read() -> None:
        is_read.set()

    monkeypatch.setattr(Rereading, "message_of", slowly)
    again = mqtt.durable(client_id=worker.client_id)
    eventually(lambda: session.client is not None and session.client.queue_topics()._joined)
    again.ping()
    assert session.is_resuming
    server.broker.run(read())
    producer.publish(f"$queue/{queue}", b"work", 1)
    assert again.message().payload == b"work"
