"""Schedules when clocks are set, disks fail and the power goes: nothing early, nothing twice, nothing lost."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Literal

import pytest

from millstream import aio
from millstream.broker.schedules.log import ScheduleLog
from millstream.broker.schedules.messages import Collected
from millstream.client import Outgoing
from millstream.config import Settings
from millstream.errors import StorageFailed
from millstream.log.storage import File
from millstream.schedules.cron import Cron
from millstream.testing.machine import Machine
from millstream.testing.network import Network
from millstream.testing.storage import Fault
from millstream.testing.virtual_loop import VirtualLoop, run

SETTINGS = {"server": {"port": 9092}, "storage": {"free_bytes_min": 0, "segment_bytes": 16_384}}


def in_a_world(scenario: Callable[[Machine], Awaitable[None]], *, seed: int = 1) -> None:
    """A broker on a simulated disk, in virtual time; with an hour of patience."""

    async def main(loop: VirtualLoop) -> None:
        Network(loop, Random(seed))
        machine = Machine(loop, seed=seed, settings=Settings.model_validate(SETTINGS), draw_sync_s=lambda: 0.001)
        await machine.start()
        await asyncio.wait_for(scenario(machine), 3600)
        if machine.is_running:
            await machine.stop()

    run(main, seed=seed)


async def values(machine: Machine) -> list[str]:
    async with aio.connect(machine.address) as client:
        if not any((await client.offsets("orders")).values()):
            return []
        return [message.text async for message in client.stream("orders", start="earliest", timeout_s=0.5)]


# --- clocks ------------------------------------------------------------------------------------------------------


def test_a_clock_that_is_set_back_makes_a_message_wait() -> None:
    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            await client.publish("orders", "at ten", deliver_at=machine.clock.now_us() / 1e6 + 10)
        machine.clock.jump(-600)
        await asyncio.sleep(60)
        assert await values(machine) == [], "the clock on the wall does not say so yet"
        await asyncio.sleep(560)
        assert await values(machine) == ["at ten"]

    in_a_world(scenario)


def test_a_clock_that_is_set_ahead_brings_messages_within_a_second() -> None:
    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            now_s = machine.clock.now_us() / 1e6
            # One that is in memory, and one that is far away, on its way to disk.
            await client.publish("orders", "soon", deliver_at=now_s + 500)
            await client.publish("orders", "far", deliver_at=now_s + 5_000_000)
            await client.schedules.repeat("daily", "orders", "@daily", "tick")
        await asyncio.sleep(5)
        machine.clock.jump(510)
        await asyncio.sleep(1.1)
        assert await values(machine) == ["soon"]
        machine.clock.jump(6_000_000)
        await asyncio.sleep(1.5)
        assert sorted(await values(machine)) == ["far", "soon", "tick"]

    in_a_world(scenario)


async def occurred(machine: Machine) -> list[int]:
    """The times of the occurrences that are stored, in minutes after the first."""
    async with aio.connect(machine.address) as client:
        stream = client.stream("orders", start="earliest", timeout_s=0.5)
        times = [int(dict(message.header_items())["millstream-schedule-time-ms"]) async for message in stream]
    return [(time_ms - times[0]) // 60_000 for time_ms in times]


@pytest.mark.parametrize("restarts", [False, True])
def test_after_the_clock_was_set_far_back_a_recurring_schedule_goes_on_by_it(restarts: bool) -> None:
    """It stood still until the time of its last occurrence came again."""

    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            await client.schedules.repeat("tick", "orders", "* * * * *", "tick", catch_up="all")
        await asyncio.sleep(300)
        before = await occurred(machine)
        assert before == [0, 1, 2, 3, 4]
        if restarts:
            await machine.stop()
        machine.clock.jump(-3600)
        if restarts:
            await machine.start()
        await asyncio.sleep(61)
        assert await occurred(machine) == [*before, -55]
        await asyncio.sleep(120)
        assert await occurred(machine) == [*before, -55, -54, -53]
        machine.clock.jump(3600)
        await asyncio.sleep(60)
        after = (await occurred(machine))[8:]
        assert after == [5, 6, 7, 8], "of those that the clock has jumped over, what was not published before"

    in_a_world(scenario)


def test_a_clock_that_is_set_back_a_little_repeats_no_occurrence() -> None:
    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            await client.schedules.repeat("tick", "orders", "*/10 * * * *", "tick")
        await asyncio.sleep(610)
        machine.clock.jump(-590)
        await asyncio.sleep(1800)
        assert await occurred(machine) == [0, 10, 20]

    in_a_world(scenario)


def test_schedules_whose_time_has_not_come_are_not_looked_at() -> None:
    """Each look at an expression takes some 30 us in which nobody else runs; there may be thousands of them."""

    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            for number in range(50):
                await client.schedules.repeat(f"yearly-{number}", "orders", "@yearly", "x")
            await client.schedules.repeat("tick", "orders", "* * * * *", "tick")
            looks = 0
            original = Cron.next_ms

            def counted(cron: Cron, after_ms: int) -> int | None:
                nonlocal looks
                looks += 1
                return original(cron, after_ms)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Cron, "next_ms", counted)
                await asyncio.sleep(600)
            assert (await client.schedules.show_repeating("tick")).published == 10
            assert len(await client.schedules.repeating()) == 51
        assert looks < 100

    in_a_world(scenario)


# --- disks -------------------------------------------------------------------------------------------------------


def test_what_fires_is_there_once_wherever_the_power_goes() -> None:
    """The power goes at one operation of the disk after the other, while messages fire."""
    count = 40
    tried = 0
    for cut_at in range(1, 60, 2):

        async def scenario(machine: Machine, cut_at: int = cut_at) -> None:
            nonlocal tried
            async with aio.connect(machine.address) as client:
                now_s = machine.clock.now_us() / 1e6
                items = [Outgoing(value=str(n), deliver_at=now_s + 10 + n // 4) for n in range(count)]
                receipts = await client.publish_many("orders", items)
                await client.schedules.cancel(receipts[7])
                await client.schedules.move(receipts[8], deliver_at=now_s + 30)
            machine.storage.inject(Fault.POWER_CUT, at=machine.storage.operations + cut_at)
            await asyncio.sleep(25)
            if not machine.is_running:
                tried += 1
                machine.storage.heal()
                await machine.start()
            machine.storage.heal()
            await asyncio.sleep(20)
            expected = [str(n) for n in range(count) if n not in (7, 8)] + ["8"]
            assert await values(machine) == expected, f"the power went at operation {cut_at}"

        in_a_world(scenario, seed=cut_at)
    assert tried > 15, "the power went while messages fired"


def test_what_fires_is_there_once_although_the_broker_comes_back_after_days() -> None:
    """The power goes while messages are moved, and somebody else publishes before the moves are finished."""
    tried = 0
    for cut_at in range(1, 24):

        async def scenario(machine: Machine, cut_at: int = cut_at) -> None:
            nonlocal tried
            async with aio.connect(machine.address) as client:
                await client.publish("orders", "before")
                await client.publish_many("orders", [Outgoing(value=str(n), delay=10) for n in range(5)])
            machine.storage.inject(Fault.POWER_CUT, at=machine.storage.operations + cut_at)
            await asyncio.sleep(15)
            machine.storage.heal()
            if machine.is_running:
                return
            tried += 1
            machine.clock.jump(3 * 24 * 3600)
            await machine.start()
            async with aio.connect(machine.address) as client:
                await client.publish("orders", "after")
            await asyncio.sleep(15)
            assert sorted(await values(machine)) == ["0", "1", "2", "3", "4", "after", "before"], cut_at

        in_a_world(scenario, seed=cut_at)
    assert tried > 5, "the power went while messages fired"


def test_what_fires_a_little_at_a_time_is_there_once_and_in_order_wherever_the_power_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages that are too large to be in memory together, due in another order than they were published."""
    monkeypatch.setattr("millstream.broker.schedules.log._FIRE_BYTES", 2_500)
    sizes: list[int] = []
    read = ScheduleLog._collect

    async def counted(log: ScheduleLog, *args: Any, **options: Any) -> Collected[Any]:
        collected = await read(log, *args, **options)
        sizes.append(collected.size_bytes)
        return collected

    monkeypatch.setattr(ScheduleLog, "_collect", counted)
    count, tried = 12, 0
    for cut_at in (None, *range(1, 60, 4)):

        async def scenario(machine: Machine, cut_at: int | None = cut_at) -> None:
            nonlocal tried
            async with aio.connect(machine.address) as client:
                now_s = machine.clock.now_us() / 1e6
                for n in range(count):
                    await client.publish("orders", f"{n:01000}", deliver_at=now_s + 1_000 - n * 0.01)
            machine.clock.jump(1_000)  # all of them are due when the broker looks
            if cut_at is not None:
                machine.storage.inject(Fault.POWER_CUT, at=machine.storage.operations + cut_at)
            await asyncio.sleep(25)
            if not machine.is_running:
                tried += 1
                machine.storage.heal()
                await machine.start()
            machine.storage.heal()
            await asyncio.sleep(20)
            assert [int(value) for value in await values(machine)] == list(reversed(range(count))), cut_at

        in_a_world(scenario, seed=cut_at or 0)
    assert tried > 8, "the power went while messages fired"
    assert max(sizes) <= 4_000, "two and a half of them at a time, and never less than what is in one batch"


