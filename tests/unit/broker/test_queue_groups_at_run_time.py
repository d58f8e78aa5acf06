"""Queue groups that are changed and deleted while others are at it, or while the disk refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millstream.broker.queues import queues as queues_module
from millstream.broker.queues import registry as registry_module
from millstream.broker.queues.group import QueueGroup
from millstream.broker.queues.keeper import PartitionKeeper
from millstream.broker.queues.part import ROUTE_SHIFT, ROUTES_MAX, QueuePart
from millstream.broker.state import StateLog
from millstream.broker.transfer import Target
from millstream.errors import GroupNotEmpty, GroupNotFound, QuotaExceeded, StorageFailed, TopicNotFound
from millstream.queues.ledger import Ledger
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls, letter_calls, queue_calls
from millstream.wire.leases import Settle
from tests.simulated_broker import Client, run, started
from tests.unit.broker.test_queues_at_run_time import lives, publish, topic_of
from tests.waiting import eventually_async


def test_a_policy_of_a_pattern_that_could_not_be_recorded_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async def refuse(*_: object, **__: object) -> None:
            raise StorageFailed("cannot write the state: no space left on device")

        client = await started(SimulatedStorage(seed=1))
        await client.open_queue("orders.*", policy={"max_deliveries": 5})
        with monkeypatch.context() as patched:
            patched.setattr(StateLog, "record", refuse)
            with pytest.raises(StorageFailed):
                await client.call(queue_calls.ConfigureQueue(topic="orders.*", policy={"max_deliveries": 9}))
        await client.call(calls.CreateTopic(name="orders.eu"))
        info = await client.call(queue_calls.DescribeQueue(topic="orders.eu"))
        assert isinstance(info, queue_calls.QueueInfo)
        assert info.policy["max_deliveries"] == 5

    run(scenario)


def test_groups_on_patterns_are_bounded_in_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is there for good, and every topic that appears is compared with all of them."""
    monkeypatch.setattr(registry_module, "_PATTERNS_MAX", 2)

    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        await client.open_queue("orders.*", group="a")
        await client.open_queue("orders.*", group="b")
        with pytest.raises(QuotaExceeded, match="2 queue groups on patterns at most"):
            await client.open_queue("orders.*", group="c")
        await client.open_queue("orders.*", group="a")
        await client.call(queue_calls.DeleteQueue(topic="orders.*", group="b", force=True))
        await client.open_queue("orders.*", group="c")

    run(scenario)


def test_groups_that_come_and_go_leave_nothing_behind() -> None:
    async def work(client: Client) -> None:
        queues = client.broker.queues
        await client.call(calls.CreateTopic(name="orders"))
        await publish(client, [b"x"])
        for number in range(10):
            consumer = await client.open_queue(group=f"g{number}")
            (message,) = await client.lease(consumer)
            assert 0 < message.part.nonce < 2**64
            assert await client.settle(Settle.ACK, message) == [0]
            await client.call(queue_calls.CloseQueue(consumer=consumer))
            await client.call(queue_calls.DeleteQueue(topic="orders", group=f"g{number}"))
        assert len(queues._routes) == 0

    lives(work)


def test_groups_that_chance_gives_the_same_route_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: Client) -> None:
        monkeypatch.setattr(queues_module, "route_of", lambda *_: ROUTES_MAX)
        await client.call(calls.CreateTopic(name="orders"))
        await publish(client, [b"x"])
        consumers = [await client.open_queue(group=group) for group in ("one", "other")]
        held = [message for consumer in consumers for message in await client.lease(consumer)]
        assert [message.part.nonce >> ROUTE_SHIFT for message in held] == [ROUTES_MAX, 1]
        assert await client.settle(Settle.ACK, held[1]) == [0]
        assert [group.depth() for group in client.broker.queues.registry.all_groups("default")] == [1, 0]

    lives(work)


