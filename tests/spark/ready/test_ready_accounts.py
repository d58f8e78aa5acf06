"""`audit`, `latency`, `key-skew` and `usage` on messages of which the test knows everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from millstream.client import Outgoing
from millstream.errors import MessageNotFound, TopicNotFound
from millstream.spark.connection import BrokerConnection
from millstream.spark.options import Target
from millstream.spark.pipelines.ready import audit
from millstream.wire import calls, queue_calls
from tests.spark.ready.running import Ready
from tests.spark.world import World
from tests.waiting import eventually

DAY = datetime(2026, 11, 14, 12, tzinfo=UTC)


@contextmanager
def leased(world: World, topic: str, count: int, **options: Any) -> Iterator[list[Any]]:
    """Messages in the hands of a consumer."""
    with world.client.queue(topic, group="billing", timeout_s=5, **options) as queue:
        found: list[Any] = []
        while len(found) < count:
            found += queue.lease(count - len(found), wait="5s")
        yield found


# --- audit -----------------------------------------------------------------------------------------------------------


def test_every_message_has_a_place(alone: Ready, own_world: World) -> None:
    client = own_world.client
    client.create_topic("orders", 2, config={"retry": "simple,max_retries=5"})
    client.publish_many("orders", [b"%d" % n for n in range(100)])
    with (
        leased(own_world, "orders", 60) as held,
        client.queue("orders", group="late", start="latest", timeout_s=1) as late,
    ):
        for message in held[:40]:
            message.ack(wait=True)
        for message in held[40:45]:
            message.reject("no", wait=True)
        for message in held[45:50]:
            message.nack("later", retry_after="10h", wait=True)
        assert not late.lease(1, wait="1ms")
        client.publish_many("orders", [b"%d" % n for n in range(10)])
        client.publish("orders", b"not yet", deliver_at=datetime(2040, 1, 1, tzinfo=UTC))

        facts = alone.facts("audit")

    assert facts["lost"] == 0
    groups = {(each["topic"], each["group"]): each for each in facts["groups"]}
    billing = groups["orders", "billing"]
    assert (billing["published"], billing["acked"], billing["dead"], billing["letters"]) == (110, 40, 5, 5)
    assert (billing["leased"], billing["waiting"], billing["ready"], billing["lost"]) == (10, 5, 50, 0)
    assert groups["orders", "late"]["published"] == 10
    assert groups["orders", "late"]["lost"] == 0
    topics = {each["topic"]: each for each in facts["topics"]}
    assert (topics["orders"]["published"], topics["orders"]["stored"], topics["orders"]["missing"]) == (110, 110, 0)
    assert topics["orders"]["scheduled"] == 1
    assert topics["orders.dlq"]["stored"] == 5
    assert "Every message is accounted for" in alone.page


def test_what_is_not_accounted_for_is_lost_and_fails(
    alone: Ready, own_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_world.client.create_topic("orders")
    own_world.client.publish_many("orders", [b"%d" % n for n in range(20)])
    with leased(own_world, "orders", 20) as held:
        for message in held:
            message.ack(wait=True)
    whole = BrokerConnection.call

    def forgetful(self: BrokerConnection, asked: Any, kind: Any = Any) -> Any:
        answer = whole(self, asked, kind)
        if type(asked).__name__ == "DescribeQueue":
            answer.settled["acked"] -= 3  # a broker that has lost three of them
        return answer

    monkeypatch.setattr(BrokerConnection, "call", forgetful)
    with pytest.raises(MessageNotFound, match="3 messages are not accounted for"):
        alone.run("audit", report="report.html")
    assert "3 messages are nowhere" in alone.page
    assert alone.facts("audit", fail=False)["lost"] == 3


def test_a_group_that_began_late_in_a_compacted_topic_has_lost_nothing(own_world: World) -> None:
    client = own_world.client
    client.create_topic("prices", config={"cleanup": "compact", "segment_bytes": 4096})
    changes = [Outgoing(value=b"%0100d" % n, key=b"k%d" % (n % 3)) for n in range(400)]
    for first in range(0, 400, 10):
        client.publish_many("prices", changes[first : first + 10])
    with client.queue("prices", group="all", timeout_s=5) as queue:
        queue.lease(1, wait="5s")[0].ack(wait=True)
    own_world.broker.clock.advance("3h")
    eventually(lambda: len(client.browse("prices", limit=1000)) < 100, "the topic is compacted")
    with client.queue("prices", group="billing", start="latest", timeout_s=1) as late:
        assert not late.lease(1, wait="1ms")
    client.publish_many("prices", changes[:20])
    with leased(own_world, "prices", 20) as held:
        for message in held:
            message.ack(wait=True)
    connection = BrokerConnection(Target((own_world.broker.address,)))
    account = audit._group(connection, "prices", "billing")
    assert (account.published, account.acked, account.lost, account.exact) == (20, 20, 0, True)
    account = audit._group(connection, "prices", "all")
    assert (account.published, account.acked, account.lost, account.exact) == (420, 1, 0, True)


def test_what_retention_takes_while_an_audit_reads_is_not_missing(own_world: World) -> None:
    client = own_world.client
    client.create_topic("orders", config={"segment_bytes": 4096, "retention_messages": 50})
    for first in range(0, 400, 10):
        client.publish_many("orders", [b"%0100d" % n for n in range(first, first + 10)])
    connection = BrokerConnection(Target((own_world.broker.address,)))
    info = connection.call(calls.DescribeTopic(name="orders"), calls.TopicInfo)
    own_world.broker.clock.advance("1h")
    eventually(lambda: client.offsets("orders", "earliest")[0] > 0, "retention has acted")
    left = 400 - client.offsets("orders", "earliest")[0]
    account = audit._topic(info, left, audit._removed_since(connection, info), 0)
    assert (account.published, account.stored, account.removed, account.missing) == (400, left, 400 - left, 0)
    assert audit._topic(info, left - 1, audit._removed_since(connection, info), 0).missing == 1
    client.delete_topic("orders")
    assert audit._topic(info, 0, audit._removed_since(connection, info), 0).missing == 0


def test_what_is_deleted_while_an_audit_looks_is_left_out_unless_it_was_asked_for(own_world: World) -> None:
    client = own_world.client
    for topic in ("orders", "sales"):
        client.create_topic(topic)
        with client.queue(topic, group="billing", timeout_s=1):
            pass
    connection = BrokerConnection(Target((own_world.broker.address,)))
    everything, asked = audit.Audit(report="r.html"), audit.Audit(report="r.html", topics=["orders", "sales"])
    listed = connection.call(queue_calls.ListQueues(), list[queue_calls.QueueSummary])
    known = everything.describe(connection, ["orders", "sales"])
    client.queues.delete("sales", "billing", force=True)
    assert [each.topic for each in asked.account(connection, known, listed)] == ["orders"]
    client.delete_topic("sales")
    assert [each.topic for each in everything.account(connection, known, listed)] == ["orders"]
    assert list(everything.describe(connection, ["orders", "sales"])) == ["orders"]
    with pytest.raises(TopicNotFound, match="'sales'"):
        asked.describe(connection, ["orders", "sales"])
    with pytest.raises(TopicNotFound, match="'sales'"):
        asked.account(connection, known, listed)


# --- latency ---------------------------------------------------------------------------------------------------------


def test_the_time_from_publish_to_settle_is_told_by_hour(alone: Ready, own_world: World) -> None:
    client, clock = own_world.client, own_world.broker.clock
    client.create_topic("orders", config={"retry": "simple,max_retries=5"})
    client.publish_many("orders", [b"%d" % n for n in range(10)])
    with leased(own_world, "orders", 10, auto_extend=False, lease="10h") as held:
        clock.advance("10s")
        for message in held[:9]:
            message.ack(wait=True)
        clock.advance("2h")
        held[9].ack(wait=True)

    facts = alone.facts("latency", sample=1.0)

    (total,) = [each for each in facts["rows"] if each["hour"] is None]
    assert (total["topic"], total["group"], total["recorded"], total["messages"]) == ("orders", "billing", 10, 10)
    assert total["p50"] == pytest.approx(10_000, abs=5_000)
    assert total["longest"] == pytest.approx(7_210_000, abs=20_000)
    hours = [each for each in facts["rows"] if each["hour"] is not None]
    assert [each["recorded"] for each in hours] == [9, 1]
    distance = datetime.fromisoformat(hours[1]["hour"]) - datetime.fromisoformat(hours[0]["hour"])
    assert distance in (timedelta(hours=2), timedelta(hours=3))
    assert "orders → billing" in alone.page


@pytest.mark.slow
def test_a_message_that_had_failed_counts_for_itself_only(alone: Ready, own_world: World) -> None:
    client = own_world.client
    client.create_topic("orders", config={"retry": "simple,max_retries=5"})
    client.publish_many("orders", [b"0", b"1"])
    with leased(own_world, "orders", 2) as (first, second):
        first.ack(wait=True)
        second.nack("once more", retry_after="0s", wait=True)
    with leased(own_world, "orders", 1) as (again,):
        again.ack(wait=True)
    (total,) = [each for each in alone.facts("latency", sample=0.01)["rows"] if each["hour"] is None]
    assert (total["recorded"], total["retried"], total["messages"]) == (2, 1, 101)


def test_a_message_that_had_failed_before_the_time_in_question_counts_for_itself_only(
    alone: Ready, own_world: World
) -> None:
    client = own_world.client
    client.create_topic("orders", config={"retry": "simple,max_retries=5"})
    client.publish_many("orders", [b"0", b"1"])
    with leased(own_world, "orders", 2) as (first, second):
        first.ack(wait=True)
        second.nack("once more", retry_after="2h", wait=True)
    own_world.broker.clock.advance("3h")
    with leased(own_world, "orders", 1) as (again,):
        again.ack(wait=True)
    # From when the report is made on: the broker is three hours ahead of it.
    (total,) = [each for each in alone.facts("latency", sample=0.01, last="1ms")["rows"] if each["hour"] is None]
    assert (total["recorded"], total["retried"], total["messages"]) == (1, 1, 1)


def test_nothing_recorded_is_said(alone: Ready) -> None:
    assert alone.facts("latency")["rows"] == []
    assert "No settled message was recorded" in alone.page


# --- key-skew --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_keys_with_more_than_their_share_are_found(alone: Ready, own_world: World) -> None:
    client = own_world.client
    client.create_topic("hot", 4)
    client.create_topic("even", 2)
    keys = ["<i>whale"] * 60 + [f"k{n}" for n in range(39)] + [None]
    client.publish_many("hot", [Outgoing(value=b"x", key=key) for key in keys])
    client.create_topic("single", 4)
    client.publish_many("single", [Outgoing(value=b"x", key="k")] * 8)
    client.publish_many("even", [Outgoing(value=b"x", key=f"k{n % 50}") for n in range(500)])

    facts = alone.facts("key-skew")

    topics = {each["topic"]: each for each in facts["topics"]}
    hot = topics["hot"]
    assert (hot["messages"], hot["keys"], hot["hot"]) == (100, 40, True)
    assert (hot["top"][0]["key"], hot["top"][0]["messages"], hot["top"][0]["share"]) == ("<i>whale", 60, 0.6)
    assert sum(count for _, count in hot["partitions"]) == 100
    assert len(hot["partitions"]) == 4
    assert hot["skew"] == max(count for _, count in hot["partitions"]) / 25
    assert (topics["even"]["keys"], topics["even"]["top"][0]["messages"]) == (50, 10)
    assert (topics["single"]["skew"], len(topics["single"]["partitions"])) == (4.0, 4)
    assert "<code>&lt;i&gt;whale</code> has 60%" in alone.page
    assert "<i>whale" not in alone.page


# --- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_namespaces_store_is_counted(alone: Ready, own_world: World) -> None:
    own_world.client.create_namespace("shop")
    shop = own_world.broker.connect(namespace="shop")
    for client, topic, count in ((own_world.client, "logs", 5), (shop, "orders", 20), (shop, "bills", 10)):
        client.create_topic(topic)
        times = [DAY + timedelta(days=n % 2) for n in range(count)]
        client.publish_many(topic, [Outgoing(value=b"12345678", key=b"12", timestamp=time) for time in times])

    facts = alone.facts("usage")

    spaces = {each["namespace"]: each for each in facts["namespaces"]}
    assert (spaces["shop"]["topics"], spaces["shop"]["messages"], spaces["shop"]["published_bytes"]) == (2, 30, 300)
    assert (spaces["default"]["messages"], spaces["default"]["published"]) == (5, 5)
    assert spaces["shop"]["bytes"] > 300
    days = {(each["namespace"], each["topic"], each["day"]): each["messages"] for each in facts["days"]}
    assert days["shop", "orders", "2026-11-14"] == days["shop", "orders", "2026-11-15"] == 10
    assert days["default", "logs", "2026-11-14"] == 3
    assert "Usage by namespace" in alone.page
    assert alone.facts("usage", namespaces="shop")["namespaces"][0]["namespace"] == "shop"
