"""Dedup ids that cannot be read back: nothing is stored twice because nobody knows better."""

from __future__ import annotations

import asyncio

import pytest

from millstream.errors import MillstreamError, OutOfSequence, StorageFailed, Throttled
from millstream.log.partition import Chunk, PartitionLog
from millstream.options import DEDUP_ID
from millstream.records import encode_batch, encode_headers
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls
from millstream.wire.messages import PublishRequest
from tests.simulated_broker import Client, after_power_cut, run, started

HOUR = {"dedup_window_ms": 3_600_000}


def publish(
    client: Client, *values: bytes, headers: bytes, producer: int = 0, sequence: int = 0
) -> asyncio.Future[tuple[int, bool]]:
    """Where the messages are, and whether that was a repetition."""
    future: asyncio.Future[tuple[int, bool]] = asyncio.get_running_loop().create_future()

    def confirmed(error: MillstreamError | None, _label: int, base: int, _time: int, again: bool) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result((base, again))

    batch = encode_batch(
        values,
        headers=[headers] * len(values),
        options=True,
        base_timestamp_us=1,
        producer=producer << 16,
        first_sequence=sequence,
    )
    client.broker.publish(client.session, PublishRequest("orders", 0, 1, 0, memoryview(batch)), confirmed)
    client.broker.flush()
    return future


async def publish_once(client: Client, dedup_id: str) -> tuple[int, bool]:
    """As clients do: again while the broker reads which ids it has seen."""
    partition = client.broker.topics.partition("default", "orders", 0)
    await partition.duplicates(HOUR["dedup_window_ms"]).known()
    return await publish(client, b"x", headers=encode_headers({DEDUP_ID: dedup_id}))


def test_ids_behind_a_message_whose_headers_nobody_can_read_are_known_after_a_restart() -> None:
    """It was stored while the topic had no window, when nobody looked into its headers."""

    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        await publish(client, b"alone", headers=b"\xff")
        await publish(client, b"two", b"together", headers=b"\xff\xff\xff")
        await client.call(calls.AlterTopic(name="orders", config=HOUR))
        assert await publish_once(client, "order-1") == (3, False)
        client = await after_power_cut(client, storage)
        assert await publish_once(client, "order-1") == (3, True)
        await client.broker.stop()

    run(scenario)


async def send(client: Client, sequence: int, *, dedup_id: str = "") -> tuple[int, bool]:
    """The batch of a producer with this number."""
    await client.broker.topics.partition("default", "orders", 0).duplicates(HOUR["dedup_window_ms"]).known()
    headers = encode_headers({DEDUP_ID: dedup_id} if dedup_id else {})
    return await publish(client, b"%d" % sequence, headers=headers, producer=7, sequence=sequence)


def test_a_repetition_that_was_not_answered_before_a_restart_is_answered_after_it() -> None:
    """Its number was used up in memory only.  Its producer heard that it came out of sequence, took another identity
    and sent everything again that was not confirmed, also what was stored.
    """

    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", config=HOUR))
        assert await send(client, 0, dedup_id="order-1") == (0, False)
        assert await send(client, 1) == (1, False)
        assert await send(client, 2, dedup_id="order-1") == (0, True)
        assert await send(client, 3) == (2, False)
        client = await after_power_cut(client, storage)
        # The last two answers were lost on their way.
        assert await send(client, 2, dedup_id="order-1") == (0, True)
        assert await send(client, 3) == (2, True)
        assert await send(client, 4, dedup_id="order-2") == (3, False)
        assert await client.read_all() == [b"0", b"1", b"3", b"4"]
        await client.broker.stop()

    run(scenario)


def test_a_known_id_does_not_let_a_producer_leave_something_out() -> None:
    """A number that is ahead of what is stored says that a batch is missing, which its producer has to send first."""

    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        await client.call(calls.CreateTopic(name="orders", config=HOUR))
        assert await send(client, 0, dedup_id="order-1") == (0, False)
        with pytest.raises(OutOfSequence, match="expected 1"):
            await send(client, 2, dedup_id="order-1")
        assert await send(client, 1, dedup_id="order-2") == (1, False)
        with pytest.raises(OutOfSequence, match="expected 2"):
            await send(client, 2**32 - 1, dedup_id="order-3")
        assert await send(client, 2, dedup_id="order-3") == (2, False), "what was refused is not known"
        await client.broker.stop()

    run(scenario)


def test_while_ids_cannot_be_read_from_the_disk_a_message_with_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that may be a repetition was stored as a new one.  Messages without an id are not concerned."""

    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", config=HOUR))
        await publish_once(client, "order-1")
        client = await after_power_cut(client, storage)
        read = PartitionLog.read

        def failing(log: PartitionLog, offset: int, max_bytes: int, *, before: int) -> Chunk:
            if log.directory.startswith("topics/default/orders"):
                raise StorageFailed("cannot read the log: Input/output error")
            return read(log, offset, max_bytes, before=before)

        with monkeypatch.context() as patch:
            patch.setattr(PartitionLog, "read", failing)
            for _ in range(3):
                with pytest.raises(StorageFailed, match=r"dedup ids .* cannot be read.*Input/output error"):
                    await publish_once(client, "order-1")
            assert await client.send([b"plain"]) == 1
        with pytest.raises(StorageFailed):
            await publish_once(client, "order-1")
        with pytest.raises(Throttled):
            await publish(client, b"x", headers=encode_headers({DEDUP_ID: "order-1"}))
        assert await publish_once(client, "order-1") == (0, True), "and read as soon as the disk answers"
        await client.broker.stop()

    run(scenario)