def test_a_receipt_from_before_a_restart_settles_nothing_of_another_group() -> None:
    """Both groups hold the message; the one that acks is the first to come back, and has what was the other's place."""

    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await publish(client, [b"x"])
        receipts["slow"], receipts["quick"] = [await _leased(client, group) for group in ("slow", "quick")]
        assert await _acked(client, receipts["quick"]) == "done"

    async def again(client: Client) -> None:
        await client.open_queue(group="quick")
        assert await _acked(client, receipts["slow"]) == "receipt_invalid"
        assert await _acked(client, receipts["quick"]) == "done", "to say it again is a success"
        assert await _leased(client, "slow"), "nobody has acked it there"

    receipts: dict[str, str] = {}
    lives(work, again)


async def _leased(client: Client, group: str) -> str:
    (message,) = await client.call(queue_calls.LeaseMessages(topic="orders", group=group))  # type: ignore[misc]
    return message.receipt  # type: ignore[no-any-return]


async def _acked(client: Client, receipt: str) -> str:
    item = queue_calls.SettleItem(receipt=receipt)
    (outcome,) = await client.call(queue_calls.SettleMessages(items=[item]))  # type: ignore[misc]
    return outcome.result  # type: ignore[no-any-return]


def test_priorities_are_not_remembered_for_nobody() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config={"lanes": "strict"}))
        consumer = await client.open_queue(group="old")
        await client.call(queue_calls.CloseQueue(consumer=consumer))
        await client.call(queue_calls.DeleteQueue(topic="orders", group="old"))
        for _ in range(20):
            await publish(client, [b"urgent", *[b"normal"] * 999], priorities=[0, *[2] * 999])
        await client.broker.queues.sweep()
        (keeper,) = client.broker.queues._keepers.values()
        known = keeper.source.lanes.next_in(0, 1)
        assert known is None or known >= 16_000
        consumer = await client.open_queue(group="new")
        await eventually_async(lambda: not keeper._surveys)
        assert [message.value for message in await client.lease(consumer, 21)] == [*[b"urgent"] * 20, b"normal"]

    lives(work)


def test_what_has_expired_stays_counted_when_its_group_is_deleted() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", partitions=2))
        consumer = await client.open_queue(group="brief")
        for partition in range(2):
            await publish(client, [b"x"] * 5, partition=partition, expiry_us=[1] * 5)
        assert await client.lease(consumer) == []
        assert client.broker.metrics.messages_expired == 10, "as soon as anybody comes upon them"
        await client.call(queue_calls.DeleteQueue(topic="orders", group="brief", force=True))
        await client.broker.queues.sweep()
        assert client.broker.metrics.messages_expired == 10

    lives(work)


def test_a_sweep_looks_at_a_share_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", partitions=20))
        await client.open_queue()
        swept: list[int] = []
        tidied: list[PartitionKeeper] = []
        monkeypatch.setattr(QueuePart, "sweep", lambda part, _: swept.append(part.number))
        monkeypatch.setattr(PartitionKeeper, "forget_below", lambda keeper, _: tidied.append(keeper))
        monkeypatch.setattr(Ledger, "counts", lambda *_: pytest.fail("nobody counts everything every second"))
        for rounds in range(1, 6):
            await client.broker.queues.sweep()
            assert len(swept) == len(tidied) == 4 * rounds
        assert sorted(swept) == list(range(20))
        assert len(set(tidied)) == 20
        monkeypatch.undo()

    lives(work)


def test_a_group_that_could_not_be_made_leaves_no_beginning_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: Client) -> None:
        async def refuse(*_: object, **__: object) -> None:
            raise StorageFailed("cannot write the state: no space left on device")

        await client.call(calls.CreateTopic(name="orders"))
        await publish(client, [b"before"])
        with monkeypatch.context() as patched:
            patched.setattr(StateLog, "record", refuse)
            with pytest.raises(StorageFailed):
                await client.open_queue(start="latest")
        assert [message.value for message in await client.lease(await client.open_queue())] == [b"before"]

    async def again(client: Client) -> None:
        assert [message.value for message in await client.lease(await client.open_queue())] == [b"before"]

    lives(work, again)


