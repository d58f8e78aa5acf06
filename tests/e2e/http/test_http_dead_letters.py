"""Dead letters over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from millstream.client import Client
from tests.waiting import eventually


def bury(client: Client, topic: str, *values: bytes, reason: str = "no such customer") -> None:
    client.publish_many(topic, values)
    leased = client.queues.lease(topic, max=len(values))
    client.queues.settle("reject", [message.receipt for message in leased], reason=reason)


def letters(http: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    answer = http.get("/dead-letters", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["letters"]
    return found


def test_letters_are_found_by_what_they_say_and_shown_whole(http: httpx.Client, client: Client) -> None:
    client.publish("mail", b'{"to": "ann"}', key="k", headers={"tenant": "eu"})
    (leased,) = client.queues.lease("mail")
    client.queues.settle("reject", [leased.receipt], reason="No such Customer")
    found = {
        "topic": letters(http, topic="mail"),
        "error": letters(http, error="customer"),
        "header": letters(http, header=["tenant:eu"]),
        "name": letters(http, header="tenant"),
        "key": letters(http, topic="mail", key="k"),
    }
    for what, rows in found.items():
        assert [row["original_id"] for row in rows] == [leased.id], what
    assert letters(http, header=["tenant:us"]) == letters(http, header=["tenant=us"]) == []
    assert letters(http, header=["tenant=eu"]) == found["header"]
    assert letters(http, reason="POISON") == []
    answer = http.get("/dead-letters", params={"reason": "BORED"})
    assert answer.status_code == 400
    assert "REJECTED" in answer.json()["message"]
    (row,) = found["topic"]
    letter = http.get(f"/dead-letters/{row['id']}").json()
    assert (letter["value"], letter["reason"], letter["error"]) == ({"to": "ann"}, "REJECTED", "No such Customer")
    assert letter["attempts"][0]["kind"] == "reject"
    assert letter["headers"] == {"tenant": "eu"}


def test_lists_show_the_beginning_of_values_and_go_on_where_they_ended(http: httpx.Client, client: Client) -> None:
    bury(client, "long", *(str(number).encode() * 100 for number in range(3)))
    first = http.get("/dead-letters", params={"topic": "long", "limit": 2, "value_bytes": 4}).json()
    assert [(row["value"], row["size"]) for row in first["letters"]] == [("0000", 100), ("1111", 100)]
    second = http.get("/dead-letters", params={"topic": "long", "after": first["after"], "value_bytes": 4}).json()
    assert [row["value"] for row in second["letters"]] == ["2222"]
    assert second["after"] == ""


def test_letters_are_counted_and_purged_by_a_filter(http: httpx.Client, client: Client) -> None:
    bury(client, "waste", b"1", b"2", reason="a")
    bury(client, "waste", b"3", reason="b")
    statistics = http.get("/dead-letters/statistics", params={"topic": "waste"}).json()
    assert (statistics["total"], statistics["by_error"]) == (3, {"a": 2, "b": 1})
    body = {"filter": {"topic": "waste", "error": "a"}}
    assert http.post("/dead-letters/purge", json=body | {"dry_run": True}).json()["total"] == 2
    assert http.post("/dead-letters/purge", json=body | {"limit": 1}).json()["total"] == 1
    assert http.post("/dead-letters/purge", json=body).json()["total"] == 1
    (left,) = letters(http, topic="waste")
    assert http.post("/dead-letters/purge", json={"ids": [left["id"]]}).json()["total"] == 1
    assert letters(http, topic="waste") == []


def test_a_forgotten_filter_is_not_everything(http: httpx.Client) -> None:
    for path in ("/dead-letters/purge", "/dead-letters/replays"):
        answer = http.post(path, json={})
        assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_ARGUMENT")


def test_a_replay_is_planned_run_edited_and_reported(http: httpx.Client, client: Client) -> None:
    bury(client, "retry", b"1", b"2")
    body = {"filter": {"topic": "retry"}, "edit": {"value": {"fixed": True}, "set_headers": {"by": "me"}}}
    planned = http.post("/dead-letters/replays", json=body | {"dry_run": True}).json()
    assert (planned["plan"]["total"], planned["plan"]["targets"], planned["replay"]) == (2, {"retry": 2}, None)
    nothing = http.post("/dead-letters/replays", json={"filter": {"topic": "never.was"}}).json()["replay"]
    assert (nothing["status"], nothing["total"]) == ("completed", 0)
    assert nothing["reason"].startswith("there is nothing to replay: no dead letter matches")
    replay = http.post("/dead-letters/replays", json=body).json()["replay"]
    eventually(lambda: http.get(f"/dead-letters/replays/{replay['id']}").json()["status"] == "completed")
    report = http.get(f"/dead-letters/replays/{replay['id']}").json()
    assert (report["replayed"], report["failed"]) == (2, 0)
    assert replay["id"] in [row["id"] for row in http.get("/dead-letters/replays").json()]
    leased = http.post("/queues/retry/default/lease", json={"max": 10}).json()
    assert [message["value"] for message in leased] == [{"fixed": True}, {"fixed": True}]
    assert leased[0]["headers"]["by"] == "me"


def test_a_replay_sets_headers_to_text_however_it_is_written_and_to_nothing_else(http: httpx.Client) -> None:
    def planned(text: str) -> httpx.Response:
        body = {"everything": True, "dry_run": True, "edit": {"set_headers": {"by": text}}}
        return http.post("/dead-letters/replays", json=body)

    assert planned("base64:bWU=").status_code == 200
    refused = planned("base64:/w==")
    assert (refused.status_code, refused.json()["code"]) == (400, "INVALID_ARGUMENT")
    assert "header 'by' is not text" in refused.text


def test_a_replay_can_be_aborted(http: httpx.Client, client: Client) -> None:
    bury(client, "endless", b"1", b"2", b"3")
    body = {"filter": {"topic": "endless"}, "rate": 0.01}
    replay = http.post("/dead-letters/replays", json=body).json()["replay"]
    assert http.delete(f"/dead-letters/replays/{replay['id']}").json()["status"] == "aborted"
    assert letters(http, topic="endless")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/dead-letters?limit=0", None, 400),
        ("GET", "/dead-letters?after=nonsense", None, 400),
        ("GET", f"/dead-letters?after=a/0/{'9' * 5_000}", None, 400),
        ("GET", "/dead-letters?since_ms=99999999999999999999", None, 400),
        ("GET", "/dead-letters?topic=**", None, 400),
        ("GET", "/dead-letters?unknown=1", None, 400),
        ("GET", "/dead-letters/statistics?until_ms=-1", None, 400),
        ("GET", "/dead-letters/nonsense", None, 400),
        ("GET", "/dead-letters/01M7GKBEFSGBA51QG000000000", None, 404),
        ("GET", "/dead-letters/replays/r-0", None, 404),
        ("DELETE", "/dead-letters/replays/r-0", None, 404),
        ("POST", "/dead-letters/purge", {"filter": {"tpic": "x"}}, 400),
        ("POST", "/dead-letters/purge", {"everything": True, "ids": ["01M7GKBEFSGBA51QG000000000"]}, 400),
        ("POST", "/dead-letters/replays", {"everything": True, "rate": -1}, 400),
        ("POST", "/dead-letters/replays", {"everything": True, "target": "nowhere"}, 404),
        ("POST", "/dead-letters/replays", {"everything": True, "edit": {"value": 1, "encoding": "base64"}}, 400),
    ],
)
def test_bad_input_is_refused_with_a_sentence(
    http: httpx.Client, method: str, path: str, body: Any, status: int
) -> None:
    answer = http.request(method, path, json=body) if body is not None else http.request(method, path)
    assert answer.status_code == status, answer.text
    assert answer.json()["message"]
