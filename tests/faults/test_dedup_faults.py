"""Dedup ids that cannot be read back: nothing is stored twice because nobody knows better."""

from __future__ import annotations

import asyncio

import pytest

from millstream.errors import MillstreamError, StorageFailed, Throttled
from millstream.log.partition import Chunk, PartitionLog
from millstream.options import DEDUP_ID
from millstream.records import encode_batch, encode_headers
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls
from millstream.wire.messages import PublishRequest
from tests.simulated_broker import Client, after_power_cut, run, started

HOUR = {"dedup_window_ms": 3_600_000}


def publish(client: Client, *values: bytes, headers: bytes) -> asyncio.Future[tuple[int, bool]]:
    """Where the messages are, and whether that was a repetition."""
    future: asyncio.Future[tuple[int, bool]] = asyncio.get_running_loop().create_future()

    def confirmed(error: MillstreamError | None, _label: int, base: int, _time: int, again: bool) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result((base, again))

    batch = encode_batch(values, headers=[headers] * len(values), options=True, base_timestamp_us=1)
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
