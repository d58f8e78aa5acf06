"""Schedules over HTTP, those that recur among them; and why something is not delivered."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from millstream.client import Client, Outgoing
from millstream.testing.broker import BrokerForTests


def test_what_is_pending_is_listed_soonest_first_and_shown(http: httpx.Client, client: Client) -> None:
    later = client.publish("mail", json={"n": 2}, key="k", delay="2h")
    sooner = client.publish("mail", b"1", delay="1h")
    rows = http.get("/topics/mail/schedules").json()["schedules"]
    assert [row["id"] for row in rows] == [sooner.id, later.id]
    after = http.get("/topics/mail/schedules", params={"after_ms": rows[1]["due_ms"]}).json()["schedules"]
    assert [row["id"] for row in after] == [later.id]
    keyed = http.get("/topics/mail/schedules", params={"key": "k"}).json()["schedules"]
    assert [row["key"] for row in keyed] == ["k"]
    shown = http.get(f"/schedules/{later.id}").json()
    assert (shown["state"], shown["value"], shown["key"]) == ("pending", {"n": 2}, "k")
    (statistics,) = http.get("/schedules/statistics", params={"topic": "mail"}).json()
    assert (statistics["pending"], statistics["next_due_ms"]) == (2, rows[0]["due_ms"])


@pytest.mark.parametrize("key", [None, "k"])
def test_what_is_due_in_the_same_millisecond_is_listed_page_by_page(
    http: httpx.Client, client: Client, key: str | None
) -> None:
    topic = f"pages-{key}"
    client.create_topic(topic, partitions=2)
    due_s = time.time() + 3_600
    items = [Outgoing(value="x", deliver_at=due_s + (n >= 120) * 60, key=key) for n in range(130)]
    sent = [receipt.id for receipt in client.publish_many(topic, items)]
    seen: list[str] = []
    after = ""
    while after or not seen:
        query: dict[str, Any] = {"limit": 50, "after": after} | ({"key": key} if key else {})
        page = http.get(f"/topics/{topic}/schedules", params=query).json()
        seen += [row["id"] for row in page["schedules"]]
        assert len(seen) <= len(sent), "a page came again"
        after = page["after"]
    assert sorted(seen) == sorted(sent)


def test_a_message_is_moved_and_taken_back(http: httpx.Client, client: Client) -> None:
    receipt = client.publish("moved", b"1", delay="1h")
    due_ms = time.time_ns() // 1_000_000 + 7_200_000
    assert http.patch(f"/schedules/{receipt.id}", json={"deliver_at_ms": due_ms}).json()["due_ms"] == due_ms
    assert http.patch(f"/schedules/{receipt.id}", json={"delay_ms": 60_000}).json()["due_ms"] < due_ms
    assert http.delete(f"/schedules/{receipt.id}").status_code == 204
    assert http.get(f"/schedules/{receipt.id}").json()["state"] == "cancelled"


def test_what_was_delivered_cannot_be_taken_back() -> None:
    with BrokerForTests(http=True) as broker, broker.connect() as client:  # time is skipped, for this broker alone
        receipt = client.publish("gone", b"1", delay="5s")
        broker.clock.advance("5s")
        assert client.queues.lease("gone", wait="5s")[0].value == b"1"
        answer = httpx.delete(f"{broker.url}/api/v1/schedules/{receipt.id}")
    assert (answer.status_code, answer.json()["code"]) == (409, "SCHEDULE_FIRED")


def test_many_are_taken_back_by_ids_or_by_key(http: httpx.Client, client: Client) -> None:
    ids = [client.publish("many", b"1", key="k", delay="1h").id for _ in range(3)]
    answer = http.post("/schedules/cancel", json={"ids": [ids[0], "0" * 26]}).json()
    assert answer["cancelled"] == 1
    assert answer["refused"][0]["code"] == "SCHEDULE_NOT_FOUND"
    assert http.post("/schedules/cancel", json={"topic": "many", "key": "k"}).json()["cancelled"] == 2


def test_a_recurring_schedule_is_made_paused_and_deleted(http: httpx.Client, client: Client) -> None:
    body = {"topic": "reports", "cron": "0 9 * * MON-FRI", "timezone": "Europe/Berlin", "value": {"daily": True}}
    made = http.put("/recurring/report", json=body | {"headers": {"a": "b"}, "key": "k", "priority": "high"})
    assert made.status_code == 200
    assert (made.json()["value"], made.json()["key"], made.json()["headers"]) == ({"daily": True}, "k", {"a": "b"})
    assert made.json()["next_ms"] > 0
    assert made.json()["priority"] == 1
    assert http.post("/recurring/report/pause").json()["next_ms"] == 0
    assert http.post("/recurring/report/resume").json()["paused"] is False
    assert [row["name"] for row in http.get("/recurring", params={"topic": "reports"}).json()] == ["report"]
    assert http.get("/recurring", params={"topic": "other"}).json() == []
    assert http.get("/recurring/report", params={"encoding": "base64"}).json()["encoding"] == "base64"
    assert http.delete("/recurring/report").status_code == 204
    assert http.get("/recurring/report").status_code == 404


def test_a_recurring_schedule_without_a_value_is_refused(http: httpx.Client) -> None:
    refused = http.put("/recurring/report", json={"topic": "reports", "cron": "@daily"})
    assert refused.status_code == 400
    assert "a message needs a value" in refused.json()["message"]


def test_why_says_what_holds_a_message_or_a_queue_up(http: httpx.Client, client: Client) -> None:
    receipt = client.publish("waits", b"1", delay="1h")
    told = http.get("/why", params={"id": receipt.id}).json()
    assert (told["state"], told["facts"]["topic"]) == ("schedule-pending", "waits")
    client.publish("idle", b"1")
    http.put("/queues/idle/night", json={"paused": True})
    told = http.get("/why", params={"topic": "idle", "group": "night"}).json()
    assert told["state"] == "paused"
    assert "paused" in told["sentence"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/topics/nowhere/schedules", None, 404),
        ("GET", "/topics/mail/schedules?limit=1001", None, 400),
        ("GET", "/topics/mail/schedules?before_ms=soon", None, 400),
        ("GET", "/topics/mail/schedules?after=1/2", None, 400),
        ("GET", "/topics/mail/schedules?after=1/2/-3", None, 400),
        ("GET", "/schedules/statistics?topic=nowhere", None, 404),
        ("GET", "/schedules/nonsense", None, 400),
        ("GET", "/schedules/01M7GKBEFSGBA51QG000000000", None, 404),
        ("DELETE", "/schedules/01M7GKBEFSGBA51QG000000000", None, 404),
        ("PATCH", "/schedules/01M7GKBEFSGBA51QG000000000", {"delay_ms": 5}, 404),
        ("PATCH", "/schedules/01M7GKBEFSGBA51QG000000000", {}, 400),
        ("PATCH", "/schedules/01M7GKBEFSGBA51QG000000000", {"deliver_at_ms": 10**20}, 400),
        ("POST", "/schedules/cancel", {}, 400),
        ("POST", "/schedules/cancel", {"ids": ["0" * 26], "topic": "mail", "key": "k"}, 400),
        ("PUT", "/recurring/bad name", {"topic": "mail", "cron": "@daily", "value": ""}, 400),
        ("PUT", "/recurring/x", {"topic": "mail", "cron": "sometimes", "value": ""}, 400),
        ("PUT", "/recurring/x", {"topic": "mail", "cron": "0 0 30 2 *", "value": ""}, 400),
        ("PUT", "/recurring/x", {"topic": "mail", "cron": "@daily", "value": "", "timezone": "../../etc/passwd"}, 400),
        ("PUT", "/recurring/x", {"topic": "mail", "cron": "@daily", "value": "", "timezone": "\u0000"}, 400),
        ("PUT", "/recurring/x", {"topic": "mail", "cron": "@daily", "value": "", "priority": 9}, 400),
        ("PUT", "/recurring/x", {"topic": "mail", "cron": "@daily", "value": "", "priority": "urgent"}, 400),
        ("PUT", "/recurring/x", {"topic": "**", "cron": "@daily", "value": ""}, 400),
        ("PUT", "/recurring/x", {"topic": "mail", "cron": "@daily", "value": "v" * 1_048_577}, 413),
        ("PUT", "/recurring/x", {"topic": "mail", "cron": "@daily", "value": "", "headers": {"n" * 70_000: ""}}, 413),
        ("POST", "/recurring/nobody/pause", None, 404),
        ("DELETE", "/recurring/nobody", None, 404),
        ("GET", "/why", None, 400),
        ("GET", "/why?id=nonsense", None, 400),
        ("GET", "/why?id=01M7GKBEFSGBA51QG000000000&topic=mail", None, 400),
        ("GET", "/why?topic=nowhere&group=x", None, 404),
    ],
)
def test_bad_input_is_refused_with_a_sentence(
    http: httpx.Client, client: Client, method: str, path: str, body: Any, status: int
) -> None:
    client.create_topic("mail", if_missing=True)
    answer = http.request(method, path, json=body) if body is not None else http.request(method, path)
    assert answer.status_code == status, answer.text
    assert answer.json()["message"]
