"""Limits are kept however long a topic takes to fill a file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from millstream import aio
from millstream.broker import cleanup
from millstream.broker.partition import Partition
from millstream.broker.queues.part import QueuePart
from millstream.broker.registry import Topic
from millstream.client import Client
from millstream.errors import MessageGone, ReceiptInvalid, StorageFailed
from millstream.log.compaction import Compaction
from millstream.log.partition import PartitionLog
from millstream.log.segment import Segment
from millstream.testing.broker import BrokerForTests
from millstream.wire.leases import Settled
from tests.logged import logged


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerForTests]:
    with BrokerForTests(tmp_path) as running:
        yield running


def segments(broker: BrokerForTests, topic: str) -> list[Segment]:
    return list(broker.broker.topics.partition("default", topic, 0).log.segments)


def kept(client: Client, topic: str) -> int:
    (partition,) = client.topic(topic).partitions
    return partition.next_offset - partition.start_offset


def test_a_slow_topic_keeps_its_messages_not_much_longer_than_asked_for(broker: BrokerForTests) -> None:
    client = broker.connect()
    client.create_topic("slow", config={"retention_ms": 16 * 60_000})
    for _ in range(60):
        client.publish("slow", b"reading")
        broker.clock.advance("1m")
    # The oldest is just past its age: time goes on beside the clock that is advanced.
    assert 15 <= kept(client, "slow") <= 16 + 2 + 2, "an eighth more, and a round of cleanup at each end"
    assert len(segments(broker, "slow")) <= 10


def test_a_slow_topic_keeps_not_many_more_messages_than_asked_for(broker: BrokerForTests) -> None:
    client = broker.connect()
    client.create_topic("few", config={"retention_messages": 5})
    client.create_topic("small", config={"retention_bytes": 800})
    for _ in range(40):
        client.publish("few", b"reading")
        client.publish("small", bytes(50))
        broker.clock.advance("1m")
    assert 5 <= kept(client, "few") <= 7
    sizes = [segment.size for segment in segments(broker, "small")]
    assert 800 <= sum(sizes) <= 1200
    assert max(len(segments(broker, "few")), len(sizes)) <= 10


def test_a_slow_compacted_topic_holds_the_history_of_an_hour_or_so(broker: BrokerForTests) -> None:
    client = broker.connect()
    client.create_topic("table", config={"cleanup": "compact"})
    for number in range(30):
        client.publish("table", b"%d" % number, key=b"k")
        broker.clock.advance("5m")
    values = [message.value for message in client.stream("table", start="earliest", timeout_s=0.2)]
    assert len(values) <= 15
    assert values[-1] == b"29"
    assert len(segments(broker, "table")) <= 3


def test_a_compacted_topic_that_also_deletes_forgets_keys_that_nobody_writes_any_more(broker: BrokerForTests) -> None:
    client = broker.connect()
    client.create_topic("sessions", config={"cleanup": "compact+delete", "retention_ms": 4 * 3_600_000})
    for number in range(20):
        client.publish("sessions", b"seen", key=b"user %02d" % number)
        broker.clock.advance("30m")
    keys = [message.key for message in client.stream("sessions", start="earliest", timeout_s=0.2)]
    assert keys[-1] == b"user 19"
    assert keys[0] >= b"user 09"
    assert len(segments(broker, "sessions")) <= 12


def test_an_idle_topic_is_rolled_once(broker: BrokerForTests) -> None:
    client = broker.connect()
    client.create_topic("idle", config={"retention_ms": 80 * 60_000})
    client.publish("idle", b"the only one")
    broker.clock.advance("30m")
    first, active = segments(broker, "idle")
    broker.clock.advance("30m")
    assert segments(broker, "idle") == [first, active]
    broker.clock.advance("30m")
    assert kept(client, "idle") == 0


def test_the_age_of_what_is_written_is_known_after_a_restart(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker:
        client = broker.connect()
        client.create_topic("slow", config={"retention_ms": 80 * 60_000})
        client.publish("slow", b"before")
        broker.clock.advance("9m")
        skipped_us = broker.clock.skipped_us
    with BrokerForTests(tmp_path) as broker:
        broker.clock.skipped_us = skipped_us
        broker.connect().publish("slow", b"after")
        broker.clock.advance("2m")
        assert [segment.messages for segment in segments(broker, "slow")] == [2, 0]


def test_a_queue_that_nobody_works_on_is_not_cut_into_more_and_more_segments(broker: BrokerForTests) -> None:
    client = broker.connect()
    client.create_topic("jobs", config={"cleanup": "settled", "retention_messages": 2})
    client.queue("jobs", group="w").close()
    for _ in range(30):
        client.publish("jobs", b"job")
        broker.clock.advance("1m")
    assert kept(client, "jobs") == 30
    assert len(segments(broker, "jobs")) <= 5


def test_many_topics_are_rolled_in_turns(broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "_ROLLS_PER_ROUND", 2)
    client = broker.connect()
    names = [f"t{number}" for number in range(6)]
    for name in names:
        client.create_topic(name, config={"retention_messages": 8})
    for name in names:
        client.publish(name, b"1")
    rolled = []
    for _ in range(4):
        broker.run(broker.broker._life.cleanup.run())
        rolled.append(sum(len(segments(broker, name)) > 1 for name in names))
        for name in names[:2]:
            client.publish(name, b"again")
    assert rolled[:3] == [2, 4, 6], "those that are written all the time do not keep others from their turn"


def test_a_partition_that_cannot_be_cleaned_up_costs_no_other_its_turn(
    broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(log: PartitionLog, **_: object) -> Compaction:
        raise ValueError(f"nobody has thought of this in {log.directory}")

    monkeypatch.setattr(cleanup.Compaction, "plan", plan)
    client = broker.connect()
    client.create_topic("table", config={"cleanup": "compact"})
    client.create_topic("few", config={"retention_messages": 5})
    client.publish("table", b"1", key=b"k")
    with logged() as log:
        for _ in range(40):
            client.publish("few", b"reading")
            broker.run(broker.broker._life.cleanup.run())
        failed = log.all("cleanup failed", directory="topics/default/table/0")
    assert kept(client, "few") <= 7
    assert len(failed) == 40
    assert "nobody has thought of this" in failed[0]["reason"]
    assert "Traceback" in failed[0]["exception"]


def test_a_partition_that_cannot_be_opened_costs_no_other_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BrokerForTests(tmp_path) as broker:
        client = broker.connect()
        for name in ("broken", "few"):
            client.create_topic(name, config={"retention_messages": 5})
            client.publish(name, b"reading")
    with BrokerForTests(tmp_path) as broker:
        topics = broker.broker.topics
        opened = topics.partition_of

        def partition_of(topic: Topic, number: int) -> Partition:
            if topic.name == "broken":
                raise StorageFailed("it cannot be opened")
            return opened(topic, number)

        monkeypatch.setattr(topics, "partition_of", partition_of)
        with logged() as log:
            broker.run(broker.broker._life.cleanup.run())
            assert log.one("a partition cannot be looked after", topic="broken")["reason"] == "it cannot be opened"
        assert len(segments(broker, "few")) == 2, "the file that is written to is closed, for retention to take it away"


# What queue groups lose by it


LOST = "millstream_removed_unsettled_total{"


def lost(client: Client) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in client.metrics().splitlines() if line.startswith(LOST)]
    return {name.split('group="')[1].split('"')[0]: float(value) for name, value in lines}


def test_messages_that_a_queue_loses_to_retention_are_counted_warned_of_and_said(broker: BrokerForTests) -> None:
    client = broker.connect()
    client.create_topic("jobs", config={"retention_ms": 60_000})
    client.queue("jobs", group="w").close()
    for _ in range(3):
        client.publish("jobs", b"job")
    with client.queue("jobs", group="w") as queue:
        message = queue.next(5)
        assert message is not None
        message.ack(wait=True)
    assert client.why("jobs/w").sentence.startswith("Nobody consumes the group")
    with logged() as log:
        broker.clock.advance("10m")
        warnings = log.all(level="warning", group="w")
    assert [(entry["topic"], entry["messages"]) for entry in warnings] == [("jobs", 2)], "once, and not in every round"
    assert "cleanup=settled" in warnings[0]["advice"]
    told = client.why("jobs/w")
    assert told.state == "empty"
    assert told.facts["gone"] == 2
    assert told.sentence == (
        "Nothing is left to settle; no consumer is connected. 2 messages were removed by retention before the group "
        "had settled them; with cleanup=settled on the topic, retention waits."
    )
    assert lost(client) == {"w": 2}
    assert client.queues.describe("jobs", "w").settled["gone"] == 2


def test_what_was_removed_before_a_group_was_made_is_not_its_loss(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker:
        client = broker.connect()
        client.create_topic("jobs", config={"retention_ms": 60_000})
        client.publish("jobs", b"before")
        broker.clock.advance("10m")
        client.queue("jobs", group="w").close()
        client.queue("jobs", group="late", start="latest").close()
        for group in ("w", "late"):
            assert client.why(f"jobs/{group}").sentence == "Everything is settled; no consumer is connected."
        assert set(lost(client).values()) == {0}
    with BrokerForTests(tmp_path) as broker:
        client = broker.connect()
        for group in ("w", "late"):
            assert client.why(f"jobs/{group}").sentence == "Everything is settled; no consumer is connected."
            assert not client.queues.describe("jobs", group).settled.get("gone")


@pytest.mark.parametrize("action", ["ack", "nack", "reject"])
def test_who_settles_a_message_that_retention_took_is_told_that_it_is_gone(
    broker: BrokerForTests, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = broker.connect()
    client.create_topic("jobs", config={"retention_ms": 60_000})
    for _ in range(3):
        client.publish("jobs", b"job")
    # Longer than the advance: a lease that ended before retention came would bring its message to the queue below.
    (by_receipt,) = client.queues.lease("jobs", "w", lease="1h")
    with client.queue("jobs", group="w", lease="1h", auto_extend=False) as queue:
        held = [queue.next(5) for _ in range(2)]
        broker.clock.advance("10m")
        waited, unwaited = held
        assert waited is not None
        assert unwaited is not None
        with pytest.raises(MessageGone, match="not delivered again"):
            getattr(waited, action)(wait=True)
        getattr(unwaited, action)()
        queue.flush()
        assert queue.next(0.2) is None
        assert (queue.stats.gone, queue.stats.refused) == (2, 0)
        assert client.queues.settle(action, [by_receipt.receipt])[0].result == "gone"
    assert "is not delivered again" in caplog.text
    assert client.queues.describe("jobs", "w").settled.get("gone") == 3
    assert not client.queues.describe("jobs", "w").settled.get("dead")


def test_an_ack_of_a_message_that_retention_took_a_moment_ago_or_long_ago_has_one_answer(
    broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the group has looked at its log since, and whether the lease has ended."""
    client = broker.connect()
    client.create_topic("jobs", config={"retention_ms": 60_000})
    for _ in range(3):
        client.publish("jobs", b"job")
    leased = [client.queues.lease("jobs", "w", lease=lease)[0] for lease in ("1h", "1h", "2m")]
    monkeypatch.setattr(QueuePart, "sweep", lambda *_: False)
    broker.clock.advance("10m")
    results = []
    for message in leased:
        results += [outcome.result for outcome in client.queues.settle("ack", [message.receipt])]
        client.queues.describe("jobs", "w")  # looks at the log
    assert results == ["gone"] * 3
    assert client.queues.describe("jobs", "w").settled == {"acked": 0, "gone": 3}


