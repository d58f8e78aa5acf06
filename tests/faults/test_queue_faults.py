"""Queues on a disk that loses power: nothing durable is forgotten, nothing is lost, and dead letters are written once.

Each life of the machine has an event loop of its own, so that nothing of a broker outlives the power cut.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar
from unittest.mock import Mock

import pytest

from millstream import retries
from millstream.broker import journal as journal_module
from millstream.broker.cut_moves import CutMoves
from millstream.broker.queues import queues as queues_module
from millstream.errors import MillstreamError, StorageFailed, TopicNotFound
from millstream.retries import parse_retry
from millstream.testing.storage import Fault, Operation, PowerCut, SimulatedStorage
from millstream.wire import calls, queue_calls
from millstream.wire.admin_calls import CheckHealth, ComponentHealth, HealthReport
from millstream.wire.leases import Settle
from tests.examples import seeds
from tests.simulated_broker import Client, started
from tests.waiting import eventually_async

T = TypeVar("T")

DONE, RETRIED, DEAD = 0, 1, 2


def life(storage: SimulatedStorage, work: Callable[[Client], Awaitable[T]]) -> T:
    """One run of a broker, from a start to a power cut."""

    async def run() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # PowerCut may hit anywhere
        return await work(await started(storage))

    return asyncio.run(asyncio.wait_for(run(), 60))


def power_cut(storage: SimulatedStorage, *, lose_everything: bool = False) -> None:
    storage.heal()
    storage.power_cut(lose_everything=lose_everything)


def countdown(steps: int) -> Callable[[Operation], bool]:
    left = steps

    def hit(_: Operation) -> bool:
        nonlocal left
        left -= 1
        return left == 0

    return hit


async def drained(client: Client, topic: str = "orders") -> list[bytes | None]:
    """Everything that the queue still delivers, waits included."""
    consumer = await client.open_queue(topic)
    found = []
    while messages := await client.lease(consumer, wait_ms=300):
        found += [message.value for message in messages]
    return found


async def letters(client: Client) -> list[bytes | None]:
    await CutMoves(client.broker.topics, hidden=True).finish()
    try:
        return await client.read_all("orders.dlq")
    except TopicNotFound:
        return []


@pytest.mark.parametrize("seed", range(5))
def test_acks_that_were_asked_to_be_durable_survive(seed: int) -> None:
    storage = SimulatedStorage(seed=seed)

    async def first(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"%d" % n for n in range(10)])
        consumer = await client.open_queue(policy={"ack_durability": "sync"})
        leased = await client.lease(consumer)
        assert await client.settle(Settle.ACK, leased[0], leased[1], leased[5]) == [DONE] * 3

    async def second(client: Client) -> None:
        assert await drained(client) == [b"%d" % n for n in (2, 3, 4, 6, 7, 8, 9)]

    life(storage, first)
    power_cut(storage, lose_everything=True)
    life(storage, second)


def test_a_flush_in_between_does_not_make_a_durable_ack_less_durable() -> None:
    storage = SimulatedStorage(seed=1)

    async def first(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"a", b"b"])
        leased = await client.lease(await client.open_queue(policy={"ack_durability": "sync"}))
        settled = asyncio.ensure_future(client.settle(Settle.ACK, leased[0]))
        await asyncio.sleep(0)
        client.broker.queues.flush()  # as its timer may do any moment
        assert await settled == [DONE]

    async def second(client: Client) -> None:
        assert await drained(client) == [b"b"]

    life(storage, first)
    power_cut(storage, lose_everything=True)
    life(storage, second)


def test_acks_that_nobody_waited_for_cost_a_repetition_at_most() -> None:
    storage = SimulatedStorage(seed=1)

    async def first(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"%d" % n for n in range(10)])
        leased = await client.lease(await client.open_queue())
        await client.settle(Settle.ACK, *leased[:5])

    async def second(client: Client) -> None:
        found = await drained(client)
        assert set(found) >= {b"5", b"6", b"7", b"8", b"9"}
        assert len(found) == len(set(found))

    life(storage, first)
    power_cut(storage, lose_everything=True)
    life(storage, second)


@pytest.mark.parametrize("seed", seeds(16, 40))
def test_a_dead_letter_is_neither_lost_nor_doubled_whenever_the_power_goes(seed: int) -> None:
    storage = SimulatedStorage(seed=seed)
    rng = random.Random(seed)
    dead: set[bytes | None] = set()
    acked: set[bytes | None] = set()
    values = [b"%d" % n for n in range(8)]

    async def first(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config={"retry": "standard,max_retries=0"}))
        await client.send(values)
        leased = await client.lease(await client.open_queue(policy={"ack_durability": "sync"}))
        storage.inject(Fault.POWER_CUT, when=countdown(rng.randint(1, 45)))
        with suppress(PowerCut, MillstreamError, TimeoutError):
            async with asyncio.timeout(0.3):
                for message, kind in zip(leased, (2, 3, 1, 3, 2, 1), strict=False):
                    (result,) = await client.settle(Settle(kind), message, reason="no")
                    (acked if kind == Settle.ACK else dead).add(message.value)
                    assert result == (DONE if kind == Settle.ACK else DEAD)

    async def second(client: Client) -> None:
        buried = Counter(await letters(client))
        left = Counter(await drained(client))
        for value in values:
            if value in acked:
                assert (buried[value], left[value]) == (0, 0), value
            elif value in dead:
                assert (buried[value], left[value]) == (1, 0), value
            else:
                assert buried[value] + left[value] == 1 or value in values[2::3], f"{value!r} is lost or doubled"

    with suppress(PowerCut):
        life(storage, first)
    power_cut(storage)
    life(storage, second)


def test_failures_and_waits_survive() -> None:
    storage = SimulatedStorage(seed=3)

    async def first(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"a", b"b"])
        leased = await client.lease(await client.open_queue(policy={"ack_durability": "sync"}))
        assert await client.settle(Settle.NACK, leased[0], value=3_600_000, reason="later") == [RETRIED]
        assert await client.settle(Settle.NACK, leased[1], value=0) == [RETRIED]

    async def second(client: Client) -> None:
        (message,) = await client.lease(await client.open_queue())
        assert (message.value, message.part.failures) == (b"b", 1)
        peeked = await client.call(queue_calls.PeekQueue(topic="orders", state="waiting"))
        assert isinstance(peeked, list)
        assert [(entry.value, entry.attempts[0].reason) for entry in peeked] == [(b"a", "later")]

    life(storage, first)
    power_cut(storage, lose_everything=True)
    life(storage, second)


def test_letters_that_are_owed_when_the_journal_is_rewritten_are_still_written() -> None:
    """The snapshot knows the messages as settled; it must know, too, that nobody has their letters yet."""
    storage = SimulatedStorage(seed=5)

    async def first(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"a", b"b", b"c"])
        leased = await client.lease(await client.open_queue(policy={"ack_durability": "sync"}))
        await client.settle(Settle.ACK, leased[0])
        part = client.broker.queues.part(client.broker.topics.registry.get("default", "orders"), "default", 0)
        # No dead letter topic can be made, so the letters stay owed.
        storage.inject(Fault.WRITE_ERROR, when=lambda operation: operation.path.startswith("state/topics"))
        with pytest.raises(MillstreamError):
            await client.settle(Settle.REJECT, leased[1], reason="bad")
        journal = part.keeper.journal
        journal._snapped.clear()
        journal._snapshot()
        await part.keeper.journal.record_durably(("queue/other", ["start", 0, 0]))
        await asyncio.sleep(0.05)
        assert journal.partition.log.start_offset > 0, "what came before the snapshot is gone"

    async def second(client: Client) -> None:
        client.broker.queues.part(client.broker.topics.registry.get("default", "orders"), "default", 0)
        await asyncio.gather(*client.broker.queues._tasks)
        assert await letters(client) == [b"b"]
        assert await drained(client) == [b"c"]

    async def third(client: Client) -> None:
        client.broker.queues.part(client.broker.topics.registry.get("default", "orders"), "default", 0)
        await asyncio.gather(*client.broker.queues._tasks)
        assert await letters(client) == [b"b"], "once is enough"

    life(storage, first)
    power_cut(storage)
    life(storage, second)
    power_cut(storage, lose_everything=True)
    life(storage, third)


async def _health(client: Client) -> ComponentHealth:
    report = await client.call(CheckHealth())
    assert isinstance(report, HealthReport)
    return next(component for component in report.components if component.name == "journals")


@pytest.mark.parametrize("together", [True, False])
def test_a_fact_that_cannot_be_written_costs_nobody_else_theirs(together: bool) -> None:
    """Two groups of one partition share a journal; those of two topics are written in one round."""
    storage = SimulatedStorage(seed=1)
    topic = "orders" if together else "innocent"

    async def first(client: Client) -> None:
        for name in {"orders", topic}:
            await client.call(calls.CreateTopic(name=name))
            await client.send([b"%d" % n for n in range(5)], topic=name)
        bad = await client.lease(await client.open_queue(group="bad"), 3)
        good = await client.lease(await client.open_queue(topic, group="good"), 3)
        assert (await _health(client)).status == "healthy"
        await client.settle(Settle.NACK, bad[0], value=2**80)  # no door lets this through
        await client.settle(Settle.ACK, *bad[1:])
        await client.settle(Settle.ACK, *good)
        client.broker.queues.flush()
        health = await _health(client)
        assert health.status == "degraded"
        assert "queue/bad" in health.message
        await client.broker.stop()

    async def second(client: Client) -> None:
        bad = await client.lease(await client.open_queue(group="bad"))
        good = await client.lease(await client.open_queue(topic, group="good"))
        assert [message.value for message in good] == [b"3", b"4"]
        assert [message.value for message in bad] == [b"0", b"3", b"4"]
        assert (await _health(client)).status == "healthy"

    life(storage, first)
    life(storage, second)


def test_what_a_part_cannot_record_is_tried_again_and_costs_nobody_else_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = SimulatedStorage(seed=1)
    monkeypatch.setattr(queues_module, "_RETRY_S", 0.01)

    async def first(client: Client) -> None:
        taken = {}
        for name in ("orders", "innocent"):
            await client.call(calls.CreateTopic(name=name))
            await client.send([b"%d" % n for n in range(5)], topic=name)
            taken[name] = await client.lease(await client.open_queue(name), 3)
        queues = client.broker.queues
        part = queues.registry.get("default", "orders", "default").part(0)
        drain = part.ledger.drain
        monkeypatch.setattr(part.ledger, "drain", Mock(side_effect=MemoryError))
        for name in taken:
            await client.settle(Settle.ACK, *taken[name])
        queues.flush()
        assert list(queues.failing) == [part]
        assert (await _health(client)).status == "degraded"
        monkeypatch.setattr(part.ledger, "drain", drain)
        await eventually_async(lambda: not queues.failing)
        assert (await _health(client)).status == "healthy"
        await client.broker.stop()

    async def second(client: Client) -> None:
        for name in ("orders", "innocent"):
            assert await drained(client, name) == [b"3", b"4"]

    life(storage, first)
    life(storage, second)


def test_a_settle_that_should_be_on_disk_and_cannot_be_written_is_refused() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"0", b"1"])
        messages = await client.lease(await client.open_queue(policy={"ack_durability": "sync"}))
        with pytest.raises(StorageFailed, match="cannot be written"):
            await client.settle(Settle.NACK, messages[0], value=2**80)
        assert await client.settle(Settle.ACK, messages[1]) == [DONE]

    life(SimulatedStorage(seed=1), work)


def test_facts_outlive_a_journal_that_fails_in_an_unforeseen_way(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = SimulatedStorage(seed=1)

    async def first(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"0", b"1"])
        messages = await client.lease(await client.open_queue(), 1)
        await client.settle(Settle.ACK, *messages)
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "encode_batch", Mock(side_effect=RuntimeError("unforeseen")))
            client.broker.queues.flush()
        await client.broker.stop()

    async def second(client: Client) -> None:
        assert await drained(client) == [b"1"]

    life(storage, first)
    life(storage, second)


def test_a_snapshot_that_cannot_be_written_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = SimulatedStorage(seed=1)
    pack = journal_module._pack

    def unable(fact: object) -> bytes:
        if fact is not None:
            raise OverflowError("unforeseen")
        return pack(fact)

    async def first(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"%d" % n for n in range(5)])
        messages = await client.lease(await client.open_queue(), 3)
        await client.settle(Settle.ACK, *messages[1:])
        await client.settle(Settle.NACK, messages[0], value=0)
        client.broker.queues.flush()
        topics = client.broker.topics
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "_pack", unable)
            await topics.journal(topics.registry.get("default", "orders"), 0).checkpoint()
        assert (await _health(client)).status == "degraded"
        await client.broker.stop()

    async def second(client: Client) -> None:
        assert await drained(client) == [b"0", b"3", b"4"]

    life(storage, first)
    life(storage, second)


def test_a_broker_starts_with_settings_that_are_beyond_the_limits_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = SimulatedStorage(seed=1)
    retry = "standard,initial=99999999999999999999d,max=99999999999999999999d"

    async def first(client: Client) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(retries, "_BOUNDS", {})
            await client.call(calls.CreateTopic(name="orders", config={"retry": retry}))
            await client.send([b"0", b"1"])
            await client.open_queue(policy={"retry": "standard,multiplier=nan"})
        await client.broker.stop()

    async def second(client: Client) -> None:
        messages = await client.lease(await client.open_queue())
        assert await client.settle(Settle.NACK, *messages) == [RETRIED, RETRIED]
        client.broker.queues.flush()
        assert (await _health(client)).status == "healthy"
        await client.call(queue_calls.ConfigureQueue(topic="orders", policy={"retry": ""}))

    parse_retry.cache_clear()
    life(storage, first)
    parse_retry.cache_clear()
    life(storage, second)
