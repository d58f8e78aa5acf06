"""Schedules through the SDK: delivered at or after their time and never before, moved, cancelled, expired, repeated."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import millstream
from millstream import aio
from millstream.broker.schedules.log import ScheduleLog
from millstream.broker.schedules.recurring import Recurring
from millstream.client import Client, Message, Outgoing
from millstream.config import Settings
from millstream.errors import (
    InvalidArgument,
    QuotaExceeded,
    ScheduleFired,
    ScheduleNotFound,
)
from millstream.headers import encode_headers
from millstream.ids import SCHEDULES
from millstream.schedules.recurring import RecurringSchedule
from millstream.testing.broker import BrokerForTests, BrokerProcess
from millstream.wire.queue_calls import Explain, Explanation
from tests.native import NativeClient
from tests.waiting import eventually


def delivered(client: Client, topic: str = "orders") -> list[Message]:
    """What is in the topic now."""
    with client.stream(topic, start="earliest") as stream:
        found = [stream.next(timeout_s=10) for _ in range(sum(client.offsets(topic).values()))]
    return [message for message in found if message is not None]


def values(client: Client, topic: str = "orders") -> list[str]:
    return [message.text for message in delivered(client, topic)]


@pytest.fixture
def client(broker: BrokerForTests) -> Iterator[Client]:
    with millstream.connect(broker.address) as client:
        yield client


def far_from_an_occurrence(broker: BrokerForTests, minutes: int = 1) -> None:
    """Half of the way between two occurrences, so that none comes while the test takes its time."""
    period_us = minutes * 60_000_000
    ahead_us = (period_us // 2 - broker.clock.now_us()) % period_us
    broker.clock.advance(ahead_us / 1e6)


# --- time --------------------------------------------------------------------------------------------------------


def test_a_message_may_be_moved_beyond_the_calendar(client: Client) -> None:
    receipt = client.publish("orders", "patience", delay="1h")
    far_s = 400_000_000_000.0  # in the year 14645
    assert client.schedules.move(receipt, deliver_at=far_s).due_ms == far_s * 1000
    assert "is scheduled for 400000000000000 ms" in client.why(receipt.id).sentence
    client.schedules.cancel(receipt)


def test_a_message_comes_at_its_time_and_not_before(broker: BrokerForTests, client: Client) -> None:
    receipt = client.publish("orders", "later", key="c-17", headers={"a": "b"}, priority=1, delay="10s")
    assert receipt.scheduled
    assert (receipt.partition, receipt.offset) == (0, 0)
    assert client.publish("orders", "now").scheduled is False
    broker.clock.advance("9s")
    assert values(client) == ["now"]
    broker.clock.advance("1s")
    eventually(lambda: values(client) == ["now", "later"])
    message = delivered(client)[1]
    assert message.key == b"c-17"
    assert message.headers == {"a": "b", "millstream-scheduled-id": receipt.id}
    assert client.schedules.show(receipt).state == "fired"


def test_within_ten_milliseconds_on_an_idle_machine(client: Client) -> None:
    """In real time.  One try must succeed: others may be using this machine."""
    client.create_topic("orders")
    with client.stream("orders") as stream:
        lags_ms: list[float] = []
        while len(lags_ms) < 100 and min(lags_ms, default=10) >= 10:
            due_s = time.time() + 0.1
            client.publish("orders", "x", deliver_at=due_s)
            assert stream.next(timeout_s=5) is not None
            lag_ms = (time.time() - due_s) * 1000
            assert lag_ms >= 0, "never early"
            lags_ms.append(lag_ms)
    assert min(lags_ms) < 10, f"lags in ms: {lags_ms}"


def test_messages_come_in_the_order_of_their_times_and_then_as_published(
    broker: BrokerForTests, client: Client
) -> None:
    now_s = broker.clock.now_us() / 1e6
    delays = [50, 10, 30, 10, 20, 50, 10]
    items = [Outgoing(value=f"{delay}-{n}", deliver_at=now_s + delay) for n, delay in enumerate(delays)]
    receipts = client.publish_many("orders", items)
    assert all(receipt.scheduled for receipt in receipts)
    broker.clock.advance("1m")
    expected = [f"{delay}-{n}" for delay, n in sorted((delay, n) for n, delay in enumerate(delays))]
    eventually(lambda: values(client) == expected)


def test_a_time_that_has_passed_means_now(client: Client) -> None:
    client.publish("orders", "past", deliver_at=1.0)
    eventually(lambda: values(client) == ["past"])
    assert not client.publish("orders", "no delay", delay=0).scheduled


def test_a_century_is_not_too_far(broker: BrokerForTests, client: Client) -> None:
    receipt = client.publish("orders", "for our grandchildren", delay="5200w")
    assert client.schedules.list("orders")[0].id == receipt.id
    broker.clock.advance("1m")
    assert client.schedules.show(receipt).state == "pending"
    client.schedules.move(receipt, delay=0)
    eventually(lambda: values(client) == ["for our grandchildren"])


def test_producers_send_delayed_and_ordinary_messages_side_by_side(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("orders", partitions=3)
    with client.producer("orders", batch_messages=50) as producer:
        for number in range(1000):
            producer.send(f"later-{number}", key=f"k{number % 7}", delay="1m")
            producer.send(f"now-{number}", key=f"k{number % 7}")
    assert sum(client.offsets("orders").values()) == 1000
    assert client.schedules.stats("orders")[0].pending == 1000
    broker.clock.advance("1m1s")
    eventually(lambda: sum(client.offsets("orders").values()) == 2000)
    seen = [message for message in delivered(client) if message.text.startswith("later")]
    for key in {message.key for message in seen}:
        numbers = [int(message.text.split("-")[1]) for message in seen if message.key == key]
        assert numbers == sorted(numbers), "with one delay, a key's messages stay in order"
        assert len({message.partition for message in seen if message.key == key}) == 1


def test_the_same_asynchronously(broker: BrokerForTests) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), aio.connect(broker.address) as client:
            later, now, gone = await asyncio.gather(
                client.publish("orders", "later", delay="1m"),
                client.publish("orders", "now"),
                client.publish("orders", "gone", delay="1m", key="k"),
            )
            assert (later.scheduled, now.scheduled, gone.scheduled) == (True, False, True)
            await client.schedules.cancel(gone)
            assert (await client.schedules.show(gone)).state == "cancelled"
            assert [entry.id for entry in await client.schedules.list("orders")] == [later.id]
            await client.schedules.move(later, delay="1h")
            made = await client.schedules.repeat("nightly", "orders", "0 3 * * *", "tick", priority="high")
            assert made.priority == 1
            assert [entry.name for entry in await client.schedules.repeating()] == [made.name]
            await client.schedules.stop("nightly")

    asyncio.run(main())


# --- changing one's mind -----------------------------------------------------------------------------------------


def test_a_cancelled_message_never_comes(broker: BrokerForTests, client: Client) -> None:
    gone, kept = (client.publish("orders", text, delay="10s") for text in ("gone", "kept"))
    client.schedules.cancel(gone)
    client.schedules.cancel(gone.id)  # again, as after a lost answer
    broker.clock.advance("1m")
    eventually(lambda: values(client) == ["kept"])
    assert client.schedules.show(gone).state == "cancelled"
    with pytest.raises(ScheduleFired):
        client.schedules.cancel(kept)
    with pytest.raises(ScheduleFired):
        client.schedules.move(kept, delay="1m")
    with pytest.raises(ScheduleNotFound):
        client.schedules.move(gone, delay="1m")


def test_unknown_ids_are_told_apart_from_ids_that_are_none(client: Client) -> None:
    ordinary = client.publish("orders", "an ordinary message")
    for unknown in ("0" * 26, ordinary.id):
        with pytest.raises(ScheduleNotFound):
            client.schedules.show(unknown)
        with pytest.raises(ScheduleNotFound):
            client.schedules.cancel(unknown)
    with pytest.raises(InvalidArgument, match="not a message id"):
        client.schedules.cancel("order 17")


def test_everything_of_a_key_can_be_listed_and_cancelled(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("orders", partitions=2)
    for number in range(20):
        client.publish("orders", f"{number}", key=f"c-{number % 2}", delay=60 - number)
    listed = client.schedules.list("orders", key="c-1")
    assert [entry.due_ms for entry in listed] == sorted(entry.due_ms for entry in listed)
    assert {entry.key for entry in listed} == {b"c-1"}
    assert len(listed) == 10
    assert client.schedules.cancel_key("orders", "c-1") == 10
    assert client.schedules.cancel_key("orders", "c-1") == 0
    broker.clock.advance("2m")
    eventually(lambda: len(values(client)) == 10)
    assert {message.key for message in delivered(client)} == {b"c-0"}


def test_a_moved_message_comes_at_its_new_time_and_only_then(broker: BrokerForTests, client: Client) -> None:
    sooner, later, back = (client.publish("orders", text, delay="1m") for text in ("sooner", "later", "back"))
    client.schedules.move(sooner, delay="10s")
    client.schedules.move(later, delay="3m")
    client.schedules.move(back, delay="3m")
    client.schedules.move(back, deliver_at=client.schedules.show(back).moved_from_ms / 1000)
    assert [entry.id for entry in client.schedules.list("orders")] == [sooner.id, back.id, later.id]
    broker.clock.advance("11s")
    eventually(lambda: values(client) == ["sooner"])
    broker.clock.advance("1m")
    eventually(lambda: values(client) == ["sooner", "back"])
    broker.clock.advance("2m")
    eventually(lambda: values(client) == ["sooner", "back", "later"])


def test_a_message_that_expires_before_it_is_due_is_not_delivered(broker: BrokerForTests, client: Client) -> None:
    expired = client.publish("orders", "expired", delay="2m", ttl="1m")
    client.publish("orders", "in time", delay="2m", ttl="3m")
    broker.clock.advance("2m1s")
    eventually(lambda: values(client) == ["in time"])
    assert client.schedules.show(expired).state == "expired"
    assert client.schedules.stats("orders")[0].expired == 1


def test_a_list_has_bounds_and_a_limit(broker: BrokerForTests, client: Client) -> None:
    now_s = broker.clock.now_us() / 1e6
    client.publish_many("orders", [Outgoing(value=str(n), deliver_at=now_s + 100 + n) for n in range(50)])
    listed = client.schedules.list("orders", after=now_s + 110, before=now_s + 120)
    assert [entry.offset for entry in listed] == list(range(10, 20))
    assert [entry.offset for entry in client.schedules.list("orders", limit=3)] == [0, 1, 2]
    with pytest.raises(InvalidArgument, match="limit"):
        client.schedules.list("orders", limit=0)


def test_more_than_one_answer_holds_is_listed_whole(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("orders", partitions=2)
    due_s = broker.clock.now_us() / 1e6 + 3600
    sent = [it.id for it in client.publish_many("orders", [Outgoing(value="x", deliver_at=due_s)] * 2_500)]

    async def listed() -> list[list[str]]:
        async with await aio.connect(broker.address) as other:
            found = [entry.id async for entry in other.schedules.iterate("orders")]
            return [found, [entry.id for entry in await other.schedules.list("orders", limit=20_000)]]

    ways = [[it.id for it in client.schedules.iterate("orders")]]
    ways += [[it.id for it in client.schedules.list("orders", limit=20_000)], *asyncio.run(listed())]
    for found in ways:
        assert sorted(found) == sorted(sent)
    assert [it.id for it in client.schedules.list("orders", limit=1_001)] == ways[0][:1_001]


def test_why_says_when_it_comes_and_what_became_of_it(broker: BrokerForTests, client: Client) -> None:
    receipt = client.publish("orders", "later", delay="10s")

    def why() -> Explanation:
        explanation: Explanation = client.call(Explain(id=receipt.id), Explanation)
        return explanation

    assert why().state == "schedule-pending"
    assert why().sentence.startswith("The message is scheduled for 20")
    client.schedules.cancel(receipt)
    assert why().state == "schedule-cancelled"


# --- what stays --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_everything_survives_a_restart_also_without_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str
) -> None:
    monkeypatch.setattr("millstream.broker.schedules.window.RUN_ROWS", 64)  # so that there are many runs
    with BrokerForTests(tmp_path) as broker:
        client = broker.connect()
        now_s = broker.clock.now_us() / 1e6
        # In an order that is not that of their times; most of it beyond what memory holds.
        items = [Outgoing(value=f"{n * 37 % 500}", deliver_at=now_s + 60 + 3 * (n * 37 % 500)) for n in range(500)]
        runs, receipts = tmp_path / "topics/default/orders/0.due", client.publish_many("orders", items[:250])
        eventually(lambda: list(runs.glob("*.due")))  # or a slow machine puts all of it into one
        receipts += client.publish_many("orders", items[250:])
        by_value = {item.value: receipt for item, receipt in zip(items, receipts, strict=True)}
        client.schedules.cancel(by_value["7"])
        client.schedules.move(by_value["8"], deliver_at=now_s + 60 + 3 * 499.5)
        broker.clock.advance("60s")
        eventually(lambda: values(client) == ["0"])
        eventually(lambda: len(list(runs.glob("*.due"))) > 1)
    if index == "lost":
        shutil.rmtree(tmp_path / "topics/default/orders/0.due")
    with BrokerForTests(tmp_path) as broker:
        client = broker.connect()
        assert client.schedules.stats("orders")[0].pending == 498
        assert client.schedules.show(by_value["7"]).state == "cancelled"
        assert client.schedules.show(by_value["0"]).state == "fired"
        order = [*map(str, range(1, 7)), *map(str, range(9, 500)), "8"]
        assert [entry.id for entry in client.schedules.list("orders", limit=1000)] == [by_value[it].id for it in order]
        for minute in range(1, 27):  # the window moves with the clock
            broker.clock.advance("1m")
            eventually(lambda: sum(client.offsets("orders").values()) >= min(499, 20 * minute - 21))  # noqa: B023
        eventually(lambda: values(client) == ["0", *order])
        assert client.schedules.stats("orders")[0].pending == 0


def test_what_is_settled_is_removed_from_the_disk(tmp_path: Path) -> None:
    settings = Settings.model_validate({"storage": {"cleanup_interval_ms": 5000, "segment_bytes": 16_384}})
    with BrokerForTests(tmp_path, settings=settings) as broker:
        client = broker.connect()
        client.publish_many("orders", [Outgoing(value="x" * 1000, delay=10) for _ in range(100)])
        last = client.publish("orders", "last", delay="2m")
        directory = tmp_path / "topics/default/orders/0.schedules"
        before = sum(path.stat().st_size for path in directory.iterdir())
        broker.clock.advance("15s")
        eventually(lambda: sum(client.offsets("orders").values()) == 100)
        broker.clock.advance("10s")
        eventually(lambda: sum(path.stat().st_size for path in directory.iterdir()) < before / 2)
        assert client.schedules.show(last).state == "pending"
    with BrokerForTests(tmp_path, settings=settings) as broker:
        client = broker.connect()
        assert client.schedules.stats("orders")[0].pending == 1
        broker.clock.advance("3m")
        eventually(lambda: values(client)[-1] == "last")


def test_one_message_that_waits_does_not_keep_all_that_came_after_it(tmp_path: Path) -> None:
    settings = Settings.model_validate({"storage": {"cleanup_interval_ms": 5000, "segment_bytes": 16_384}})
    directory = tmp_path / "topics/default/orders/0.schedules"

    def stored_bytes() -> int:
        return sum(path.stat().st_size for path in directory.glob("*.log"))

    with BrokerForTests(tmp_path, settings=settings) as broker:
        client = broker.connect()
        waiting = [client.publish("orders", "waits", delay="3m")]
        for number in range(20):
            client.publish_many("orders", [Outgoing(value=f"{number:01000}", delay=10) for _ in range(10)])
            waiting.append(client.publish("orders", f"waits {number}", key="k", delay="3m"))
        gone = client.publish("orders", "gone", delay="3m")
        client.schedules.cancel(gone)
        before = stored_bytes()
        broker.clock.advance("15s")
        eventually(lambda: sum(client.offsets("orders").values()) == 200)
        broker.clock.advance("6s")
        eventually(lambda: stored_bytes() < before / 3)
        assert [entry.id for entry in client.schedules.list("orders")] == [receipt.id for receipt in waiting]
        assert len(client.schedules.list("orders", key="k")) == 20
    with BrokerForTests(tmp_path, settings=settings) as broker:
        client = broker.connect()
        assert client.schedules.stats("orders")[0].pending == len(waiting)
        assert client.schedules.show(waiting[0]).value == b"waits"
        broker.clock.advance("4m")
        eventually(lambda: values(client)[200:] == ["waits", *(f"waits {number}" for number in range(20))])


def test_a_deleted_topic_takes_its_schedules_with_it(broker: BrokerForTests, client: Client) -> None:
    client.publish("orders", "never", delay=10)
    client.delete_topic("orders")
    client.publish("orders", "a new topic", delay=30)
    broker.clock.advance("20s")
    assert values(client) == []
    broker.clock.advance("20s")
    eventually(lambda: values(client) == ["a new topic"])


def test_ephemeral_topics_have_schedules_too(broker: BrokerForTests, client: Client) -> None:
    client.create_topic("orders", config={"mode": "ephemeral"})
    assert client.publish("orders", "later", delay=10).label == "memory"
    broker.clock.advance("11s")
    eventually(lambda: values(client) == ["later"])


@pytest.mark.slow
def test_schedules_survive_kill_nine_and_fire_exactly_once(tmp_path: Path) -> None:
    count = 300
    broker = BrokerProcess(tmp_path).start()
    with millstream.connect(broker.address) as client:
        due_s = time.time() + 0.3
        client.publish_many("orders", [Outgoing(value=str(n), deliver_at=due_s + n / 200) for n in range(count)])
    for _ in range(3):  # in the middle of it, again and again
        time.sleep(0.35)
        broker.kill()
        broker.start()
    with millstream.connect(broker.address) as client:
        eventually(lambda: sum(client.offsets("orders").values()) >= count, within_s=20)
        time.sleep(0.2)
        assert values(client) == [str(n) for n in range(count)], "all of them, each once, in order"
    broker.stop()


# --- limits ------------------------------------------------------------------------------------------------------


def test_limits_are_kept(tmp_path: Path) -> None:
    settings = Settings.model_validate({"schedules": {"max_delay_ms": "1h", "max_pending": 3}})
    with BrokerForTests(tmp_path, settings=settings) as broker:
        client = broker.connect()
        with pytest.raises(InvalidArgument, match=r"max_delay_ms allows 1h"):
            client.publish("orders", "too far", delay="61m")
        receipts = [client.publish("orders", str(n), delay="59m") for n in range(3)]
        with pytest.raises(QuotaExceeded, match="max_pending"):
            client.publish("orders", "too many", delay="1m")
        with pytest.raises(InvalidArgument, match="max_delay_ms"):
            client.schedules.move(receipts[0], delay="2h")
        client.schedules.cancel(receipts[0])
        client.publish("orders", "there is room again", delay="1m")


@pytest.mark.parametrize("limited", ["by number", "by dedup id"])
def test_a_repetition_of_what_is_scheduled_is_no_matter_of_limits(tmp_path: Path, limited: str) -> None:
    """A producer whose answer was lost sends again what is stored, also when there is no room for more."""
    settings = Settings.model_validate({"schedules": {"max_pending": 1}})
    due_us = [(time.time_ns() // 1000) + 3_600_000_000]
    with BrokerForTests(tmp_path, settings=settings) as broker, NativeClient(broker.address) as client:
        client.call("topic.create", name="orders", config={"dedup_window_ms": 60_000})
        producer = client.call("producer.new")["producer_id"]
        options = {"partition": SCHEDULES, "deliver_at_us": due_us}

        def publish(number: int) -> bool:
            mark = [encode_headers({"millstream-dedup-id": f"id-{number}"})]
            return client.publish(
                "orders",
                [b"x"],
                **options,
                **({"producer": producer, "sequence": number} if limited == "by number" else {}),
                **({"headers": mark, "options": True} if limited == "by dedup id" else {}),
            ).duplicate

        assert not publish(0)
        for _ in range(2):  # what was refused was not remembered
            with pytest.raises(QuotaExceeded, match="max_pending"):
                publish(1)
        assert publish(0)


def test_the_limit_holds_while_a_log_of_schedules_is_still_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That begins when the log is opened, and takes its time after a restart with many of them."""

    async def dawdle(_self: ScheduleLog) -> None:
        pass

    monkeypatch.setattr(ScheduleLog, "_load", dawdle)
    settings = Settings.model_validate({"schedules": {"max_pending": 2}})
    with BrokerForTests(tmp_path, settings=settings) as broker:
        broker.connect().publish("orders", "later", delay="1h")
    with BrokerForTests(tmp_path, settings=settings) as broker:
        client = broker.connect()
        client.publish("orders", "later", delay="1h")
        with pytest.raises(QuotaExceeded, match="has 2 messages scheduled"):
            client.publish("orders", "one too many", delay="1h")


