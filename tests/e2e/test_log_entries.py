"""What the log of a broker says of those who use it, at which level."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import millstream
from millstream.config import Settings
from millstream.errors import Unauthorized
from millstream.server.logs import set_log_level
from millstream.testing.broker import BrokerForTests
from tests.e2e.access_world import guarded
from tests.e2e.mqtt.support import Address, Wires
from tests.logged import Logged, logged
from tests.native import NativeClient
from tests.waiting import eventually


@pytest.fixture
def log() -> Iterator[Logged]:
    with logged() as entries:
        yield entries


@pytest.mark.parametrize("level", ["debug", "error"])
def test_a_new_level_is_said_in_the_log_by_whom_and_what_it_was(
    broker: BrokerForTests, log: Logged, level: str
) -> None:
    broker.broker.on_log_level = set_log_level
    with broker.connect(client_id="operator") as client:
        client.admin.set_log_level(level)  # type: ignore[arg-type]
    entry = log.one("log level changed")
    assert (entry["level"], entry["now"], entry["before"]) == ("warning", level, "info")
    assert (entry["client"], entry["logger"]) == ("operator", "millstream.administration")


def test_a_native_client_is_seen_coming_and_going(broker: BrokerForTests, log: Logged) -> None:
    with broker.connect(client_id="worker-7") as client:
        client.create_topic("orders")
        came = log.one("client connected")
    gone = log.one("client gone")
    for entry in (came, gone):
        assert (entry["level"], entry["door"], entry["client"]) == ("debug", "native", "worker-7")
        assert (entry["namespace"], entry["address"].rpartition(":")[0]) == ("default", "127.0.0.1")
    assert gone["reason"] == "the client closed the connection"


def test_nothing_of_it_is_written_unless_it_is_asked_for(broker: BrokerForTests) -> None:
    with logged("info") as log:
        with broker.connect() as client:
            client.publish("orders", b"1")
        assert not [entry for entry in log.all() if entry["level"] == "debug" or "client" in entry["event"]]


def test_who_speaks_another_language_is_refused_with_address_and_code(broker: BrokerForTests, log: Logged) -> None:
    host, port = broker.address.split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: millstream\r\n\r\n")
        while stranger.recv(1000):
            pass
        mine = "{}:{}".format(*stranger.getsockname())
    entry = log.one("connection refused")
    assert (entry["level"], entry["door"], entry["address"]) == ("info", "native", mine)
    assert entry["code"] == "INVALID_FORMAT"


def test_a_wrong_key_is_refused_at_every_door_and_not_written_down(log: Logged) -> None:
    with guarded(http=True) as broker:
        with pytest.raises(Unauthorized), millstream.connect(broker.address, key="ms_wrong_secret") as client:
            client.topics()
        headers = {"authorization": "Bearer ms_wrong_secret"}
        assert httpx.get(f"{broker.url}/api/v1/topics?key=ms_hidden", headers=headers).status_code == 401
        with pytest.raises(InvalidStatus), connect(f"{broker.url.replace('http', 'ws')}/api/v1/ws?key=ms_hidden"):
            pass
        refused = log.all("connection refused")
        assert [(entry["door"], entry["code"]) for entry in refused] == [
            ("native", "UNAUTHORIZED"),
            ("http", "UNAUTHORIZED"),
            ("http", "UNAUTHORIZED"),
        ]
        assert "secret" not in str(log.all())
        assert "ms_hidden" not in str(log.all())


def test_who_is_one_too_many_is_refused(log: Logged) -> None:
    settings = Settings.model_validate({"server": {"max_connections": 1, "heartbeat_ms": 3_600_000}})
    with BrokerForTests(settings=settings) as broker, broker.connect() as client:
        client.topics()
        with NativeClient(broker.address, hello=False) as other:
            while other.socket.recv(1000):
                pass
    assert log.one("connection refused")["code"] == "QUOTA_EXCEEDED"


def test_an_attacker_cannot_fill_the_log(broker: BrokerForTests, log: Logged) -> None:
    host, port = broker.address.split(":")
    for _ in range(60):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while stranger.recv(1000):
                pass
    assert len(log.all("connection refused")) < 40


def test_a_websocket_and_an_mqtt_client_are_seen_coming_and_going(log: Logged) -> None:
    with BrokerForTests(http=True, mqtt=True) as broker:
        with connect(f"{broker.url.replace('http', 'ws')}/api/v1/ws?client_id=browser") as line:
            line.recv()
        assert log.one("client connected", door="websocket")["client"] == "browser"
        assert log.one("client gone", door="websocket")["reason"] == "the client closed the connection"
        wires = Wires(Address("127.0.0.1", broker.mqtt_port))
        wire = wires.connect(client_id="sensor")
        assert log.one("client connected", door="mqtt")["client"] == "sensor"
        wires.connect(client_id="sensor")
        assert log.one("client gone", door="mqtt")["reason"] == "another client has the same identifier"
        wire.close()


def test_an_http_request_is_one_entry_without_its_query(log: Logged) -> None:
    with BrokerForTests(http=True) as broker:
        httpx.get(f"{broker.url}/api/v1/topics?limit=3", headers={"x-client-id": "shop", "x-request-id": "r-1"})
        httpx.get(f"{broker.url}/api/v1/topics/none?key=hidden")
        eventually(lambda: len(log.all("request")) == 2)  # it is written when the answer is on its way
        found, missed = log.all("request")
    assert (found["method"], found["path"], found["status"]) == ("GET", "/api/v1/topics", 200)
    assert (found["client"], found["request"], found["logger"]) == ("shop", "r-1", "millstream.http")
    assert found["took_ms"] < 5_000
    assert missed["status"] == 400
    assert "hidden" not in str(log.all())


def test_a_bad_http_request_is_refused_with_its_address(log: Logged) -> None:
    with BrokerForTests(http=True) as broker:
        host, port = broker.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
            while stranger.recv(1000):
                pass
    assert log.one("connection refused")["code"] == "INVALID_FORMAT"


def test_a_rebalance_says_why_and_who_takes_part(broker: BrokerForTests, log: Logged) -> None:
    with NativeClient(broker.address) as client:
        client.call("topic.create", name="orders", partitions=2)
        first = client.call("group.join", group="g", topics=["orders"])["member_id"]
        second = client.call("group.join", group="g", topics=["orders"])["member_id"]
        client.call("group.leave", group="g", member_id=second)
        client.call("topic.alter", name="orders", partitions=4)
        while not log.all(reason="a member expired"):
            broker.clock.advance("3s")  # not more at once: a broker that stood still itself holds it against nobody
            client.call("topic.list")
    entries = log.all("group rebalanced")
    assert [(entry["reason"], entry["members"]) for entry in entries] == [
        ("a member joined", 1),
        ("a member joined", 2),
        ("a member left", 1),
        ("topics changed", 1),
    ]
    last = log.one("group has other members")  # nobody is left to have its partitions
    assert (last["reason"], last["members"], last["generation"]) == ("a member expired", 0, entries[-1]["generation"])
    assert [entry["generation"] for entry in entries] == sorted({entry["generation"] for entry in entries})
    assert {(entry["group"], entry["namespace"], entry["level"]) for entry in entries} == {("g", "default", "info")}
    assert (entries[0]["member"], entries[2]["member"]) == (first, second)


def test_leases_that_expire_are_one_entry_a_round(broker: BrokerForTests, log: Logged) -> None:
    with broker.connect() as client:
        client.publish_many("jobs", [b"job"] * 30)
        with client.queue("jobs", group="workers", lease="10s") as queue:
            assert len(queue.lease(max=30, wait=5)) == 30
            broker.clock.advance("11s")
            entry = log.one("leases expired")
    assert (entry["topic"], entry["group"], entry["messages"]) == ("jobs", "workers", 30)


def test_what_is_read_at_the_start_and_sealed_later_is_told_step_by_step(tmp_path: Path, log: Logged) -> None:
    with BrokerForTests(tmp_path) as broker, broker.connect() as client:
        client.create_topic("orders", config={"segment_bytes": 4096})
        for _ in range(3):
            client.publish("orders", bytes(3000))
        sealed = log.all("segments sealed", logger="millstream.commit")
    assert sealed
    assert sealed[0]["directory"].startswith("topics/default/orders")
    assert log.one("state read", directory="state/topics", facts=0)
    assert log.all("log opened", directory="state/groups")


def test_a_slow_call_and_a_slow_request_are_warned_of_with_who_made_them(
    log: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BrokerForTests(http=True) as broker, broker.connect(client_id="shop") as client:
        client.publish("orders", b"1")
        call = broker.broker.call

        async def slow(session: Any, asked: object) -> object:
            await asyncio.sleep(0.15)
            return await call(session, asked)

        monkeypatch.setattr(broker.broker, "call", slow)
        client.topics()
        httpx.get(f"{broker.url}/api/v1/topics", headers={"x-client-id": "browser"})
    entry = log.one("slow call")
    assert (entry["level"], entry["call"], entry["client"]) == ("warning", "topic.list", "shop")
    assert entry["took_ms"] >= 150
    assert entry["correlation"] > 0
    entry = log.one("slow request")
    assert (entry["level"], entry["path"], entry["client"]) == ("warning", "/api/v1/topics", "browser")


def test_who_asked_to_wait_is_not_slow(log: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.server.http.app.SLOW_MS", 1000)  # a busy machine is slow by itself
    with BrokerForTests(http=True) as broker, broker.connect() as client:
        client.create_topic("orders")
        url = f"{broker.url}/api/v1/topics/orders/messages"
        assert httpx.get(url, params={"wait_ms": 1200}).status_code == 200
    assert not log.all("slow request")
