"""Requests that want to be taken for something else: two in one, paths that lead elsewhere, bodies of any depth."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from millstream.client import Client
from millstream.testing.broker import BrokerForTests

HOST = b"Host: localhost\r\n"


def exchange(broker: BrokerForTests, sent: bytes) -> bytes:
    """All that is answered until the connection is closed."""
    host, _, port = broker.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        received = b""
        try:
            while chunk := client.recv(65_536):
                received += chunk
        except ConnectionResetError:
            pass
        return received


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 0x5\r\n",
        b"Content-Length : 5\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n",
        b"X: a\r\n Content-Length: 5\r\n",
        b"X: a\nContent-Length: 5\r\n",
        b"X: a\rContent-Length: 5\r\n",
        b"X\x00: a\r\n",
    ],
)
def test_a_request_that_others_may_measure_differently_is_refused(broker: BrokerForTests, head: bytes) -> None:
    hidden = b"GET /health/live HTTP/1.1\r\n" + HOST + b"\r\n"
    answer = exchange(broker, b"POST /api/v1/topics HTTP/1.1\r\n" + HOST + head + b"\r\n0\r\n\r\n" + hidden)
    assert answer.count(b"HTTP/1.1 ") <= 1, "what was hidden in it was answered"
    assert b"HTTP/1.1 200" not in answer


@pytest.mark.parametrize("first", [b"BREW /api/v1/topics HTTP/1.1", b"hello", b"GET / HTTP/9.9"])
def test_what_is_no_request_gets_an_error_of_the_usual_shape(broker: BrokerForTests, first: bytes) -> None:
    head, _, body = exchange(broker, first + b"\r\n" + HOST + b"\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head.lower()
    told = json.loads(body)
    assert (told["code"], told["details"]["retriable"]) == ("INVALID_FORMAT", False)
    assert "HTTP" in told["message"]
    assert "native protocol" not in "".join(told["suggestions"])
    assert f"x-request-id: {told['request_id']}".encode() in head.lower()


def test_what_is_repeated_of_a_request_cannot_end_a_header(broker: BrokerForTests) -> None:
    for said in (b"a\rSet-Cookie: x=1", b"a\nSet-Cookie: x=1", b"a\r\n\tSet-Cookie: x=1"):
        answer = exchange(
            broker, b"GET /api/v1/topics/none HTTP/1.1\r\n" + HOST + b"X-Request-Id: " + said + b"\r\n\r\n"
        )
        head = answer.partition(b"\r\n\r\n")[0]
        assert not any(line.lower().startswith(b"set-cookie") for line in head.replace(b"\r", b"\n").split(b"\n"))


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard/../api.py",
        "/dashboard/../../errors.py",
        "/dashboard/%2e%2e/errors.py",
        "/dashboard/..%2f..%2fetc%2fpasswd",
        "/dashboard//etc/passwd",
        "/dashboard/__init__.py",
        "/dashboard/pages/",
        "/%2e%2e/%2e%2e/etc/passwd",
    ],
)
def test_no_path_leads_out_of_the_dashboard(broker: BrokerForTests, path: str) -> None:
    answer = exchange(broker, b"GET " + path.encode() + b" HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404"), answer[:100]


@pytest.mark.parametrize("name", ["..", ".", "../up", "a/../../b", "a..b", "a\x00b", "a b", ".hidden", "a" * 256, "é"])
def test_no_name_leads_out_of_the_data_directory(broker: BrokerForTests, name: str) -> None:
    with httpx.Client(base_url=f"{broker.url}/api/v1") as http:
        for path, body in (("/topics", {"name": name}), ("/namespaces", {"name": name})):
            assert http.post(path, json=body).json()["code"] == "INVALID_NAME"


@pytest.mark.parametrize("depth", [1_000, 100_000, 4_000_000])
def test_a_body_of_any_depth_is_refused_with_a_sentence(http: httpx.Client, depth: int) -> None:
    http.post("/topics", json={"name": "deep"})
    nested = b"[" * depth + b"]" * depth
    for path, body in (
        ("/topics", nested),
        ("/topics", b'{"name":"x","config":{"a":' + nested + b"}}"),
        ("/topics/deep/messages", b'{"value":"x","headers":' + nested + b"}"),
    ):
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 413)
        assert answer.json()["code"] in ("INVALID_ARGUMENT", "PAYLOAD_TOO_LARGE")


def test_a_packed_body_is_not_unpacked(http: httpx.Client, client: Client) -> None:
    import gzip

    http.post("/topics", json={"name": "packed"})
    bomb = gzip.compress(bytes(1_000_000))
    headers = {"content-encoding": "gzip", "content-type": "application/octet-stream"}
    assert http.post("/topics/packed/messages", content=bomb, headers=headers).status_code == 200
    assert client.browse("packed")[0].value == bomb
    refused = http.post("/topics/packed/messages", content=bomb, headers=headers | {"content-type": "application/json"})
    assert refused.json()["code"] == "INVALID_ARGUMENT"


def test_no_other_site_is_told_that_it_may_read(http: httpx.Client) -> None:
    for method in ("GET", "OPTIONS"):
        answer = http.request(method, "/topics", headers={"Origin": "https://evil.example"})
        assert answer.status_code in (403, 405)
        assert not [name for name in answer.headers if name.startswith("access-control-")]