@pytest.mark.parametrize("overflow", ["reject", "evict"])
def test_a_full_queue_does_not_keep_anybody_from_scheduling(client: Client, overflow: str) -> None:
    client.create_topic("orders", config={"max_depth": 1, "overflow": overflow})
    with client.queue("orders"):
        client.publish("orders", "fills the queue")
        assert client.publish("orders", "later", delay="1h").scheduled


def test_due_times_and_partitions_have_to_fit_each_other(broker: BrokerForTests) -> None:
    with NativeClient(broker.address) as client:
        client.call("topic.create", name="orders")
        with pytest.raises(InvalidArgument, match="log of schedules"):
            client.publish("orders", [b"x"], deliver_at_us=[1])
        for due in (None, [5, 0]):
            with pytest.raises(InvalidArgument, match="needs a time"):
                client.publish("orders", [b"x", b"y"], partition=SCHEDULES, deliver_at_us=due)


# --- recurring ---------------------------------------------------------------------------------------------------


def test_a_recurring_schedule_publishes_one_message_per_occurrence(broker: BrokerForTests, client: Client) -> None:
    far_from_an_occurrence(broker)
    made = client.schedules.repeat(
        "tick", "ticks", "* * * * *", json={"n": 1}, key="k", headers={"a": "b"}, timezone="Europe/Berlin"
    )
    assert made.next_ms % 60_000 == 0
    for count in (1, 2, 3):
        broker.clock.advance("1m")
        eventually(lambda: client.schedules.show_repeating("tick").published == count)  # noqa: B023
    messages = delivered(client, "ticks")
    assert [message.json() for message in messages] == [{"n": 1}] * 3
    times = [int(message.headers["millstream-schedule-time-ms"]) for message in messages]
    assert times == [made.next_ms + n * 60_000 for n in range(3)]
    assert messages[0].headers["millstream-schedule"] == "tick"
    assert messages[0].headers["a"] == "b"
    client.schedules.stop("tick")
    broker.clock.advance("5m")
    assert len(delivered(client, "ticks")) == 3
    with pytest.raises(ScheduleNotFound):
        client.schedules.show_repeating("tick")


