"""Following a topic over HTTP: lines of JSON for as long as somebody reads."""

from __future__ import annotations

import asyncio
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
from millstream.entries import AnyEntry, Entry
from millstream.errors import TopicNotFound
from millstream.ids import SCHEDULES
from millstream.server.http.following import Follower
from millstream.server.publishing import publish
from millstream.testing.broker import BrokerForTests
from millstream.wire import calls
from tests.waiting import eventually


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests(http=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(broker: BrokerForTests) -> Client:
    return broker.connect()


def read(broker: BrokerForTests, topic: str, count: int, **options: Any) -> list[dict[str, Any]]:
    """The first lines of a stream."""
    url = f"{broker.url}/api/v1/topics/{topic}/stream"
    with httpx.stream("GET", url, params=options, timeout=30) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = answer.iter_lines()
        return [json.loads(next(lines)) for _ in range(count)]


def waiters(broker: BrokerForTests, topic: str) -> int:
    found = broker.broker.topics.registry.get("default", topic)
    return sum(len(partition._waiters) for partition in found.partitions if partition is not None)


def test_everything_there_is_and_then_what_comes(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("all", partitions=3)
    receipts = [client.publish("all", f"old {number}", key=str(number)) for number in range(20)]
    got: list[dict[str, Any]] = []
    started = threading.Event()

    def follow() -> None:
        url = f"{broker.url}/api/v1/topics/all/stream"
        with httpx.stream("GET", url, params={"earliest": True}, timeout=30) as answer:
            for line in answer.iter_lines():
                got.append(json.loads(line))
                if len(got) >= 20:
                    started.set()
                if len(got) == 21:
                    return

    thread = threading.Thread(target=follow)
    thread.start()
    assert started.wait(20)
    eventually(lambda: waiters(broker, "all") == 3)
    client.publish("all", "new", headers={"a": "b"})
    thread.join(20)
    assert {message["id"] for message in got[:20]} == {receipt.id for receipt in receipts}
    assert (got[20]["value"], got[20]["headers"]) == ("new", {"a": "b"})
    for number in range(3):
        offsets = [message["offset"] for message in got if message["partition"] == number]
        assert offsets == sorted(offsets)


def test_a_stream_begins_where_it_is_told(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("places", partitions=2)
    client.publish_many("places", ["0", "1", "2", "3"])
    [number] = [number for number, end in client.offsets("places").items() if end]
    assert [m["value"] for m in read(broker, "places", 2, partition=number, offset=2)] == ["2", "3"]
    assert [m["value"] for m in read(broker, "places", 1, after=f"{number}:3")] == ["3"]
    assert [m["value"] for m in read(broker, "places", 1, from_ms=1)] == ["0"]
    answer = httpx.get(f"{broker.url}/api/v1/topics/places/stream", params={"offset": 1, "earliest": True})
    assert answer.status_code == 400


@pytest.mark.parametrize("partition", [-1, 1, SCHEDULES, 2**63])
def test_a_partition_that_is_none_is_refused_before_the_stream_begins(
    broker: BrokerForTests, client: Client, partition: int
) -> None:
    client.publish("whole", "x", delay=3_600)
    answer = httpx.get(f"{broker.url}/api/v1/topics/whole/stream", params={"partition": partition, "earliest": True})
    assert (answer.status_code, answer.json()["code"]) == (404, "PARTITION_NOT_FOUND")


def test_a_limit_ends_the_stream(broker: BrokerForTests, client: Client) -> None:
    client.publish_many("limited", [str(number) for number in range(10)])
    answer = httpx.get(f"{broker.url}/api/v1/topics/limited/stream", params={"earliest": True, "limit": 4})
    assert [json.loads(line)["value"] for line in answer.text.splitlines()] == ["0", "1", "2", "3"]


def test_a_quiet_stream_says_that_it_lives_and_where_to_go_on(broker: BrokerForTests, client: Client) -> None:
    client.publish("quiet", "x")
    [beat] = read(broker, "quiet", 1, heartbeat_ms=100)
    assert beat["after"] == "0:1"
    client.publish("quiet", "y")
    assert [m["value"] for m in read(broker, "quiet", 1, after=beat["after"])] == ["y"]


def test_a_reader_that_goes_away_leaves_nothing_behind(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("left")
    client.publish("left", "x")
    assert len(read(broker, "left", 1, earliest=True)) == 1
    eventually(lambda: waiters(broker, "left") == 0)


def test_a_reader_that_goes_away_as_a_message_comes_leaves_nothing_behind_either(
    broker: BrokerForTests, client: Client
) -> None:
    client.create_topic("crossed")

    async def go_away() -> bool:
        inside = broker.broker
        uids = inside.topics.registry.get("default", "crossed").partition_uids
        session = inside.own_session("default", "test")
        follower = Follower(inside, session, "crossed", uids, {0: 0}, encoding="auto")
        pieces = follower.lines(limit=0, heartbeat_ms=60_000)
        reading = asyncio.ensure_future(anext(pieces))  # type: ignore[arg-type]
        for _ in range(20):  # until it waits for news
            await asyncio.sleep(0)
        assert follower._waiting
        follower._news.set()
        reading.cancel()
        ended, _ = await asyncio.wait((reading,), timeout=1)
        reading.cancel()
        return bool(ended)

    assert broker.run(go_away())


def test_a_slow_reader_does_not_fill_the_memory(broker: BrokerForTests, client: Client) -> None:
    """It is sent what the sockets hold; the rest stays in the log."""
    client.create_topic("slow")
    for _ in range(20):
        client.publish_many("slow", [b"x" * 100_000] * 10)
    fetched: list[int] = []
    original = broker.broker.fetch

    def counting(session: Any, request: Any, reply: Any) -> Any:
        fetched.append(request.offset)
        return original(session, request, reply)

    broker.broker.fetch = counting  # type: ignore[method-assign]
    try:
        address = urlparse(broker.url)
        with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            connection.sendall(b"GET /api/v1/topics/slow/stream?earliest=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            eventually(lambda: bool(fetched))
            before = -1
            while before != len(fetched):
                before = len(fetched)
                time.sleep(0.2)
            assert max(fetched) < 150, "most of the 200 messages are still to be read"
            # The client goes away with everything unread, and so does the stream.
    finally:
        broker.broker.fetch = original  # type: ignore[method-assign]
    eventually(lambda: waiters(broker, "slow") == 0)


@pytest.mark.parametrize(("count", "size"), [(10_000, 1), (10, 300_000)])
def test_a_large_batch_comes_in_pieces_and_others_have_their_turn_between(
    broker: BrokerForTests, count: int, size: int
) -> None:
    topic = f"large-{count}"
    entries: list[AnyEntry] = [b"x" * size] * count

    async def follow() -> tuple[list[int], int]:
        inside = broker.broker
        session = inside.own_session("default", "test")
        await publish(inside, session, topic, entries, now_us=inside.now_us())
        uids = inside.topics.registry.get("default", topic).partition_uids
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        other = asyncio.ensure_future(take_turns())
        follower = Follower(inside, session, topic, uids, {0: 0}, encoding="auto")
        pieces = [piece async for piece in follower.lines(limit=count, heartbeat_ms=1000)]
        other.cancel()
        assert sum(piece.count(b"\n") for piece in pieces) == count
        return [len(piece) for piece in pieces], turns

    sizes, turns = broker.run(follow())  # type: ignore[misc]
    assert max(sizes) < 1_500_000
    assert len(sizes) >= 3
    assert turns >= len(sizes) // 2


def test_a_request_of_many_batches_lets_others_have_their_turn(broker: BrokerForTests) -> None:
    entries = [Entry(b"v", None, b"", 2, 0, 0, 0, False, b"%d" % number) for number in range(2_000)]

    async def publish_all() -> int:
        inside = broker.broker
        session = inside.own_session("default", "test")
        await inside.call(session, calls.CreateTopic(name="batches", config={"dedup_window_ms": 60_000}))
        asked = most = 0
        original = inside.publish

        def counting(*arguments: Any) -> None:
            nonlocal asked, most
            if not asked:
                asyncio.get_running_loop().call_soon(next_turn)
            asked += 1
            most = max(most, asked)
            original(*arguments)

        def next_turn() -> None:
            nonlocal asked
            asked = 0

        inside.publish = counting  # type: ignore[method-assign]
        try:
            results = await publish(inside, session, "batches", entries, now_us=inside.now_us())
        finally:
            inside.publish = original  # type: ignore[method-assign]
        assert [result.offset for result in results] == list(range(2_000))  # type: ignore[union-attr]
        return most

    assert broker.run(publish_all()) <= 256  # type: ignore[operator]


def test_a_topic_that_is_deleted_ends_the_stream_with_an_error(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("doomed")
    client.publish("doomed", "x")
    url = f"{broker.url}/api/v1/topics/doomed/stream"
    with httpx.stream("GET", url, params={"earliest": True}, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        eventually(lambda: waiters(broker, "doomed") == 1)
        client.delete_topic("doomed")
        assert json.loads(next(lines))["error"]["code"] == "TOPIC_NOT_FOUND"
        assert list(lines) == []
    assert httpx.get(url).status_code == 404


def test_a_stream_does_not_go_on_in_another_topic_of_the_same_name(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("again")
    client.publish_many("again", [bytes(1000)] * 600)  # more than fits into one piece

    async def follow() -> tuple[int, str]:
        inside = broker.broker
        uids = inside.topics.registry.get("default", "again").partition_uids
        session = inside.own_session("default", "test")
        follower = Follower(inside, session, "again", uids, {0: 0}, encoding="auto")
        pieces = follower.lines(limit=0, heartbeat_ms=60_000)
        await anext(pieces)
        await inside.call(session, calls.DeleteTopic(name="again"))
        await inside.call(session, calls.CreateTopic(name="again"))
        entries: list[AnyEntry] = [b"another"] * 1_000
        await publish(inside, session, "again", entries, now_us=inside.now_us())
        lines = b""
        try:
            async for piece in pieces:
                lines += piece
        except TopicNotFound as error:
            return lines.count(b"another"), str(error)
        return lines.count(b"another"), "it came to an end"

    assert broker.run(follow()) == (0, "topic 'again' was deleted; there is another one of this name")


def test_a_stop_of_the_broker_ends_streams_and_long_polls() -> None:
    broker = BrokerForTests(http=True).start()
    client = broker.connect()
    client.publish("orders", "x")
    statuses: list[int] = []

    def poll() -> None:
        params = {"after": "0:1", "wait_ms": 60_000}
        statuses.append(httpx.get(f"{broker.url}/api/v1/topics/orders/messages", params=params, timeout=30).status_code)

    polling = threading.Thread(target=poll)
    polling.start()
    url = f"{broker.url}/api/v1/topics/orders/stream"
    with httpx.stream("GET", url, params={"earliest": True}, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        eventually(lambda: waiters(broker, "orders") == 2)
        began_s = time.monotonic()
        broker.stop()
        assert time.monotonic() - began_s < 5
        assert list(lines) == []
    polling.join(20)
    assert statuses == [503]
