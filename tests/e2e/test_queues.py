"""Queues over a real socket: what is leased, settled, tried again, buried, and who gets what."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.config import ServerSettings, Settings
from millstream.errors import (
    ConfigInvalid,
    GroupNotEmpty,
    GroupNotFound,
    ShuttingDown,
    SubscriptionNotFound,
    TopicNotFound,
)
from millstream.headers import decode_headers
from millstream.records import Batch
from millstream.testing.broker import BrokerForTests, BrokerProcess
from millstream.wire.frames import FrameType
from millstream.wire.leases import Scope, Settle, SettleEntry, decode_lease_result, decode_settle_result, lasting_ms
from tests.native import Delivered, NativeClient, delivered
from tests.waiting import eventually

DONE, RETRIED, DEAD, INVALID = 0, 1, 2, 40
SHORT = "standard,max_retries=2,initial=50ms"


@pytest.fixture
def client(broker: BrokerForTests) -> Iterator[NativeClient]:
    with NativeClient(broker.address) as connected:
        connected.call("topic.create", name="orders", config={"retry": SHORT})
        yield connected


@pytest.fixture
def other(broker: BrokerForTests) -> Iterator[NativeClient]:
    with NativeClient(broker.address, client_id="other") as connected:
        yield connected


def values(messages: list[Delivered]) -> list[bytes | None]:
    return [message.value for message in messages]


def letters(client: NativeClient, topic: str) -> list[tuple[bytes | None, dict[str, str]]]:
    """The dead letters on a topic, once there are some: value and headers."""
    eventually(lambda: topic in {entry["name"] for entry in client.call("topic.list")})
    data, found, at = bytes(client.fetch(topic, 0, wait_ms=5000).batches), [], 0
    while at < len(data):
        batch = Batch.parse(data, at)
        at += batch.header.length
        for value, raw in zip(batch.values(), batch.raw_headers() or (), strict=True):
            found.append((value, {name: text.decode() for name, text in decode_headers(raw)}))
    return found


def counts(client: NativeClient, topic: str = "orders", group: str = "default") -> tuple[int, int, int]:
    info = client.call("queue.describe", topic=topic, group=group)
    assert info["depth"] == info["ready"] + info["leased"] + info["waiting"]
    return info["ready"], info["leased"], info["waiting"]


# --- leasing and settling ----------------------------------------------------------------------------------------


def test_what_is_published_is_leased_once_and_gone_when_it_is_acked(client: NativeClient) -> None:
    client.publish("orders", [b"a", b"b", b"c"])
    consumer = client.open_queue("orders")
    leased = client.lease(consumer)
    assert values(leased) == [b"a", b"b", b"c"]
    assert [(m.part.delivery, m.part.failures) for m in leased] == [(1, 0)] * 3
    assert client.lease(consumer) == [], "what is leased is nobody else's"
    assert counts(client) == (0, 3, 0)
    assert client.ack(*leased) == [DONE] * 3
    assert counts(client) == (0, 0, 0)


def test_a_lease_takes_as_many_as_were_asked_for_across_batches(client: NativeClient) -> None:
    for start in range(0, 30, 10):
        client.publish("orders", [b"%d" % n for n in range(start, start + 10)])
    consumer = client.open_queue("orders")
    assert values(client.lease(consumer, 7)) == [b"%d" % n for n in range(7)]
    assert values(client.lease(consumer, 16)) == [b"%d" % n for n in range(7, 23)]
    assert values(client.lease(consumer, 100)) == [b"%d" % n for n in range(23, 30)]


def test_only_what_is_leased_travels(client: NativeClient) -> None:
    client.publish("orders", [bytes(1000)] * 1000)
    (message,) = client.lease(client.open_queue("orders"), 1)
    assert sum(map(len, message.part.batches)) < 2000, "a batch is cut at the edges of the lease"


def test_a_lease_respects_its_size_but_gives_at_least_one_message(client: NativeClient) -> None:
    for _ in range(4):
        client.publish("orders", [bytes(30_000)] * 2)
    consumer = client.open_queue("orders")
    assert len(client.lease(consumer, 100, max_bytes=1)) >= 1
    assert len(client.lease(consumer, 100, max_bytes=130_000)) in (2, 3, 4)


def test_one_settle_can_say_different_things_of_one_lease(client: NativeClient) -> None:
    client.publish("orders", [b"%d" % n for n in range(10)])
    leased = client.lease(client.open_queue("orders"))
    nonce, start = leased[0].part.nonce, leased[0].part.start
    results = client.settle(
        SettleEntry(Settle.ACK, nonce, Scope.BITMAP, start, 0, 0b1010101),
        SettleEntry(Settle.NACK, nonce, Scope.ONE, start + 1, -1, reason="later"),
        SettleEntry(Settle.REJECT, nonce, Scope.ONE, start + 3, reason="bad"),
        SettleEntry(Settle.ACK, nonce, Scope.REST),
    )
    assert results == [DONE, RETRIED, DEAD, DONE]
    info = client.call("queue.describe", topic="orders")
    assert (info["depth"], info["settled"]["acked"], info["settled"]["dead"]) == (1, 8, 1)
    assert [value for value, _ in letters(client, "orders.dlq")] == [b"3"]


def test_a_repeated_ack_is_a_success_and_a_late_or_foreign_settle_is_refused(
    client: NativeClient, other: NativeClient
) -> None:
    client.publish("orders", [b"a", b"b"])
    consumer = client.open_queue("orders", lease_ms=100)
    first, second = client.lease(consumer)
    assert other.ack(first) == [INVALID], "somebody else's lease"
    assert client.ack(first) == [DONE]
    assert client.ack(first) == [DONE], "an ack whose answer was lost is sent again"
    (again,) = client.lease(consumer, wait_ms=5000)
    assert (again.value, again.part.failures) == (b"b", 1), "the lease ran out, which is a failure"
    assert client.ack(second) == [INVALID], "late"
    assert client.settle_one(Settle.REJECT, second) == INVALID
    assert client.settle(SettleEntry(Settle.ACK, 12345)) == [INVALID], "never was"
    assert counts(client) == (0, 1, 0), "and nothing changed"
    assert client.ack(again) == [DONE]


def test_a_deadline_is_acted_on_within_a_tenth_of_a_second(client: NativeClient, other: NativeClient) -> None:
    """In real time.  One try must succeed: others may be using this machine."""
    client.call("queue.open", topic="orders", policy={"retry": "standard,initial=0ms"})
    consumer, waiting = client.open_queue("orders", lease_ms=300), other.open_queue("orders")
    late_ms: list[float] = []
    while len(late_ms) < 20 and min(late_ms, default=101) > 100:
        client.publish("orders", [b"a"])
        asked_s = time.monotonic()
        (leased,) = client.lease(consumer)
        granted_s = time.monotonic()
        (again,) = other.lease(waiting, wait_ms=5000)
        now_s = time.monotonic()
        assert again.value == b"a"
        assert leased.part.lease_ms == 300
        assert (now_s - asked_s) * 1000 >= leased.part.lease_ms - 5
        late_ms.append((now_s - granted_s) * 1000 - leased.part.lease_ms)
        assert other.ack(again) == [DONE]
    assert min(late_ms) <= 100, late_ms


def test_an_extended_lease_lasts_longer(client: NativeClient, other: NativeClient) -> None:
    client.publish("orders", [b"a"])
    (leased,) = client.lease(client.open_queue("orders", lease_ms=500))
    assert client.settle_one(Settle.EXTEND, leased, 60_000) == DONE
    assert other.lease(other.open_queue("orders"), wait_ms=700) == []
    assert client.ack(leased) == [DONE]


def test_released_messages_come_back_uncounted(client: NativeClient) -> None:
    client.publish("orders", [b"a", b"b"])
    consumer = client.open_queue("orders")
    first, second = client.lease(consumer)
    assert client.settle(SettleEntry(Settle.RELEASE, first.part.nonce)) == [DONE]
    again = client.lease(consumer)
    assert values(again) == [b"a", b"b"]
    assert {message.part.failures for message in again} == {0}
    assert client.ack(second) == [INVALID]


# --- failing -----------------------------------------------------------------------------------------------------


def test_a_failed_message_waits_is_tried_again_and_ends_on_the_dead_letter_topic(client: NativeClient) -> None:
    client.publish("orders", [b"doomed"], keys=[b"k"])
    consumer = client.open_queue("orders")
    nacked = 0.0
    for attempt in range(3):
        (message,) = client.lease(consumer, wait_ms=5000)
        waited_ms = (time.monotonic() - nacked) * 1000
        assert (message.part.delivery, message.part.failures) == (attempt + 1, attempt)
        if attempt:
            assert 50 * 2 ** (attempt - 1) - 10 <= waited_ms <= 50 * 2 ** (attempt - 1) + 2000
        nacked = time.monotonic()  # before it is: the calls behind it take their time on a busy machine
        result = client.settle_one(Settle.NACK, message, reason=f"db down {attempt}")
        assert result == (RETRIED if attempt < 2 else DEAD)
        if attempt < 2:
            assert counts(client) == (0, 0, 1)
    ((value, headers),) = letters(client, "orders.dlq")
    assert value == b"doomed"
    assert headers["millstream-dead-reason"] == "MAX_RETRIES_EXCEEDED"
    assert headers["millstream-dead-error"] == "db down 2"
    assert headers["millstream-dead-offset"] == "0"
    assert "db down 1" in headers["millstream-dead-attempts"]
    assert counts(client) == (0, 0, 0)


def test_a_consumer_can_say_when_to_try_again(client: NativeClient) -> None:
    client.publish("orders", [b"a"])
    consumer = client.open_queue("orders")
    (message,) = client.lease(consumer)
    assert client.settle_one(Settle.NACK, message, 250) == RETRIED
    assert client.lease(consumer, wait_ms=100) == []
    assert values(client.lease(consumer, wait_ms=5000)) == [b"a"]


def test_a_rejected_message_is_a_dead_letter_at_once(client: NativeClient) -> None:
    client.publish("orders", [b"bad", b"good"])
    bad, good = client.lease(client.open_queue("orders"))
    assert client.settle_one(Settle.REJECT, bad, reason="bad payload") == DEAD
    ((value, headers),) = letters(client, "orders.dlq")
    assert (value, headers["millstream-dead-reason"]) == (b"bad", "REJECTED")
    assert headers["millstream-dead-error"] == "bad payload"
    assert client.ack(good) == [DONE]


def test_a_consumer_that_disconnects_gives_its_leases_back_at_once(
    broker: BrokerForTests, client: NativeClient, other: NativeClient
) -> None:
    client.publish("orders", [b"a", b"b"])
    with NativeClient(broker.address) as doomed:
        leased = doomed.lease(doomed.open_queue("orders"))
        doomed.ack(leased[0])
    (again,) = other.lease(other.open_queue("orders"), wait_ms=5000)
    assert (again.value, again.part.delivery, again.part.failures) == (b"b", 2, 0), "nobody failed"


def test_redelivery_prefers_another_consumer(client: NativeClient, other: NativeClient) -> None:
    client.publish("orders", [b"a"])
    first = client.open_queue("orders")
    second = other.open_queue("orders")
    (message,) = client.lease(first)
    asked_first = client.send_lease(first, wait_ms=500)
    client.send_settle(SettleEntry(Settle.NACK, message.part.nonce, value=0))
    asked_second = other.send_lease(second, wait_ms=3000)
    assert values(delivered(decode_lease_result(other.answer(asked_second)))) == [b"a"]
    answers = {client.receive()[1] for _ in range(2)}
    assert asked_first in answers, "the first in line was passed over, and got nothing"


def test_alone_a_consumer_gets_its_own_failures_back(client: NativeClient) -> None:
    client.publish("orders", [b"a"])
    consumer = client.open_queue("orders")
    (message,) = client.lease(consumer)
    client.settle_one(Settle.NACK, message)
    assert values(client.lease(consumer, wait_ms=5000)) == [b"a"]


# --- waiting -----------------------------------------------------------------------------------------------------


def test_a_waiting_lease_is_answered_when_a_message_comes(client: NativeClient, other: NativeClient) -> None:
    consumer, took_s = other.open_queue("orders"), []
    for _ in range(3):  # one of them, at least, meets a machine that has time for it
        waiting = other.send_lease(consumer, wait_ms=10_000)
        started = time.monotonic()
        client.publish("orders", [b"a"])
        assert values(delivered(decode_lease_result(other.answer(waiting)))) == [b"a"]
        took_s.append(time.monotonic() - started)
    assert min(took_s) < 2


def test_waiting_ends_with_nothing(client: NativeClient) -> None:
    consumer, took_s = client.open_queue("orders"), []
    for _ in range(3):
        started = time.monotonic()
        assert client.lease(consumer, wait_ms=150) == []
        took_s.append(time.monotonic() - started)
    assert 0.14 <= min(took_s) < 2


def test_those_who_wait_are_served_in_their_order(client: NativeClient) -> None:
    consumers = [client.open_queue("orders") for _ in range(3)]
    waiting = [client.send_lease(consumer, 1, wait_ms=10_000) for consumer in consumers]
    client.send_publish("orders", [b"0", b"1", b"2"], acks=0)
    for number, correlation in enumerate(waiting):
        assert values(delivered(decode_lease_result(client.answer(correlation)))) == [b"%d" % number]


def test_all_partitions_have_their_turn(client: NativeClient) -> None:
    client.call("topic.create", name="wide", partitions=4)
    for partition in range(4):
        client.publish("wide", [b"%d" % partition] * 100, partition=partition)
    consumer = client.open_queue("wide")
    taken = Counter(message.value for _ in range(20) for message in client.lease(consumer, 5))
    assert sum(taken.values()) == 100
    assert all(count >= 20 for count in taken.values()), taken
    assert len(taken) == 4


def test_leases_that_wait_end_with_their_connection(client: NativeClient, broker: BrokerForTests) -> None:
    with NativeClient(broker.address) as gone:
        gone.send_lease(gone.open_queue("orders"), wait_ms=60_000)
        gone.call("broker.describe")
    eventually(lambda: client.call("queue.describe", topic="orders")["consumers"] == [])
    client.publish("orders", [b"a"])
    assert counts(client) == (1, 0, 0), "nobody took it to a client that is gone"


# --- groups ------------------------------------------------------------------------------------------------------


def test_every_group_gets_every_message(client: NativeClient) -> None:
    client.publish("orders", [b"a"])
    for group in ("billing", "shipping"):
        (message,) = client.lease(client.open_queue("orders", group=group))
        assert client.ack(message) == [DONE]
    assert {entry["group"] for entry in client.call("queue.list")} == {"billing", "shipping"}


def test_a_group_may_begin_at_the_end(client: NativeClient) -> None:
    client.publish("orders", [b"old"])
    consumer = client.open_queue("orders", group="late", start="latest")
    client.publish("orders", [b"new"])
    assert values(client.lease(consumer)) == [b"new"]


def test_settings_belong_to_the_group_and_may_not_differ(client: NativeClient) -> None:
    client.open_queue("orders", policy={"ordering": "key"})
    client.open_queue("orders", policy={"ordering": "key"})
    client.open_queue("orders")
    with pytest.raises(ConfigInvalid, match="ordering"):
        client.open_queue("orders", policy={"ordering": "strict"})
    with pytest.raises(ConfigInvalid, match="lease_ms"):
        client.open_queue("orders", group="new", policy={"lease_ms": 1})
    with pytest.raises(TopicNotFound):
        client.open_queue("nothing")
    with pytest.raises(GroupNotFound):
        client.call("queue.describe", topic="orders", group="nobody")
    with pytest.raises(SubscriptionNotFound, match="consumer 77"):
        client.lease(77)


def test_a_paused_group_hands_out_nothing_until_it_goes_on(client: NativeClient, other: NativeClient) -> None:
    consumer = other.open_queue("orders")
    client.call("queue.configure", topic="orders", policy={"paused": True})
    client.publish("orders", [b"a"])
    waiting = other.send_lease(consumer, wait_ms=10_000)
    assert client.call("why", topic="orders", group="default")["state"] == "paused"
    assert counts(client) == (1, 0, 0)
    client.call("queue.configure", topic="orders", policy={"paused": False})
    assert values(delivered(decode_lease_result(other.answer(waiting)))) == [b"a"]


def test_purged_means_settled(client: NativeClient) -> None:
    client.publish("orders", [b"a", b"b", b"c"])
    consumer = client.open_queue("orders")
    (leased,) = client.lease(consumer, 1)
    assert client.call("queue.purge", topic="orders") == {"purged": 3}
    assert counts(client) == (0, 0, 0)
    assert client.lease(consumer) == []
    client.ack(leased)
    client.publish("orders", [b"d"])
    assert values(client.lease(consumer)) == [b"d"]


def test_a_deleted_group_begins_anew(client: NativeClient) -> None:
    client.publish("orders", [b"a"])
    consumer = client.open_queue("orders")
    client.ack(*client.lease(consumer))
    with pytest.raises(GroupNotEmpty, match="consumer"):
        client.call("queue.delete", topic="orders")
    client.call("queue.close", consumer=consumer)
    client.call("queue.delete", topic="orders")
    assert client.call("queue.list") == []
    assert values(client.lease(client.open_queue("orders"))) == [b"a"]


def test_a_pattern_is_a_group_on_every_topic_that_matches_also_later_ones(
    client: NativeClient, other: NativeClient
) -> None:
    for name in ("news.eu", "news.us", "sport.eu"):
        client.call("topic.create", name=name)
        client.publish(name, [name.encode()])
    consumer = other.open_queue("news.*", group="readers")
    first = other.lease(consumer)
    assert sorted(values(first)) == [b"news.eu", b"news.us"]  # type: ignore[type-var]
    assert {message.part.topic for message in first} == {"news.eu", "news.us"}
    waiting = other.send_lease(consumer, wait_ms=10_000)
    client.call("topic.create", name="news.asia")
    client.publish("news.asia", [b"news.asia"])
    assert values(delivered(decode_lease_result(other.answer(waiting)))) == [b"news.asia"]
    assert other.ack(*first) == [DONE, DONE]


def test_partitions_that_are_added_are_served(client: NativeClient, other: NativeClient) -> None:
    waiting = other.send_lease(other.open_queue("orders"), wait_ms=10_000)
    client.call("topic.alter", name="orders", partitions=3)
    client.publish("orders", [b"a"], partition=2)
    assert values(delivered(decode_lease_result(other.answer(waiting)))) == [b"a"]


def test_a_deleted_topic_takes_its_queues_with_it(client: NativeClient, other: NativeClient) -> None:
    client.publish("orders", [b"a", b"b"])
    consumer = other.open_queue("orders")
    (leased,) = other.lease(consumer, 1)
    client.call("topic.delete", name="orders", force=True)
    assert other.ack(leased) == [INVALID]
    assert client.call("queue.list") == []
    with pytest.raises(TopicNotFound):
        other.lease(consumer)
    client.call("topic.create", name="orders")
    client.publish("orders", [b"new"])
    assert values(client.lease(client.open_queue("orders"))) == [b"new"]


# --- order, lanes, expiry ----------------------------------------------------------------------------------------


def test_ordering_by_key_gives_one_message_per_key_at_a_time(client: NativeClient) -> None:
    client.publish("orders", [b"a1", b"a2", b"b1", b"a3", b"b2"], keys=[b"a", b"a", b"b", b"a", b"b"])
    consumer = client.open_queue("orders", policy={"ordering": "key"})
    first = client.lease(consumer)
    assert values(first) == [b"a1", b"b1"]
    assert client.lease(consumer) == []
    client.ack(first[0])
    (second,) = client.lease(consumer)
    assert second.value == b"a2"
    client.settle_one(Settle.NACK, second)
    assert client.lease(consumer) == [], "a retry keeps its place: the key waits for it"
    (again,) = client.lease(consumer, wait_ms=5000)
    assert again.value == b"a2"


def test_strict_order_gives_one_message_at_a_time(client: NativeClient) -> None:
    client.publish("orders", [b"a", b"b"], keys=[b"x", b"y"])
    consumer = client.open_queue("orders", policy={"ordering": "strict"})
    (first,) = client.lease(consumer)
    assert client.lease(consumer) == []
    client.ack(first)
    assert values(client.lease(consumer)) == [b"b"]


def test_lanes_are_served_by_their_shares(client: NativeClient) -> None:
    for priority in range(5):
        client.publish("orders", [b"%d" % priority] * 100, priorities=[priority] * 100)
    taken = Counter(values(client.lease(client.open_queue("orders"), 100)))
    assert taken == {b"0": 50, b"1": 25, b"2": 15, b"3": 7, b"4": 3}


def test_expired_messages_are_not_delivered(client: NativeClient) -> None:
    past, future = int((time.time() - 10) * 1e6), int((time.time() + 3600) * 1e6)
    client.publish("orders", [b"old", b"new", b"always"], expiry_us=[past, future, 0])
    assert values(client.lease(client.open_queue("orders"))) == [b"new", b"always"]
    info = client.call("queue.describe", topic="orders")
    assert (info["settled"]["expired"], info["depth"]) == (1, 2)


def test_expired_messages_can_be_dead_letters(client: NativeClient) -> None:
    client.call("topic.alter", name="orders", config={"on_expiry": "dead_letter"})
    client.publish("orders", [b"old"], expiry_us=[1])
    assert client.lease(client.open_queue("orders")) == []
    ((value, headers),) = letters(client, "orders.dlq")
    assert (value, headers["millstream-dead-reason"]) == (b"old", "TTL_EXPIRED")


# --- looking -----------------------------------------------------------------------------------------------------


def test_peek_shows_messages_with_their_state_and_takes_nothing(client: NativeClient) -> None:
    client.publish("orders", [b"a", b"b", b"c"], keys=[b"k", None, None])
    consumer = client.open_queue("orders")
    first, second = client.lease(consumer, 2)
    client.settle_one(Settle.NACK, second, 60_000, reason="later")
    seen = client.call("queue.peek", topic="orders")
    assert [(entry["offset"], entry["state"]) for entry in seen] == [(0, "leased"), (1, "waiting"), (2, "ready")]
    assert seen[1]["attempts"][0]["reason"] == "later"
    assert [entry["offset"] for entry in client.call("queue.peek", topic="orders", state="ready")] == [2]
    assert client.ack(first) == [DONE]
    (state,) = client.call("queue.message", id=seen[0]["id"])
    assert (state["state"], state["group"]) == ("settled", "default")


@pytest.mark.parametrize(
    ("state", "word"), [("leased", "leased"), ("waiting", "retry"), ("ready", "consumer"), ("settled", "settled")]
)
def test_why_answers_with_a_sentence(client: NativeClient, state: str, word: str) -> None:
    client.publish("orders", [b"a"])
    consumer = client.open_queue("orders")
    (entry,) = client.call("queue.peek", topic="orders")
    if state == "ready":
        client.call("queue.close", consumer=consumer)
    else:
        (message,) = client.lease(consumer)
        if state == "waiting":
            client.settle_one(Settle.NACK, message, 60_000)
        elif state == "settled":
            client.ack(message)
    answer: dict[str, Any] = client.call("why", id=entry["id"], group="default")
    assert word in answer["sentence"].lower(), answer
    assert answer["facts"]


def test_leases_by_text_outlive_their_connection(broker: BrokerForTests, client: NativeClient) -> None:
    client.publish("orders", [b"a", b"b", b"c"])
    with NativeClient(broker.address) as door:
        leased = door.call("queue.lease", topic="orders", max=3, lease_ms=60_000)
    assert [message["value"] for message in leased] == ["YQ==", "Yg==", "Yw=="]
    assert counts(client) == (0, 3, 0)
    results = client.call(
        "queue.settle",
        items=[
            {"receipt": leased[0]["receipt"]},
            {"receipt": leased[1]["receipt"], "action": "nack", "reason": "no"},
            {"receipt": leased[2]["receipt"][:-1] + "z", "action": "reject"},
            {"receipt": "orders:0:2:1:0000000000000000", "action": "reject"},
        ],
    )
    assert [entry["result"] for entry in results] == ["done", "retried", "receipt_invalid", "receipt_invalid"]
    assert counts(client) == (0, 1, 1)


# --- restarts ----------------------------------------------------------------------------------------------------


def test_a_restart_keeps_what_was_settled_and_how_often_it_failed(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path / "data") as broker, NativeClient(broker.address) as client:
        client.call("topic.create", name="orders", config={"retry": "standard,initial=60s"})
        client.publish("orders", [b"%d" % n for n in range(5)])
        leased = client.lease(client.open_queue("orders", policy={"max_deliveries": 7}))
        client.ack(leased[0], leased[2])
        client.settle_one(Settle.NACK, leased[1], 0, reason="why not")
        client.settle_one(Settle.NACK, leased[3], reason="later")
    with BrokerForTests(tmp_path / "data") as broker, NativeClient(broker.address) as client:
        assert counts(client) == (2, 0, 1)
        again = client.lease(client.open_queue("orders", policy={"max_deliveries": 7}))
        assert [(m.value, m.part.failures) for m in again] == [(b"1", 1), (b"4", 0)]
        seen = client.call("queue.peek", topic="orders", state="waiting")
        assert [(entry["offset"], entry["attempts"][0]["reason"]) for entry in seen] == [(3, "later")]


def test_kill_nine_keeps_what_was_recorded(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        with NativeClient(broker.address) as client:
            client.call("topic.create", name="orders")
            client.publish("orders", [b"%d" % n for n in range(4)])
            leased = client.lease(client.open_queue("orders", policy={"ack_durability": "sync"}))
            assert client.ack(leased[0]) == [DONE]
            assert client.settle_one(Settle.REJECT, leased[1], reason="bad") == DEAD
        broker.kill()
    with BrokerProcess(tmp_path / "data") as broker, NativeClient(broker.address) as client:
        assert values(client.lease(client.open_queue("orders"))) == [b"2", b"3"]
        assert [value for value, _ in letters(client, "orders.dlq")] == [b"1"]
        broker.stop()


# --- the door ----------------------------------------------------------------------------------------------------


def test_a_consumer_that_does_not_read_is_given_no_more(tmp_path: Path) -> None:
    settings = Settings(server=ServerSettings(connection_memory_bytes=256 * 1024))
    with BrokerForTests(tmp_path, settings=settings) as broker, NativeClient(broker.address) as good:
        good.call("topic.create", name="orders")
        for _ in range(20):
            good.publish("orders", [b"x" * 500_000])
        with NativeClient(broker.address) as lazy:
            lazy.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
            consumer = lazy.open_queue("orders")
            asked = [lazy.send_lease(consumer, 1) for _ in range(20)]
            good.call("broker.describe")
            assert counts(good)[0] > 5, "what it cannot read is there for others"
            answered = [lazy.receive() for _ in asked]
            assert sorted(correlation or 0 for _, correlation, _ in answered) == asked
            assert counts(good)[:2] == (0, 20)


def test_stopping_answers_leases_that_wait_and_keeps_acks(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker:
        client = NativeClient(broker.address)
        client.call("topic.create", name="orders")
        client.publish("orders", [b"a", b"b"])
        consumer = client.open_queue("orders")
        first, _ = client.lease(consumer)
        waiting = client.send_lease(consumer, wait_ms=60_000)
        client.send_settle(SettleEntry(Settle.ACK, first.part.nonce, Scope.ONE, first.offset))
        assert client.receive()[0] == FrameType.RESPONSE
        broker.stop()
        with pytest.raises(ShuttingDown):
            decode_lease_result(client.answer(waiting))
    with BrokerForTests(tmp_path) as broker, NativeClient(broker.address) as client:
        assert values(client.lease(client.open_queue("orders"))) == [b"b"]


def test_ephemeral_topics_are_queues_too(client: NativeClient) -> None:
    client.call("topic.create", name="fleeting", config={"mode": "ephemeral", "retry": SHORT})
    client.publish("fleeting", [b"a", b"b"])
    first, second = client.lease(client.open_queue("fleeting", policy={"ack_durability": "sync"}))
    assert client.ack(first) == [DONE]
    assert client.settle_one(Settle.REJECT, second) == DEAD
    assert [value for value, _ in letters(client, "fleeting.dlq")] == [b"b"]


def test_a_closed_consumer_gives_back_what_it_holds(client: NativeClient, other: NativeClient) -> None:
    client.publish("orders", [b"a"])
    consumer = client.open_queue("orders")
    (message,) = client.lease(consumer)
    client.call("queue.close", consumer=consumer)
    assert values(other.lease(other.open_queue("orders"), wait_ms=5000)) == [b"a"]
    assert client.ack(message) == [INVALID]


def test_leases_of_a_detached_consumer_outlive_its_connection(broker: BrokerForTests, client: NativeClient) -> None:
    client.publish("orders", [b"a", b"b"])
    with NativeClient(broker.address) as gone:
        held = gone.lease(gone.open_queue("orders", detached=True, lease_ms=400), 1)
    assert values(client.lease(client.open_queue("orders"), wait_ms=100)) == [b"b"]
    assert client.ack(*held) == [DONE], "whoever has the receipt may settle"


def test_one_group_does_not_disturb_another(client: NativeClient) -> None:
    client.publish("orders", [b"a", b"b"])
    slow, fast = client.open_queue("orders", group="slow"), client.open_queue("orders", group="fast")
    (held, _) = client.lease(slow)
    assert client.ack(*client.lease(fast)) == [DONE, DONE]
    assert counts(client, group="slow") == (0, 2, 0)
    assert counts(client, group="fast") == (0, 0, 0)
    assert client.settle_one(Settle.NACK, held) == RETRIED
    assert counts(client, group="fast") == (0, 0, 0)


@pytest.mark.parametrize("asks", [True, False])
def test_how_long_an_extended_lease_lasts_is_told_to_clients_that_ask_for_it(
    broker: BrokerForTests, asks: bool
) -> None:
    with NativeClient(broker.address, hello=False) as client:
        client.hello(**{"extensions": True} if asks else {})
        client.call("topic.create", name="orders")
        client.publish("orders", [b"a", b"b"])
        consumer = client.open_queue("orders", policy={"processing_ms": 60_000})
        first, second = client.lease(consumer)
        entries = [
            SettleEntry(Settle.EXTEND, first.part.nonce, value=3_600_000),
            SettleEntry(Settle.EXTEND, 1),
            SettleEntry(Settle.ACK, second.part.nonce, Scope.ONE, second.offset),
            SettleEntry(Settle.EXTEND, first.part.nonce, value=40_000),
        ]
        answer = client.answer(client.send_settle(*entries))
        assert list(decode_settle_result(answer, 4)) == [0, 40, 0, 0]
        lasting = lasting_ms(answer)
        assert len(lasting) == (2 if asks else 0)
        assert all(55_000 < ms <= 60_000 for ms in lasting)