def test_a_paused_schedule_waits_and_does_not_make_up_for_the_pause(broker: BrokerForTests, client: Client) -> None:
    far_from_an_occurrence(broker)
    client.schedules.repeat("tick", "ticks", "* * * * *", "x", catch_up="all", paused=True)
    broker.clock.advance("5m")
    assert client.schedules.resume("tick").published == 0
    broker.clock.advance("1m")
    eventually(lambda: client.schedules.show_repeating("tick").published == 1)
    assert client.schedules.pause("tick").next_ms == 0
    broker.clock.advance("5m")
    assert client.schedules.show_repeating("tick").published == 1


def test_schedules_that_occur_at_the_same_time_are_published_at_the_same_time(
    broker: BrokerForTests, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"tick-{number}" for number in range(20)]
    publish, under_way, most = Recurring._publish, 0, 0

    async def counted(recurring: Recurring, schedule: RecurringSchedule, at_ms: int) -> bool:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await publish(recurring, schedule, at_ms)
        finally:
            under_way -= 1

    far_from_an_occurrence(broker)
    for name in names:
        client.schedules.repeat(name, "ticks", "* * * * *", name)
    monkeypatch.setattr(Recurring, "_publish", counted)
    broker.clock.advance("1m")
    eventually(lambda: sorted(values(client, "ticks")) == sorted(names))
    assert most == len(names)


