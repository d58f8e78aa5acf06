"""Dead letters with the real broker: they arrive with their history, can be found, and purged."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream import aio
from millstream.client import Client
from millstream.errors import ConfigInvalid, InvalidArgument, MessageNotFound
from millstream.testing.broker import BrokerForTests, BrokerProcess
from millstream.wire import letter_calls
from tests.e2e.letters_world import bury, texts
from tests.either import EitherClient
from tests.waiting import eventually


@pytest.fixture
def client(broker: BrokerForTests) -> Iterator[Client]:
    with millstream.connect(broker.address) as connected:
        yield connected


# --- arriving --------------------------------------------------------------------------------------------------------


def test_a_rejected_message_becomes_a_letter_with_its_whole_history(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("orders", partitions=3)
    sent = client.publish("orders", "bad", key=b"c-17", headers={"shop": "berlin"}, priority=1)
    with client.queue("orders", group="billing", consumer="worker-1") as work:
        (message,) = work.lease(wait=10)
        message.nack(reason="db down", retry_after=0)
        (message,) = work.lease(wait=10)
        message.reject("bad payload")
    eventually(lambda: client.dead_letters.stats().total)
    (letter,) = client.dead_letters.list()
    letter = client.dead_letters.show(letter.id)
    assert (letter.topic, letter.partition) == ("orders.dlq", sent.partition)
    assert (letter.original_topic, letter.original_offset, letter.original_id) == ("orders", sent.offset, sent.id)
    assert (letter.text, letter.key, letter.priority) == ("bad", b"c-17", 1)
    assert letter.headers == [("shop", b"berlin")]
    assert (letter.reason, letter.error, letter.group) == ("REJECTED", "bad payload", "billing")
    assert (letter.deliveries, letter.failures) == (2, 2)
    assert [(attempt.kind, attempt.reason) for attempt in letter.attempts] == [
        ("nack", "db down"),
        ("reject", "bad payload"),
    ]
    assert all("worker-1" in attempt.consumer for attempt in letter.attempts)
    assert letter.attempts[0].delivered_ms <= letter.attempts[0].ended_ms <= letter.attempts[1].delivered_ms
    assert letter.kept_until_ms - letter.dead_ms == pytest.approx(14 * 24 * 3_600_000, abs=60_000)
    assert len(client.topic("orders.dlq").partitions) == 3


def test_used_up_retries_make_a_letter(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("orders", config={"retry": "simple,max_retries=1"})
    client.publish("orders", "bad")
    with client.queue("orders") as work:
        for number in range(2):
            (message,) = work.lease(wait=10)
            message.nack(reason=f"failure {number}")
    eventually(lambda: client.dead_letters.stats().total)
    (letter,) = client.dead_letters.list()
    assert (letter.reason, letter.error, letter.failures) == ("MAX_RETRIES_EXCEEDED", "failure 1", 2)
    assert [attempt.reason for attempt in letter.attempts] == ["failure 0", "failure 1"]


def test_letters_of_a_topic_with_a_dead_letter_topic_of_its_own_are_found(client: Client) -> None:
    client.create_topic("orders", config={"dead_letter_topic": "graveyard"})
    client.publish("orders", "bad")
    with client.queue("orders") as work:
        (message,) = work.lease(wait=10)
        message.reject("no")
    eventually(lambda: client.dead_letters.stats(topic="orders").total)
    (letter,) = client.dead_letters.list()
    assert (letter.topic, letter.original_topic) == ("graveyard", "orders")
    assert client.dead_letters.replay([letter.id]).wait(20).replayed == 1
    assert client.offsets("orders") == {0: 2}


def test_an_acked_letter_of_the_group_dlq_is_dealt_with(client: Client) -> None:
    first, second = bury(client, "one", "two")
    with client.queue("orders.dlq", group="dlq") as work:
        (message,) = work.lease(wait=10)
        assert message.id == first
        message.ack()
        work.flush()
        assert [letter.id for letter in client.dead_letters.list()] == [second]


def test_working_on_letters_does_not_move_them_out_of_sight(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as process, millstream.connect(process.address) as client:
        (rejected, failed, acked) = bury(client, "rejected", "failed", "acked")
        with client.queue("orders.dlq", group="dlq") as work:
            by_id = {message.id: message for message in work.lease(3, wait=10)}
            by_id[acked].ack()
            by_id[rejected].reject("cannot be mended")
            message = by_id[failed]
            for _ in range(3):
                message.nack(reason="not yet", retry_after=0)
                (message,) = work.lease(wait=10)
            message.nack(reason="not yet", retry_after=0)
            work.flush()
            assert work.lease(wait=0.2) == []
        assert [letter.id for letter in client.dead_letters.list(topic="orders")] == [rejected, failed]
        assert "orders.dlq.dlq" not in [topic.name for topic in client.topics()]
        assert client.why(rejected).facts["set_aside"]
    with BrokerProcess(tmp_path) as process, millstream.connect(process.address) as client:
        assert [letter.id for letter in client.dead_letters.list(topic="orders")] == [rejected, failed]
        with client.queue("orders.dlq", group="dlq") as work:
            assert work.lease(wait=0.2) == []
        client.dead_letters.replay([rejected]).wait(10)
        client.dead_letters.purge([failed])
        assert client.dead_letters.list() == []


def test_a_letter_goes_on_to_where_somebody_has_said(client: Client) -> None:
    client.create_topic("orders.dlq", config={"dead_letter_topic": "hopeless"})
    bury(client, "bad")
    with client.queue("orders.dlq", group="dlq") as work:
        (message,) = work.lease(wait=10)
        message.reject("never")
    eventually(lambda: [letter.topic for letter in client.dead_letters.list()] == ["hopeless"])


@pytest.mark.parametrize("way", [["a"], ["b", "a"], ["b", "c", "a"]])
def test_dead_letters_that_would_come_back_are_refused(client: Client, way: list[str]) -> None:
    for name, letters in zip(reversed(way[:-1]), reversed(way[1:]), strict=True):
        client.create_topic(name, config={"dead_letter_topic": letters})
    with pytest.raises(ConfigInvalid, match="come back"):
        client.create_topic("a", config={"dead_letter_topic": way[0]})
    client.create_topic("a")
    with pytest.raises(ConfigInvalid, match="come back"):
        client.alter_topic("a", config={"dead_letter_topic": way[0]})
    with pytest.raises(ConfigInvalid, match="come back"):
        client.create_topic("d.dlq", config={"dead_letter_topic": "d"})


def test_a_letter_that_somebody_works_on_is_his_until_he_gives_it_back(client: Client) -> None:
    bury(client, "one")
    with client.queue("orders.dlq", group="dlq") as work:
        (message,) = work.lease(wait=10)
        assert client.dead_letters.stats().total == 1, "it is not dealt with yet"
        report = client.dead_letters.replay(everything=True).wait(20)
        assert (report.replayed, report.failed) == (0, 1)
        assert [failure.retriable for failure in report.failures] == [True]
        (settled,) = work.nack([message])
        assert settled.name == "RETRIED"
        assert client.dead_letters.replay(everything=True).wait(20).replayed == 1
        assert work.lease(wait=0.2) == []
    assert client.dead_letters.stats().total == 0


# --- looking ---------------------------------------------------------------------------------------------------------


def test_letters_are_listed_by_filter(client: Client) -> None:
    bury(client, "a", error="db down", shop="berlin")
    bury(client, "b", error="DB gone", shop="paris", key="k")
    bury(client, "c", topic="bills.eu", reason="POISON", group="audit", error="")
    letters = client.dead_letters
    assert texts(letters.list()) == ["c", "a", "b"]
    assert texts(letters.list(topic="orders")) == ["a", "b"]
    assert texts(letters.list(topic="bills.#")) == ["c"]
    assert texts(letters.list(error="db")) == ["a", "b"]
    assert texts(letters.list(headers={"shop": "paris"})) == ["b"]
    assert texts(letters.list(headers={"shop": None})) == ["a", "b"]
    assert texts(letters.list(key="k")) == ["b"]
    assert texts(letters.list(reason="poison", group="audit")) == ["c"]
    assert texts(letters.list(limit=2)) == ["c", "a"]
    assert letters.list(topic="nothing") == []
    now = letters.list()[1].dead_ms / 1000
    assert texts(letters.list(topic="orders", since=now)) == ["a", "b"]
    assert letters.list(topic="orders", until=now - 1) == []
    assert letters.list(since=now + 3600) == []


def test_many_letters_come_page_by_page_with_whole_values(client: Client) -> None:
    values = [f"{number:04}" + "x" * 2000 for number in range(1200)]
    client.create_topic("orders.dlq", partitions=3)
    client.publish_many("orders.dlq", values)
    letters = list(client.dead_letters.iterate())
    assert sorted(texts(letters)) == values
    assert len({letter.id for letter in letters}) == 1200
    (short,) = client.dead_letters.list(limit=1)
    assert (len(short.value or b""), short.value_bytes) == (256, 2004)
    assert client.dead_letters.show(short.id).value == values[0].encode()


def test_a_call_that_takes_long_answers_in_parts(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.create_topic("orders.dlq", partitions=2)
    client.publish_many("orders.dlq", [f"{number}" for number in range(450)])
    client.publish_many("orders.dlq", [millstream.Outgoing(value="x", partition=1)])
    monkeypatch.setattr("millstream.broker.letters.letters._WORK_MS", -1)
    page = client.call(letter_calls.ListLetters(limit=1000), letter_calls.LetterPage)
    assert 0 < len(page.letters) < 450
    assert page.after
    assert len(list(client.dead_letters.iterate())) == 451
    assert client.dead_letters.stats().total == 451
    assert client.dead_letters.purge(everything=True, limit=420).total == 420
    assert client.dead_letters.purge(everything=True).total == 31
    with pytest.raises(InvalidArgument, match="after="):
        client.call(letter_calls.CountLetters(after="nonsense"), letter_calls.LetterCount)


def test_statistics_count_what_is_there(client: Client) -> None:
    bury(client, "a", "b", error="db down")
    bury(client, "c", topic="bills", reason="POISON", error="odd")
    statistics = client.dead_letters.stats()
    assert (statistics.total, statistics.bytes) == (3, 3)
    assert statistics.by_reason == {"REJECTED": 2, "POISON": 1}
    assert statistics.by_topic == {"orders": 2, "bills": 1}
    assert statistics.by_error == {"db down": 2, "odd": 1}
    assert statistics.by_age == {"under 1 h": 3}
    assert client.dead_letters.stats(topic="bills").total == 1


def test_what_is_no_letter_is_not_shown(client: Client) -> None:
    ordinary = client.publish("orders", "x")
    with pytest.raises(MessageNotFound, match="not the id of a dead letter"):
        client.dead_letters.show(ordinary.id)
    (letter,) = bury(client, "a")
    with pytest.raises(MessageNotFound):
        client.dead_letters.show(letter[:-1] + ("0" if letter[-1] != "0" else "1"))
    with pytest.raises(InvalidArgument):
        client.dead_letters.show("nonsense")


def test_letters_of_another_namespace_are_not_ours(broker: BrokerForTests, client: Client) -> None:
    (letter,) = bury(client, "secret")
    client.create_namespace("other")
    with millstream.connect(broker.address, namespace="other") as stranger:
        assert stranger.dead_letters.list() == []
        with pytest.raises(MessageNotFound):
            stranger.dead_letters.show(letter)
        with pytest.raises(MessageNotFound):
            stranger.dead_letters.purge([letter])


@pytest.mark.parametrize("call", ["purge", "replay", "list", "stats"])
def test_a_condition_that_does_not_exist_is_refused_and_nothing_is_chosen(client: Client, call: str) -> None:
    """A slip of the pen was ignored, and what was left of the conditions chose far more than was meant."""
    bury(client, "1")
    with pytest.raises(InvalidArgument, match="there is no condition 'gruop'; use error, group, "):
        getattr(client.dead_letters, call)(topic="orders", gruop="somebody else's")
    assert client.dead_letters.stats(topic="orders").total == 1
    assert [message.value for message in client.browse("orders")] == [b"1"]


def test_messages_and_traces_are_not_looked_for_by_conditions_that_do_not_exist(client: Client) -> None:
    client.publish("orders", b"1")
    with pytest.raises(InvalidArgument, match="there is no condition 'sinse'; use header, key, "):
        client.browse("orders", sinse=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="there is no condition 'untill'; use failures_only, "):
        client.traces(untill=1)  # type: ignore[call-arg]


# --- purging ---------------------------------------------------------------------------------------------------------


def test_a_purge_removes_what_matches_for_good(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker, millstream.connect(broker.address) as client:
        bury(client, "a", "b", reason="POISON")
        kept, gone = bury(client, "c", "d")
        letters = client.dead_letters
        assert letters.purge(reason="POISON", dry_run=True).total == 2
        assert letters.stats().total == 4
        assert letters.purge(reason="POISON", limit=1).total == 1
        assert letters.purge(reason="POISON").by_reason == {"POISON": 1}
        assert letters.purge([gone]).total == 1
        assert letters.purge([gone]).total == 0
    with BrokerForTests(tmp_path) as broker, millstream.connect(broker.address) as client:
        assert [letter.id for letter in client.dead_letters.list()] == [kept]
        assert client.dead_letters.purge(everything=True).total == 1
        assert client.dead_letters.stats().total == 0


def test_nobody_means_everything_by_saying_nothing(client: Client) -> None:
    (letter,) = bury(client, "a")
    for ask in (client.dead_letters.replay, client.dead_letters.plan_replay, client.dead_letters.purge):
        with pytest.raises(InvalidArgument, match="say which"):
            ask()
        with pytest.raises(InvalidArgument, match="say which"):
            ask([letter], everything=True)
    with pytest.raises(InvalidArgument, match=r"'filter\.topik' is not known here"):
        client.call(_Mistyped(filter={"topik": "orders"}), Any)
    assert client.dead_letters.stats().total == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_none_at_all_is_no_limit_that_anybody_means(broker: BrokerForTests, client: Client, asynchronous: bool) -> None:
    """A purge of none removed all of them; a list of none was empty here and had one letter there."""
    bury(client, "a", "b")
    either = EitherClient(broker.address, asynchronous=asynchronous)
    letters = either.client.dead_letters
    for limit in (0, -1, 0.5):
        for ask in (lambda: letters.purge(everything=True, limit=limit), lambda: letters.list(limit=limit)):  # noqa: B023
            with pytest.raises(InvalidArgument, match="limit is a number from 1 on, not"):
                either.do(ask())
    assert len(either.do(letters.list(limit=1))) == 1
    assert either.do(letters.purge(everything=True, limit=1)).total == 1
    assert client.dead_letters.stats().total == 1
    either.end()


class _Mistyped(letter_calls.CallForm, tag="dlq.purge"):
    filter: dict[str, str]


# --- the asynchronous client -----------------------------------------------------------------------------------------


def test_the_asynchronous_client_has_the_same_words(broker: BrokerForTests, client: Client) -> None:
    ids = bury(client, "a", "b", "c")

    async def work() -> None:
        async with aio.connect(broker.address) as other:
            letters = other.dead_letters
            assert [letter.id for letter in await letters.list(limit=2)] == ids[:2]
            assert [letter.text async for letter in letters.iterate(topic="orders")] == ["a", "b", "c"]
            assert (await letters.show(ids[0])).text == "a"
            assert (await letters.stats()).total == 3
            assert (await letters.plan_replay([ids[0]])).total == 1
            replay = await letters.replay([ids[0]])
            assert (await replay.wait(20)).replayed == 1
            assert (await replay.abort()).status == "completed"
            assert (await letters.replay_status(replay.id)).info == replay.info
            assert [info.id for info in await letters.replays()] == [replay.id]
            assert (await letters.purge(everything=True)).total == 2

    asyncio.run(work())


# --- being told ------------------------------------------------------------------------------------------------------


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[int], queue.Queue[dict[str, Any]]]]:
    """A web server that writes down what it is told; the list holds the statuses it answers with first."""
    statuses: list[int] = []
    told: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = statuses.pop(0) if statuses else 200
            self.send_response(status)
            self.end_headers()
            if status < 400:
                told.put(json.loads(body))

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}/dead", statuses, told
    server.shutdown()
    server.server_close()


def test_a_webhook_is_told_of_each_letter(
    client: Client, webhook: tuple[str, list[int], queue.Queue[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    url, statuses, told = webhook
    statuses.append(503)  # it is tried again
    client.create_topic("orders", config={"dead_letter_alert": url})
    sent = client.publish("orders", "bad")
    with client.queue("orders", group="billing") as work:
        (message,) = work.lease(wait=10)
        message.reject("bad payload")
        work.flush()
    alert = told.get(timeout=20)
    (letter,) = client.dead_letters.list()
    assert alert == {
        "queue": "orders",
        "group": "billing",
        "message_id": sent.id,
        "dead_letter_id": letter.id,
        "failure_reason": "REJECTED",
        "error": "bad payload",
        "retry_count": letter.failures,
        "moved_at": letter.dead_ms,
    }
    eventually(lambda: client.broker()["metrics"]["millstream_dead_letter_alerts_sent"] == 1)
    metrics = client.broker()["metrics"]
    assert (metrics["millstream_messages_dead_lettered"], metrics["millstream_dead_letter_alerts_failed"]) == (1, 0)
