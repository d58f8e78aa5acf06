"""Messages of a schedule log: found in whatever batch they are, a little at a time."""

from __future__ import annotations

import asyncio
import time
import tracemalloc

import pytest

from millstream.broker.schedules.messages import collect, open_messages
from millstream.ids import SCHEDULES
from millstream.records import Batch, encode_batch, stamp
from millstream.testing.storage import SimulatedStorage
from millstream.wire.calls import CreateTopic
from millstream.wire.schedule_calls import ListSchedules
from tests.simulated_broker import Client, run, started
from tests.unit.broker.test_queues_at_run_time import publish


def swept(count: int, *, base_offset: int = 1000) -> Batch:
    """A batch as a sweep leaves it: every other message of it is gone."""
    values: list[bytes | None] = [b"%d" % number for number in range(count)]
    batch = encode_batch(
        values,
        offsets=[2 * number for number in range(count)],
        deliver_at_us=[5_000] * count,
        base_timestamp_us=1,
    )
    stamp(memoryview(batch), 0, base_offset=base_offset, append_time_us=7, leader_epoch=0)
    return Batch.parse(bytes(batch))


def test_messages_of_a_swept_batch_are_found_by_their_offsets() -> None:
    batch = swept(10)
    found = open_messages(batch, [1002, 1010, 1018])
    assert [(message.offset, message.value) for message in found] == [(1002, b"1"), (1010, b"5"), (1018, b"9")]
    assert [message.offset for message in open_messages(batch, list(batch.offsets()))] == list(batch.offsets())


def test_what_was_swept_meanwhile_is_left_out_and_nothing_else_comes_in_its_place() -> None:
    assert [message.offset for message in open_messages(swept(2), [1001, 1002])] == [1002]
    assert [message.offset for message in open_messages(swept(3), [1003, 1004])] == [1004]


def test_many_messages_of_a_large_swept_batch_are_found_at_once() -> None:
    batch = swept(65_000)
    wanted = list(batch.offsets())[::3]
    started_s = time.process_time()
    found = open_messages(batch, wanted)
    assert [message.offset for message in found] == wanted
    assert time.process_time() - started_s < 2, "not a walk through all offsets for each of them"


async def scheduled(client: Client, values: list[bytes]) -> None:
    """Each value in a batch of its own, due in an hour."""
    await client.call(CreateTopic(name="orders"))
    due_us = client.broker.now_us() + 3_600_000_000
    for value in values:
        await publish(client, [value], partition=SCHEDULES, deliver_at_us=[due_us])


def test_others_have_their_turn_while_many_messages_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.broker.schedules.messages._TURN_BYTES", 1)

    async def scenario() -> None:
        client = await started(SimulatedStorage())
        await scheduled(client, [b"x" * 10_000] * 60)
        (log,) = client.broker.schedules._all()
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        others = asyncio.ensure_future(take_turns())
        partition = log.partition
        collected = await collect(partition.log, range(60), partition.high_watermark, lambda message: message.value)
        others.cancel()
        assert collected == (dict.fromkeys(range(60), b"x" * 10000), 60, 600_000)
        assert turns >= 2
        await client.broker.stop()

    run(scenario)


def test_what_is_too_much_for_memory_ends_behind_a_whole_batch() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage())
        await scheduled(client, [b"x" * 1_000] * 20)
        (log,) = client.broker.schedules._all()
        partition = log.partition
        read = await collect(partition.log, range(5, 20), partition.high_watermark, lambda _: None, bytes_max=3_500)
        assert (list(read.found), read.looked_at, read.size_bytes) == ([5, 6, 7, 8], 4, 4_000)
        await client.broker.stop()

    run(scenario)


def test_a_list_of_large_messages_does_not_hold_them() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage(), segment_bytes=1 << 20)
        await scheduled(client, [b"x" * 200_000] * 60)
        tracemalloc.start()
        try:
            listed = await client.call(ListSchedules(topic="orders"))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert [summary.size_bytes for summary in listed] == [200_000] * 60  # type: ignore[attr-defined]
        assert peak < 6_000_000, "half of what they take together"
        await client.broker.stop()

    run(scenario)
