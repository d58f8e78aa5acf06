"""Who may what: API keys as passwords, roles and scopes for publishing and subscribing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.mqtt.packets import V4, V5, Connack, Connect, Disconnect, Filter, Properties, Publish, Subscribe, Will
from millstream.mqtt.reasons import Reason
from tests.e2e.access_world import key_for, new_key
from tests.e2e.mqtt.support import REFERENCE, Millstream, Wire, Wires, both_versions, unique

pytestmark = pytest.mark.skipif(bool(REFERENCE), reason=f"{REFERENCE} has no API keys")


@pytest.fixture(scope="module")
def server() -> Iterator[Millstream]:
    running = Millstream(access={"mode": "keys"})
    yield running
    running.stop()


def log_in(mqtt: Wires, version: int, key: str, **options: object) -> Wire:
    wire = mqtt.open(version)
    answer = wire.connect(Connect(version, unique("c"), True, 60, "device", key.encode(), **options))  # type: ignore[arg-type]
    assert answer.reason == 0, answer
    return wire


def come(mqtt: Wires, client_id: str, key: str) -> Wire:
    """With a session that lasts."""
    wire, told = mqtt.open(), Properties(session_expiry_s=3600)
    assert wire.connect(Connect(V5, client_id, False, 60, "device", key.encode(), properties=told)).reason == 0
    return wire


@both_versions
def test_who_has_no_key_is_not_let_in(mqtt: Wires, version: int) -> None:
    for username, password in ((None, None), ("device", None), ("device", b"wrong"), ("device", b"\xff\x00")):
        wire = mqtt.open(version)
        answer = wire.connect(Connect(version, unique("c"), True, 60, username, password))
        assert answer.reason in (Reason.BAD_USER_NAME_OR_PASSWORD, Reason.NOT_AUTHORIZED)
        assert not answer.session_present
        wire.end()


@both_versions
def test_a_key_with_both_roles_may_publish_and_subscribe(
    mqtt: Wires, server: Millstream, version: int, topic: str
) -> None:
    wire = log_in(mqtt, version, key_for(server.broker, "produce", "consume"))
    assert wire.subscribe(topic, qos=1) == (1,)
    assert wire.publish(topic, b"x", 1) < 0x80
    assert wire.message().payload == b"x"


@both_versions
def test_3_9_3_a_filter_beyond_the_scope_is_refused_and_the_others_hold(
    mqtt: Wires, server: Millstream, version: int, topic: str
) -> None:
    key = key_for(server.broker, "produce", "consume", scopes=[topic.replace("/", ".") + ".#"])
    wire = log_in(mqtt, version, key)
    refused = Reason.NOT_AUTHORIZED if version == V5 else 0x80
    assert wire.subscribe(f"{topic}/mine", "others/theirs", "#", f"{topic}/#", qos=1) == (1, refused, refused, 1)
    wire.publish(f"{topic}/mine", b"x", 1)
    wire.message()


def test_4_3_2_a_publish_that_is_not_allowed_is_refused(mqtt: Wires, server: Millstream, topic: str) -> None:
    watcher = log_in(mqtt, V5, key_for(server.broker, "consume"))
    watcher.subscribe(topic)
    wire = log_in(mqtt, V5, key_for(server.broker, "consume"))
    assert wire.publish(topic, b"x", 1) == Reason.NOT_AUTHORIZED
    assert wire.publish(topic, b"x", 2) == Reason.NOT_AUTHORIZED
    wire.send(Publish(topic, b"x", 0))
    watcher.nothing()


def test_3_3_5_2_in_311_it_is_swallowed_or_ends_the_connection(mqtt: Wires, server: Millstream, topic: str) -> None:
    watcher = log_in(mqtt, V4, key_for(server.broker, "consume"))
    watcher.subscribe(topic)
    wire = log_in(mqtt, V4, key_for(server.broker, "consume"))
    wire.send(Publish(topic, b"x", 1, packet_id=1))
    try:
        wire.next()
    except Exception as closed:
        assert "closed" in str(closed)
    watcher.nothing()


def test_a_key_that_only_produces_subscribes_to_nothing(mqtt: Wires, server: Millstream, topic: str) -> None:
    wire = log_in(mqtt, V5, key_for(server.broker, "produce"))
    assert wire.subscribe(topic, f"$share/g/{topic}") == (Reason.NOT_AUTHORIZED, Reason.NOT_AUTHORIZED)
    assert wire.publish(topic, b"x", 1) < 0x80


def test_names_that_are_no_topics_need_the_right_to_all(mqtt: Wires, server: Millstream) -> None:
    scoped = log_in(mqtt, V5, key_for(server.broker, "produce", "consume", scopes=["a.#"]))
    assert scoped.publish("a/with space", b"x", 1) == Reason.NOT_AUTHORIZED
    assert scoped.subscribe("a/with space") == (Reason.NOT_AUTHORIZED,)
    free = log_in(mqtt, V5, key_for(server.broker, "produce", "consume"))
    assert free.subscribe("a/with space") == (2,)
    assert free.publish("a/with space", b"x", 1) < 0x80


def test_names_like_those_of_inboxes_need_the_right_to_all_unless_there_is_one(
    mqtt: Wires, server: Millstream, topic: str
) -> None:
    """Any reader may reply to an inbox, whose address is a secret; what nobody waits for may reach others."""
    name = f"_inbox/{unique('nobody')}"
    worker = log_in(mqtt, V5, key_for(server.broker, "consume", scopes=[topic.replace("/", ".")]))
    assert worker.publish(name, b"x", 1) == Reason.NOT_AUTHORIZED
    assert worker.subscribe(name, "_inbox/+", "_inbox/#") == (Reason.NOT_AUTHORIZED,) * 3
    free = log_in(mqtt, V5, key_for(server.broker, "produce", "consume"))
    assert free.subscribe("_inbox/#") == (2,)
    assert free.publish(name, b"x", 1) < 0x80
    assert free.message().payload == b"x"
    worker.subscribe(topic)
    with server.broker.connect(key=key_for(server.broker, "produce", "consume")) as client:
        asking = threading.Thread(target=client.request, args=(topic.replace("/", "."), b"?"))
        asking.start()
        told = worker.message().properties
        assert told.response_topic is not None
        said = Properties(correlation_data=told.correlation_data)
        assert worker.publish(told.response_topic, b"!", 1, properties=said) < 0x80
        asking.join()
    free.nothing()


def test_whoever_may_have_a_filter_gets_again_all_that_came_by_it(mqtt: Wires, server: Millstream, topic: str) -> None:
    """Names that are no topics come by a wildcard of the scope; one in flight was given up without a word."""
    names = [f"{topic}/plain", f"{topic}/room 7", f"{topic}/v1.2"]
    scope = topic.replace("/", ".")
    key, client_id = key_for(server.broker, "consume", scopes=[f"{scope}.#"]), unique("c")
    reader = come(mqtt, client_id, key)
    reader.subscribe(f"{topic}/#", qos=1)
    writer = log_in(mqtt, V5, key_for(server.broker, "produce"))
    for name in names:
        writer.publish(name, b"x", 1)
    assert sorted(reader.receive(Publish).topic for _ in names) == names
    reader.drop()
    again = come(mqtt, client_id, key)
    found = [again.receive(Publish) for _ in names]
    assert sorted(message.topic for message in found) == names
    assert all(message.dup for message in found)
    again.drop()
    narrow = come(mqtt, client_id, key_for(server.broker, "consume", scopes=[f"{scope}.plain"]))
    assert narrow.message().topic == names[0], "this one it may have, whatever it is subscribed to"
    narrow.nothing()


def test_a_will_that_is_not_allowed_does_not_happen(mqtt: Wires, server: Millstream, topic: str) -> None:
    watcher = log_in(mqtt, V5, key_for(server.broker, "consume"))
    watcher.subscribe(topic)
    wire = mqtt.open(V5)
    key = key_for(server.broker, "consume")
    answer = wire.connect(Connect(V5, unique("c"), True, 60, "device", key.encode(), Will(topic, b"x", 1)))
    if answer.reason == 0:
        wire.drop()
    else:
        assert answer.reason == Reason.NOT_AUTHORIZED
    watcher.nothing()


def test_a_key_that_is_revoked_ends_its_connections(mqtt: Wires, server: Millstream) -> None:
    admin = server.broker.connect(key=key_for(server.broker, "admin"))
    made = admin.keys.create("consume", "produce", name="device")
    wire = log_in(mqtt, V5, made.key)
    admin.keys.revoke(made.info.id)
    for packet in wire.end():
        assert isinstance(packet, Disconnect)
        assert packet.reason in (Reason.NOT_AUTHORIZED, Reason.ADMINISTRATIVE_ACTION)
    again = mqtt.open(V5)
    answer = again.connect(Connect(V5, unique("c"), True, 60, "device", made.key.encode()))
    assert answer.reason in (Reason.BAD_USER_NAME_OR_PASSWORD, Reason.NOT_AUTHORIZED)


def test_letters_that_lie_with_those_of_other_topics_need_the_right_to_all_of_them(
    mqtt: Wires, server: Millstream, topic: str
) -> None:
    name, shared = topic.replace("/", "."), unique("failed")
    client = server.broker.connect(key=key_for(server.broker, "admin"))
    client.create_topic(shared)
    client.create_topic(name, config={"dead_letter_topic": shared})
    own = log_in(mqtt, V5, key_for(server.broker, "consume", scopes=[name]))
    assert own.subscribe(f"$queue/dlq/{topic}", qos=1) == (Reason.NOT_AUTHORIZED,)
    assert own.publish(f"$queue/dlq/{topic}/$ack", b"any", 1) == Reason.NOT_AUTHORIZED
    both = log_in(mqtt, V5, key_for(server.broker, "consume", scopes=[name, shared]))
    assert both.subscribe(f"$queue/dlq/{topic}", qos=1) == (1,)


def test_subscriptions_of_the_broker_itself_are_closed_to_strangers(mqtt: Wires, server: Millstream) -> None:
    wire = log_in(mqtt, V5, key_for(server.broker, "consume", scopes=["a.#"]))
    wire.send(Subscribe(1, (Filter("$admin/#", 0),)))
    wire.ping()
    assert [packet.reasons[0] >= 0x80 for packet in wire.inbox if hasattr(packet, "reasons")] == [True]


@both_versions
def test_who_comes_back_takes_the_place_of_its_own_connection_in_a_quota(
    mqtt: Wires, server: Millstream, version: int
) -> None:
    """The broker may not have noticed yet that the one before is gone."""
    namespace = unique("team")
    admin = server.broker.connect(key=key_for(server.broker, "admin"))
    admin.create_namespace(namespace)
    admin.set_quota(namespace, connections=1)
    key = key_for(server.broker, "produce", "consume", scopes=[f"{namespace}:#"]).encode()

    def come(client_id: str, password: bytes = key) -> tuple[Wire, Connack]:
        wire = mqtt.open(version)
        return wire, wire.connect(Connect(version, client_id, True, 60, f"{namespace}:device", password))

    first, answer = come("device-7")
    assert answer.reason == 0, answer
    for stranger in (("device-8",), ("device-7", b"wrong")):
        assert come(*stranger)[1].reason != 0
        first.ping()
    second, answer = come("device-7")
    assert answer.reason == 0, answer
    first.end()
    second.ping()
    assert come("device-8")[1].reason != 0
    assert admin.quota(namespace).connections_used == 1
    admin.close()


def leave_will(mqtt: Wires, key: str, will: Will) -> Wire:
    wire, told = mqtt.open(V5), Properties(session_expiry_s=3600)
    assert wire.connect(Connect(V5, unique("c"), True, 60, "device", key.encode(), will, told)).reason == 0
    return wire


def test_a_key_that_is_revoked_takes_the_wills_with_it_that_were_left_with_it(
    mqtt: Wires, server: Millstream, topic: str
) -> None:
    """The broker publishes wills itself, and may do everything."""
    admin = server.broker.connect(key=key_for(server.broker, "admin"))
    watcher = log_in(mqtt, V5, key_for(server.broker, "consume"))
    watcher.subscribe(topic, qos=1)
    revoked, good = (admin.keys.create("produce", name="device") for _ in range(2))
    later = Properties(will_delay_s=30)
    connected = leave_will(mqtt, revoked.key, Will(topic, b"at once", 1))
    for made in (revoked, good):
        leave_will(mqtt, made.key, Will(topic, made.info.id.encode(), 1, properties=later)).drop()
    admin.keys.revoke(revoked.info.id)
    connected.end()
    watcher.nothing()
    mqtt.skip(31)
    assert watcher.message().payload == good.info.id.encode()
    watcher.nothing()
    admin.close()


def test_a_restart_knows_with_which_key_a_will_was_left(tmp_path: Path, topic: str) -> None:
    server = Millstream(tmp_path, access={"mode": "keys"})
    wires = Wires(server)
    made = [new_key(server.broker, "produce") for _ in range(2)]
    for one in made:
        will = Will(topic, one.info.id.encode(), 1, properties=Properties(will_delay_s=30))
        leave_will(wires, one.key, will).drop()
    wires.close()
    server.stop()
    server = Millstream(tmp_path, access={"mode": "keys"})
    wires = Wires(server)
    try:
        server.broker.run(server.broker.broker.access.revoke(made[0].info.id))
        watcher = log_in(wires, V5, key_for(server.broker, "consume"))
        watcher.subscribe(topic, qos=1)
        wires.skip(31)
        assert watcher.message().payload == made[1].info.id.encode()
        watcher.nothing()
    finally:
        wires.close()
        server.stop()
