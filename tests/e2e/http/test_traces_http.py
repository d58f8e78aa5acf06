"""Traces over HTTP: the passport of one message, and the traces of many."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from millstream.testing.broker import BrokerForTests

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def web() -> Iterator[httpx.Client]:
    with BrokerForTests(http=True) as broker, httpx.Client(base_url=f"{broker.url}/api/v1") as client:
        yield client


def publish(web: httpx.Client, topic: str) -> str:
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    answer = web.post(f"/topics/{topic}/messages", json={"value": "x", "key": "c-17"}, headers=headers)
    message_id: str = answer.json()[0]["id"]
    return message_id


def reject(web: httpx.Client, topic: str) -> None:
    (message,) = web.post(f"/queues/{topic}/billing/lease", json={"max": 1, "wait_ms": 5000}).json()
    answer = web.post("/queues/reject", json={"receipts": [message["receipt"]], "reason": "bad payload"})
    assert answer.status_code == 200


def test_a_passport_tells_the_story_of_a_message(web: httpx.Client) -> None:
    message_id = publish(web, "orders")
    reject(web, "orders")

    answer = web.get(f"/messages/{message_id}/passport")

    assert answer.status_code == 200
    passport = answer.json()
    assert {name: passport[name] for name in ("id", "topic", "trace_id", "key")} == {
        "id": message_id,
        "topic": "orders",
        "trace_id": TRACE,
        "key": "c-17",
    }
    kinds = [event["kind"] for event in passport["events"]]
    assert kinds == ["published", "stored", "leased", "rejected", "dead_lettered"]
    assert passport["events"][3]["error"] == "bad payload"
    letter = web.get(f"/dead-letters/{passport['events'][-1]['link']}").json()
    assert letter["original_id"] == message_id
    for event in passport["events"]:
        assert set(event) == {"kind", "time_ms", "group", "consumer", "error", "note", "link"}


def test_traces_are_found_and_come_in_pages(web: httpx.Client) -> None:
    ids = [publish(web, "pages") for _ in range(3)]
    for _ in ids:
        reject(web, "pages")
    query: dict[str, str | int] = {"topic": "pages", "failures_only": "true", "limit": 4}

    first = web.get("/traces", params=query).json()
    second = web.get("/traces", params={**query, "after": first["after"]}).json()

    assert len(first["events"]) == 4
    assert len(second["events"]) == 2
    assert second["after"] == ""
    events = first["events"] + second["events"]
    assert sorted(event["kind"] for event in events) == ["dead_lettered"] * 3 + ["rejected"] * 3
    assert {event["id"] for event in events} == set(ids)
    assert [event["time_ms"] for event in events] == sorted((event["time_ms"] for event in events), reverse=True)
    found = web.get("/traces", params={"topic": "pages", "key": "c-17", "limit": 100}).json()
    assert [event["kind"] for event in found["events"]].count("stored") == 3


def test_without_a_condition_the_newest_of_everything_is_listed(web: httpx.Client) -> None:
    ids = [publish(web, topic) for topic in ("all.a", "all.b")]
    for topic in ("all.a", "all.b"):
        reject(web, topic)

    events = web.get("/traces", params={"limit": 4}).json()["events"]

    assert {event["id"] for event in events} == set(ids)
    assert [event["topic"] for event in events] == ["all.b"] * 2 + ["all.a"] * 2


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/messages/01M7GKBEFSGBA51QG000000000/passport", 404),
        ("/messages/nonsense/passport", 400),
        ("/traces?trace_id=xyz", 400),
        ("/traces?key=x", 400),
        ("/traces?topic=missing", 404),
        ("/traces?after=-1", 400),
        ("/traces?limit=0", 400),
        ("/traces?from_ms=99999999999999999999", 400),
        ("/traces?what=else", 400),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(web: httpx.Client, path: str, status: int) -> None:
    answer = web.get(path)

    assert answer.status_code == status
    assert answer.json()["message"]
