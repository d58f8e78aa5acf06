"""MQTT from a shell: `millstream mqtt`, against a real broker with real clients."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from millstream.client.blocking.mqtt import Mqtt
from millstream.config import Settings
from millstream.mqtt.packets import V4, V5, Filter, Properties, Will
from millstream.testing.broker import BrokerForTests
from millstream.wire.mqtt_calls import RetainedInfo
from tests.e2e.command_line import CommandLine, keep_logs_out
from tests.e2e.mqtt.support import Borrowed, Millstream, Wires


@pytest.fixture(scope="module")
def server() -> Iterator[Millstream]:
    server = Millstream()
    keep_logs_out()
    wires = Wires(server)
    sensor = wires.connect(V5, "sensor-1", keep_alive_s=60, will=Will("sensors/1/gone", b""))
    sensor.subscribe(Filter("commands/#", 1, no_local=True, retain_handling=2))
    away = wires.durable(V4, "sensor-2")
    away.subscribe("commands/+", qos=1)
    away.disconnect()
    for number in range(3):
        sensor.publish("commands/all", f"command {number}".encode(), 1)
    hour = Properties(message_expiry_s=3600)
    sensor.publish("sensors/1/temperature", b"21.5", 1, retain=True, properties=hour)
    sensor.publish("sensors/1/picture", b"\xff" * 2048, 1, retain=True)
    yield server
    wires.close()
    server.stop()


@pytest.fixture
def run(server: Millstream, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(capsys, monkeypatch, server.broker.address)


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_status_has_the_figures(run: CommandLine) -> None:
    shown = run("mqtt", "status")
    assert "2, 1 that last, 1 of those away" in shown
    assert "2 messages, 2.0 KiB" in shown
    assert json.loads(run("mqtt", "status", "--everywhere", "--json"))["connected"] == 1


def test_sessions_are_listed_and_shown(run: CommandLine) -> None:
    shown = run("mqtt", "sessions")
    assert "sensor-1" in shown
    [line] = [line for line in words(shown) if line and line[0] == "sensor-2"]
    assert line == ["sensor-2", "away", "-", "-", "7", "d", "1", "0", "3", "0"]
    assert [one["client_id"] for one in json.loads(run("mqtt", "sessions", "--away", "--json"))] == ["sensor-2"]
    assert [one["client_id"] for one in json.loads(run("mqtt", "sessions", "sensor-", "--max", "1", "--json"))] == [
        "sensor-1"
    ]
    assert "say one of them" in run("mqtt", "sessions", "--away", "--connected", code=2, errors=True)

    shown = run("mqtt", "session", "sensor-1")
    for text in ("keep-alive", "1 m", "5.0", "with its connection", "sensors/1/gone", "no local, no retained"):
        assert text in shown
    shown = run("mqtt", "session", "sensor-2")
    assert "7 d without its client" in shown
    assert "3 in the log, 0 in memory" in shown
    assert ["commands.all", "0", "0", "3"] in words(shown)
    assert "there is no MQTT session 'x'" in run("mqtt", "session", "x", code=1, errors=True)


def test_what_is_taken_out_while_retained_messages_are_shown_is_left_out(
    run: CommandLine, server: Millstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_ever = Mqtt.retained

    def list_and_lose(self: Mqtt, topic_filter: str) -> Iterator[RetainedInfo]:
        listed = list(as_ever(self, topic_filter))
        self.clear_retained("rooms/1")
        return iter(listed)

    wires = Wires(server)
    visitor = wires.connect(V5, "visitor")
    for number in range(3):
        visitor.publish(f"rooms/{number}", b"warm", 1, retain=True)
    monkeypatch.setattr(Mqtt, "retained", list_and_lose)
    shown = json.loads(run("mqtt", "retained", "rooms/#", "--values", "--json"))
    assert [one["topic"] for one in shown] == ["rooms/0", "rooms/2"]
    run("mqtt", "clear", "rooms/#", "--yes")
    wires.close()


def test_retained_messages_are_listed_and_taken_out(run: CommandLine) -> None:
    assert "2 KiB" in run("mqtt", "retained")
    shown = run("mqtt", "retained", "sensors/+/temperature", "--values")
    assert "21.5" in shown
    assert "picture" not in shown
    assert run("mqtt", "clear", "sensors/#", "--dry-run").strip() == "would take out 2 retained messages"
    counted = json.loads(run("mqtt", "clear", "sensors/#", "--dry-run", "--json"))
    assert counted == {"filter": "sensors/#", "cleared": 2, "dry_run": True}
    assert "Add --yes" in run("mqtt", "clear", "sensors/#", code=2, errors=True)
    assert run("mqtt", "clear", "sensors/1/picture", "--yes").strip() == "took out 1 retained message"
    assert [one["topic"] for one in json.loads(run("mqtt", "retained", "--json"))] == ["sensors/1/temperature"]


def test_top_and_doctor_speak_of_mqtt(run: CommandLine, server: Millstream) -> None:
    assert "MQTT: connected 1  sessions 2  away 1" in run("top", "--once")
    arguments = ("--broker", server.broker.address, "--json")
    checks = json.loads(
        run("doctor", *arguments, "--set", "server.port=0", "--set", "http.port=0", "--set", "mqtt.port=0")
    )["checks"]
    [mqtt] = [check for check in checks if check["name"] == "mqtt"]
    assert mqtt["verdict"] == "ok"
    assert "1 connected, 2 sessions" in mqtt["found"]


def test_the_doctor_warns_before_a_limit_is_reached(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.model_validate({"mqtt": {"sessions_max": 10}})
    with BrokerForTests(settings=settings, mqtt=True) as broker:
        wires = Wires(Borrowed(broker))
        for number in range(9):
            wires.durable(V5, f"c{number}").disconnect()
        monkeypatch.setenv("MILLSTREAM_BROKER", broker.address)
        shown = run("doctor", "--json", "--set", "server.port=0", "--set", "http.port=0", "--set", "mqtt.port=0")
        [mqtt] = [check for check in json.loads(shown)["checks"] if check["name"] == "mqtt"]
        assert mqtt["verdict"] == "warn"
        assert "9 of mqtt.sessions_max = 10" in mqtt["found"]


def test_clients_are_disconnected_and_forgotten(run: CommandLine) -> None:
    assert run("mqtt", "disconnect", "sensor-1").strip() == "disconnected sensor-1"
    assert run("mqtt", "disconnect", "sensor-2").strip() == "sensor-2 was not connected"
    told = json.loads(run("mqtt", "disconnect", "sensor-2", "--json"))
    assert told == {"client": "sensor-2", "disconnected": False}
    assert "Add --yes" in run("mqtt", "forget", "sensor-2", code=2, errors=True)
    assert run("mqtt", "forget", "sensor-2", "--yes").strip() == "forgot the session of sensor-2"
    assert json.loads(run("mqtt", "sessions", "--json")) == []
