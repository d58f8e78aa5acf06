"""The ways in to MQTT, with a client that others wrote: TCP and WebSocket, of a broker as users start it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.testing.broker import BrokerForTests, BrokerProcess
from tests.e2e.mqtt.round_trip import round_trip

paho: Any = pytest.importorskip("paho.mqtt.client")


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests(http=True, mqtt=True) as broker:
        yield broker


def test_tcp_and_websocket_lead_to_the_same_broker(broker: BrokerForTests) -> None:
    round_trip(broker.mqtt_port, "tcp")
    round_trip(int(broker.url.rpartition(":")[2]), "websockets")


def test_both_ways_in_are_listed_with_their_clients(broker: BrokerForTests) -> None:
    clients = []
    for port, transport in ((broker.mqtt_port, "tcp"), (int(broker.url.rpartition(":")[2]), "websockets")):
        client = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id=f"by-{transport}", transport=transport)
        client.connect("127.0.0.1", port)
        client.loop_start()
        clients.append(client)
    with broker.connect() as native:
        while len(found := [it.client_id for it in native.admin.connections() if it.client_id.startswith("by-")]) < 2:
            pass
    assert sorted(found) == ["by-tcp", "by-websockets"]
    for client in clients:
        client.disconnect()
        client.loop_stop()


@pytest.mark.usefixtures("as_users_start_it")
def test_a_broker_as_users_start_it_speaks_mqtt_until_it_is_stopped(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as process:
        round_trip(process.mqtt_port, "tcp")
        lost: queue.Queue[Any] = queue.Queue()
        client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        client.on_disconnect = lambda *about: lost.put(about[3])
        client.connect("127.0.0.1", process.mqtt_port)
        client.loop_start()
        while not client.is_connected():
            pass
        assert process.stop() == 0
        assert "shutting down" in str(lost.get(timeout=10))
        client.loop_stop()
