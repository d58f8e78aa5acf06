"""kill -9 of the broker at every step of the handshakes, and under load; the long version is in tests/slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import millstream
from millstream.mqtt.packets import V4, V5, Filter, Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel, Will
from millstream.testing.broker import BrokerProcess
from tests.e2e.mqtt.support import REFERENCE, Address, Wires, free_port, unique
from tests.mqtt_kills import MqttKillRun

pytestmark = pytest.mark.skipif(bool(REFERENCE), reason=f"{REFERENCE} keeps nothing that it did not save")

#: What happens before the kill, and after `yield` what happens after it.
Story = Callable[[Wires, int, str], Iterator[None]]
STORIES: list[Story] = []


def story(told: Story) -> Story:
    STORIES.append(told)
    return told


@story
def a_confirmed_publish_waits_for_its_reader(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic)
    reader.disconnect()
    for qos in (1, 2):
        writer.publish(topic, b"%d" % qos, qos)
    yield
    again = mqtt.durable(version, reader.client_id)
    assert again.connack.session_present
    assert again.payloads(2) == [b"1", b"2"]
    again.nothing()


@story
def a_name_that_is_no_topic_waits_as_well(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    name = f"/with space//{topic}"
    reader = mqtt.durable(version)
    reader.subscribe(name)
    reader.disconnect()
    mqtt.connect(version).publish(name, b"x", 2)
    yield
    found = mqtt.durable(version, reader.client_id).message()
    assert (found.topic, found.payload) == (name, b"x")


@story
def an_unconfirmed_delivery_is_repeated_with_its_id(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic)
    for qos in (1, 2):
        writer.publish(topic, b"%d" % qos, qos)
    first = [reader.receive(Publish) for _ in range(2)]
    yield
    again = mqtt.durable(version, reader.client_id)
    repeated = again.messages(2)
    assert [message.payload for message in repeated] == [b"1", b"2"]
    # The id of a QoS 2 message is what keeps it from being taken twice.
    assert repeated[1].packet_id == first[1].packet_id
    assert repeated[1].dup
    again.nothing()


@story
def a_received_delivery_is_only_released(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic)
    writer.publish(topic, b"x", 2)
    found = reader.receive(Publish)
    reader.send(Pubrec(found.packet_id))
    reader.receive(Pubrel)
    yield
    again = mqtt.durable(version, reader.client_id)
    assert again.receive(Pubrel).packet_id == found.packet_id
    again.send(Pubcomp(found.packet_id))
    again.nothing()


@story
def a_completed_delivery_does_not_come_back(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic)
    for number in range(30):
        writer.publish(topic, b"%d" % number, 2)
        reader.message()
    reader.ping()
    yield
    again = mqtt.durable(version, reader.client_id)
    assert again.connack.session_present
    # The last PUBCOMP may be forgotten; then its PUBREL comes again, and never the message.
    again.nothing(Publish)


@story
def confirmations_of_qos_1_are_kept(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    """QoS 1 may come twice, but not everything that was ever confirmed."""
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(f"{topic}/+", qos=1)
    for number in range(50):
        writer.publish(f"{topic}/{number % 3}", b"%d" % number, 1)
        reader.send(Puback(reader.receive(Publish).packet_id))
    reader.ping()
    reader.nothing(seconds=0.3)
    yield
    mqtt.durable(version, reader.client_id).nothing()


@story
def a_received_publish_is_not_taken_twice(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    reader, writer = mqtt.durable(version), mqtt.durable(version)
    reader.subscribe(topic)
    writer.send(Publish(topic, b"x", 2, packet_id=7))
    writer.receive(Pubrec)
    yield
    back, again = mqtt.durable(version, reader.client_id), mqtt.durable(version, writer.client_id)
    assert again.connack.session_present
    again.send(Publish(topic, b"x", 2, dup=True, packet_id=7))
    assert again.receive(Pubrec).packet_id == 7
    again.send(Pubrel(7))
    assert again.receive(Pubcomp).packet_id == 7
    assert back.message().payload == b"x"
    back.nothing()


@story
def a_received_publish_is_published_at_its_release(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    reader, writer = mqtt.durable(version), mqtt.durable(version)
    reader.subscribe(topic)
    writer.send(Publish(topic, b"x", 2, packet_id=8))
    writer.receive(Pubrec)
    yield
    back, again = mqtt.durable(version, reader.client_id), mqtt.durable(version, writer.client_id)
    again.send(Pubrel(8))
    assert again.receive(Pubcomp).reason == 0
    assert back.message().payload == b"x"
    again.send(Pubrel(8))
    again.receive(Pubcomp)
    back.nothing()


@story
def a_completed_publish_stays_completed(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    reader, writer = mqtt.durable(version), mqtt.durable(version)
    reader.subscribe(topic)
    reader.disconnect()
    writer.send(Publish(topic, b"x", 2, packet_id=9))
    writer.receive(Pubrec)
    writer.send(Pubrel(9))
    writer.receive(Pubcomp)
    yield
    back, again = mqtt.durable(version, reader.client_id), mqtt.durable(version, writer.client_id)
    again.send(Pubrel(9))
    again.receive(Pubcomp)
    assert back.message().payload == b"x"
    back.nothing()


@story
def subscriptions_are_kept_and_forgotten(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    reader = mqtt.durable(version)
    reader.subscribe(f"{topic}/a", f"{topic}/b")
    reader.unsubscribe(f"{topic}/a")
    yield
    again = mqtt.durable(version, reader.client_id)
    writer = mqtt.connect(version)
    for name in ("a", "b"):
        writer.publish(f"{topic}/{name}", name.encode(), 1)
    assert again.message().payload == b"b"
    again.nothing()


@story
def retained_messages_are_kept_and_deleted(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    writer = mqtt.connect(version)
    for name in ("kept", "deleted"):
        writer.publish(f"{topic}/{name}", name.encode(), 1, retain=True)
    writer.publish(f"{topic}/deleted", b"", 1, retain=True)
    yield
    reader = mqtt.connect(version)
    reader.subscribe(f"{topic}/#")
    found = reader.message()
    assert (found.payload, found.retain) == (b"kept", True)
    reader.nothing()


@story
def a_clean_session_is_gone(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    first = mqtt.durable(version)
    first.subscribe(topic)
    first.disconnect()
    mqtt.connect(version, first.client_id, clean=True, expiry_s=0)
    yield
    assert not mqtt.durable(version, first.client_id).connack.session_present


@story
def properties_and_options_are_kept(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    reader = mqtt.durable(V5)
    reader.subscribe(Filter(topic, 1, retain_as_published=True), properties=Properties(subscription_ids=(77,)))
    reader.disconnect()
    said = Properties(content_type="a/b", correlation_data=b"\xff", user=(("a", "1"), ("a", "2")))
    mqtt.connect(V5).publish(topic, b"x", 1, retain=True, properties=said)
    yield
    found = mqtt.durable(V5, reader.client_id).message()
    assert found.properties == Properties(
        content_type="a/b", correlation_data=b"\xff", user=(("a", "1"), ("a", "2")), subscription_ids=(77,)
    )
    assert found.retain


@story
def the_will_of_a_lost_client_is_published_or_waits(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    """A client that was lost before the kill, whose will waits for its delay."""
    if version == V4:
        yield
        return
    reader = mqtt.durable(V5)
    reader.subscribe(topic)
    reader.disconnect()
    mqtt.durable(V5, will=Will(topic, b"gone", 1, properties=Properties(will_delay_s=1))).drop()
    mqtt.connect(V5).ping()
    yield
    assert mqtt.durable(V5, reader.client_id).message().payload == b"gone"


@story
def what_a_member_of_a_share_has_not_confirmed_is_sent_again(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    member, writer = mqtt.durable(version), mqtt.connect(version)
    member.subscribe(f"$share/work/{topic}")
    for qos in (1, 2):
        writer.publish(topic, b"%d" % qos, qos)
    first = [member.receive(Publish) for _ in range(2)]
    yield
    again = mqtt.durable(version, member.client_id).messages(2)
    assert [(message.payload, message.packet_id) for message in again] == [(m.payload, m.packet_id) for m in first]


@story
def what_waits_for_a_member_of_a_share_comes_when_it_is_back(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    member, writer = mqtt.durable(V5, receive_maximum=1), mqtt.connect(version)
    member.subscribe(f"$share/work/{topic}")
    for number in range(5):
        writer.publish(topic, b"%d" % number, 1)
    assert member.receive(Publish).payload == b"0"
    yield
    again = mqtt.durable(V5, member.client_id)
    assert again.payloads(5) == [b"0", b"1", b"2", b"3", b"4"]
    again.nothing()


@story
def a_completed_id_can_be_used_again(mqtt: Wires, version: int, topic: str) -> Iterator[None]:
    """The last of the stories, because the kill must come right after the PUBCOMP."""
    reader, writer = mqtt.durable(version), mqtt.durable(version)
    reader.subscribe(topic)
    writer.send(Publish(topic, b"old", 2, packet_id=446))
    writer.receive(Pubrec)
    writer.send(Pubrel(446))
    writer.receive(Pubcomp)
    yield
    back, again = mqtt.durable(version, reader.client_id), mqtt.durable(version, writer.client_id)
    again.send(Publish(topic, b"new", 2, packet_id=446))
    again.receive(Pubrec)
    again.send(Pubrel(446))
    again.receive(Pubcomp)
    assert back.payloads(2) == [b"old", b"new"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], BaseException | None]:
    """All stories are told at once, with one kill in the middle."""
    server = Address("127.0.0.1", free_port())
    data: Path = tmp_path_factory.mktemp("mqtt") / "data"
    told: dict[tuple[str, int], BaseException | None] = {}
    with BrokerProcess(data, arguments=("--mqtt-port", str(server.port))) as broker:
        mqtt = Wires(server)
        begun = []
        for tell in STORIES:
            for version in (V4, V5):
                begun.append(((tell.__name__, version), tell(mqtt, version, f"kills/{unique('t')}")))
        _go_on(begun, told)
        broker.kill()
        broker.start()
        _go_on(begun, told)
        mqtt.close()
        assert broker.stop() == 0
    return told


def _go_on(
    begun: list[tuple[tuple[str, int], Iterator[None]]], told: dict[tuple[str, int], BaseException | None]
) -> None:
    for name, rest in begun:
        if told.get(name) is None:
            try:
                next(rest, None)
                told[name] = None
            except Exception as failure:
                told[name] = failure


@pytest.mark.parametrize("version", [V4, V5], ids=["3.1.1", "5.0"])
@pytest.mark.parametrize("name", [tell.__name__ for tell in STORIES])
def test_after_a_kill(outcomes: dict[tuple[str, int], BaseException | None], name: str, version: int) -> None:
    failure = outcomes[name, version]
    if failure is not None:
        raise AssertionError(f"{name}: {failure!r}") from failure


@pytest.mark.slow
def test_mqtt_under_load_survives_kill_nine(tmp_path: Path) -> None:
    """Twice: in the middle of everything, and at the end."""
    with MqttKillRun(tmp_path, 5, brief=True) as run:
        run.round()
        run.finish()
        run.audit()


@pytest.mark.parametrize("version", [V4, V5], ids=["3.1.1", "5.0"])
def test_what_a_client_was_told_of_sessions_and_wills_holds_after_a_kill_at_once(tmp_path: Path, version: int) -> None:
    """Facts that nobody waits for are written together, by default within 50 ms: here that takes long."""
    config = tmp_path / "config.yaml"
    config.write_text("storage:\n  ack_flush_interval_ms: 10000\n")
    server = Address("127.0.0.1", free_port())
    will = Will("wills/one", b"gone", 1)
    arguments = ("--mqtt-port", str(server.port), "--config", str(config))
    with BrokerProcess(tmp_path / "data", arguments=arguments) as broker:
        mqtt = Wires(server)
        ended, reader = mqtt.durable(version), mqtt.durable(version)
        ended.subscribe("ended")
        ended.disconnect()
        reader.subscribe("wills/+")
        left = mqtt.durable(version, will=will)
        lost = mqtt.durable(version, will=Will("wills/two", b"lost", 1))
        given_up = mqtt.durable(version)
        given_up.disconnect(0, Properties(session_expiry_s=0) if version == V5 else None)
        left.disconnect()
        assert not mqtt.connect(version, ended.client_id, clean=True).connack.session_present
        lost.drop()
        assert reader.message().payload == b"lost"
        broker.kill()
        broker.start()
        assert not mqtt.durable(version, ended.client_id).connack.session_present
        assert mqtt.durable(version, given_up.client_id).connack.session_present is (version == V4)
        writer = mqtt.connect(version)
        with millstream.connect(broker.address) as client:
            for name, stored in (("one", [b"end"]), ("two", [b"lost", b"end"])):
                writer.publish(f"wills/{name}", b"end", 1)
                assert [it.value for it in client.browse(f"wills.{name}")] == stored
        mqtt.close()
