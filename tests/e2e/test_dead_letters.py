"""Dead letters with the real broker: they arrive with their history, can be found, replayed once each, and purged."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream import aio
from millstream.client import Client
from millstream.dead_letters import DeadLetter, ReplayInfo
from millstream.errors import ConfigInvalid, InvalidArgument, MessageNotFound, ReplayNotFound, TopicNotFound
from millstream.testing.broker import BrokerForTests, BrokerProcess
from millstream.wire import letter_calls
from millstream.wire.subscription_calls import SetMode
from tests.waiting import eventually


@pytest.fixture
def client(broker: BrokerForTests) -> Iterator[Client]:
    with millstream.connect(broker.address) as connected:
        yield connected


def bury(
    client: Client,
    *values: str,
    topic: str = "orders",
    key: str | None = None,
    error: str = "db down",
    reason: str = "REJECTED",
    group: str = "billing",
    **headers: str,
) -> list[str]:
    """Publish messages and their dead letters, as the broker writes them; returns the ids of the letters."""
    ids = []
    for value in values:
        original = client.publish(topic, value, key=key)
        about = {
            "millstream-dead-reason": reason,
            "millstream-dead-error": error,
            "millstream-dead-group": group,
            "millstream-dead-topic": topic,
            "millstream-dead-partition": str(original.partition),
            "millstream-dead-offset": str(original.offset),
            "millstream-dead-id": original.id,
        }
        receipt = client.publish(f"{topic}.dlq", value, key=key, headers={**headers, **about})
        ids.append(receipt.id)
    return ids


def texts(letters: list[DeadLetter]) -> list[str]:
    return [letter.text for letter in letters]


def messages(client: Client, topic: str, count: int, start: int = 0) -> list[millstream.Message]:
    """The messages of a topic with one partition from an offset on; fails when there are more or fewer."""
    assert client.offsets(topic)[0] - start == count
    with client.stream(topic, partitions=[0], start=start, timeout_s=5) as stream:
        return [message for _, message in zip(range(count), stream, strict=False)]


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


def test_a_letter_that_somebody_works_on_is_his_no_longer_when_it_is_replayed(client: Client) -> None:
    bury(client, "one")
    with client.queue("orders.dlq", group="dlq") as work:
        (message,) = work.lease(wait=10)
        assert client.dead_letters.stats().total == 1, "it is not dealt with yet"
        assert client.dead_letters.replay(everything=True).wait(20).replayed == 1
        (settled,) = work.nack([message])
        assert settled.name == "INVALID"
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


# --- replaying -------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_happen_and_does_nothing(client: Client) -> None:
    ids = bury(client, "a", "b")
    plan = client.dead_letters.plan_replay(topic="orders", rate=2)
    assert (plan.total, plan.targets, plan.first, plan.duration_ms) == (2, {"orders": 2}, ids, 1000)
    assert client.dead_letters.plan_replay(everything=True, target="missing").warnings
    assert client.dead_letters.stats().total == 2
    assert client.offsets("orders") == {0: 2}
    assert client.dead_letters.replays() == []


def test_a_plan_says_who_else_gets_the_messages_again(client: Client) -> None:
    client.create_topic("orders")
    client.create_topic("orders.again")
    with client.queue("orders", group="audit") as other, client.queue("orders", group="billing"):
        bury(client, "1")
        (done,) = other.lease(wait=10)
        done.ack()
        (warning,) = client.dead_letters.plan_replay(topic="orders").warnings
        assert "group 'audit' too" in warning
        assert client.dead_letters.plan_replay(topic="orders", target="orders.again").warnings == []
        replay = client.dead_letters.replay(topic="orders")
        assert replay.plan is not None
        assert replay.plan.warnings == [warning]
        (again,) = other.lease(wait=10)
        assert again.text == "1"


def test_replayed_messages_are_new_and_say_where_they_were(client: Client) -> None:
    (letter,) = bury(client, "a", key="k", shop="berlin")
    replay = client.dead_letters.replay(everything=True)
    info = replay.wait(20)
    assert (info.status, info.total, info.replayed, info.failed) == ("completed", 1, 1, 0)
    (message,) = messages(client, "orders", 1, start=1)
    assert (message.text, message.key) == ("a", b"k")
    assert message.headers == {
        "shop": "berlin",
        "millstream-replay-id": replay.id,
        "millstream-replayed-from": letter,
        "millstream-replayed-reason": "REJECTED",
    }
    assert client.dead_letters.list() == []
    assert client.dead_letters.show(letter).text == "a", "it can be looked at as long as it is stored"
    assert client.dead_letters.replay(everything=True).wait(20).total == 0, "nothing is sent twice"


def test_letters_go_out_in_the_order_of_their_originals(client: Client) -> None:
    """Whatever order they died in."""
    originals = [client.publish("orders", f"{number}", key=b"k") for number in range(4)]
    for number in (2, 0, 3, 1):
        headers = {"millstream-dead-topic": "orders", "millstream-dead-id": originals[number].id}
        client.publish("orders.dlq", f"{number}", key=b"k", headers=headers)
    client.dead_letters.replay(topic="orders").wait(20)
    assert [message.text for message in messages(client, "orders", 4, start=4)] == ["0", "1", "2", "3"]


def test_keys_go_to_their_partition_and_the_rest_back_to_where_it_was(client: Client) -> None:
    client.create_topic("orders", partitions=4)
    client.create_topic("orders.dlq", partitions=4)
    sent = [client.publish("orders", "x", key=f"k{number}") for number in range(20)]
    for number, receipt in enumerate(sent):
        headers = {"millstream-dead-topic": "orders", "millstream-dead-id": receipt.id}
        client.publish("orders.dlq", f"{number}", key=f"k{number}", headers=headers, partition=0)
    headers = {"millstream-dead-topic": "orders", "millstream-dead-partition": "2"}
    client.publish("orders.dlq", "keyless", headers=headers)
    ends = client.offsets("orders")
    client.dead_letters.replay(everything=True).wait(20)
    found = {}
    for partition, end in client.offsets("orders").items():
        if end > ends[partition]:
            with client.stream("orders", partitions=[partition], start=ends[partition], timeout_s=5) as stream:
                found |= {
                    message.text: partition for _, message in zip(range(end - ends[partition]), stream, strict=False)
                }
    assert found.pop("keyless") == 2
    assert found == {f"{number}": receipt.partition for number, receipt in enumerate(sent)}


def test_a_replay_can_repair_messages_and_send_them_elsewhere(client: Client) -> None:
    client.create_topic("repaired")
    good, bad = bury(client, "good", "bad", step="1", secret="x")
    replay = client.dead_letters.replay(
        [bad], target="repaired", value="better", set_headers={"step": "2"}, remove_headers=["secret"]
    )
    assert replay.wait(20).replayed == 1
    (message,) = messages(client, "repaired", 1)
    assert message.text == "better"
    assert message.headers["step"] == "2"
    assert "secret" not in message.headers
    assert [letter.id for letter in client.dead_letters.list()] == [good]


def test_the_rate_is_kept(client: Client) -> None:
    bury(client, *map(str, range(11)))
    began_s = time.monotonic()
    client.dead_letters.replay(everything=True, rate=20).wait(20)
    assert time.monotonic() - began_s >= 0.45
    assert len(messages(client, "orders", 11, start=11)) == 11


def test_an_id_that_is_named_in_two_ways_is_sent_once(client: Client) -> None:
    (letter,) = bury(client, "once")
    assert client.dead_letters.replay([letter, letter.lower()]).wait(20).total == 1
    assert client.offsets("orders")[0] == 2


def test_what_a_replay_makes_larger_can_still_be_read(client: Client) -> None:
    letters = bury(client, *map(str, range(12)))
    start = client.offsets("orders")[0]
    assert client.dead_letters.replay(letters, value=bytes(1_000_000)).wait(30).replayed == 12
    assert [len(message.value or b"") for message in messages(client, "orders", 12, start=start)] == [1_000_000] * 12


def test_an_aborted_replay_leaves_the_rest_where_it_is(client: Client) -> None:
    bury(client, *map(str, range(50)))
    replay = client.dead_letters.replay(everything=True, rate=10)
    eventually(lambda: replay.progress().replayed)
    info = replay.abort()
    assert info.status == "aborted"
    assert 0 < info.replayed < 50
    assert client.offsets("orders")[0] == 50 + info.replayed
    assert client.dead_letters.stats().total == 50 - info.replayed
    assert replay.progress() == info, "nothing moves any more"


def test_what_cannot_be_sent_stays_and_the_report_says_why(client: Client) -> None:
    bury(client, "fits", "x" * 2000)
    client.create_topic("small", config={"max_message_bytes": 1000})
    info = client.dead_letters.replay(everything=True, target="small").wait(20)
    assert (info.status, info.replayed, info.failed) == ("completed", 1, 1)
    (failure,) = info.failures
    assert "2000 bytes" in failure.reason
    assert [letter.id for letter in client.dead_letters.list()] == [failure.id]
    with pytest.raises(TopicNotFound, match="target of the replay"):
        client.dead_letters.replay(everything=True, target="missing")


def test_a_replay_waits_while_the_broker_takes_nothing(client: Client) -> None:
    bury(client, "a")
    client.call(SetMode(mode="maintenance", reason="new disks"), Any)
    replay = client.dead_letters.replay(everything=True)
    eventually(lambda: replay.progress().status == "paused")
    assert "new disks" in replay.info.reason
    client.call(SetMode(mode="normal"), Any)
    assert replay.wait(20).replayed == 1


def test_a_replay_waits_for_room_in_a_full_queue(client: Client) -> None:
    client.create_topic("target", config={"max_depth": 5})
    bury(client, *map(str, range(8)))
    replay = client.dead_letters.replay(everything=True, target="target", rate=20)
    eventually(lambda: replay.progress().status == "paused")
    assert "'target' is full" in replay.info.reason
    with client.queue("target") as work:

        def is_drained() -> bool:
            work.ack(work.lease(max=10))
            return replay.progress().is_over

        eventually(is_drained)
    assert replay.info.replayed == 8


def test_a_replay_that_does_not_help_ends(client: Client) -> None:
    """Its messages die again as fast as they are sent; they are not sent in circles either."""
    bury(client, *map(str, range(200)))
    client.create_topic("target", config={"retry": "simple,max_retries=0"})
    stopping = threading.Event()

    def refuse() -> None:
        with client.queue("target") as work:
            while not stopping.is_set():
                for message in work.lease(max=10, wait=0.1):
                    message.nack(reason="still down")

    refusing = threading.Thread(target=refuse)
    refusing.start()
    try:
        replay = client.dead_letters.replay(topic="orders", target="target", rate=25)
        info = replay.wait(30)
        assert info.status == "failed"
        assert "died again" in info.reason
        assert 20 <= info.relapsed <= info.replayed < 200
        eventually(lambda: client.dead_letters.stats(topic="target").total == replay.progress().relapsed)
    finally:
        stopping.set()
        refusing.join()


def test_replays_of_the_same_letters_at_the_same_time_send_each_once(broker: BrokerForTests, client: Client) -> None:
    bury(client, *map(str, range(300)))

    async def replay_four_times() -> list[ReplayInfo]:
        async with aio.connect(broker.address) as other:
            begun = await asyncio.gather(*(other.dead_letters.replay(everything=True) for _ in range(4)))
            return [await replay.wait(30) for replay in begun]

    reports = asyncio.run(replay_four_times())
    assert {report.status for report in reports} == {"completed"}
    assert sum(report.replayed for report in reports) == 300
    found = [message.text for message in messages(client, "orders", 300, start=300)]
    assert sorted(found, key=int) == [str(number) for number in range(300)]


def test_nobody_means_everything_by_saying_nothing(client: Client) -> None:
    (letter,) = bury(client, "a")
    for ask in (client.dead_letters.replay, client.dead_letters.plan_replay, client.dead_letters.purge):
        with pytest.raises(InvalidArgument, match="say which"):
            ask()
        with pytest.raises(InvalidArgument, match="say which"):
            ask([letter], everything=True)
    with pytest.raises(InvalidArgument, match="Object contains unknown field"):
        client.call(_Mistyped(filter={"topik": "orders"}), Any)
    assert client.dead_letters.stats().total == 1


class _Mistyped(letter_calls.CallForm, tag="dlq.purge"):
    filter: dict[str, str]


def test_an_unknown_replay_is_refused(client: Client) -> None:
    with pytest.raises(ReplayNotFound):
        client.dead_letters.replay_status("r-0")


# --- surviving -------------------------------------------------------------------------------------------------------


def test_a_replay_goes_on_after_a_restart(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker, millstream.connect(broker.address) as client:
        bury(client, *map(str, range(30)))
        replay = client.dead_letters.replay(everything=True, rate=40)
        eventually(lambda: replay.progress().replayed)
        replay_id = replay.id
        bury(client, "late", topic="bills")
    with BrokerForTests(tmp_path) as broker, millstream.connect(broker.address) as client:
        info = client.dead_letters.replay_status(replay_id).wait(20)
        assert (info.status, info.replayed, info.total) == ("completed", 30, 30)
        found = [message.text for message in messages(client, "orders", 30, start=30)]
        assert found == [str(number) for number in range(30)]
        assert [report.id for report in client.dead_letters.replays()] == [replay_id]
        assert texts(client.dead_letters.list()) == ["late"], "only what was dead when it began is replayed"


def test_an_aborted_replay_stays_aborted_after_a_crash(tmp_path: Path) -> None:
    port = free_port()
    with BrokerProcess(tmp_path, port=port) as broker, millstream.connect(broker.address) as client:
        bury(client, "a", "b", "c")
        replay = client.dead_letters.replay(everything=True, rate=0.5)
        replay.abort()
        sent = replay.info.replayed
        broker.kill()
        broker.start()
        assert client.dead_letters.replay_status(replay.id).info.status == "aborted"
        assert client.offsets("orders")[0] == 3 + sent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@pytest.mark.slow
def test_kill_nine_in_the_middle_of_a_replay_loses_and_repeats_nothing(tmp_path: Path) -> None:
    count, keys = 2000, 5
    port = free_port()
    with BrokerProcess(tmp_path, port=port) as broker, millstream.connect(broker.address) as client:
        client.create_topic("orders", partitions=2)
        client.create_topic("orders.dlq", partitions=2)
        sent = client.publish_many(
            "orders", [millstream.Outgoing(value=f"{n}", key=f"k{n % keys}") for n in range(count)]
        )
        dead = [
            millstream.Outgoing(
                value=f"{n}",
                key=f"k{n % keys}",
                headers={"millstream-dead-topic": "orders", "millstream-dead-id": sent[n].id},
            )
            for n in reversed(range(count))
        ]
        client.publish_many("orders.dlq", dead)
        before = client.offsets("orders")
        replay = client.dead_letters.replay(everything=True, rate=1500)
        for _ in range(3):
            time.sleep(0.15)
            broker.kill()
            broker.start()
        info = replay.wait(60)
        assert (info.status, info.replayed) == ("completed", count)
        seen: dict[bytes, list[int]] = {}
        left = count
        with client.stream("orders", start=before, timeout_s=10) as stream:
            while left:
                message = stream.next(timeout_s=10)
                assert message is not None, f"{left} messages are missing"
                assert message.key is not None
                seen.setdefault(message.key, []).append(int(message.text))
                left -= 1
        assert sum(client.offsets("orders").values()) == 2 * count, "something was sent twice"
        for key, numbers in seen.items():
            assert numbers == sorted(numbers), f"the order of {key!r} was lost"
        assert sorted(n for numbers in seen.values() for n in numbers) == list(range(count))
        assert client.dead_letters.stats().total == 0


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
