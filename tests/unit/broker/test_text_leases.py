"""Leases as text: what happens when the one who asked is gone, and how much a consumer may hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from millstream.errors import InvalidArgument
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls, queue_calls
from tests.simulated_broker import Client, run, started


async def with_topic() -> Client:
    client = await started(SimulatedStorage(seed=1))
    await client.call(calls.CreateTopic(name="orders"))
    return client


async def ready(client: Client) -> int:
    info = await client.call(queue_calls.DescribeQueue(topic="orders"))
    assert isinstance(info, queue_calls.QueueInfo)
    return info.ready


def somebody_waits(client: Client) -> bool:
    return any(group.waiting for group in client.broker.queues.registry.all_groups("default"))


async def turns_until(check: Callable[[], bool]) -> None:
    """Let the loop turn, and be back in the very turn in which it comes true."""
    while not check():  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_what_was_leased_in_the_moment_the_asker_left_is_ready_at_once() -> None:
    async def scenario() -> None:
        client = await with_topic()
        polling = asyncio.ensure_future(client.call(queue_calls.LeaseMessages(topic="orders", wait_ms=30_000)))
        await turns_until(lambda: somebody_waits(client))
        sent = client.send([b"1"])
        await turns_until(lambda: not somebody_waits(client))
        polling.cancel()  # it has been given the message, and has not woken up yet
        with pytest.raises(asyncio.CancelledError):
            await polling
        await sent
        assert await ready(client) == 1
        await client.broker.stop()

    run(scenario)


def test_a_consumer_waits_for_room_and_a_settle_makes_some() -> None:
    async def scenario() -> None:
        client = await with_topic()
        await client.send([b"1", b"2", b"3"])
        opened = await client.call(queue_calls.OpenQueue(topic="orders", by_receipt=True))
        assert isinstance(opened, queue_calls.QueueOpened)
        call = queue_calls.LeaseMessages(consumer=opened.consumer, max=10, max_in_flight=2, wait_ms=30_000)
        held = await client.call(call)
        assert isinstance(held, list)
        assert [message.value for message in held] == [b"1", b"2"]
        more = asyncio.ensure_future(client.call(call))
        await asyncio.sleep(0.01)
        assert not more.done()
        stranger = Client(client.broker)  # whoever has the receipt
        await stranger.call(queue_calls.SettleMessages(items=[queue_calls.SettleItem(receipt=held[0].receipt)]))
        assert [message.value for message in await more] == [b"3"]  # type: ignore[attr-defined]
        client.broker.session_closed(client.session)
        assert await ready(stranger) == 2, "what its consumer held went back with it"
        await client.broker.stop()

    run(scenario)


@pytest.mark.parametrize("wrong", [{"delay_ms": 10**30}, {"delay_ms": -1}, {"reason": "x" * 100_000}])
@pytest.mark.parametrize("action", ["nack", "extend"])
def test_what_no_journal_could_hold_is_refused_and_changes_nothing(action: Any, wrong: dict[str, Any]) -> None:
    async def scenario() -> None:
        client = await with_topic()
        await client.send([b"1"])
        [message] = await client.call(queue_calls.LeaseMessages(topic="orders"))  # type: ignore[misc]
        item = queue_calls.SettleItem(receipt=message.receipt, action=action, **wrong)
        with pytest.raises(InvalidArgument):
            await client.call(queue_calls.SettleMessages(items=[item]))
        client.broker.queues.flush()
        await client.call(queue_calls.SettleMessages(items=[queue_calls.SettleItem(receipt=message.receipt)]))
        assert await ready(client) == 0
        await client.broker.stop()

    run(scenario)


def test_without_a_length_it_is_extended_by_its_own() -> None:
    async def scenario() -> None:
        client = await with_topic()
        await client.send([b"1"])
        [message] = await client.call(queue_calls.LeaseMessages(topic="orders", lease_ms=60_000))  # type: ignore[misc]

        async def extended_by(delay_ms: int | None) -> int:
            item = queue_calls.SettleItem(receipt=message.receipt, action="extend", delay_ms=delay_ms)
            [outcome] = await client.call(queue_calls.SettleMessages(items=[item]))  # type: ignore[misc]
            return outcome.deadline_ms - client.broker.now_us() // 1000  # type: ignore[no-any-return]

        await asyncio.sleep(0.1)  # what is left of it is too little now
        with pytest.raises(InvalidArgument, match="more than 0"):
            await extended_by(0)
        assert 59_990 <= await extended_by(None) <= 60_000, "and not by what leases of the queue last otherwise"
        await client.broker.stop()

    run(scenario)


def test_what_a_consumer_holds_is_settled_by_its_own_session_unless_it_says_otherwise() -> None:
    async def scenario() -> None:
        client = await with_topic()
        await client.send([b"1"])
        opened = await client.call(queue_calls.OpenQueue(topic="orders"))
        assert isinstance(opened, queue_calls.QueueOpened)
        held = await client.call(queue_calls.LeaseMessages(consumer=opened.consumer))
        items = [queue_calls.SettleItem(receipt=held[0].receipt)]  # type: ignore[index]
        refused = await Client(client.broker).call(queue_calls.SettleMessages(items=items))
        assert refused == [queue_calls.SettleOutcome(receipt=items[0].receipt, result="receipt_invalid")]
        settled = await client.call(queue_calls.SettleMessages(items=items))
        assert settled == [queue_calls.SettleOutcome(receipt=items[0].receipt, result="done")]
        await client.broker.stop()

    run(scenario)
