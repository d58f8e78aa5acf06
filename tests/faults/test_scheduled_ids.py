"""Dedup ids of messages for now and for later: one of them enters the topic, whichever comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from millstream import aio
from millstream.config import Settings
from millstream.errors import StorageFailed
from millstream.log.partition import Chunk, PartitionLog
from millstream.testing.machine import Machine
from millstream.testing.network import Network
from millstream.testing.virtual_loop import VirtualLoop, run

SETTINGS = {"server": {"port": 9092}, "storage": {"free_bytes_min": 0, "segment_bytes": 16_384}}
WINDOW = {"dedup_window_ms": "10m"}


def in_a_world(scenario: Callable[[Machine], Awaitable[None]], *, seed: int = 1, sync_s: float = 0.001) -> None:
    """A broker on a simulated disk, in virtual time, with a topic that recognises ids."""

    async def main(loop: VirtualLoop) -> None:
        Network(loop, Random(seed))
        machine = Machine(loop, seed=seed, settings=Settings.model_validate(SETTINGS), draw_sync_s=lambda: sync_s)
        await machine.start()
        async with aio.connect(machine.address) as client:
            await client.create_topic("orders", config=WINDOW)
        await asyncio.wait_for(scenario(machine), 3600)
        if machine.is_running:
            await machine.stop()

    run(main, seed=seed)


async def values(machine: Machine) -> list[str]:
    async with aio.connect(machine.address) as client:
        if not any((await client.offsets("orders")).values()):
            return []
        return [message.text async for message in client.stream("orders", start="earliest", timeout_s=0.5)]


async def restarted(machine: Machine) -> None:
    await machine.stop()
    await machine.start()


@pytest.mark.parametrize("restarts", [False, True])
def test_what_was_published_now_is_not_delivered_again_later(restarts: bool) -> None:
    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            await client.publish("orders", "now", dedup_id="A")
            later = await client.publish("orders", "later", dedup_id="A", delay="1m")
            await client.publish("orders", "another", dedup_id="B", delay="1m")
        if restarts:
            await restarted(machine)
        await asyncio.sleep(62)
        assert await values(machine) == ["now", "another"]
        async with aio.connect(machine.address) as client:
            assert (await client.schedules.show(later)).state == "fired", "it is in its topic"
            assert await client.schedules.list("orders") == []

    in_a_world(scenario)


@pytest.mark.parametrize("restarts", [False, True])
def test_what_was_published_for_later_and_then_now_is_stored_once(restarts: bool) -> None:
    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            await client.publish("orders", "later", dedup_id="A", delay="1m")
            assert not (await client.publish("orders", "now", dedup_id="A")).duplicate
        if restarts:
            await restarted(machine)
        await asyncio.sleep(62)
        assert await values(machine) == ["now"]

    in_a_world(scenario)


@pytest.mark.parametrize("restarts", [False, True])
def test_what_was_delivered_is_known_to_who_publishes_it_again_now(restarts: bool) -> None:
    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            await client.publish("orders", "first", dedup_id="0")  # the ids of the topic have been read
            await client.publish_many("orders", [aio.Outgoing(value=name, dedup_id=name, delay=1) for name in "ABC"])
        await asyncio.sleep(2)
        if restarts:
            await restarted(machine)
        async with aio.connect(machine.address) as client:
            again = await client.publish("orders", "B", dedup_id="B")
            assert again.duplicate
            stored = {message.id: message.text async for message in client.stream("orders", timeout_s=0.5)}
            assert stored[again.id] == "B", "the receipt names the one that is there"
        assert await values(machine) == ["first", "A", "B", "C"]

    in_a_world(scenario)


def test_two_messages_for_later_with_one_id_that_are_due_together_are_delivered_once() -> None:
    """The second was published after the window of the first, which was still waiting."""

    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            await client.publish("orders", "first", dedup_id="A", delay="30m")
            await asyncio.sleep(900)
            assert not (await client.publish("orders", "second", dedup_id="A", delay="15m")).duplicate
        await asyncio.sleep(902)
        assert await values(machine) == ["first"]

    in_a_world(scenario)


def test_a_message_that_is_published_while_one_with_its_id_is_being_delivered_is_a_repetition() -> None:
    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            await client.publish("orders", "first", dedup_id="0")
            await client.publish("orders", "later", dedup_id="A", delay=1)
            await asyncio.sleep(wait_s)
            await client.publish("orders", "now", dedup_id="A")
        await asyncio.sleep(2)
        assert len(await values(machine)) == 2, "and which of the two is all the same"

    for tenths in range(12):
        wait_s = tenths / 10
        in_a_world(scenario, sync_s=0.2)


@pytest.mark.parametrize("restarts", [False, True])
def test_the_id_of_a_message_that_was_cancelled_is_free_again(restarts: bool) -> None:
    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            first = await client.publish("orders", "first", dedup_id="reminder-17", delay="1m")
            await client.schedules.cancel(first)
        if restarts:
            await restarted(machine)
        async with aio.connect(machine.address) as client:
            second = await client.publish("orders", "second", dedup_id="reminder-17", delay="1m")
            assert not second.duplicate
        if restarts:
            await restarted(machine)
        async with aio.connect(machine.address) as client:
            third = await client.publish("orders", "third", dedup_id="reminder-17", delay="1m")
            assert third.duplicate
            assert third.id == second.id, "the one that is pending is the original now"
        await asyncio.sleep(62)
        assert await values(machine) == ["second"]

    in_a_world(scenario)


def test_the_power_may_go_at_any_moment_of_a_delivery_that_turns_out_to_be_a_repetition() -> None:
    """What makes it one is on disk before the other is done with."""

    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            await client.alter_topic("orders", {"fsync": "never"})
            later = await client.publish("orders", "later", dedup_id="A", delay=1)
            await client.publish("orders", "now", dedup_id="A")
            await asyncio.sleep(1.2)
            assert (await client.schedules.show(later)).state == "fired"
        machine.cut_power()
        await machine.start()
        await asyncio.sleep(2)
        assert await values(machine) == ["now"]

    in_a_world(scenario)


def test_where_ids_cannot_be_read_what_is_due_is_delivered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was confirmed long ago: twice is better than never."""

    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            await client.publish("orders", "now", dedup_id="A")
            await client.publish("orders", "later", dedup_id="B", delay="1m")
        await restarted(machine)
        read = PartitionLog.read

        def failing(log: PartitionLog, offset: int, max_bytes: int, *, before: int) -> Chunk:
            if log.directory == "topics/default/orders/0":
                raise StorageFailed("cannot read the log: Input/output error")
            return read(log, offset, max_bytes, before=before)

        with monkeypatch.context() as patch:
            patch.setattr(PartitionLog, "read", failing)
            await asyncio.sleep(62)
        assert await values(machine) == ["now", "later"]

    in_a_world(scenario)
