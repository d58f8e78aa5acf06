"""Queues over HTTP: leased with a long poll or as a stream, settled by receipt."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest

from millstream.client import Client
from millstream.testing.broker import BrokerForTests
from tests.waiting import eventually


def lease(http: httpx.Client, topic: str, **body: Any) -> list[dict[str, Any]]:
    answer = http.post(f"/queues/{topic}/default/lease", json=body)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()
    return found


def test_a_message_is_leased_once_and_gone_when_acked(http: httpx.Client, client: Client) -> None:
    client.publish("mail", json={"to": "ann"}, key="k", headers={"a": "b"})
    (message,) = lease(http, "mail", max=5)
    assert (message["value"], message["encoding"], message["key"]) == ({"to": "ann"}, "json", "k")
    assert message["headers"] == {"a": "b"}
    assert message["delivery"] == 1
    assert lease(http, "mail") == []
    answer = http.post("/queues/ack", json={"receipts": [message["receipt"]]})
    assert answer.json() == [{"receipt": message["receipt"], "result": "done"}]
    assert client.queues.describe("mail").depth == 0


def test_with_auto_ack_messages_are_done_when_they_are_sent(http: httpx.Client, client: Client) -> None:
    client.publish_many("done", [b"1", b"2", b"3"])
    (message,) = lease(http, "done", auto_ack=True)
    assert (message["value"], client.queues.describe("done").depth) == ("1", 2)
    with http.stream("GET", "/queues/done/default/stream?max_in_flight=1&auto_ack=true") as stream:
        lines = (json.loads(line) for line in stream.iter_lines())
        assert [next(lines)["value"], next(lines)["value"]] == ["2", "3"]
    assert client.queues.describe("done").depth == 0


def test_a_message_is_told_of_with_what_it_is_to_each_group(http: httpx.Client, client: Client) -> None:
    message_id = client.publish("parcels", b"one").id
    http.put("/queues/parcels/packing", json={})
    (leased,) = lease(http, "parcels", lease_ms=60_000)
    at_first = {one["group"]: one["state"] for one in http.get(f"/messages/{message_id}/queues").json()}
    assert at_first == {"default": "leased", "packing": "ready"}
    http.post("/queues/nack", json={"receipts": [leased["receipt"]], "reason": "no stamps", "delay_ms": 60_000})
    (failed,) = http.get(f"/messages/{message_id}/queues", params={"group": "default"}).json()
    assert (failed["state"], failed["deliveries"], failed["failures"]) == ("waiting", 1, 1)
    assert [attempt["reason"] for attempt in failed["attempts"]] == ["no stamps"]
    assert "value" not in failed
    assert http.get("/messages/01M7GKBEFSGBA51QG000000000/queues").status_code == 404


def test_values_are_shown_as_the_caller_says(http: httpx.Client, client: Client) -> None:
    client.publish_many("shapes", [b'{"a":1}', b"plain", b"\xff\xfe"])
    first, second, third = lease(http, "shapes", max=3, encoding="base64", lease_ms=60_000)
    assert [one["value"] for one in (first, second, third)] == ["eyJhIjoxfQ==", "cGxhaW4=", "//4="]
    http.post("/queues/nack", json={"receipts": [first["receipt"]], "delay_ms": 0})
    (again,) = lease(http, "shapes", encoding="text")
    assert (again["value"], again["encoding"], again["size"]) == ('{"a":1}', "text", 7)
    assert (again["delivery"], again["failures"]) == (2, 1)


def test_each_item_of_a_batch_has_an_action_and_an_outcome(http: httpx.Client, client: Client) -> None:
    client.publish_many("many", [b"1", b"2", b"3", b"4"])
    receipts = [message["receipt"] for message in lease(http, "many", max=4)]
    items = [
        {"receipt": receipts[0]},
        {"receipt": receipts[1], "action": "nack", "reason": "busy", "delay_ms": 60_000},
        {"receipt": receipts[2], "action": "reject", "reason": "never"},
        {"receipt": receipts[3], "action": "extend", "delay_ms": 60_000},
        {"receipt": "many:0:0:1:0000000000000000"},
    ]
    outcomes = http.post("/queues/settle", json={"items": items}).json()
    assert [outcome["result"] for outcome in outcomes] == ["done", "retried", "dead", "done", "receipt_invalid"]
    states = {row["value"]: row["state"] for row in http.get("/queues/many/default/messages").json()}
    assert states == {"2": "waiting", "4": "leased"}
    (waiting,) = http.get("/queues/many/default/messages", params={"state": "waiting"}).json()
    assert waiting["attempts"][0]["reason"] == "busy"


def test_rejected_and_extended_by_their_own_paths(http: httpx.Client, client: Client) -> None:
    client.publish_many("paths", [b"1", b"2"])
    first, second = (message["receipt"] for message in lease(http, "paths", max=2))
    asked_ms = time.time() * 1000
    (extended,) = http.post("/queues/extend", json={"receipts": [first], "delay_ms": 60_000}).json()
    assert extended["result"] == "done"
    assert 55_000 < extended["deadline_ms"] - asked_ms < 65_000
    (extended,) = http.post("/queues/extend", json={"receipts": [first], "delay_ms": 3_600_000}).json()
    assert 250_000 < extended["deadline_ms"] - asked_ms < 305_000, "processing_ms, and not what was asked for"
    assert http.post("/queues/reject", json={"receipts": [second]}).json()[0]["result"] == "dead"


def test_receipts_that_are_all_bad_are_a_conflict(http: httpx.Client) -> None:
    for receipt in ("nonsense", "orders:0:0:1:0000000000000001", "\u0000"):
        answer = http.post("/queues/ack", json={"receipts": [receipt]})
        assert (answer.status_code, answer.json()["code"]) == (409, "RECEIPT_INVALID")


def test_a_long_poll_gets_what_comes_while_it_waits(http: httpx.Client, client: Client) -> None:
    client.create_topic("slow")
    found: list[Any] = []
    poll = threading.Thread(target=lambda: found.extend(lease(http, "slow", wait_ms=5000)))
    poll.start()
    eventually(lambda: any(queue.consumers for queue in client.queues.list("slow")))
    client.publish("slow", b"now")
    poll.join(5)
    assert [message["value"] for message in found] == ["now"]


def test_a_long_poll_whose_client_went_away_takes_nothing(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("left")
    with httpx.Client(base_url=f"{broker.url}/api/v1", timeout=0.3) as impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post("/queues/left/default/lease", json={"wait_ms": 30_000})
    eventually(lambda: not client.queues.describe("left").consumers)
    client.publish("left", b"still there")
    assert [message.state for message in client.queues.peek("left")] == ["ready"]


@contextlib.contextmanager
def stream(broker: BrokerForTests, topic: str, **query: Any) -> Iterator[Iterator[dict[str, Any]]]:
    url = f"{broker.url}/api/v1/queues/{topic}/default/stream"
    with httpx.stream("GET", url, params=query, timeout=10) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        yield map(json.loads, answer.iter_lines())


def test_a_stream_gives_no_more_than_its_credit_and_goes_on_when_something_is_settled(
    broker: BrokerForTests, http: httpx.Client, client: Client
) -> None:
    client.publish_many("credit", [str(number).encode() for number in range(5)])
    with stream(broker, "credit", max_in_flight=2) as lines:
        held = [next(lines), next(lines)]
        assert client.queues.describe("credit").leased == 2
        seen = [line["value"] for line in held]
        while len(seen) < 5:
            receipt = held.pop(0)["receipt"]
            assert http.post("/queues/ack", json={"receipts": [receipt]}).json()[0]["result"] == "done"
            line = next(lines)
            held.append(line)
            seen.append(line["value"])
            assert client.queues.describe("credit").leased == 2
        assert seen == ["0", "1", "2", "3", "4"]


def test_what_a_stream_has_not_settled_goes_back_when_it_ends(broker: BrokerForTests, client: Client) -> None:
    client.publish_many("ends", [b"1", b"2"])
    with stream(broker, "ends", lease_ms=60_000, consumer="reader") as lines:
        next(lines)
        (consumer,) = client.queues.describe("ends").consumers
        assert (consumer.name, consumer.leased, consumer.detached) == ("reader", 2, False)
    eventually(lambda: client.queues.describe("ends").leased == 0)
    assert client.queues.describe("ends").ready == 2


@pytest.mark.parametrize(
    "behind",
    [
        "GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /api/v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    ],
    ids=["request", "upgrade"],
)
def test_a_stream_with_a_request_behind_it_ends_with_its_connection(
    broker: BrokerForTests, client: Client, behind: str
) -> None:
    topic = f"behind-{len(behind)}"
    client.publish(topic, "x")
    place = urlparse(broker.url)
    path = f"/api/v1/queues/{topic}/default/stream?lease_ms=60000&heartbeat_ms=100"
    with socket.create_connection((place.hostname, place.port), timeout=10) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        received = b""
        while b"receipt" not in received:
            received += connection.recv(65_536)
        connection.sendall(behind.encode())
    eventually(lambda: not client.queues.describe(topic).consumers)
    assert client.queues.describe(topic).ready == 1


def test_a_quiet_stream_says_that_it_is_alive(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("quiet")
    with stream(broker, "quiet", heartbeat_ms=100) as lines:
        assert "heartbeat_ms" in next(lines)


def test_a_stream_that_cannot_begin_is_an_ordinary_error(http: httpx.Client) -> None:
    assert http.get("/queues/nowhere/default/stream").json()["code"] == "TOPIC_NOT_FOUND"
    assert http.get("/queues/nowhere/default/stream", params={"max_in_flight": 0}).status_code == 400


def test_a_group_is_made_changed_shown_and_deleted(http: httpx.Client, client: Client) -> None:
    client.publish_many("work", [b"1", b"2"])
    made = http.put("/queues/work/night", json={"ordering": "key", "start": "latest"})
    assert made.status_code == 200
    assert (made.json()["policy"]["ordering"], made.json()["depth"]) == ("key", 0)
    changed = http.put("/queues/work/night", json={"paused": True}).json()
    assert (changed["policy"]["ordering"], changed["policy"]["paused"]) == ("key", True)
    assert http.get("/queues/work/night").json()["policy"]["paused"] is True
    assert http.delete("/queues/work/night").status_code == 204
    assert http.get("/queues/work/night").json()["code"] == "GROUP_NOT_FOUND"


def test_queues_are_listed_in_pages(http: httpx.Client, client: Client) -> None:
    client.create_topic("paged")
    for group in ("a", "b", "c"):
        http.put(f"/queues/paged/{group}", json={})
    answer = http.get("/queues", params={"topic": "paged", "limit": 2, "offset": 1})
    assert [row["group"] for row in answer.json()] == ["b", "c"]
    assert answer.headers["x-total-count"] == "3"
    assert [row["topic"] for row in http.get("/queues", params={"group": "b"}).json()] == ["paged"]
    assert http.get("/queues", params={"topic": "nowhere"}).json()["code"] == "TOPIC_NOT_FOUND"


def test_a_purge_settles_everything(http: httpx.Client, client: Client) -> None:
    client.publish_many("waste", [b"1", b"2", b"3"])
    lease(http, "waste")
    assert http.post("/queues/waste/default/purge").json() == {"purged": 3}
    assert client.queues.describe("waste").depth == 0


def test_nothing_is_leased_during_maintenance(http: httpx.Client, client: Client) -> None:
    client.publish("closed", b"1")
    client.set_mode("maintenance", "new disk")
    try:
        answer = http.post("/queues/closed/default/lease", json={})
        assert (answer.status_code, answer.json()["code"]) == (503, "READ_ONLY")
    finally:
        client.set_mode("normal")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/queues/orders/default/lease", {"max": 0}),
        ("POST", "/queues/orders/default/lease", {"max": 10**30}),
        ("POST", "/queues/orders/default/lease", {"wait_ms": 60_001}),
        ("POST", "/queues/orders/default/lease", {"lease_ms": -1}),
        ("POST", "/queues/orders/default/lease", {"unknown": 1}),
        ("POST", "/queues/orders/default/lease", {"encoding": "rot13"}),
        ("POST", "/queues/settle", {"items": []}),
        ("POST", "/queues/settle", {"items": [{"receipt": "x", "action": "eat"}]}),
        ("POST", "/queues/nack", {"receipts": ["x"], "delay_ms": -5}),
        ("POST", "/queues/nack", {"receipts": ["x"], "reason": "r" * 2000}),
        ("PUT", "/queues/orders.%23/default", {}),
        ("PUT", "/queues/orders/default", {"ordering": "sideways"}),
        ("PUT", "/queues/%00/default", {}),
        ("GET", "/queues?limit=0", None),
        ("GET", "/queues?offset=-1", None),
        ("GET", "/queues?limit=99999999999999999999999", None),
        ("GET", "/queues/orders/default/messages?state=odd", None),
    ],
)
def test_bad_input_is_refused_with_a_sentence(
    http: httpx.Client, client: Client, method: str, path: str, body: Any
) -> None:
    client.create_topic("orders", if_missing=True)
    answer = http.request(method, path, json=body) if body is not None else http.request(method, path)
    assert answer.status_code == 400, answer.text
    assert answer.json()["message"]


def test_queues_of_a_namespace_are_under_it(http: httpx.Client, broker: BrokerForTests) -> None:
    http.post("/namespaces", json={"name": "eu"})
    with broker.connect(namespace="eu") as client:
        client.publish("mail", b"bonjour")
    (message,) = http.post("/namespaces/eu/queues/mail/default/lease", json={}).json()
    assert message["value"] == "bonjour"
    assert http.post("/queues/ack", json={"receipts": [message["receipt"]]}).status_code == 409
    assert http.post("/namespaces/eu/queues/ack", json={"receipts": [message["receipt"]]}).status_code == 200
