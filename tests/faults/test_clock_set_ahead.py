"""A clock that somebody sets ahead, and right again a moment later, takes nothing away for good."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

from millstream import aio
from millstream.broker.patience import PatientClock
from millstream.clock import SystemClock
from millstream.config import Settings
from millstream.mqtt.messages import Message
from millstream.testing.machine import Machine
from millstream.testing.network import Network
from millstream.testing.virtual_loop import VirtualLoop, run

DAY_S = 24 * 3600
WAIT_S = 600
SETTINGS = {
    "server": {"port": 9092},
    "storage": {
        "free_bytes_min": 0,
        "segment_bytes": 4096,
        "cleanup_interval_ms": 1000,
        "clock_wait_ms": WAIT_S * 1000,
    },
}


def in_a_world(scenario: Callable[[Machine, aio.Client], Awaitable[None]]) -> None:
    """A broker on a simulated disk, in virtual time, and a client of it."""

    async def main(loop: VirtualLoop) -> None:
        Network(loop, Random(1))
        machine = Machine(loop, seed=1, settings=Settings.model_validate(SETTINGS), draw_sync_s=lambda: 0.001)
        await machine.start()
        async with aio.connect(machine.address) as client:
            await asyncio.wait_for(scenario(machine, client), 7 * DAY_S)
        await machine.stop()

    run(main, seed=1)


async def clock_of(client: aio.Client) -> tuple[str, str]:
    (found,) = [each for each in (await client.admin.health()).components if each.name == "clock"]
    return found.status, found.message


async def fill(client: aio.Client, topic: str) -> None:
    for number in range(20):
        await client.publish(topic, bytes([number]) * 1000)


async def first_of(client: aio.Client, topic: str) -> int:
    return (await client.offsets(topic, "earliest"))[0]


def test_retention_deletes_nothing_that_is_old_only_because_the_clock_was_set_ahead() -> None:
    async def scenario(machine: Machine, client: aio.Client) -> None:
        await client.create_topic("orders", config={"retention_ms": DAY_S * 1000})
        await fill(client, "orders")
        machine.clock.jump(30 * DAY_S)
        await asyncio.sleep(WAIT_S - 60)
        assert await first_of(client, "orders") == 0
        status, message = await clock_of(client)
        assert status == "degraded"
        assert "set ahead by 4w2d" in message
        machine.clock.jump(-30 * DAY_S)
        await asyncio.sleep(2 * WAIT_S)
        assert await first_of(client, "orders") == 0
        assert (await clock_of(client))[0] == "healthy"

    in_a_world(scenario)


def test_a_clock_that_stays_ahead_counts_in_the_end() -> None:
    async def scenario(machine: Machine, client: aio.Client) -> None:
        await client.create_topic("orders", config={"retention_ms": DAY_S * 1000})
        await fill(client, "orders")
        machine.clock.jump(30 * DAY_S)
        await asyncio.sleep(WAIT_S + 10)
        assert await first_of(client, "orders") > 0
        assert (await clock_of(client))[0] == "healthy"

    in_a_world(scenario)


def test_time_that_passes_counts_also_while_a_jump_is_waited_for() -> None:
    async def scenario(machine: Machine, client: aio.Client) -> None:
        await client.create_topic("orders", config={"retention_ms": 60_000})
        await fill(client, "orders")
        machine.clock.jump(30 * DAY_S)
        await asyncio.sleep(50)
        assert await first_of(client, "orders") == 0
        await asyncio.sleep(30)
        assert await first_of(client, "orders") > 0

    in_a_world(scenario)


def test_a_message_in_a_queue_does_not_expire_by_a_jump_and_one_that_came_after_it_does() -> None:
    async def scenario(machine: Machine, client: aio.Client) -> None:
        await client.create_topic("jobs", config={"message_ttl_ms": 60_000})
        await client.publish("jobs", "before")
        machine.clock.jump(3600)
        await asyncio.sleep(30)
        async with client.queue("jobs", group="workers") as queue:
            message = await queue.next(1)
            assert message is not None
            assert message.text == "before"
            await message.ack()
        await client.publish("jobs", "after")
        await asyncio.sleep(70)
        async with client.queue("jobs", group="workers") as queue:
            assert await queue.next(1) is None, "it is older than it may be, whichever clock is right"

    in_a_world(scenario)


def test_what_mqtt_keeps_stays_through_a_jump_and_is_seen_again_when_the_clock_is_right() -> None:
    async def scenario(machine: Machine, _: aio.Client) -> None:
        broker = machine.broker
        assert broker is not None
        retained = broker.mqtt.retained
        expiry_us = machine.clock.now_us() + 1_200_000_000
        await retained.put("default", Message("boiler", b"on", 1, True, expiry_us=expiry_us))
        machine.clock.jump(3600)
        await asyncio.sleep(30)
        assert not list(retained.matching("default", "boiler")), "by the clock, nobody may have it"
        machine.clock.jump(-3600)
        await asyncio.sleep(30)
        assert [kept.message.payload for kept in retained.matching("default", "boiler") if kept] == [b"on"]

    in_a_world(scenario)


def test_records_of_messages_stay_through_a_jump_also_while_others_are_written() -> None:
    async def scenario(machine: Machine, client: aio.Client) -> None:
        await client.create_topic("jobs")
        async with client.queue("jobs", group="workers") as queue:

            async def fail(value: str) -> None:
                await client.publish("jobs", value)
                message = await queue.next(1)
                assert message is not None
                await message.reject(value)
                await asyncio.sleep(15)

            await fail("before")
            machine.clock.jump(30 * DAY_S)
            await fail("meanwhile")
            machine.clock.jump(-30 * DAY_S)
            await asyncio.sleep(WAIT_S)
        recorded = [event.error for event in await client.traces(topic="jobs", failures_only=True)]
        assert "before" in recorded

    in_a_world(scenario)


class SetByHand:
    """Clocks that go as they are told."""

    def __init__(self) -> None:
        self._wall_ms = self._elapsed_ms = 1_000_000_000

    def now_us(self) -> int:
        return self._wall_ms * 1000

    def monotonic_ms(self) -> int:
        return self._elapsed_ms

    elapsed_ms = monotonic_ms

    def jump(self, seconds: int) -> None:
        self._wall_ms += seconds * 1000

    def go_on(self, seconds: int) -> None:
        self.jump(seconds)
        self._elapsed_ms += seconds * 1000


def test_a_jump_counts_when_it_has_stood_for_long_enough_whatever_jumps_come_after_it() -> None:
    """A clock that is corrected every few minutes would have kept everything for ever."""
    clock = SetByHand()
    patient = PatientClock(clock, wait_ms=WAIT_S * 1000)
    clock.jump(30 * DAY_S)
    for _ in range(2):
        assert clock.now_us() - patient.now_us() >= 30 * DAY_S * 1_000_000
        clock.go_on(WAIT_S // 2 - 10)
        clock.jump(2)
    patient.now_us()
    clock.go_on(30)
    assert clock.now_us() - patient.now_us() == 4_000_000, "the later ones have not stood for so long"
    clock.go_on(WAIT_S)
    assert clock.now_us() == patient.now_us()
    assert patient.complaint() == ""


def test_what_is_set_back_is_taken_from_the_last_jump() -> None:
    clock = SetByHand()
    patient = PatientClock(clock, wait_ms=WAIT_S * 1000)
    clock.jump(DAY_S)
    patient.now_us()
    clock.go_on(WAIT_S // 2)
    clock.jump(3600)
    patient.now_us()
    clock.jump(-3600)
    assert clock.now_us() - patient.now_us() == DAY_S * 1_000_000
    clock.go_on(WAIT_S // 2)
    assert clock.now_us() == patient.now_us()


def test_a_message_that_comes_after_a_jump_was_taken_back_in_part_grows_old_as_time_goes() -> None:
    clock = SetByHand()
    patient = PatientClock(clock, wait_ms=WAIT_S * 1000)
    before_us = clock.now_us()
    clock.jump(10 * 3600)
    patient.moment()
    clock.go_on(60)
    clock.jump(-9 * 3600)
    patient.moment()
    stamp_us = clock.now_us()
    clock.go_on(30)
    moment = patient.moment()
    assert moment.of(stamp_us) - stamp_us == 30_000_000
    assert moment.of(before_us) - before_us == 90_000_000


class Asleep(SystemClock):
    """A machine that has slept: the wall clock and time that has passed went on, time-outs did not."""

    slept_ms = 0

    def now_us(self) -> int:
        return super().now_us() + self.slept_ms * 1000

    def elapsed_ms(self) -> int:
        return super().elapsed_ms() + self.slept_ms


def test_time_for_which_the_machine_slept_has_passed() -> None:
    clock = Asleep()
    patient = PatientClock(clock, wait_ms=WAIT_S * 1000)
    clock.slept_ms = 8 * 3_600_000
    assert clock.now_us() - patient.now_us() < 3_600_000_000
    assert patient.complaint() == ""
