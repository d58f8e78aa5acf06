"""Topics over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millstream.testing.broker import BrokerForTests
from tests.waiting import eventually


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests(http=True) as running:
        yield running


@pytest.fixture(scope="module")
def http(broker: BrokerForTests) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{broker.url}/api/v1") as client:
        yield client


def test_a_topic_is_made_shown_changed_and_deleted(http: httpx.Client) -> None:
    made = http.post("/topics", json={"name": "life", "partitions": 2, "config": {"retention_ms": 1000}})
    assert made.status_code == 201
    assert made.json()["config"]["retention_ms"] == 1000
    assert http.post("/topics", json={"name": "life"}).status_code == 409
    assert http.post("/topics", json={"name": "life", "if_missing": True}).status_code == 201
    changed = http.patch("/topics/life", json={"partitions": 3, "config": {"max_depth": 7}})
    assert changed.status_code == 200
    shown = http.get("/topics/life").json()
    assert shown == changed.json()
    assert (shown["partition_count"], shown["config"]["max_depth"], len(shown["partitions"])) == (3, 7, 3)
    assert http.delete("/topics/life").status_code == 204
    assert http.get("/topics/life").json()["code"] == "TOPIC_NOT_FOUND"


def test_the_list_says_what_is_in_each_topic_and_who_reads_it(broker: BrokerForTests, http: httpx.Client) -> None:
    client = broker.connect()
    client.create_topic("rows.work")
    client.create_topic("rows.idle")
    client.publish_many("rows.work", ["a", "b", "c", "d"])
    with client.queue("rows.work", group="billing") as queue:
        message = queue.next(5)
        assert message is not None
        message.reject("never")
        leased = queue.next(5)
        assert leased is not None

        def rows_now() -> dict[str, dict[str, Any]]:
            return {row["name"]: row for row in http.get("/topics", params={"pattern": "rows.*"}).json()}

        eventually(lambda: rows_now()["rows.work"]["dead_letters"])
        rows = rows_now()
        assert list(rows) == ["rows.idle", "rows.work"]
        work = rows["rows.work"]
        assert (work["messages"], work["depth"], work["groups"]) == (4, 3, 1)
        assert work["leased"] >= 1
        assert work["dead_letters"] == 1
        assert work["size_bytes"] > 0
        assert rows["rows.idle"]["messages"] == rows["rows.idle"]["size_bytes"] == 0
    every = http.get("/topics", params={"pattern": "rows.#", "include_dead_letters": "true", "limit": 1, "offset": 1})
    assert every.headers["x-total-count"] == "3"
    assert [row["name"] for row in every.json()] == ["rows.work"]


def test_what_several_groups_have_not_settled_is_counted_once_everywhere(
    broker: BrokerForTests, http: httpx.Client
) -> None:
    broker.connect().publish_many("counted", ["a", "b", "c"])
    for group in ("billing", "printing"):
        assert http.put(f"/queues/counted/{group}", json={}).is_success
    [leased] = http.post("/queues/counted/billing/lease", json={}).json()
    http.post("/queues/ack", json={"receipts": [leased["receipt"]]})
    [listed] = http.get("/topics", params={"pattern": "counted"}).json()
    [active] = [row for row in http.get("/stats/overview").json()["busiest"] if row["topic"] == "counted"]
    assert listed["depth"] == active["depth"] == http.get("/topics/counted/flow").json()["depth"] == 3


def test_where_partitions_begin_and_end(broker: BrokerForTests, http: httpx.Client) -> None:
    client = broker.connect()
    client.create_topic("places", partitions=2)
    client.publish_many("places", [b"x"] * 3)
    ends = {entry["partition"]: entry["offset"] for entry in http.get("/topics/places/offsets").json()}
    assert sorted(ends.values()) == [0, 3]
    [only] = http.get("/topics/places/offsets", params={"partition": 1, "at": "earliest"}).json()
    assert only == {"partition": 1, "offset": 0}
    at = http.get("/topics/places/offsets", params={"at": "timestamp", "timestamp_ms": 1}).json()
    assert [entry["offset"] for entry in at] == [0, 0]
    assert http.get("/topics/places/offsets", params={"at": "timestamp"}).status_code == 400
    assert http.get("/topics/places/offsets", params={"partition": 9}).status_code == 404


def test_flow_and_lanes(broker: BrokerForTests, http: httpx.Client) -> None:
    client = broker.connect()
    client.create_topic("busy", config={"throttle_depth": 10})
    with client.queue("busy") as queue:
        client.publish("busy", "now", priority="critical")
        client.publish("busy", "later", priority="low")
        assert queue.next(5) is not None
        assert http.get("/topics/busy/flow").json()["throttle_depth"] == 10
        [group] = http.get("/topics/busy/lanes").json()
        assert group["group"] == "default"
        assert sum(lane["served"] for lane in group["lanes"]) >= 1
    assert http.get("/topics/nowhere/flow").status_code == 404
    assert http.get("/topics/nowhere/lanes").status_code == 404


def test_a_namespace_of_its_own(http: httpx.Client) -> None:
    assert http.post("/namespaces/team/topics", json={"name": "plans"}).status_code == 201
    assert [row["name"] for row in http.get("/namespaces/team/topics").json()] == ["plans"]
    assert http.get("/topics/plans").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/topics", {"name": "a/b"}),
        ("POST", "/topics", {"name": "x", "partitions": 0}),
        ("POST", "/topics", {"name": "x", "partitions": 10**30}),
        ("POST", "/topics", {"name": "x", "config": {"retention": 5}}),
        ("POST", "/topics", {"name": "x", "extra": 5}),
        ("POST", "/topics", {}),
        ("PATCH", "/topics/some", {"partitions": -1}),
        ("GET", "/topics?limit=0", None),
        ("GET", "/topics?limit=99999999999999999999", None),
        ("GET", "/topics?offset=-1", None),
        ("GET", "/topics?pattern=a..b", None),
        ("GET", "/topics?unknown=1", None),
        ("GET", "/topics/a%2Fb/offsets?at=never", None),
    ],
)
def test_mistakes_are_told_in_one_sentence(http: httpx.Client, method: str, path: str, body: object) -> None:
    http.post("/topics", json={"name": "some", "if_missing": True})
    answer = http.request(method, path, json=body) if body is not None else http.request(method, path)
    assert answer.status_code == 400
    assert answer.json()["message"]
