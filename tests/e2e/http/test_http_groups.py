"""Stream groups over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from millstream.client import Client
from tests.waiting import eventually


def group(http: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/groups/{name}").json()
    return found


def test_groups_are_listed_filtered_and_paged(http: httpx.Client, client: Client) -> None:
    client.create_topic("news")
    client.create_topic("weather")
    for name, topic in (("a", "news"), ("b", "weather"), ("c", "news")):
        client.commit_offsets(name, {(topic, 0): 0})
    answer = http.get("/groups", params={"topic": "news", "limit": 1, "offset": 1})
    assert [row["name"] for row in answer.json()] == ["c"]
    assert answer.headers["x-total-count"] == "2"
    assert http.get("/groups", params={"state": "stable"}).json() == []
    assert http.delete("/groups/b").status_code == 204
    assert [row["name"] for row in http.get("/groups").json()] == ["a", "c"]


def test_lag_is_told_in_all_and_per_partition(http: httpx.Client, client: Client) -> None:
    client.create_topic("orders", partitions=2)
    for number in range(5):
        client.publish("orders", b"x", partition=number % 2)
    client.commit_offsets("audit", {("orders", 0): 1, ("orders", 1): 2})
    lag = http.get("/groups/audit/lag").json()
    assert (lag["group"], lag["lag"]) == ("audit", 2)
    assert [(row["partition"], row["lag"]) for row in lag["partitions"]] == [(0, 2), (1, 0)]
    assert http.get("/groups/audit/lag", params={"topic": "other"}).json()["lag"] == 0


def test_a_group_is_moved_after_a_dry_run(http: httpx.Client, client: Client) -> None:
    client.create_topic("moved")
    client.publish_many("moved", [b"1", b"2", b"3"])
    client.commit_offsets("mover", {("moved", 0): 3})
    body = {"topic": "moved", "to": "shift", "value": -2, "dry_run": True}
    assert http.post("/groups/mover/reset", json=body).json() == [{"topic": "moved", "partition": 0, "offset": 1}]
    assert client.committed("mover")[0].offset == 3
    http.post("/groups/mover/reset", json={"topic": "moved", "to": "earliest"})
    assert client.committed("mover")[0].offset == 0


def test_members_are_listed_and_can_be_thrown_out(http: httpx.Client, client: Client) -> None:
    client.create_topic("parts", partitions=4)
    with client.stream("parts", group="readers"):
        eventually(lambda: group(http, "readers")["state"] == "stable")
        (member,) = http.get("/groups/readers/members").json()
        assert member["partitions"] == [{"topic": "parts", "partitions": [0, 1, 2, 3]}]
        busy = http.post("/groups/readers/reset", json={"topic": "parts", "to": "latest"})
        assert (busy.status_code, busy.json()["code"]) == (409, "GROUP_NOT_EMPTY")
        assert http.delete("/groups/readers").status_code == 409
        assert http.delete(f"/groups/readers/members/{member['member_id']}").status_code == 204
        assert http.delete("/groups/readers/members/nobody").json()["code"] == "UNKNOWN_MEMBER"


def test_a_rebalance_begins_a_new_generation(http: httpx.Client, client: Client) -> None:
    client.create_topic("dealt", partitions=4)
    with client.stream("dealt", group="dealers"):
        eventually(lambda: group(http, "dealers")["state"] == "stable")
        before = group(http, "dealers")["generation"]
        answer = http.post("/groups/dealers/rebalance").json()
        assert answer["generation"] == before + 1
        eventually(lambda: group(http, "dealers")["state"] == "stable")


def test_a_paused_group_reads_nothing_until_it_goes_on(http: httpx.Client, client: Client) -> None:
    client.create_topic("held")
    client.publish("held", b"1")
    with client.stream("held", group="holders", timeout_s=10) as stream:
        assert stream.next(10).value == b"1"  # type: ignore[union-attr]
        assert http.post("/groups/holders/pause").json()["paused"] is True
        assert group(http, "holders")["paused"] is True
        eventually(lambda: stream.next(0.01) is None and not group(http, "holders")["members"][0]["partitions"])
        client.publish("held", b"2")
        assert stream.next(0.2) is None
        assert client.committed("holders")[0].offset == 1, "what was read was committed before it was given back"
        assert http.post("/groups/holders/resume").json()["paused"] is False
        assert stream.next(10).value == b"2"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/groups/nobody", None, 404, "GROUP_NOT_FOUND"),
        ("GET", "/groups/%20bad", None, 400, "INVALID_NAME"),
        ("DELETE", "/groups/nobody", None, 404, "GROUP_NOT_FOUND"),
        ("GET", "/groups/nobody/lag", None, 404, "GROUP_NOT_FOUND"),
        ("GET", "/groups/nobody/members", None, 404, "GROUP_NOT_FOUND"),
        ("POST", "/groups/nobody/rebalance", None, 404, "GROUP_NOT_FOUND"),
        ("POST", "/groups/nobody/pause", None, 404, "GROUP_NOT_FOUND"),
        ("POST", "/groups/nobody/resume", None, 404, "GROUP_NOT_FOUND"),
        ("POST", "/groups/nobody/reset", {"topic": "news", "to": "latest"}, 404, "GROUP_NOT_FOUND"),
        ("POST", "/groups/nobody/reset", {"topic": "nothing", "to": "latest"}, 404, "TOPIC_NOT_FOUND"),
        ("POST", "/groups/nobody/reset", {"topic": "no thing", "to": "latest"}, 400, "INVALID_NAME"),
        (
            "POST",
            "/groups/nobody/reset",
            {"topic": "news", "to": "latest", "partitions": [9]},
            404,
            "PARTITION_NOT_FOUND",
        ),
        ("POST", "/groups/nobody/reset", {"topic": "news", "to": "sideways"}, 400, "INVALID_ARGUMENT"),
        ("POST", "/groups/nobody/reset", {"topic": "news", "to": "offset"}, 400, "INVALID_ARGUMENT"),
        ("POST", "/groups/nobody/reset", {"topic": "news", "to": "offset", "value": 10**40}, 400, "INVALID_ARGUMENT"),
        ("GET", "/groups?state=odd", None, 400, "INVALID_ARGUMENT"),
        ("GET", "/groups?limit=1001", None, 400, "INVALID_ARGUMENT"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(
    http: httpx.Client, client: Client, method: str, path: str, body: Any, status: int, code: str
) -> None:
    client.create_topic("news", if_missing=True)
    answer = http.request(method, path, json=body) if body is not None else http.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
