"""Logs that cannot be opened, mostly because too many files are: what does not need them goes on."""

from __future__ import annotations

import asyncio
import errno

import pytest

from millstream.broker.webhooks import webhooks
from millstream.errors import StorageFailed
from millstream.log.storage import NotOpened
from millstream.testing.storage import Fault, SimulatedStorage
from millstream.wire import calls
from millstream.wire.message_calls import SummarizeTopics, TopicSummaries
from millstream.wire.queue_calls import ListQueues
from millstream.wire.webhook_calls import CreateWebhook
from tests.simulated_broker import after_kill, run, started
from tests.waiting import eventually_async


def test_a_partition_that_cannot_be_opened_is_said_to_be_and_hides_no_other() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=6)
        client = await started(storage, segment_bytes=1 << 24)
        for topic in ("orders", "payments"):
            await client.call(calls.CreateTopic(name=topic))
        await client.send([bytes(300_000)] * 3)
        await client.send([b"x"], topic="payments")
        for topic in ("orders", "payments"):
            await client.open_queue(topic)
        await client.call(calls.JoinGroup(group="audit", topics=["orders", "payments"]))
        storage.inject(Fault.NO_SPACE, times=100, when=lambda operation: operation.path.startswith("topics/default/o"))
        client = await after_kill(client, storage)
        info = await client.call(calls.DescribeGroup(name="audit"))
        assert isinstance(info, calls.GroupInfo)
        orders, payments = info.lag
        assert (orders.lag, "No space left" in (orders.failed or "")) == (0, True)
        assert (payments.lag, payments.failed) == (1, None)
        described = await client.call(calls.DescribeTopic(name="orders"))
        assert isinstance(described, calls.TopicInfo)
        assert "No space left" in (described.partitions[0].failed or "")
        found = await client.call(SummarizeTopics())
        assert isinstance(found, TopicSummaries)
        assert [(one.name, one.messages, bool(one.failed)) for one in found.topics] == [
            ("orders", 0, True),
            ("payments", 1, False),
        ]
        queues = await client.call(ListQueues())
        assert isinstance(queues, list)
        assert [(one.topic, one.depth, bool(one.failed)) for one in queues] == [
            ("orders", 0, True),
            ("payments", 1, False),
        ]
        storage.heal()
        info = await client.call(calls.DescribeGroup(name="audit"))
        assert isinstance(info, calls.GroupInfo)
        assert [(line.topic, line.lag) for line in info.lag] == [("orders", 3), ("payments", 1)]
        await client.broker.stop()

    run(scenario)


def test_a_webhook_that_finds_its_topic_unreadable_at_the_start_goes_on_when_it_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhooks, "_RETRY_S", 0.001)

    async def scenario() -> None:
        storage = SimulatedStorage(seed=6)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"x"])
        await client.call(CreateWebhook(topic="orders", url="http://127.0.0.1:9/"))
        with monkeypatch.context() as patch:
            names, refused = storage.names, []

            def too_many_open_files(directory: str) -> list[str]:
                if directory == "topics/default/orders/0.state":
                    refused.append(directory)
                    raise OSError(errno.EMFILE, "Too many open files", directory)
                return names(directory)

            patch.setattr(storage, "names", too_many_open_files)
            client = await after_kill(client, storage)
            with pytest.raises(StorageFailed, match="Too many open files"):
                client.send([b"y"])
            await eventually_async(lambda: len(refused) > 10)
        entry = next(iter(client.broker.webhooks._entries.values()))
        await eventually_async(lambda: entry.runner is not None)
        await client.broker.stop()

    run(scenario)


def test_a_broker_that_found_too_many_files_open_stops_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that was put off waited for an interval that never came."""

    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage, fsync_interval_ms=3_600_000)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"x"])
        partition = client.broker.topics.registry.get("default", "orders").partitions[0]
        assert partition is not None
        sync_directory, refused, over = storage.sync_directory, [], []

        def too_many_open_files(directory: str) -> None:
            if directory.endswith("orders/0") and not over:
                refused.append(directory)
                raise NotOpened(errno.EMFILE, "Too many open files", directory)
            sync_directory(directory)

        monkeypatch.setattr(storage, "sync_directory", too_many_open_files)
        partition.log.roll()
        syncing = asyncio.ensure_future(partition.sync())
        await eventually_async(lambda: len(refused) > 1)
        over.append(True)
        async with asyncio.timeout(10):
            await syncing
            await client.broker.stop()

    run(scenario)
