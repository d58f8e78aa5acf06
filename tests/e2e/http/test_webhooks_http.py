"""Webhooks over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest

from millstream.testing.broker import BrokerForTests


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with BrokerForTests(http=True) as broker, httpx.Client(base_url=f"{broker.url}/api/v1") as client:
        yield client


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_a_webhook_from_its_making_to_its_end(http: httpx.Client, url: str) -> None:
    missing = http.post("/webhooks", json={"topic": "orders", "url": url})
    assert (missing.status_code, missing.json()["code"]) == (404, "TOPIC_NOT_FOUND")
    http.post("/topics", json={"name": "orders"}).raise_for_status()
    made = http.post("/webhooks", json={"topic": "orders", "url": url, "group": "crm", "concurrency": 2})
    assert made.status_code == 201
    webhook, secret = made.json()["webhook"], made.json()["secret"]
    assert (webhook["concurrency"], webhook["state"], len(secret)) == (2, "active", 64)
    path = f"/webhooks/{webhook['id']}"

    assert http.post(f"{path}/test").json()["status"] == 204
    changed = http.patch(path, json={"rate": 5, "headers": {"X-Token": "hidden"}}).json()
    assert (changed["rate"], changed["concurrency"], changed["header_names"]) == (5, 2, ["X-Token"])
    assert http.post(f"{path}/pause").json()["state"] == "paused"
    assert http.post(f"{path}/resume").json()["state"] == "active"
    rotated = http.post(f"{path}/rotate", json={"keep_ms": 1000}).json()
    assert rotated["secret"] != secret
    assert rotated["webhook"]["rotating_until_ms"] > 0

    listed = http.get("/webhooks", params={"topic": "orders", "group": "crm"})
    assert (listed.headers["x-total-count"], listed.json()[0]["id"]) == ("1", webhook["id"])
    for text in (listed.text, http.get(path).text):
        assert not any(hidden in text for hidden in (secret, rotated["secret"], "hidden"))
    assert http.get("/namespaces/default/webhooks").json()[0]["id"] == webhook["id"]
    assert http.get("/webhooks", params={"topic": "nothing"}).json() == []

    assert http.delete(path).status_code == 204
    gone = http.get(path)
    assert (gone.status_code, gone.json()["code"]) == (404, "WEBHOOK_NOT_FOUND")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"topic": "orders"}, "'url' is missing"),
        ({"topic": "orders", "url": "ftp://x"}, "http:// or https://"),
        ({"topic": "orders", "url": "http://u:p@x/"}, "put credentials into a header"),
        ({"topic": "../up", "url": "http://x/"}, "topic '../up' is not valid"),
        ({"topic": "orders", "url": "http://x/", "colour": 1}, "'colour' is not known here"),
        ({"topic": "orders", "url": "http://x/", "concurrency": 10**30}, ""),
        ({"topic": "orders", "url": "http://x/", "rate": 1e300}, "rate must be"),
        ({"topic": "orders", "url": "http://x/", "timeout_ms": -1}, "timeout_ms must be"),
        ({"topic": "orders", "url": "http://x/", "headers": {"a\nb": "c"}}, "cannot be the name"),
        ({"topic": "orders", "url": "http://x/", "secret": "\x00" * 20}, "16 to 256"),
        ({"topic": "orders", "group": "\x00", "url": "http://x/"}, ""),
        ({"topic": "orders", "url": "http://\ud800/"}, ""),
    ],
)
def test_a_bad_registration_is_refused_in_one_sentence(http: httpx.Client, body: object, complaint: str) -> None:
    answer = http.post("/webhooks", content=json.dumps(body))
    assert answer.status_code == 400, answer.text
    assert complaint in answer.json()["message"].lower()
    assert http.get("/webhooks").json() == []