def test_letters_of_a_deleted_group_say_nothing_about_the_next_of_its_name() -> None:
    async def work(client: Client) -> None:
        for name in ("orders", "orders.dlq"):
            await client.call(calls.CreateTopic(name=name))
        await publish(client, [b"x"])
        transfer = client.broker.topics.transfer(client.broker.topics.registry.get("default", "orders"), 0)
        async with transfer._turn(Target("default", "orders.dlq", 0)):
            consumer = await client.open_queue()
            (message,) = await client.lease(consumer)
            rejecting = asyncio.ensure_future(client.settle(Settle.REJECT, message))
            await eventually_async(lambda: transfer._turns[Target("default", "orders.dlq", 0)].moves == 2)
            await client.call(queue_calls.DeleteQueue(topic="orders", force=True))
            await client.open_queue()
        await rejecting
        await eventually_async(lambda: not client.broker.topics.moves_undone)
        assert await client.read_all("orders.dlq") == [b"x"]

    async def again(client: Client) -> None:
        assert [message.value for message in await client.lease(await client.open_queue())] == [b"x"]

    lives(work, again)


def test_who_waits_for_topics_of_a_pattern_is_told_when_it_is_deleted() -> None:
    async def work(client: Client) -> None:
        consumer = await client.open_queue("orders.*")  # there is none yet
        waiting = asyncio.ensure_future(client.lease(consumer, wait_ms=10_000))
        await asyncio.sleep(0)
        with pytest.raises(GroupNotEmpty):
            await client.call(queue_calls.DeleteQueue(topic="orders.*"))
        await client.call(queue_calls.DeleteQueue(topic="orders.*", force=True))
        with pytest.raises(GroupNotFound, match="was deleted"):
            await asyncio.wait_for(waiting, 5)
        with pytest.raises(GroupNotFound, match="was deleted"):
            await client.lease(consumer)

    lives(work)


