"""Partitions that are put away again while somebody else needs them, or while the disk is full."""

from __future__ import annotations

import asyncio
import threading

import pytest

from millstream.errors import StorageFailed
from millstream.log.segment import Segment
from millstream.testing.storage import Fault, SimulatedStorage
from millstream.wire import calls, message_calls
from tests.simulated_broker import run, started


def test_a_partition_that_a_full_disk_kept_from_being_put_away_in_order_takes_messages() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage, segment_bytes=1 << 20)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([bytes(300_000)])
        storage.inject(Fault.NO_SPACE, when=lambda operation: operation.path.startswith("topics/"))
        with pytest.raises(StorageFailed):
            client.broker.topics.close_idle(client.broker.topics.registry.get("default", "orders"), 0)
        await client.send([b"x"])
        assert await client.read_all() == [bytes(300_000), b"x"]

    run(scenario)


def test_a_partition_is_not_put_away_under_somebody_who_looks_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        for _ in range(5):
            await client.send([bytes(8_000)])
        await client.broker.stop()
        client = await started(storage)
        entered, go = asyncio.Event(), threading.Event()
        loop, original = asyncio.get_running_loop(), Segment.verify

        def verify(segment: Segment, **options: bool) -> object:
            result = original(segment, **options)
            loop.call_soon_threadsafe(entered.set)
            go.wait(10)
            return result

        monkeypatch.setattr(Segment, "verify", verify)
        looking = asyncio.ensure_future(client.call(message_calls.BrowseMessages(topic="orders", limit=10)))
        await entered.wait()
        client.broker.topics.close_idle(client.broker.topics.registry.get("default", "orders"), 0)
        go.set()
        page = await asyncio.wait_for(looking, 10)
        assert isinstance(page, message_calls.MessagePage)
        assert len(page.messages) == 5

    run(scenario)


def test_a_log_that_a_full_disk_keeps_from_being_closed_in_order_keeps_no_other_from_it() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage, segment_bytes=1 << 20)
        for name in ("one", "two"):
            await client.call(calls.CreateTopic(name=name))
            await client.send([bytes(300_000)], topic=name)
        storage.inject(Fault.NO_SPACE, when=lambda operation: operation.path.startswith("topics/default/one"))
        await client.broker.stop()
        client = await started(storage, segment_bytes=1 << 20)
        for name in ("one", "two"):
            assert await client.read_all(name) == [bytes(300_000)]
        assert client.broker.topics.partition("default", "two", 0).log.recovery.rebuilt_indexes == 0

    run(scenario)