@pytest.mark.parametrize(("catch_up", "minutes"), [("none", [0, 4]), ("latest", [0, 3, 4]), ("all", [0, 1, 2, 3, 4])])
def test_an_occurrence_that_was_published_and_not_noted_does_not_stand_for_a_later_one(
    catch_up: Literal["none", "latest", "all"], minutes: list[int]
) -> None:
    """The power goes between the message and the fact, and comes back after other occurrences."""

    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            made = await client.schedules.repeat("tick", "orders", "* * * * *", "x", catch_up=catch_up)
        facts = re.compile(r"state/schedules.*\.log")
        machine.storage.inject(Fault.POWER_CUT, when=lambda operation: bool(facts.match(operation.path)))
        await asyncio.sleep(made.next_ms / 1000 - machine.clock.now_us() / 1e6 + 1)
        assert not machine.is_running
        machine.storage.heal()
        await asyncio.sleep(3 * 60 + 30)
        await machine.start()
        await asyncio.sleep(60)
        async with aio.connect(machine.address) as client:
            stream = client.stream("orders", start="earliest", timeout_s=0.5)
            times = [int(message.headers["millstream-schedule-time-ms"]) async for message in stream]
            assert [(time_ms - made.next_ms) // 60_000 for time_ms in times] == minutes
            shown = await client.schedules.show_repeating("tick")
            assert (shown.published, shown.last_ms) == (len(times), times[-1])

    in_a_world(scenario)


def test_a_full_disk_delays_and_loses_nothing() -> None:
    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            await client.publish_many("orders", [Outgoing(value=str(n), delay=10 + n) for n in range(5)])
        machine.storage.inject(Fault.NO_SPACE, when=lambda operation: operation.path.startswith("topics"), times=1000)
        await asyncio.sleep(30)
        assert await values(machine) == []
        machine.storage.heal()
        await asyncio.sleep(10)
        assert await values(machine) == [str(n) for n in range(5)]

    in_a_world(scenario)


def test_a_cancel_that_could_not_be_recorded_is_no_cancel() -> None:
    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            receipt = await client.publish("orders", "stays", delay=10)
            machine.storage.inject(Fault.NO_SPACE, when=lambda operation: ".state/" in operation.path, times=1000)
            with pytest.raises(StorageFailed):
                await client.schedules.cancel(receipt)
            machine.storage.heal()
            await asyncio.sleep(15)
            assert (await client.schedules.show(receipt)).state == "fired"

    in_a_world(scenario)


def test_without_room_for_the_index_everything_still_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.broker.schedules.window.RUN_ROWS", 16)

    async def scenario(machine: Machine) -> None:
        machine.storage.inject(Fault.NO_SPACE, when=lambda operation: ".due/" in operation.path, times=100_000)
        async with aio.connect(machine.address) as client:
            now_s = machine.clock.now_us() / 1e6
            for n in range(100):
                await client.publish("orders", str(n), deliver_at=now_s + 700 + n)
        await asyncio.sleep(850)
        assert await values(machine) == [str(n) for n in range(100)]

    in_a_world(scenario)


def test_a_damaged_message_is_lost_alone() -> None:
    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            # In a segment that is sealed: at the end of a log a damaged batch is a torn one.
            receipts = [await client.publish("orders", f"{n:05000}", delay=100) for n in range(8)]
        await machine.stop()
        path = f"topics/default/orders/0.schedules/{0:020d}.log"
        machine.storage.flip(path, machine.storage.read_all(path).index(f"{2:05000}".encode()))
        await machine.start()
        async with aio.connect(machine.address) as client:
            assert (await client.schedules.stats("orders"))[0].pending == 7
            assert (await client.schedules.show(receipts[2])).state == "lost"
        await asyncio.sleep(150)
        assert [int(value[-1]) for value in await values(machine)] == [0, 1, 3, 4, 5, 6, 7]

    in_a_world(scenario)


@pytest.mark.parametrize("part", [".schedules/", ".state/"])
def test_schedules_that_could_not_be_opened_at_the_start_are_opened_later(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    async def scenario(machine: Machine) -> None:
        async with aio.connect(machine.address) as client:
            receipt = await client.publish("orders", "waits", delay=60)
        await machine.stop()
        is_broken = True
        open_file = machine.storage.open

        def refuse(path: str, *, create: bool = False) -> File:
            if is_broken and part in path:
                raise OSError(errno.EIO, "the disk does not answer")
            return open_file(path, create=create)

        monkeypatch.setattr(machine.storage, "open", refuse)
        await machine.start()
        await asyncio.sleep(10)
        async with aio.connect(machine.address) as client:
            with pytest.raises(StorageFailed, match="does not answer"):
                await client.schedules.show(receipt)
            is_broken = False
            assert (await client.schedules.show(receipt)).state == "pending", "the next one who asks finds it"
        await machine.stop()
        is_broken = True
        await machine.start()
        await asyncio.sleep(60)
        assert await values(machine) == []
        is_broken = False
        await asyncio.sleep(2)
        assert await values(machine) == ["waits"], "nobody asked, and it came"

    in_a_world(scenario)