@pytest.mark.parametrize("late", ["orders.eu", "orders.dlq"])
def test_a_topic_that_comes_while_a_pattern_is_opened_belongs_to_it(monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    pattern, group = ("orders.*", "default") if late == "orders.eu" else ("*.dlq", "dlq")

    async def work(client: Client) -> None:
        record = StateLog.record

        async def slowly(log: StateLog, *facts: Any, **options: Any) -> None:
            if log is client.broker.queues.registry._log and not topics:
                topics.append(late)
                await client.call(calls.CreateTopic(name=late))
                await publish(client, [b"x"], topic=late)
                await client.call(letter_calls.ListLetters())  # for which the broker uses the group `dlq`
            await record(log, *facts, **options)

        topics: list[str] = []
        monkeypatch.setattr(StateLog, "record", slowly)
        consumer = await client.open_queue(pattern, group=group)
        assert [message.value for message in await client.lease(consumer)] == [b"x"]
        await client.call(queue_calls.ConfigureQueue(topic=pattern, group=group, policy={"max_deliveries": 5}))
        info = await client.call(queue_calls.DescribeQueue(topic=late, group=group))
        assert isinstance(info, queue_calls.QueueInfo)
        assert info.policy["max_deliveries"] == 5
        await client.call(queue_calls.DeleteQueue(topic=pattern, group=group, force=True))

    lives(work)


@pytest.mark.parametrize("start", ["earliest", "latest"])
@pytest.mark.parametrize("topic", ["orders", "orders.dlq"])
def test_a_group_whose_topic_is_deleted_while_it_is_made_never_was(
    monkeypatch: pytest.MonkeyPatch, start: str, topic: str
) -> None:
    group = "dlq" if topic == "orders.dlq" else "g"

    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name=topic))
        await publish(client, [b"x"], topic=topic)
        await client.call(letter_calls.ListLetters())
        waiting, deleted = asyncio.Event(), asyncio.Event()

        def slow(waited: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
            async def slowly(*facts: Any, **options: Any) -> None:
                waiting.set()
                await waited(*facts, **options)
                await deleted.wait()

            return slowly

        with monkeypatch.context() as patched:
            # Where it waits for the disk: for its beginning, if that has to be written down, and for itself.
            journal = client.broker.topics.journal(topic_of(client, topic), 0)
            patched.setattr(journal, "record_durably", slow(journal.record_durably))
            registry = client.broker.queues.registry
            patched.setattr(registry, "_record", slow(registry._record))
            opening = asyncio.ensure_future(client.open_queue(topic, group=group, start=start))
            await waiting.wait()
            patched.undo()
            await client.call(calls.DeleteTopic(name=topic, force=True))
            deleted.set()
            with pytest.raises(TopicNotFound, match="was deleted"):
                await opening
        await client.call(calls.CreateTopic(name=topic))
        assert await client.call(queue_calls.ListQueues()) == []

    async def again(client: Client) -> None:
        assert await client.call(queue_calls.ListQueues()) == []

    lives(work, again)


def test_a_topic_that_is_deleted_while_a_pattern_is_opened_keeps_nobody_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(client: Client) -> None:
        for name in ("orders.eu", "orders.us"):
            await client.call(calls.CreateTopic(name=name))
            await publish(client, [name.encode()], topic=name)
        record = StateLog.record

        async def slowly(log: StateLog, facts: Any, **options: Any) -> None:
            await record(log, facts, **options)
            if "queue/default/orders.eu/default" in facts and not deleted:
                deleted.append("orders.eu")
                await client.call(calls.DeleteTopic(name="orders.eu", force=True))

        deleted: list[str] = []
        monkeypatch.setattr(StateLog, "record", slowly)
        consumer = await client.open_queue("orders.*")
        assert deleted
        assert [message.value for message in await client.lease(consumer)] == [b"orders.us"]

    lives(work)


def test_what_a_pattern_gave_up_on_does_not_come_back_to_it_from_wherever_letters_go() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.failed"))
        await client.call(calls.CreateTopic(name="orders.eu", config={"dead_letter_topic": "orders.failed"}))
        await publish(client, [b"bad"], topic="orders.eu")
        consumer = await client.open_queue("orders.#")
        (message,) = await client.lease(consumer)
        await client.settle(Settle.REJECT, message)
        assert await client.read_all("orders.failed") == [b"bad"]
        assert await client.lease(consumer) == []
        named = await client.open_queue("*.failed")
        assert [message.value for message in await client.lease(named)] == [b"bad"]

    lives(work)


def test_where_letters_go_may_change_while_a_pattern_is_consumed() -> None:
    async def work(client: Client) -> None:
        for name in ("orders.eu", "orders.failed"):
            await client.call(calls.CreateTopic(name=name))
        consumer = await client.open_queue("orders.*")
        await client.call(calls.AlterTopic(name="orders.eu", config={"dead_letter_topic": "orders.failed"}))
        await publish(client, [b"bad"], topic="orders.eu")
        (message,) = await client.lease(consumer)
        await client.settle(Settle.REJECT, message)
        assert await client.lease(consumer) == [], "what it gave up on is not for it"
        await client.call(calls.AlterTopic(name="orders.eu", config={"dead_letter_topic": ""}))
        again = await client.open_queue("orders.*")
        assert [message.value for message in await client.lease(again)] == [b"bad"], "it is a topic like any other"
        await client.call(queue_calls.ConfigureQueue(topic="orders.*", policy={"max_deliveries": 9}))
        await client.call(queue_calls.DeleteQueue(topic="orders.*", force=True))
        assert await client.call(queue_calls.ListQueues()) == []

    lives(work)


def test_a_topic_of_a_pattern_that_could_not_be_opened_is_joined_when_it_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_module, "_AGAIN_S", 0.01)

    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.eu"))
        await publish(client, [b"x"], topic="orders.eu")
        with monkeypatch.context() as patched:
            patched.setattr(QueueGroup, "open", _refused)
            consumer = await client.open_queue("orders.*")
            assert await client.lease(consumer) == []
        assert [message.value for message in await client.lease(consumer, wait_ms=10_000)] == [b"x"]

    lives(work)


async def _refused(group: QueueGroup) -> None:
    raise StorageFailed(f"too many files are open for {group.topic.name}")