def test_after_a_downtime_the_latest_occurrence_is_made_up_for(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker:
        far_from_an_occurrence(broker, minutes=10)
        client = broker.connect()
        for catch_up in ("none", "latest", "all"):
            client.schedules.repeat(catch_up, f"t-{catch_up}", "*/10 * * * *", "x", catch_up=catch_up)
        skipped_us = broker.clock.skipped_us
    restarted = BrokerForTests(tmp_path)
    restarted.clock.skip(skipped_us + 3_605 * 1_000_000)  # down for an hour
    with restarted as broker:
        client = broker.connect()
        eventually(lambda: client.schedules.show_repeating("all").published == 6)
        published = {entry.name: entry.published for entry in client.schedules.repeating()}
        assert published == {"none": 0, "latest": 1, "all": 6}


def test_a_recurring_schedule_that_makes_no_sense_is_refused(client: Client) -> None:
    for cron, zone in (("nonsense", "UTC"), ("0 0 * * *", "Mars/Olympus")):
        with pytest.raises(InvalidArgument):
            client.schedules.repeat("x", "ticks", cron, "x", timezone=zone)
    with pytest.raises(InvalidArgument, match="catch_up"):
        client.schedules.repeat("x", "ticks", "@daily", "x", catch_up="some")  # type: ignore[arg-type]
    with pytest.raises(millstream.errors.InvalidName):
        client.schedules.repeat("a/b", "ticks", "@daily", "x")
    with pytest.raises(InvalidArgument, match="a message needs a value; only a deletion marker"):
        client.schedules.repeat("x", "ticks", "@daily")
    assert client.schedules.repeat("x", "ticks", "@daily", key="k").value is None, "a deletion marker, every day"
    assert client.schedules.repeat("x", "ticks", "@daily", "").value == b""
