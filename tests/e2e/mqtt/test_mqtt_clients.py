"""Clients that others wrote, in both versions, unmodified.  A client that is not installed is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.mqtt.packets import V4, V5
from tests.e2e.mqtt.clients import TOOLS, LastWords, Message, Paho, Tool, Wish, every_tool, why_not
from tests.e2e.mqtt.support import Server, running_server, unique


@every_tool
def test_publish_and_subscribe_with_every_qos(server: Server, tool: Tool, version: int, topic: str) -> None:
    reader = tool.reader(server.port, Wish(version, f"{topic}/+", unique("c")))
    messages = [Message(f"{topic}/x", b"qos %d" % qos, qos) for qos in (0, 1, 2)]
    tool.publish(server.port, version, *messages)
    assert sorted(reader.next() for _ in messages) == messages
    reader.close()


@every_tool
def test_retained_messages(server: Server, tool: Tool, version: int, topic: str) -> None:
    tool.publish(server.port, version, Message(topic, b"kept", 1, True))
    reader = tool.reader(server.port, Wish(version, topic, unique("c")))
    assert reader.next() == Message(topic, b"kept", 1, True)
    reader.close()


@every_tool
def test_last_words(server: Server, tool: Tool, version: int, topic: str) -> None:
    watcher = Paho().reader(server.port, Wish(version, topic, unique("c")))
    will = LastWords(topic, b"gone")
    tool.reader(server.port, Wish(version, f"{topic}/own", unique("c"), will=will)).drop()
    assert watcher.next() == Message(topic, b"gone", 1)
    watcher.close()


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Message]]:
    """What every client found after the server had been stopped and started: one restart is enough for all."""
    data: Path = tmp_path_factory.mktemp("mqtt") / "data"
    cases = [(tool, version) for tool in TOOLS if not why_not(tool) for version in (V4, V5)]
    with running_server(data) as first:
        for tool, version in cases:
            name = _name(tool, version)
            tool.reader(first.port, Wish(version, f"restart/{name}/#", name, durable=True)).close()
            before = Message(f"restart/{name}/before", b"one", 2)
            tool.publish(first.port, version, before, Message(f"restart/{name}/kept", b"kept", 1, True))
    found: dict[str, list[Message]] = {}
    with running_server(data) as second:
        for tool, version in cases:
            name = _name(tool, version)
            tool.publish(second.port, version, Message(f"restart/{name}/after", b"two", 1))
            reader = tool.reader(second.port, Wish(version, f"restart/{name}/#", name, durable=True))
            found[name] = [reader.next() for _ in range(4)]
            reader.close()
    return found


def _name(tool: Tool, version: int) -> str:
    return f"{tool.name.split()[0].replace('.', '')}-{version}"


@every_tool
def test_a_session_outlives_a_restart_of_the_server(
    restarted: dict[str, list[Message]], tool: Tool, version: int
) -> None:
    topic = f"restart/{_name(tool, version)}"
    found = restarted[_name(tool, version)]
    # Clients hand QoS 1 and 2 over at different moments, so there is no order between them.
    assert sorted(message for message in found if not message.retain) == [
        Message(f"{topic}/after", b"two", 1),
        Message(f"{topic}/before", b"one", 2),
        Message(f"{topic}/kept", b"kept", 1),
    ]
    assert [message for message in found if message.retain] == [Message(f"{topic}/kept", b"kept", 1, True)]


def test_all_of_them_talk_to_each_other(server: Server, topic: str) -> None:
    present = [(tool, version) for tool in TOOLS for version in (V4, V5) if not why_not(tool)]
    readers = [tool.reader(server.port, Wish(version, topic, unique("c"))) for tool, version in present]
    for tool, version in present:
        name = f"{tool.name} {version}".encode()
        tool.publish(server.port, version, Message(topic, name, 1))
        for reader in readers:
            assert reader.next() == Message(topic, name, 1)
    for reader in readers:
        reader.close()