def test_to_ack_again_what_was_acked_before_retention_took_it_is_a_success(broker: BrokerForTests) -> None:
    client = broker.connect()
    client.create_topic("jobs", config={"retention_ms": 60_000})
    client.publish("jobs", b"job")
    (message,) = client.queues.lease("jobs", "w", lease="1h")
    assert client.queues.settle("ack", [message.receipt])[0].result == "done"
    broker.clock.advance("10m")
    assert client.queues.settle("ack", [message.receipt])[0].result == "done"


def test_a_second_word_about_a_message_that_retention_took_is_not_called_a_loss(
    broker: BrokerForTests, caplog: pytest.LogCaptureFixture
) -> None:
    client = broker.connect()
    client.create_topic("jobs", config={"retention_ms": 60_000})
    client.publish("jobs", b"job")
    with client.queue("jobs", group="w", lease="1h", auto_extend=False) as queue:
        message = queue.next(5)
        assert message is not None
        message.ack(wait=True)
        broker.clock.advance("10m")
        with pytest.raises(ReceiptInvalid, match="settled before") as refused:
            message.nack(wait=True)
        assert not isinstance(refused.value, MessageGone)
        assert queue.reject([message]) == [Settled.GONE]
        assert (queue.stats.gone, queue.stats.refused) == (0, 0)
    assert "is not delivered again" not in caplog.text


