"""Clients that come in crowds, talk without end or say nothing: they cost the broker little, and others nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

from millstream.config import Settings
from millstream.testing.broker import BrokerForTests

CONNECTIONS_MAX = 20


@pytest.fixture
def broker() -> Iterator[BrokerForTests]:
    settings = Settings.model_validate(
        {"server": {"max_connections": CONNECTIONS_MAX, "heartbeat_ms": 3_600_000}, "http": {"request_ms": 300}}
    )
    with BrokerForTests(settings=settings, http=True) as running:
        yield running


def connect(broker: BrokerForTests) -> socket.socket:
    host, _, port = broker.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def read_until_closed(client: socket.socket) -> bytes:
    received = b""
    try:
        while chunk := client.recv(65_536):
            received += chunk
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_who_does_not_say_what_he_wants_is_let_go(broker: BrokerForTests, said: bytes) -> None:
    with connect(broker) as client:
        client.sendall(said)
        assert read_until_closed(client) == b""


def test_a_body_that_never_ends_is_given_up(broker: BrokerForTests) -> None:
    with connect(broker) as client:
        head = b"POST /api/v1/topics/t/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        client.sendall(head + b'{"value": ')
        answer = read_until_closed(client)
        assert answer.startswith(b"HTTP/1.1 504")
        assert b"did not come within 0.3 s" in answer


def test_a_head_without_end_is_refused(broker: BrokerForTests) -> None:
    with connect(broker) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-More: more\r\n" * 8_000)
        assert read_until_closed(client)[:12] in (b"HTTP/1.1 400", b"")


def test_a_crowd_is_turned_away_and_its_place_is_free_when_it_leaves(broker: BrokerForTests) -> None:
    settings = broker.settings
    assert settings.server.max_connections == CONNECTIONS_MAX
    crowd = [connect(broker) for _ in range(CONNECTIONS_MAX)]
    try:
        with connect(broker) as one_too_many:
            assert read_until_closed(one_too_many) == b""
    finally:
        for client in crowd:
            client.close()
    with httpx.Client(transport=httpx.HTTPTransport(retries=20)) as client:
        assert client.get(f"{broker.url}/health/live").status_code == 200
    assert broker.broker.metrics.connections_refused >= 1
