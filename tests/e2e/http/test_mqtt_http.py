"""MQTT over HTTP: sessions and retained messages."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from millstream.mqtt.packets import V5, Disconnect, Properties
from millstream.testing.broker import BrokerForTests
from tests.e2e.mqtt.support import Borrowed, Wires


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests(http=True, mqtt=True) as running:
        yield running


@pytest.fixture
def mqtt(broker: BrokerForTests) -> Iterator[Wires]:
    wires = Wires(Borrowed(broker))
    yield wires
    wires.close()


def test_a_session_from_its_beginning_to_its_end(http: httpx.Client, mqtt: Wires) -> None:
    client_id = "floor 1/sensor?7"  # what must be escaped in a path
    wire = mqtt.durable(V5, client_id)
    wire.subscribe("halls/+/light", qos=1)
    assert http.get("/mqtt").json()["connected"] == 1
    page = http.get("/mqtt/sessions", params={"prefix": "floor", "connected": True}).json()
    assert ([one["client_id"] for one in page["sessions"]], page["after"]) == ([client_id], "")
    path = f"/mqtt/sessions/{client_id.replace('/', '%2F').replace('?', '%3F')}"
    found = http.get(path).json()
    assert (found["client_id"], found["connected"], found["version"]) == (client_id, True, 5)
    assert found["subscribed"][0]["filter"] == "halls/+/light"

    answer = http.post(f"{path}/disconnect", json={"reason": "closing time"})
    assert answer.json() == {"disconnected": True}
    [farewell] = [packet for packet in wire.end() if isinstance(packet, Disconnect)]
    assert farewell.properties.reason_string == "closing time"
    assert http.post(f"{path}/disconnect", json={}).json() == {"disconnected": False}
    mqtt.connect(V5).publish("halls/1/light", b"on", 1)
    assert http.get(path).json()["waiting"] == 1
    assert http.get("/mqtt/sessions", params={"connected": False}).json()["sessions"][0]["waiting"] == 1
    assert http.delete(path).status_code == 204
    gone = http.get(path)
    assert (gone.status_code, gone.json()["code"]) == (404, "SESSION_NOT_FOUND")


def test_retained_messages_are_browsed_and_cleared(http: httpx.Client, mqtt: Wires) -> None:
    wire = mqtt.connect(V5)
    user = Properties(user=(("unit", "celsius"),))
    wire.publish("rooms/1/climate", b'{"t": 21.5}', 1, retain=True, properties=user)
    wire.publish("rooms/2/picture", b"\xff\xd8", 1, retain=True)
    page = http.get("/mqtt/retained", params={"filter": "rooms/#", "limit": 1}).json()
    assert [one["topic"] for one in page["messages"]] == ["rooms/1/climate"]
    page = http.get("/mqtt/retained", params={"filter": "rooms/#", "limit": 1, "after": page["after"]}).json()
    assert ([one["topic"] for one in page["messages"]], page["after"]) == (["rooms/2/picture"], "")
    shown = http.get("/mqtt/retained/message", params={"topic": "rooms/1/climate"}).json()
    assert (shown["value"], shown["encoding"], shown["user_properties"]) == (
        {"t": 21.5},
        "json",
        [["unit", "celsius"]],
    )
    shown = http.get("/mqtt/retained/message", params={"topic": "rooms/2/picture"}).json()
    assert (shown["value"], shown["encoding"], shown["size"]) == ("/9g=", "base64", 2)
    assert http.get("/mqtt/retained/message", params={"topic": "rooms/3"}).status_code == 404
    assert http.delete("/mqtt/retained", params={"filter": "rooms/#", "dry_run": True}).json() == {"cleared": 2}
    assert http.delete("/mqtt/retained", params={"filter": "rooms/+/picture"}).json() == {"cleared": 1}
    assert http.get("/mqtt").json()["retained"] == 1
    assert http.delete("/mqtt/retained").status_code == 400, "nobody clears everything by leaving something out"
    wrong = http.get("/mqtt/retained", params={"filter": "a/#/b"})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "INVALID_ARGUMENT")


def test_another_namespace_has_its_own(http: httpx.Client, mqtt: Wires) -> None:
    mqtt.connect(V5, "here")
    assert http.get("/namespaces/elsewhere/mqtt").json()["code"] == "NAMESPACE_NOT_FOUND"
    http.post("/namespaces", json={"name": "elsewhere"})
    assert http.get("/namespaces/elsewhere/mqtt/sessions").json() == {"sessions": [], "after": ""}
    assert http.get("/namespaces/elsewhere/mqtt").json()["sessions"] == 0