def test_an_extension_beside_a_message_that_retention_took_has_its_own_deadline(broker: BrokerForTests) -> None:
    client = broker.connect()
    client.create_topic("jobs", config={"retention_ms": 60_000})
    client.create_topic("others")
    for topic in ("jobs", "others"):
        client.publish(topic, b"job")
    (gone,), (held,) = client.queues.lease("jobs", "w", lease="1h"), client.queues.lease("others", "w", lease="1h")
    broker.clock.advance("10m")
    lost, kept = client.queues.settle("extend", [gone.receipt, held.receipt], delay="2h")
    assert (lost.result, lost.deadline_ms) == ("gone", 0)
    assert kept.result == "done"
    assert abs(kept.deadline_ms - held.deadline_ms) < 1000, "processing_ms is over: it lasts as long as it did"


def test_over_http_a_receipt_of_what_retention_took_is_answered_with_its_own_code(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path, http=True) as broker:
        client = broker.connect()
        client.create_topic("jobs", config={"retention_ms": 60_000})
        client.publish("jobs", b"job")
        (message,) = client.queues.lease("jobs", "w")
        broker.clock.advance("10m")
        body = {"receipts": [message.receipt]}
        answer = httpx.post(f"{broker.url}/api/v1/queues/reject", json=body)
        assert (answer.status_code, answer.json()["code"]) == (409, "MESSAGE_GONE")


def test_an_async_consumer_is_told_too(broker: BrokerForTests) -> None:
    async def scenario() -> None:
        async with aio.connect(broker.address) as client:
            await client.create_topic("jobs", config={"retention_ms": 60_000})
            await client.publish("jobs", b"job")
            async with client.queue("jobs", group="w", lease="1h", auto_extend=False) as queue:
                message = await queue.next(5)
                assert message is not None
                broker.clock.advance("10m")
                with pytest.raises(MessageGone):
                    await message.reject("bad", wait=True)

    asyncio.run(scenario())
