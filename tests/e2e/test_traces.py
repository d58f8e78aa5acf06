"""Traces with the real broker: passports that are complete, also after a restart or a crash, and what they cost."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from millstream import aio
from millstream.broker.partition import Partition
from millstream.client import Client, Outgoing
from millstream.config import Settings
from millstream.dead_letters import DeadLetter
from millstream.errors import InvalidArgument, MessageNotFound
from millstream.testing.broker import BrokerForTests
from millstream.traces.records import Record
from millstream.wire.queue_calls import LeasedMessage, LeaseMessages, Purged, PurgeQueue
from millstream.wire.trace_calls import FindTraces, PassportInfo, TracePage
from tests.waiting import eventually

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "tracestate": "shop=1"}


@pytest.fixture(scope="module")
def shared() -> Iterator[BrokerForTests]:
    """One for all tests that have topics of their own."""
    with BrokerForTests() as running:
        yield running


@pytest.fixture(scope="module")
def client(shared: BrokerForTests) -> Client:
    return shared.connect()


def kinds(passport: PassportInfo) -> list[str]:
    return [event.kind for event in passport.events]


def link(passport: PassportInfo, kind: str) -> str:
    return next(event.link for event in passport.events if event.kind == kind)


def fail(client: Client, topic: str, *reasons: str, group: str = "billing") -> None:
    """Nack the next message, once for each reason."""
    with client.queue(topic, group=group, consumer="worker-1") as work:
        for reason in reasons:
            (message,) = work.lease(wait=10)
            message.nack(reason=reason, retry_after=0)


def kill_and_replay(client: Client, topic: str) -> tuple[str, str, str]:
    """Publish a message that fails twice, dies, is replayed and acked; returns the ids of all three of it."""
    first = client.publish(topic, b"bad", key=b"c-17", headers=HEADERS)
    fail(client, topic, "db down", "still down")
    with client.queue(topic, group="billing", consumer="worker-2") as work:
        (message,) = work.lease(wait=10)
        message.reject("bad payload")
    eventually(lambda: client.dead_letters.list(topic=topic))
    (letter,) = client.dead_letters.list(topic=topic)
    client.dead_letters.replay(ids=[letter.id]).wait()
    with client.queue(topic, group="billing", consumer="worker-3") as work:
        (again,) = work.lease(wait=10)
        assert again.headers["traceparent"] == HEADERS["traceparent"]
        again.ack()
    return first.id, letter.id, again.id


def check_whole_story(client: Client, original: str, letter: str, replayed: str) -> None:
    passport = client.passport(original)
    story = ["leased", "nacked", "leased", "nacked", "leased", "rejected", "dead_lettered", "replayed"]
    assert sorted(kinds(passport)) == sorted(["published", "stored", *story])
    assert kinds(passport)[:2] == ["published", "stored"]
    assert kinds(passport)[-2:] == ["dead_lettered", "replayed"]
    assert [event.error for event in passport.events if event.error] == [
        "db down",
        "still down",
        "bad payload",
        "bad payload",
    ]
    assert {event.consumer.partition("#")[0] for event in passport.events} == {"", "worker-1", "worker-2"}
    assert {event.group for event in passport.events} == {"", "billing"}
    assert (passport.trace_id, passport.key) == (TRACE, b"c-17")
    assert link(passport, "dead_lettered") == letter
    assert link(passport, "replayed") == replayed

    again = client.passport(replayed)
    assert sorted(kinds(again)) == sorted(["published", "stored", "replayed", "leased", "acked"])
    assert link(again, "replayed") == letter
    assert again.trace_id == TRACE
    assert [event.consumer.partition("#")[0] for event in again.events if event.kind == "acked"] == ["worker-3"]

    middle = client.passport(letter)
    assert link(middle, "dead_lettered") == original
    assert link(middle, "replayed") == replayed
    assert middle.trace_id == TRACE
    assert "acked" not in kinds(middle)


# --- passports -------------------------------------------------------------------------------------------------------


def test_a_message_that_died_and_was_replayed_has_a_complete_passport_also_after_a_restart(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker:
        ids = kill_and_replay(broker.connect(), "orders")
        check_whole_story(broker.connect(), *ids)

    with BrokerForTests(tmp_path) as broker:
        check_whole_story(broker.connect(), *ids)


def test_a_replay_that_succeeds_after_a_restart_is_recorded(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker:
        client = broker.connect()
        client.publish_many("orders", [b"x"] * 5)  # so that what is replayed has an offset that is not sampled
        with client.queue("orders", group="billing") as work:
            for message in work.lease(max=5, wait=10):
                message.reject("bad payload")
        eventually(lambda: len(client.dead_letters.list(topic="orders")) == 5)
        client.dead_letters.replay(topic="orders").wait()

    with BrokerForTests(tmp_path) as broker:
        client = broker.connect()
        eventually(lambda: broker.broker.recorder.watched)
        with client.queue("orders", group="billing", consumer="worker-3") as work:
            (again, *_) = work.lease(max=1, wait=10)
            again.ack()
        eventually(lambda: client.passport(again.id).events[-1].consumer)

        assert kinds(client.passport(again.id))[-2:] == ["leased", "acked"]


def test_what_is_on_disk_when_a_broker_is_killed_is_enough(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path / "data") as broker:
        ids = kill_and_replay(broker.connect(), "orders")
        eventually(lambda: broker.broker.metrics.trace_events_recorded == 7)
        shutil.copytree(tmp_path / "data", tmp_path / "as-if-killed")

    with BrokerForTests(tmp_path / "as-if-killed") as broker:
        check_whole_story(broker.connect(), *ids)


def test_a_death_that_nobody_recorded_is_found_in_the_dead_letter(tmp_path: Path) -> None:
    """As after a crash: the letter is certain, the record of it is not."""
    off = Settings.model_validate({"traces": {"enabled": False}})
    with BrokerForTests(tmp_path, settings=off) as broker:
        client = broker.connect()
        sent = client.publish("orders", b"bad")
        fail(client, "orders", "db down")
        with client.queue("orders", group="billing") as work:
            (message,) = work.lease(wait=10)
            message.reject("bad payload")
        eventually(lambda: client.dead_letters.list(topic="orders"))
        (letter,) = client.dead_letters.list(topic="orders")
        passport = client.passport(sent.id)

    assert kinds(passport) == ["published", "stored", "leased", "nacked", "leased", "rejected", "dead_lettered"]
    assert link(passport, "dead_lettered") == letter.id
    assert passport.events[-1].note == "REJECTED"


def test_a_message_in_the_hands_of_a_consumer_says_whose(client: Client) -> None:
    sent = client.publish("held", b"x")
    with client.queue("held", group="billing", consumer="worker-1") as work:
        (_message,) = work.lease(wait=10)

        last = client.passport(sent.id).events[-1]

    assert (last.kind, last.group, last.consumer.partition("#")[0]) == ("leased", "billing", "worker-1")
    assert last.note.startswith("until ")


def test_a_message_that_waits_for_its_retry_says_until_when(client: Client) -> None:
    sent = client.publish("waits", b"x")
    with client.queue("waits", group="billing") as work:
        (message,) = work.lease(wait=10)
        message.nack(reason="db down", retry_after=3600)

    passport = client.passport(sent.id)

    assert kinds(passport) == ["published", "stored", "leased", "nacked", "waiting"]
    assert passport.events[-1].note.startswith("it is tried again at ")


def test_each_group_has_its_own_story(client: Client) -> None:
    sent = client.publish("two", b"x")
    fail(client, "two", "no paper", group="print")
    with client.queue("two", group="mail", consumer="postman") as work:
        (message,) = work.lease(wait=10)
        message.ack()
    eventually(lambda: "acked" in kinds(client.passport(sent.id)))

    groups = {event.kind: event.group for event in client.passport(sent.id).events if event.group}

    assert groups["nacked"] == "print"
    assert groups["acked"] == "mail"


def test_a_consumer_that_goes_away_is_in_the_passport(client: Client) -> None:
    sent = client.publish("gone", b"x")
    with client.queue("gone", group="billing") as work:
        work.lease(wait=10)

    eventually(lambda: "returned" in kinds(client.passport(sent.id)))


def test_a_lease_that_runs_out_is_in_the_passport(shared: BrokerForTests, client: Client) -> None:
    sent = client.publish("slow", b"x")
    call = LeaseMessages(topic="slow", group="billing", max=1, lease_ms=1000)
    assert len(client.call(call, list[LeasedMessage])) == 1
    shared.clock.advance("2s")

    eventually(lambda: "timeout" in kinds(client.passport(sent.id)))
    (failure,) = [event for event in client.passport(sent.id).events if event.kind == "timeout"]
    assert failure.error == "no answer within 1s"


def test_what_is_purged_evicted_or_expired_says_so(shared: BrokerForTests, client: Client) -> None:
    purged = client.publish("purged", b"x")
    with client.queue("purged", group="billing"):
        purge(client, "purged")
    client.create_topic("small", config={"max_depth": 1, "overflow": "evict"})
    with client.queue("small", group="billing"):
        evicted = client.publish("small", b"x")
        client.publish("small", b"y")
    client.create_topic("brief")
    with client.queue("brief", group="billing") as work:
        expired = client.publish("brief", b"x", ttl=1)
        shared.clock.advance("5s")
        assert work.lease(wait=0) == []

    assert kinds(client.passport(purged.id)) == ["published", "stored", "purged"]
    assert kinds(client.passport(evicted.id)) == ["published", "stored", "evicted"]
    assert kinds(client.passport(expired.id)) == ["published", "stored", "expired"]


def purge(client: Client, topic: str) -> None:
    assert client.call(PurgeQueue(topic=topic, group="billing"), Purged).purged == 1


def test_a_purge_says_nothing_about_what_was_acked_before(client: Client) -> None:
    first, second = client.publish("mixed", b"1"), client.publish("mixed", b"2")
    with client.queue("mixed", group="billing", prefetch=1) as work:
        (held,) = work.lease(max=1, wait=10)
        (done,) = work.lease(max=1, wait=10)
        done.ack()
        eventually(lambda: "acked" in kinds(client.passport(second.id)))
        assert held.id == first.id
        purge(client, "mixed")

    assert "purged" in kinds(client.passport(first.id))
    assert "purged" not in kinds(client.passport(second.id))


def test_a_scheduled_message_is_followed_from_its_schedule_to_its_delivery(
    shared: BrokerForTests, client: Client
) -> None:
    schedule = client.publish("later", b"x", key=b"c-17", delay=3600, headers=HEADERS)
    client.schedules.move(schedule.id, delay=60)
    assert kinds(client.passport(schedule.id)) == ["published", "scheduled", "moved"]
    shared.clock.advance("120s")
    with client.queue("later", group="billing") as work:
        (message,) = work.lease(wait=10)

    passport = client.passport(schedule.id)
    assert kinds(passport) == ["published", "scheduled", "moved", "fired"]
    assert link(passport, "fired") == message.id
    assert (passport.trace_id, passport.key) == (TRACE, b"c-17")
    fired = client.passport(message.id)
    assert {"scheduled", "fired", "published", "stored"} <= set(kinds(fired))
    assert link(fired, "scheduled") == schedule.id
    assert fired.trace_id == TRACE


def test_a_cancelled_schedule_says_so(client: Client) -> None:
    schedule = client.publish("never", b"x", delay=3600)
    client.schedules.cancel(schedule.id)

    assert kinds(client.passport(schedule.id)) == ["published", "scheduled", "cancelled"]
    (event,) = client.traces(topic="never")
    assert (event.kind, event.id) == ("cancelled", schedule.id)


def test_schedules_far_apart_that_are_cancelled_together_make_small_records(
    client: Client, shared: BrokerForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.broker.traces.recorder._SPAN_MAX", 8)
    ids = [receipt.id for receipt in client.publish_many("sparse", [Outgoing(value=b"x", delay=3600)] * 40)]
    sizes: list[int] = []
    note = shared.broker.recorder.note

    def measured(record: Record) -> None:
        sizes.append(len(record.bits))
        note(record)

    monkeypatch.setattr(shared.broker.recorder, "note", measured)
    chosen = [ids[39], ids[0], ids[5], ids[20]]
    client.schedules.cancel_many(chosen)

    assert sizes == [1, 1, 1]
    assert sorted(event.id for event in client.traces(topic="sparse")) == sorted(chosen)


def test_an_id_that_nobody_knows_has_no_passport(client: Client) -> None:
    with pytest.raises(MessageNotFound):
        client.passport("01M7GKBEFSGBA51QG000000000")
    with pytest.raises(InvalidArgument, match="not a message id"):
        client.passport("nonsense")


def test_letters_whose_new_messages_cannot_be_read_are_replayed_all_the_same(
    client: Client, shared: BrokerForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = client.publish("unread", b"x")
    with client.queue("unread", group="billing") as work:
        (message,) = work.lease(wait=10)
        message.reject("bad payload")
    eventually(lambda: client.dead_letters.list(topic="unread"))
    replayed = shared.broker.recorder.replayed

    def unreadable(letters: Sequence[DeadLetter], partition: Partition, first: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(partition.log, "read", lambda *_, **__: (_ for _ in ()).throw(OSError("bad sector")))
            replayed(letters, partition, first)

    monkeypatch.setattr(shared.broker.recorder, "replayed", unreadable)
    done = client.dead_letters.replay(topic="unread").wait()

    assert (done.status, done.replayed) == ("completed", 1)
    assert (kinds(client.passport(sent.id))[-1], link(client.passport(sent.id), "replayed")) == ("replayed", "")


def test_another_namespace_sees_nothing(shared: BrokerForTests, client: Client) -> None:
    sent = client.publish("private", b"x", headers=HEADERS)
    fail(client, "private", "db down")
    client.create_namespace("others")
    other = shared.connect(namespace="others")

    with pytest.raises(MessageNotFound):
        other.passport(sent.id)
    assert other.traces() == []
    assert other.traces(trace_id=TRACE) == []


# --- finding ---------------------------------------------------------------------------------------------------------


def test_traces_are_found_by_trace_key_topic_and_time(client: Client) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    sent = client.publish("found", b"x", key=b"k-1", headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
    fail(client, "found", "db down")
    (event,) = client.traces(trace_id=trace)

    assert (event.kind, event.id, event.key, event.error) == ("nacked", sent.id, b"k-1", "db down")
    assert event.trace_id == trace
    assert client.traces(topic="found") == [event]
    assert client.traces(topic="found", since=event.time_ms / 1000) == [event]
    assert client.traces(topic="found", until=event.time_ms / 1000) == []
    assert client.traces(trace_id="ff" * 16) == []
    stored = client.traces(topic="found", key=b"k-1")
    assert [(it.kind, it.id) for it in stored] == [("nacked", sent.id), ("stored", sent.id)]
    assert [it.kind for it in client.traces(topic="found", trace_id=trace)] == ["nacked", "stored"]
    assert client.traces(topic="found", key=b"k-2") == []


def test_a_message_that_came_without_a_trace_is_found_by_the_one_it_was_given(client: Client) -> None:
    sent = client.publish("untraced", b"x")
    fail(client, "untraced", "db down")

    (event,) = client.traces(trace_id=client.passport(sent.id).trace_id)

    assert event.id == sent.id


def test_a_search_for_one_message_is_not_answered_with_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.broker.traces.recorder._SUBJECTS_MAX", 3)
    with BrokerForTests() as broker:
        client = broker.connect()
        receipts = client.publish_many("orders", [b"x"] * 10)
        with client.queue("orders", group="billing") as work:
            work.lease(max=10, wait=10)
        eventually(lambda: client.traces(topic="orders"))

        named = client.traces(trace_id=client.passport(receipts[1].id).trace_id)
        unnamed = client.traces(trace_id=client.passport(receipts[9].id).trace_id)

    assert [event.id for event in named] == [receipts[1].id]
    assert [(event.id, event.messages) for event in unnamed] == [("", 7)], "it is one of those"


def test_what_went_well_and_was_not_recorded_is_found_in_its_topic(client: Client) -> None:
    trace = "1af7651916cd43dd8448eb211c80319c"
    untraced = client.publish("quiet", b"other")
    sent = client.publish("quiet", b"x", key=b"k-1", headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})

    assert [event.id for event in client.traces(topic="quiet", key=b"k-1")] == [sent.id]
    assert [event.id for event in client.traces(topic="quiet", trace_id=trace)] == [sent.id]
    assert client.traces(topic="quiet", key=b"k-1", failures_only=True) == []
    its_own = client.passport(untraced.id).trace_id
    assert [event.id for event in client.traces(topic="quiet", trace_id=its_own)] == [untraced.id]
    assert client.traces(topic="quiet", trace_id=its_own, key=b"k-1") == []
    assert client.traces(topic="quiet", trace_id=its_own, until=1) == []
    client.create_topic("elsewhere")
    assert client.traces(topic="elsewhere", trace_id=its_own) == [], "it is in another topic"


def test_a_schedule_is_found_by_the_trace_it_was_given_until_it_fires() -> None:
    with BrokerForTests() as broker:
        client = broker.connect()
        schedule = client.publish("alarm", b"x", delay=60)
        its_own = client.passport(schedule.id).trace_id
        (event,) = client.traces(topic="alarm", trace_id=its_own)
        assert (event.kind, event.id) == ("scheduled", schedule.id)

        broker.clock.advance("120s")
        eventually(lambda: client.browse("alarm"))
        assert client.traces(topic="alarm", trace_id=its_own) == []


def test_without_a_condition_the_newest_of_the_namespace_is_found(client: Client) -> None:
    sent = [client.publish(topic, b"x") for topic in ("newest.a", "newest.b")]
    for topic in ("newest.a", "newest.b"):
        fail(client, topic, "db down")

    events = client.traces(limit=2)

    assert [(event.id, event.kind) for event in events] == [(sent[1].id, "nacked"), (sent[0].id, "nacked")]


def test_pages_go_on_where_the_last_one_ended(client: Client) -> None:
    client.create_topic("pages")
    for _ in range(3):
        client.publish_many("pages", [b"x"] * 4)
    with client.queue("pages", group="billing") as work:
        for message in work.lease(max=12, wait=10):
            message.reject("no")
    eventually(lambda: len(client.traces(topic="pages", limit=100)) == 24)
    expected = client.traces(topic="pages", limit=100)

    found, after = [], ""
    while True:
        page: TracePage = client.call(FindTraces(topic="pages", limit=5, after=after), TracePage)
        found += page.events
        after = page.after
        if not after:
            break
        assert len(page.events) == 5

    assert found == expected
    assert [event.kind for event in found if event.kind == "rejected"] == ["rejected"] * 12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit": 0}, "limit must be"),
        ({"limit": 1001}, "limit must be"),
        ({"after": "nonsense"}, "is not what a call of this family"),
        ({"after": "1." + "9" * 30}, "is not what a call of this family"),
        ({"key": b"x"}, "name the topic"),
        ({"trace_id": "xyz"}, "32 hexadecimal"),
        ({"from_ms": -1}, "from_ms"),
        ({"until_ms": 1 << 62}, "until_ms"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(client: Client, options: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        client.call(FindTraces(**options), TracePage)  # type: ignore[arg-type]


def test_the_asynchronous_client_finds_the_same(shared: BrokerForTests, client: Client) -> None:
    sent = client.publish("both", b"x")
    fail(client, "both", "db down")

    async def body() -> None:
        async with await aio.connect(shared.address) as other:
            assert await other.passport(sent.id) == client.passport(sent.id)
            assert await other.traces(topic="both") == client.traces(topic="both")

    asyncio.run(body())


# --- what is recorded ------------------------------------------------------------------------------------------------


def settings(**traces: object) -> Settings:
    return Settings.model_validate({"traces": traces})


def ack_all(client: Client, topic: str, count: int) -> None:
    client.publish_many(topic, [b"x"] * count)
    with client.queue(topic, group="billing", consumer="worker-1") as work:
        left = count
        while left:
            for message in work.lease(max=left, wait=10):
                message.ack()
                left -= 1


def test_of_what_goes_well_every_nth_message_is_recorded() -> None:
    with BrokerForTests(settings=settings(sample=0.1)) as broker:
        client = broker.connect()
        ack_all(client, "orders", 100)

        eventually(lambda: len(client.traces(topic="orders", limit=1000)) == 10)
        events = client.traces(topic="orders", limit=1000)
        assert sorted(event.offset for event in events) == list(range(0, 100, 10))
        assert {(event.kind, event.consumer.partition("#")[0]) for event in events} == {("acked", "worker-1")}
        unrecorded = client.browse("orders", offset=3, limit=1)[0]
        last = client.passport(unrecorded.id).events[-1]
        assert (last.kind, last.consumer) == ("acked", "")
        assert "not recorded" in last.note


def test_a_sample_of_nothing_records_failures_only() -> None:
    with BrokerForTests(settings=settings(sample=0)) as broker:
        client = broker.connect()
        ack_all(client, "orders", 10)
        client.publish("orders", b"bad")
        fail(client, "orders", "db down")
        with client.queue("orders", group="billing") as work:
            (message,) = work.lease(wait=10)
            message.ack()

        eventually(lambda: len(client.traces(topic="orders")) == 2)
        assert [event.kind for event in client.traces(topic="orders")] == ["acked", "nacked"]


def test_traces_that_are_off_record_nothing(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path, settings=settings(enabled=False)) as broker:
        client = broker.connect()
        ack_all(client, "orders", 10)
        client.publish("orders", b"bad")
        fail(client, "orders", "db down")

        assert client.traces() == []
        assert broker.broker.metrics.trace_events_recorded == 0
    assert not (tmp_path / "traces").exists()


def test_more_than_fits_is_dropped_and_counted_and_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.broker.traces.recorder._BUFFER_MAX", 5)
    monkeypatch.setattr("millstream.broker.traces.recorder.FLUSH_S", 3600.0)
    with BrokerForTests() as broker:
        client = broker.connect()
        client.publish_many("orders", [b"x"] * 20)
        with client.queue("orders", group="billing") as work:
            for message in work.lease(max=20, wait=10):
                message.nack(message.id)
        eventually(lambda: broker.broker.metrics.trace_events_dropped == 15)

        assert len(client.traces(topic="orders")) == 5
        assert broker.broker.metrics.trace_events_recorded == 5


def test_a_failure_of_many_messages_is_one_record_that_names_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.broker.traces.recorder._SUBJECTS_MAX", 3)
    with BrokerForTests() as broker:
        client = broker.connect()
        receipts = client.publish_many("orders", [b"x"] * 10)
        with client.queue("orders", group="billing") as work:
            work.lease(max=10, wait=10)
        eventually(lambda: client.traces(topic="orders"))

        named = client.traces(topic="orders")
        assert [event.messages for event in named] == [1, 1, 1, 7]
        assert [event.id for event in named] == [*(receipt.id for receipt in receipts[:3]), ""]
        assert "returned" in kinds(client.passport(receipts[9].id))
        assert broker.broker.metrics.trace_events_recorded == 1


def test_records_go_when_they_are_too_old(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path, settings=settings(retention_ms="1m")) as broker:
        client = broker.connect()
        client.publish("orders", b"x")
        fail(client, "orders", "db down")
        assert len(client.traces(topic="orders")) == 1
        broker.clock.advance("3m")
        client.publish("others", b"x")
        fail(client, "others", "db down")

        eventually(lambda: not client.traces(topic="orders"))
        assert len(client.traces(topic="others")) == 1


def test_a_disk_that_takes_no_traces_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with BrokerForTests() as broker:
        client = broker.connect()

        def refuse(*_: object, **__: object) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr(broker.broker.recorder.store, "_open", refuse)
        sent = client.publish("orders", b"x")
        fail(client, "orders", "db down")
        with client.queue("orders", group="billing") as work:
            (message,) = work.lease(wait=10)
            message.ack()

        eventually(lambda: broker.broker.metrics.trace_events_dropped)
        assert client.find(sent.id).value == b"x"