def test_a_pattern_is_opened_without_a_topic_that_cannot_be_and_nothing_is_left_when_all_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(client: Client) -> None:
        for name in ("orders.eu", "orders.us"):
            await client.call(calls.CreateTopic(name=name))
            await publish(client, [name.encode()], topic=name)
        open_group = QueueGroup.open

        async def refuse(group: QueueGroup) -> None:
            if group.topic.name == "orders.eu":
                raise StorageFailed("its log is damaged")
            await open_group(group)

        with monkeypatch.context() as patched:
            patched.setattr(QueueGroup, "open", refuse)
            consumer = await client.open_queue("orders.*")
            assert [message.value for message in await client.lease(consumer)] == [b"orders.us"]
            queues = client.broker.queues
            before = len(queues._consumers)
            with pytest.raises(StorageFailed):
                await client.open_queue("orders.eu")
            assert len(queues._consumers) == before

    lives(work)


def test_a_group_that_two_patterns_share_stays_until_both_are_deleted() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.eu"))
        await publish(client, [b"x", b"y"], topic="orders.eu")
        wide, narrow = await client.open_queue("orders.*"), await client.open_queue("*.eu")
        assert len(await client.lease(narrow, 1)) == 1
        await client.call(queue_calls.DeleteQueue(topic="*.eu", force=True))
        with pytest.raises(GroupNotFound, match="was deleted"):
            await client.lease(narrow)
        assert [message.value for message in await client.lease(wide, wait_ms=5000)] == [b"x", b"y"]
        await client.open_queue("orders.*")
        await client.call(queue_calls.DeleteQueue(topic="orders.*", force=True))
        assert await client.call(queue_calls.ListQueues()) == []

    lives(work)


def test_a_group_that_two_patterns_share_has_the_policy_of_the_one_that_is_left() -> None:
    """At once, and the same after a restart; it stays the same group, and what it was told by its own name stays."""
    made_us: dict[str, int] = {}

    def look(client: Client) -> dict[str, tuple[int, bool]]:
        groups = [client.broker.queues.registry.get("default", name, "default") for name in ("orders.eu", "orders.us")]
        return {
            it.topic.name: (it.policy.max_deliveries, made_us.setdefault(it.key, it.made_us) == it.made_us)
            for it in groups
        }

    async def work(client: Client) -> None:
        for pattern, deliveries in (("orders.*", 5), ("*.eu", 7), ("*.us", 8)):
            await client.open_queue(pattern, policy={"max_deliveries": deliveries})
        for name in ("orders.eu", "orders.us"):
            await client.call(calls.CreateTopic(name=name))
        await client.call(queue_calls.ConfigureQueue(topic="orders.us", policy={"max_deliveries": 6}))
        assert look(client) == {"orders.eu": (5, True), "orders.us": (6, True)}
        await client.call(queue_calls.DeleteQueue(topic="orders.*", force=True))
        assert look(client) == {"orders.eu": (7, True), "orders.us": (6, True)}

    async def look_again(client: Client) -> None:
        assert look(client) == {"orders.eu": (7, True), "orders.us": (6, True)}

    lives(work, look_again)


@pytest.mark.parametrize("policy", [{"max_deliveries": 5}, None])
def test_a_topic_that_comes_while_its_pattern_is_changed_or_deleted_is_no_exception(
    monkeypatch: pytest.MonkeyPatch, policy: dict[str, int] | None
) -> None:
    async def work(client: Client) -> None:
        await client.open_queue("orders.*")
        record = StateLog.record

        async def slowly(log: StateLog, *facts: Any, **options: Any) -> None:
            if log is client.broker.queues.registry._log and not topics:
                topics.append("orders.eu")
                await client.call(calls.CreateTopic(name="orders.eu"))
            await record(log, *facts, **options)

        topics: list[str] = []
        monkeypatch.setattr(StateLog, "record", slowly)
        if policy is not None:
            await client.call(queue_calls.ConfigureQueue(topic="orders.*", policy=policy))
            info = await client.call(queue_calls.DescribeQueue(topic="orders.eu"))
            assert isinstance(info, queue_calls.QueueInfo)
            assert info.policy["max_deliveries"] == 5
        else:
            await client.call(queue_calls.DeleteQueue(topic="orders.*", force=True))
            assert await client.call(queue_calls.ListQueues()) == []

    lives(work)
