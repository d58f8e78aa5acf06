"""Queues as MQTT clients use them: `$queue/...`, groups, durable shares and `$admin/queue/...`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millstream.mqtt.packets import (
    V5,
    Connect,
    Disconnect,
    Filter,
    Properties,
    Puback,
    Publish,
    Pubrec,
    Subscribe,
)
from millstream.mqtt.reasons import Reason
from tests.e2e.access_world import key_for
from tests.e2e.mqtt.queue_words import depth, join, settle, told, user
from tests.e2e.mqtt.support import Millstream, Wire, Wires, both_versions, not_in_reference, payloads, unique

pytestmark = not_in_reference("has no queues")


@pytest.fixture(scope="module")
def server() -> Iterator[Millstream]:
    running = Millstream(mqtt={"share_durable": True})
    yield running
    running.stop()


@pytest.fixture
def queue() -> str:
    """The name of a queue that nobody has used."""
    return f"shop/{unique('q')}"


# --- enqueueing ------------------------------------------------------------------------------------------------------


def test_a_publish_makes_the_queue_and_a_consumer_gets_it_with_everything_it_must_know(mqtt: Wires, queue: str) -> None:
    producer, worker = mqtt.connect(), mqtt.connect()
    assert producer.publish(f"$queue/{queue}", b"order", 1, properties=user(color="red")) == Reason.SUCCESS
    assert join(worker, queue) == 1
    message = worker.message()
    assert (message.topic, message.payload, message.qos, message.retain) == (f"$queue/{queue}", b"order", 1, False)
    said = told(message)
    assert said["color"] == "red"
    assert said["delivery-count"] == "1"
    assert len(said["message-id"]) == 26
    assert said["receipt-handle"].startswith(queue.replace("/", "."))
    assert 0 <= int(said["partition"]) < 10


def test_a_queue_that_is_made_by_its_first_use_has_the_settings_of_queues(
    mqtt: Wires, server: Millstream, queue: str
) -> None:
    mqtt.connect().publish(f"$queue/{queue}", b"x", 1)
    topic = server.broker.connect().topic(queue.replace("/", "."))
    assert topic.partition_count == 10
    shown = {name: topic.config[name] for name in ("max_depth", "message_ttl_ms", "lease_ms", "retry")}
    assert shown == {"max_depth": 100_000, "message_ttl_ms": 7 * 86_400_000, "lease_ms": 30_000, "retry": "durable"}


def test_a_message_id_of_the_publisher_is_shown_and_a_repetition_is_not_stored_again(mqtt: Wires, queue: str) -> None:
    producer, worker = mqtt.connect(), mqtt.connect()
    for _ in range(2):
        assert producer.publish(f"$queue/{queue}", b"once", 1, properties=user(message_id="order-7")) == Reason.SUCCESS
    join(worker, queue)
    message = worker.message()
    assert [value for name, value in message.properties.user if name == "message-id"] == ["order-7"]
    worker.nothing()
    assert settle(worker, queue, "ack", message_id="order-7").reason == Reason.SUCCESS


def test_a_repetition_is_recognised_when_it_is_the_first_message_after_a_restart(tmp_path: Path, queue: str) -> None:
    order = user(message_id="order-7")
    for _ in range(2):
        running = Millstream(tmp_path)
        wires = Wires(running)
        try:
            assert wires.connect().publish(f"$queue/{queue}", b"once", 1, properties=order) == Reason.SUCCESS
            assert sum(running.broker.connect().offsets(queue.replace("/", ".")).values()) == 1
        finally:
            wires.close()
            running.stop()


def test_on_a_topic_that_recognises_no_ids_a_message_id_is_a_name(mqtt: Wires, server: Millstream, queue: str) -> None:
    server.broker.connect().create_topic(queue.replace("/", "."))
    producer, worker = mqtt.connect(), mqtt.connect()
    for qos in (1, 2):
        said = producer.publish(f"$queue/{queue}", b"twice", qos, properties=user(message_id="order-7"))
        assert said == Reason.SUCCESS
    join(worker, queue)
    assert [told(worker.message())["message-id"] for _ in range(2)] == ["order-7"] * 2


def test_message_ids_spread_over_partitions_also_where_they_are_only_names(
    mqtt: Wires, server: Millstream, queue: str
) -> None:
    client = server.broker.connect()
    client.create_topic(queue.replace("/", "."), partitions=4)
    producer = mqtt.connect()
    for number in range(20):
        said = producer.publish(f"$queue/{queue}", b"x", 1, properties=user(message_id=f"order-{number}"))
        assert said == Reason.SUCCESS
    ends = client.offsets(queue.replace("/", "."))
    assert sum(ends.values()) == 20
    assert len([end for end in ends.values() if end]) > 1


def test_a_delay_lets_a_message_wait(mqtt: Wires, queue: str) -> None:
    producer, worker = mqtt.connect(), mqtt.connect()
    join(worker, queue)
    producer.publish(f"$queue/{queue}", b"later", 1, properties=user(delay_ms=60_000))
    worker.nothing()
    mqtt.skip(61)
    assert worker.message().payload == b"later"


def test_the_most_urgent_message_comes_first(mqtt: Wires, queue: str) -> None:
    producer, worker = mqtt.connect(), mqtt.connect(receive_maximum=1)
    join(worker, queue)
    for priority in ("normal", "low", "critical", 1):
        told_key = user(priority=priority, partition_key="one")
        producer.publish(f"$queue/{queue}", str(priority).encode(), 1, properties=told_key)
    found = []
    for _ in range(4):
        message = worker.message()
        found.append(message.payload)
        settle(worker, queue, "ack", message_id=told(message)["message-id"])
    assert found == [b"normal", b"critical", b"1", b"low"]


def test_messages_with_the_same_key_stay_together_in_their_order(mqtt: Wires, queue: str) -> None:
    producer, worker = mqtt.connect(), mqtt.connect()
    for number in range(10):
        producer.publish(f"$queue/{queue}", b"%d" % number, 1, properties=user(partition_key="customer-1"))
    join(worker, queue)
    messages = worker.messages(10)
    assert payloads(messages) == [b"%d" % number for number in range(10)]
    assert len({told(message)["partition"] for message in messages}) == 1


def test_where_the_group_orders_by_key_what_failed_holds_up_its_key_alone(
    mqtt: Wires, server: Millstream, queue: str
) -> None:
    producer, worker = mqtt.connect(), mqtt.connect()
    join(worker, queue)
    with server.broker.connect() as client:
        client.queues.configure(queue.replace("/", "."), "workers", ordering="key")
    for value in (b"1", b"2"):
        producer.publish(f"$queue/{queue}", value, 1, properties=user(partition_key="k"))
    first = worker.message()
    settle(worker, queue, "nack", message_id=told(first)["message-id"], retry_after_ms=0)
    again = worker.message()
    assert (first.payload, again.payload) == (b"1", b"1")
    settle(worker, queue, "ack", message_id=told(again)["message-id"])
    assert worker.message().payload == b"2"


@pytest.mark.parametrize(
    "asked",
    [
        {"delay_ms": "soon"},
        {"priority": "urgent"},
        {"priority": "9" * 5000},
        {"deliver_at": "noon"},
        {"delay_ms": 1, "deliver_at": 1},
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(mqtt: Wires, queue: str, asked: dict[str, Any]) -> None:
    producer = mqtt.connect()
    producer.send(Publish(f"$queue/{queue}", b"x", 1, packet_id=1, properties=user(**asked)))
    answer = producer.receive(Puback)
    assert answer.reason == Reason.IMPLEMENTATION_SPECIFIC_ERROR
    assert next(iter(asked)).replace("_", "-").split("-")[0] in (answer.properties.reason_string or "")


def test_the_retain_flag_means_nothing_for_a_queue(mqtt: Wires, queue: str) -> None:
    producer = mqtt.connect()
    producer.publish(f"$queue/{queue}", b"x", 1, retain=True)
    reader = mqtt.connect()
    reader.subscribe(queue)
    reader.nothing()


def test_what_other_doors_publish_is_in_the_queue_and_the_other_way_round(
    mqtt: Wires, server: Millstream, queue: str
) -> None:
    topic = queue.replace("/", ".")
    mqtt.connect().publish(f"$queue/{queue}", b"from mqtt", 1, properties=user(color="blue"))
    with server.broker.connect() as client, client.queue(topic, group="others", timeout_s=5) as others:
        message = next(iter(others))
        assert (message.value, dict(message.headers)["color"]) == (b"from mqtt", "blue")
        message.ack()
        worker = mqtt.connect()
        join(worker, queue)
        worker.message()
        client.publish(topic, b"native", headers={"shape": "round"})
        found = worker.message()
        assert (found.payload, told(found)["shape"]) == (b"native", "round")


def test_requests_keep_their_response_topic_and_their_expiry(mqtt: Wires, queue: str) -> None:
    producer, worker = mqtt.connect(), mqtt.connect()
    asked = Properties(response_topic="answers/1", correlation_data=b"c", message_expiry_s=100)
    producer.publish(f"$queue/{queue}", b"x", 1, properties=asked)
    join(worker, queue)
    found = worker.message().properties
    assert (found.response_topic, found.correlation_data) == ("answers/1", b"c")
    assert 90 < (found.message_expiry_s or 0) <= 100


def _waiting(wire: Wire) -> list[Publish]:
    """What has come although nobody has asked for it."""
    wire.ping()
    return [packet for packet in wire.inbox if isinstance(packet, Publish)]


def test_replies_reach_whoever_waits_for_them_and_make_no_queue(mqtt: Wires, server: Millstream) -> None:
    asker, worker = mqtt.connect(), mqtt.connect()
    address = f"$queue/responses/{unique('r')}"
    assert worker.publish(address, b"too early", 1) == Reason.NO_MATCHING_SUBSCRIBERS
    assert asker.subscribe(address, qos=1) == (1,)
    assert worker.publish(address, b"42", 1, properties=Properties(correlation_data=b"c")) == Reason.SUCCESS
    found = asker.message()
    assert (found.topic, found.payload, found.properties.correlation_data) == (address, b"42", b"c")
    assert not [topic for topic in server.broker.connect().topics() if topic.name.startswith("responses")]
    assert asker.unsubscribe(address) == (Reason.SUCCESS,)


# --- groups ----------------------------------------------------------------------------------------------------------


def test_members_of_a_group_share_the_messages_and_groups_are_independent(mqtt: Wires, queue: str) -> None:
    one, two, other, producer = mqtt.connect(), mqtt.connect(), mqtt.connect(), mqtt.connect()
    join(one, queue)
    join(two, queue)
    join(other, queue, "audit")
    for number in range(20):
        producer.publish(f"$queue/{queue}", b"%d" % number, 1, properties=user(partition_key=number))
    everything = sorted(b"%d" % number for number in range(20))
    assert sorted(other.payloads(20)) == everything
    shared = [sorted(packet.payload for packet in _waiting(wire)) for wire in (one, two)]
    assert sorted(chain(*shared)) == everything
    assert all(shared)


def test_a_consumer_without_a_group_is_in_that_of_its_client_id(mqtt: Wires, server: Millstream, queue: str) -> None:
    prefix = unique("press")
    for number in (1, 2):
        mqtt.connect(client_id=f"{prefix}-{number}").subscribe(f"$queue/{queue}", qos=1)
    groups = server.broker.connect().queues.list(queue.replace("/", "."))
    assert [(group.group, group.consumers) for group in groups] == [(prefix, 2)]


@both_versions
def test_a_share_names_the_group_of_a_queue(mqtt: Wires, server: Millstream, version: int, queue: str) -> None:
    worker, producer = mqtt.connect(version), mqtt.connect()
    assert worker.subscribe(f"$share/crew/$queue/{queue}", qos=1) == (1,)
    producer.publish(f"$queue/{queue}", b"x", 1)
    assert worker.message().topic == f"$queue/{queue}"
    assert depth(server, queue, "crew") == (1 if version == V5 else 0)


@pytest.mark.parametrize("filter_end", ["+", "responses/+", "a/#", "a//b", "a b", "a/$ack"])
def test_queues_have_no_wildcards_and_no_odd_names(mqtt: Wires, filter_end: str) -> None:
    wire = mqtt.connect()
    assert wire.subscribe(f"$queue/{filter_end}") == (Reason.TOPIC_FILTER_INVALID,)


# --- coming and going ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["disconnect", "drop", "unsubscribe"])
def test_what_a_consumer_has_goes_to_another_when_it_leaves(mqtt: Wires, queue: str, how: str) -> None:
    producer, one = mqtt.connect(), mqtt.connect()
    join(one, queue)
    producer.publish(f"$queue/{queue}", b"x", 1)
    one.message()
    two = mqtt.connect()
    join(two, queue)
    two.nothing()
    if how == "unsubscribe":
        assert one.unsubscribe(f"$queue/{queue}") == (Reason.SUCCESS,)
        assert one.unsubscribe(f"$queue/{queue}") == (Reason.NO_SUBSCRIPTION_EXISTED,)
    elif how == "disconnect":
        one.disconnect()
    else:
        one.drop()
    assert two.message().payload == b"x"


def test_a_session_that_lasts_takes_its_queues_up_again(mqtt: Wires, queue: str) -> None:
    producer, worker = mqtt.connect(), mqtt.durable(client_id=unique("worker"))
    join(worker, queue)
    producer.publish(f"$queue/{queue}", b"1", 1)
    worker.receive(Publish)
    worker.drop()
    producer.publish(f"$queue/{queue}", b"2", 1)
    again = mqtt.durable(client_id=worker.client_id)
    assert again.connack.session_present
    found = again.messages(2)
    assert sorted(payloads(found)) == [b"1", b"2"]
    assert not any(message.dup for message in found)
    again.nothing()


def test_a_session_remembers_its_queues_when_the_broker_restarts(tmp_path: Path, queue: str) -> None:
    client_id = unique("worker")
    server = Millstream(tmp_path)
    wires = Wires(server)
    join(wires.durable(client_id=client_id), queue)
    wires.connect().publish(f"$queue/{queue}", b"1", 1)
    wires.close()
    server.stop()
    server = Millstream(tmp_path)
    wires = Wires(server)
    try:
        worker = wires.durable(client_id=client_id)
        assert worker.message().payload == b"1"
        assert worker.unsubscribe(f"$queue/{queue}") == (Reason.SUCCESS,)
    finally:
        wires.close()
        server.stop()


@pytest.mark.parametrize(
    "asked", [{"delay_ms": 60_000}, {"priority": 1}, {"message_id": 5}, {"message_id": 5, "delay_ms": 60_000}]
)
def test_a_publish_of_qos_2_that_is_sent_again_after_a_restart_is_one_message(
    tmp_path: Path, queue: str, asked: dict[str, int]
) -> None:
    client_id = unique("producer")
    publish = Publish(f"$queue/{queue}", b"once", 2, packet_id=7, properties=user(**asked))
    for dup in (False, True):
        server = Millstream(tmp_path)
        wires = Wires(server)
        try:
            producer = wires.durable(client_id=client_id)
            producer.send(msgspec.structs.replace(publish, dup=dup))
            assert producer.receive(Pubrec).packet_id == 7
        finally:
            wires.close()
            server.stop()  # which waits for everything that is on its way
    server = Millstream(tmp_path)
    try:
        with server.broker.connect() as client:
            topic = queue.replace("/", ".")
            assert len(client.schedules.list(topic)) + sum(client.offsets(topic).values()) == 1
    finally:
        server.stop()


def test_subscribing_again_keeps_one_consumer(mqtt: Wires, server: Millstream, queue: str) -> None:
    worker = mqtt.connect()
    join(worker, queue)
    join(worker, queue)
    (group,) = server.broker.connect().queues.list(queue.replace("/", "."))
    assert group.consumers == 1


def test_a_consumer_of_a_queue_that_is_deleted_is_told(mqtt: Wires, server: Millstream, queue: str) -> None:
    worker = mqtt.connect()
    join(worker, queue)
    server.broker.connect().delete_topic(queue.replace("/", "."), force=True)
    (goodbye,) = worker.end()
    assert isinstance(goodbye, Disconnect)
    assert "deleted" in (goodbye.properties.reason_string or "")


# --- shares with a queue behind them ---------------------------------------------------------------------------------


@both_versions
def test_the_messages_of_a_member_of_a_durable_share_that_dies_go_to_another(
    mqtt: Wires, version: int, topic: str
) -> None:
    one, producer = mqtt.connect(version), mqtt.connect(version)
    assert one.subscribe(f"$share/crew/{topic}/+", qos=1) == (1,)
    producer.publish(f"{topic}/x", b"1", 1)
    found = one.receive(Publish)
    assert (found.topic, found.payload) == (f"{topic}/x", b"1")
    one.drop()
    producer.publish(f"{topic}/y", b"2", 1)  # nobody is there, and still it is kept
    two = mqtt.connect(version)
    two.subscribe(f"$share/crew/{topic}/+", qos=1)
    assert sorted(two.payloads(2)) == [b"1", b"2"]
    two.ping()
    two.drop()
    three = mqtt.connect(version)
    three.subscribe(f"$share/crew/{topic}/+", qos=1)
    three.nothing()


def test_a_durable_share_begins_with_what_is_published_from_now_on(mqtt: Wires, server: Millstream, topic: str) -> None:
    server.broker.connect().create_topic(topic.replace("/", "."))
    producer, member = mqtt.connect(), mqtt.connect()
    producer.publish(topic, b"before", 1)
    member.subscribe(f"$share/crew/{topic}", qos=1)
    producer.publish(topic, b"after", 1)
    assert member.message().payload == b"after"
    member.nothing()


# --- administration --------------------------------------------------------------------------------------------------


def administer(wire: Wire, topic: str, **document: object) -> Puback:
    wire.send(Publish(f"$admin/queue/{topic}", json.dumps(document).encode(), 1, packet_id=wire.packet_id()))
    return wire.receive(Puback)


def test_queues_are_made_and_changed_by_publishing_json(mqtt: Wires, server: Millstream, queue: str) -> None:
    wire = mqtt.connect()
    assert administer(wire, "create", name=queue, partitions=2, max_depth=5).reason == Reason.SUCCESS
    assert administer(wire, f"{queue}/config", lease_ms="1m").reason == Reason.SUCCESS
    topic = server.broker.connect().topic(queue.replace("/", "."))
    assert (topic.partition_count, topic.config["max_depth"], topic.config["lease_ms"]) == (2, 5, 60_000)
    assert topic.config["retry"] == "durable"


def test_what_is_wrong_with_a_queue_is_said(mqtt: Wires, queue: str) -> None:
    wire = mqtt.connect()
    wrong = {
        "name": administer(wire, "create"),
        "deep": administer(wire, "create", name=queue, deep=5),
        "partitions": administer(wire, "create", name=queue, partitions="many"),
        queue.replace("/", "."): administer(wire, f"{queue}/config", lease_ms=1000),
    }
    for word, answer in wrong.items():
        assert answer.reason == Reason.IMPLEMENTATION_SPECIFIC_ERROR
        assert word in (answer.properties.reason_string or "")
    assert wire.publish("$admin/queue/create", b"[", 1) == Reason.PAYLOAD_FORMAT_INVALID


def test_a_full_queue_refuses_more(mqtt: Wires, queue: str) -> None:
    wire = mqtt.connect()
    administer(wire, "create", name=queue, partitions=1, max_depth=1)
    join(wire, queue)
    assert wire.publish(f"$queue/{queue}", b"1", 1) == Reason.SUCCESS
    assert wire.publish(f"$queue/{queue}", b"2", 1) == Reason.QUOTA_EXCEEDED


def test_statistics_come_at_once_and_again(mqtt: Wires, queue: str) -> None:
    wire = mqtt.connect()
    wire.publish(f"$queue/{queue}", b"x", 1)
    join(wire, queue)
    wire.message()
    assert wire.subscribe(f"$admin/queue/{queue}/stats") == (0,)
    found = wire.message()
    assert found.topic == f"$admin/queue/{queue}/stats"
    shown = json.loads(found.payload)
    assert (shown["name"], shown["partitions"], shown["depth"], shown["dead_letters"]) == (queue, 10, 1, 0)
    (group,) = shown["groups"]
    assert (group["group"], group["leased"], group["consumers"]) == ("workers", 1, 1)
    mqtt.skip(6)
    assert wire.message().topic == f"$admin/queue/{queue}/stats"
    assert wire.subscribe(f"$admin/queue/{queue}/config") == (Reason.TOPIC_FILTER_INVALID,)


# --- rights ----------------------------------------------------------------------------------------------------------


def test_queues_need_the_rights_of_their_topic(tmp_path: Path) -> None:
    server = Millstream(tmp_path, access={"mode": "keys"})
    wires = Wires(server)
    try:
        producer, consumer, boss = (
            _connected(wires, key_for(server.broker, role, scopes=["default:shop.#"]))
            for role in ("produce", "consume", "admin")
        )
        assert producer.publish("$queue/shop/a", b"x", 1) == Reason.SUCCESS
        assert producer.publish("$queue/other/a", b"x", 1) == Reason.NOT_AUTHORIZED
        assert join(producer, "shop/a") == Reason.NOT_AUTHORIZED
        assert consumer.publish("$queue/shop/a", b"x", 1) == Reason.NOT_AUTHORIZED
        assert join(consumer, "shop/a") == 1
        assert join(consumer, "other/a") == Reason.NOT_AUTHORIZED
        receipt = told(consumer.message())["receipt-handle"]
        assert settle(producer, "shop/a", "ack", receipt_handle=receipt).reason == Reason.NOT_AUTHORIZED
        assert settle(consumer, "shop/a", "ack", receipt_handle=receipt).reason == Reason.SUCCESS
        assert administer(consumer, "create", name="shop/b").reason == Reason.NOT_AUTHORIZED
        assert consumer.subscribe("$admin/queue/shop/a/stats") == (Reason.NOT_AUTHORIZED,)
        assert administer(boss, "create", name="shop/b").reason == Reason.SUCCESS
        assert boss.subscribe("$admin/queue/shop/b/stats") == (0,)
    finally:
        wires.close()
        server.stop()


def _connected(wires: Wires, key: str) -> Wire:
    wire = wires.open()
    assert wire.connect(Connect(V5, unique("c"), password=key.encode())).reason == Reason.SUCCESS
    return wire


# --- several filters -------------------------------------------------------------------------------------------------


def test_ordinary_topics_and_queues_can_be_subscribed_to_together(mqtt: Wires, queue: str, topic: str) -> None:
    wire = mqtt.connect()
    packet = Subscribe(
        7, (Filter(topic, 1), Filter(f"$queue/{queue}", 1), Filter("$queue/+", 1)), Properties(subscription_ids=(9,))
    )
    assert wire.subscribe(*packet.filters, properties=packet.properties) == (1, 1, Reason.TOPIC_FILTER_INVALID)
    wire.publish(f"$queue/{queue}", b"q", 1)
    found = wire.message()
    assert (found.payload, found.properties.subscription_ids) == (b"q", (9,))
    wire.publish(topic, b"t", 1)
    assert wire.message().payload == b"t"
