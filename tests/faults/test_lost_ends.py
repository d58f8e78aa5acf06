"""Logs that a power cut made shorter than what somebody has read of them: nobody misses what is stored there next.

With fsync `never` and `interval` a message is read before it is on disk.  Its offset is given to another one when it is
lost, and a reader that goes on where it was would take the new messages for those that it has read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from millstream import aio
from millstream.config import Settings
from millstream.errors import StaleGeneration, StorageFailed
from millstream.testing.machine import Machine
from millstream.testing.network import Network
from millstream.testing.storage import Fault
from millstream.testing.virtual_loop import VirtualLoop, run

SETTINGS = {"server": {"port": 9092}, "storage": {"free_bytes_min": 0, "segment_bytes": 16_384}}


async def restarted(machine: Machine) -> None:
    """After a power cut that has taken everything that was not on disk."""
    machine.cut_power()
    await asyncio.sleep(1)
    machine.storage.restart(lose_everything=True)
    await machine.start()


async def values_of(stream: aio.Stream, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        message = await stream.next(timeout_s=60)
        assert message is not None, f"after {found} nothing comes"
        found.append(message.value)
    return found


def simulated(scenario: Callable[[Machine, aio.Client], Awaitable[None]]) -> None:
    async def main(loop: VirtualLoop) -> None:
        Network(loop, Random(1))
        machine = Machine(loop, seed=1, settings=Settings.model_validate(SETTINGS), draw_sync_s=lambda: 0.001)
        await machine.start()
        async with aio.connect(machine.address, timeout_s=60, stay_awake=False) as client:
            await scenario(machine, client)

    run(main)


@pytest.mark.parametrize("options", [{}, {"group": "readers"}], ids=["alone", "in a group"])
def test_what_is_stored_where_a_message_was_lost_is_read(options: dict[str, Any]) -> None:
    async def scenario(machine: Machine, client: aio.Client) -> None:
        await client.create_topic("orders", config={"fsync": "never"})
        await client.publish("orders", b"kept", fsync="group")
        async with client.stream("orders", start="earliest", **options) as stream:
            for number in range(3):
                await client.publish("orders", b"lost %d" % number)
            assert await values_of(stream, 4) == [b"kept", b"lost 0", b"lost 1", b"lost 2"]
            await restarted(machine)
            for number in range(5):
                await client.publish("orders", b"new %d" % number)
            assert await values_of(stream, 5) == [b"new %d" % number for number in range(5)]

    simulated(scenario)


async def all_values(stream: aio.Stream) -> list[bytes]:
    """Until nothing more comes; a group delivers again what a member has not committed when it joins anew."""
    found = []
    while (message := await stream.next(timeout_s=30)) is not None:
        found.append(message.value)
    return list(dict.fromkeys(found))


NEW = [b"new %d" % number for number in range(5)]


async def publish_new(machine: Machine) -> None:
    async with aio.connect(machine.address, timeout_s=60, stay_awake=False) as client:
        for value in NEW:
            await client.publish("orders", value)


async def lost_messages(client: aio.Client, count: int = 3) -> None:
    await client.create_topic("orders", config={"fsync": "never"})
    await client.publish("orders", b"kept", fsync="group")
    for number in range(count):
        await client.publish("orders", b"lost %d" % number)


@pytest.mark.parametrize("options", [{}, {"group": "readers"}], ids=["alone", "in a group"])
@pytest.mark.parametrize("how", ["latest", "seek"])
def test_a_stream_that_has_read_nothing_yet_misses_nothing_either(options: dict[str, Any], how: str) -> None:
    async def scenario(machine: Machine, client: aio.Client) -> None:
        await lost_messages(client)
        async with client.stream("orders", start="latest" if how == "latest" else "earliest", **options) as stream:
            if how == "seek":
                await values_of(stream, 4)
                await stream.seek("orders", 0, 4)
            assert await stream.next(timeout_s=1) is None
            await restarted(machine)
            await publish_new(machine)
            assert await all_values(stream) == NEW

    simulated(scenario)


@pytest.mark.parametrize("step_s", [0, -3600])
def test_a_clock_that_is_set_back_meanwhile_hides_nothing(step_s: int) -> None:
    async def scenario(machine: Machine, client: aio.Client) -> None:
        await client.create_topic("orders", config={"fsync": "never"})
        await client.publish("orders", b"kept", fsync="group")
        async with client.stream("orders", start="earliest") as stream:
            await asyncio.sleep(7200)
            for number in range(3):
                await client.publish("orders", b"lost %d" % number)
            await values_of(stream, 4)
            machine.cut_power()
            await asyncio.sleep(1)
            machine.clock.jump(step_s)
            machine.storage.restart(lose_everything=True)
            await machine.start()
            await publish_new(machine)
            assert await all_values(stream) == NEW

    simulated(scenario)


def test_a_group_commits_nothing_behind_the_end_of_a_log_that_was_cut() -> None:
    """Its heartbeats, and with them its commits, are back before a slow handler has asked for the next message."""

    async def scenario(machine: Machine, client: aio.Client) -> None:
        await client.create_topic("orders", config={"fsync": "never"})
        await client.publish("orders", b"kept", fsync="group")
        stream = await client.stream("orders", start="earliest", group="readers")
        await values_of(stream, 1)
        await stream.commit()
        await asyncio.sleep(30)
        for number in range(3):
            await client.publish("orders", b"lost %d" % number)
        await values_of(stream, 3)
        await restarted(machine)
        await asyncio.sleep(20)
        assert [entry.offset for entry in await client.committed("readers")] == [1]
        await publish_new(machine)
        await stream.close()  # and neither does the last commit
        async with client.stream("orders", start="earliest", group="readers") as successor:
            assert await all_values(successor) == NEW

    simulated(scenario)


def test_a_message_of_a_log_that_was_cut_commits_nothing_that_is_stored_in_its_place() -> None:
    async def scenario(machine: Machine, client: aio.Client) -> None:
        await lost_messages(client)
        async with client.stream("orders", start="earliest", group="readers", commit="manual") as stream:
            await values_of(stream, 3)
            last = await stream.next(timeout_s=60)
            assert last is not None
            await restarted(machine)
            await publish_new(machine)
            with contextlib.suppress(StaleGeneration):
                await stream.commit(last)
        assert all(entry.offset <= 1 for entry in await client.committed("readers"))

    simulated(scenario)


def test_a_connection_that_breaks_beside_a_compaction_repeats_nothing() -> None:
    async def scenario(_: Machine, client: aio.Client) -> None:
        await client.create_topic("orders", config={"cleanup": "compact"})
        values = [b"%03d" % number + bytes(200) for number in range(40)]
        for number, value in enumerate(values):
            await client.publish("orders", value, key=b"k%d" % number)
        async with client.stream("orders", start="earliest", max_bytes=3000) as stream:
            found = await values_of(stream, 5)
            await client.admin.compact("orders", roll=True)
            assert stream._connection is not None
            stream._connection.close()
            while (message := await stream.next(timeout_s=30)) is not None:
                found.append(message.value)
            assert found == values

    simulated(scenario)


@pytest.mark.parametrize("config", [{"fsync": "never"}, {"fsync": "interval"}, {"visible": "written"}], ids=str)
def test_no_power_cut_takes_what_lies_before_the_durable_end(config: dict[str, str]) -> None:
    async def scenario(machine: Machine, client: aio.Client) -> None:
        await client.create_topic("orders", 2, config=config)
        for number in range(3):
            await client.publish("orders", b"kept %d" % number, partition=0)
        assert await client.offsets("orders", at="durable") == {0: 3, 1: 0}
        assert [part.durable_offset for part in (await client.topic("orders")).partitions] == [3, 0]
        await restarted(machine)
        assert await client.offsets("orders") == {0: 3, 1: 0}

    simulated(scenario)


def test_the_durable_ends_of_many_partitions_share_the_disks_syncs() -> None:
    """Each waited for the one before: with a thousand partitions and a disk of 5 ms that took five seconds."""

    async def scenario(machine: Machine, client: aio.Client) -> None:
        await client.create_topic("orders", 50, config={"fsync": "never"})
        for number in range(50):
            await client.publish("orders", b"kept", partition=number)
        metrics = machine.broker.metrics
        before = metrics.sync_rounds
        assert await client.offsets("orders", at="durable") == dict.fromkeys(range(50), 1)
        assert metrics.sync_rounds - before <= 2
        await restarted(machine)
        assert await client.offsets("orders") == dict.fromkeys(range(50), 1)

    simulated(scenario)


def test_what_is_shown_before_it_is_on_disk_is_told_apart() -> None:
    async def scenario(machine: Machine, client: aio.Client) -> None:
        await client.create_topic("orders", config={"fsync": "never"})
        await client.publish("orders", b"kept", fsync="group")
        await client.publish("orders", b"lost")
        (part,) = (await client.topic("orders")).partitions
        assert (part.high_watermark, part.durable_offset) == (2, 1)
        await restarted(machine)
        assert await client.offsets("orders") == {0: 1}

    simulated(scenario)


def test_the_durable_end_of_a_log_that_failed_is_where_it_was() -> None:
    async def scenario(machine: Machine, client: aio.Client) -> None:
        await client.create_topic("orders", config={"fsync": "never"})
        await client.publish("orders", b"kept", fsync="group")
        await client.publish("orders", b"in doubt")
        machine.storage.inject(Fault.SYNC_ERROR, times=100, when=lambda it: "topics/default/orders/0/" in it.path)
        with pytest.raises(StorageFailed):
            await client.offsets("orders", at="durable")
        assert await client.offsets("orders", at="durable") == {0: 1}

    simulated(scenario)


def test_in_memory_the_durable_end_is_the_end() -> None:
    async def scenario(_: Machine, client: aio.Client) -> None:
        await client.create_topic("orders", config={"mode": "ephemeral"})
        await client.publish("orders", b"a")
        assert await client.offsets("orders", at="durable") == {0: 1}
        assert (await client.topic("orders")).partitions[0].durable_offset is None

    simulated(scenario)
