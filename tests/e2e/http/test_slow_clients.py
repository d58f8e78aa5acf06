"""Clients that come in crowds, talk without end or say nothing: they cost the broker little, and others nothing."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from http.client import HTTPResponse

import httpx
import pytest
from websockets.frames import Frame, Opcode

from millstream.config import Settings
from millstream.testing.broker import BrokerForTests
from tests.waiting import eventually

CONNECTIONS_MAX = 8


@pytest.fixture
def broker() -> Iterator[BrokerForTests]:
    settings = Settings.model_validate(
        {
            "server": {"max_connections": CONNECTIONS_MAX, "heartbeat_ms": 3_600_000},
            "http": {"request_ms": 300, "keep_alive_ms": 1000},
        }
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


@pytest.mark.parametrize("path", ["/api/v1/topics", "/", "/metrics"])
def test_a_body_that_never_begins_is_not_waited_for(broker: BrokerForTests, path: str) -> None:
    with connect(broker) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n".encode())
        read_until_closed(client)


def test_a_body_that_drips_after_its_answer_does_not_keep_the_connection(broker: BrokerForTests) -> None:
    with connect(broker) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        assert client.recv(65_536).startswith(b"HTTP/1.1 405")
        client.settimeout(0.05)
        for _ in range(200):  # ten seconds
            try:
                client.sendall(b"x")
                if not client.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("it is still there")


def test_blank_lines_between_requests_do_not_keep_the_connection(broker: BrokerForTests) -> None:
    with connect(broker) as client:
        client.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = HTTPResponse(client)
        answer.begin()
        assert (answer.status, answer.read()) == (200, b'{"live":true}')  # all of it, in however many pieces it came
        client.sendall(b"\r\n")
        assert read_until_closed(client) == b""


def test_one_header_without_end_is_refused_long_before_its_time_is_over() -> None:
    settings = Settings.model_validate({"http": {"request_ms": 60_000}})
    with BrokerForTests(settings=settings, http=True) as broker, connect(broker) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        with contextlib.suppress(ConnectionError):
            client.sendall(b"x" * 1024 * 1024)
        read_until_closed(client)


@pytest.mark.parametrize("options", [b"", b"Connection: close\r\n"])
def test_who_does_not_read_an_answer_does_not_keep_it(broker: BrokerForTests, options: bytes) -> None:
    broker.connect().publish_many("large", [bytes(900_000)] * 5)
    crowd = [connect(broker) for _ in range(CONNECTIONS_MAX)]
    try:
        for client in crowd:
            client.sendall(b"GET /api/v1/topics/large/messages HTTP/1.1\r\nHost: localhost\r\n" + options + b"\r\n")
        eventually(lambda: is_served(broker), "a place is free again")
    finally:
        for client in crowd:
            client.close()


def is_served(broker: BrokerForTests) -> bool:
    try:
        return httpx.get(f"{broker.url}/health/live").status_code == 200
    except httpx.TransportError:
        return False


# --- WebSocket ---------------------------------------------------------------------------------------------------


def upgraded(broker: BrokerForTests) -> socket.socket:
    client = connect(broker)
    client.sendall(
        b"GET /api/v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    return client


def test_pings_of_a_client_that_reads_nothing_do_not_fill_the_memory(broker: BrokerForTests) -> None:
    pings = Frame(Opcode.PING, b"x" * 125).serialize(mask=True) * 1_000
    with upgraded(broker) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert client.recv(12) == b"HTTP/1.1 101"
        client.settimeout(1)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 64 * 1024 * 1024:
                sent += client.send(pings)
        assert sent < 32 * 1024 * 1024, "somebody keeps an answer to each of them"


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Opcode.TEXT, b"\xff\xfe").serialize(mask=True),
        Frame(Opcode.TEXT, b"x").serialize(mask=False),
        b"\xf0\x80\0\0\0\0",
    ],
    ids=["text that is none", "not masked", "reserved bits"],  # a mask is random, and names must not be
)
def test_frames_that_are_none_end_their_connection_and_leave_no_traceback(
    broker: BrokerForTests, caplog: pytest.LogCaptureFixture, frame: bytes
) -> None:
    with upgraded(broker) as client:
        client.recv(12)
        client.sendall(frame * 2)
        read_until_closed(client)
    assert httpx.get(f"{broker.url}/health/live").status_code == 200
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_receipts_that_nobody_reads_do_not_fill_the_memory(broker: BrokerForTests) -> None:
    topic = "t" * 250  # its name is in every receipt
    broker.connect().create_topic(topic, config={"fsync": "never"})
    said = json.dumps({"type": "publish", "topic": topic, "messages": [{"value": 1}] * 10_000})
    frame = Frame(Opcode.TEXT, said.encode()).serialize(mask=True)
    with upgraded(broker) as client, contextlib.suppress(TimeoutError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        received = b""
        while b'"welcome"' not in received:
            received += client.recv(65_536)
        client.settimeout(3)
        for _ in range(60):
            client.sendall(frame)
    [partition] = broker.broker.topics.registry.get("default", topic).partitions
    assert partition is not None
    assert partition.high_watermark <= 15 * 10_000, "it is not read from while answers of 8 MiB wait for it"
