"""What is deleted and made again has nothing of what it was, whoever comes in between and whatever the disk refuses."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from millstream.errors import InvalidName, NamespaceNotEmpty, NamespaceNotFound, StorageFailed, TopicNotFound
from millstream.testing.storage import Fault, SimulatedStorage
from millstream.webhooks.registration import Webhook
from millstream.wire import access_calls, calls, pipeline_calls, stage_calls
from millstream.wire.webhook_calls import CreateWebhook, ListWebhooks
from tests.simulated_broker import Client, after_kill, after_power_cut, run, started


async def inside(client: Client, namespace: str = "shop") -> Client:
    """A client of a namespace that is made for it."""
    await client.call(calls.CreateNamespace(name=namespace))
    return within(client, namespace)


def within(client: Client, namespace: str = "shop") -> Client:
    other = Client(client.broker)
    other.session.namespace = namespace
    return other


def test_a_topic_that_comes_while_its_namespace_is_deleted_goes_with_it() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        shop = await inside(client)
        for name in ("one", "two"):
            await shop.call(calls.CreateTopic(name=name))
        topic = client.broker.topics.registry.get("shop", "one")
        going = asyncio.ensure_future(client.call(calls.DeleteNamespace(name="shop", force=True)))
        while not topic.deleting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await shop.call(calls.CreateTopic(name="late"))
        await going
        assert await client.call(calls.ListNamespaces()) == ["default"]
        client = await after_kill(client, storage)
        assert await client.call(calls.ListNamespaces()) == ["default"], "nothing is left of it"

    run(scenario)


@pytest.mark.parametrize("size", [1, 8000], ids=["gathered", "on its way to the disk"])
def test_who_publishes_to_a_topic_that_is_just_deleted_hears_that_it_is_gone(size: int) -> None:
    """And not that the disk has failed, which clients take for a reason to try again."""

    async def scenario() -> None:
        client = await started(SimulatedStorage())
        await client.call(calls.CreateTopic(name="orders"))
        publishing = client.send([bytes(size)])
        partition = client.broker.topics.partition("default", "orders", 0)
        await partition.retire(TopicNotFound("topic 'orders' was deleted"))
        with pytest.raises(TopicNotFound):
            await publishing

    run(scenario)


def test_a_namespace_that_gets_a_topic_while_it_waits_to_be_deleted_is_not_empty() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        shop = await inside(client)
        await client.call(access_calls.SetQuota(namespace="shop", topics=1))
        await shop.open_queue("#", group="workers")
        making = asyncio.ensure_future(shop.call(calls.CreateTopic(name="orders")))
        going = asyncio.ensure_future(client.call(calls.DeleteNamespace(name="shop")))
        await making
        await shop.send([b"mine"])
        with pytest.raises(NamespaceNotEmpty):
            await going
        assert await shop.read_all() == [b"mine"]
        quota = await client.call(access_calls.ShowQuota(namespace="shop"))
        assert isinstance(quota, access_calls.QuotaInfo)
        assert quota.topics == 1, "what is not deleted loses nothing"
        orders = client.broker.topics.registry.get("shop", "orders")
        assert [group.name for group in client.broker.queues.registry.on_topic(orders)] == ["workers"]

    run(scenario)


def test_a_topic_that_the_disk_would_not_let_go_of_goes_with_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        shop = await inside(client)
        await shop.call(calls.CreateTopic(name="orders"))
        await shop.send([b"old"])
        with monkeypatch.context() as patched:
            patched.setattr(storage, "remove_tree", _refuse)
            with pytest.raises(StorageFailed):
                await shop.call(calls.DeleteTopic(name="orders"))
        await client.call(calls.DeleteNamespace(name="shop", force=True))
        shop = await inside(client)
        await shop.call(calls.CreateTopic(name="orders"))
        assert await shop.read_all() == []

    run(scenario)


def test_nothing_of_a_namespace_is_left_if_its_deletion_ends_in_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        shop = await inside(client)
        await shop.call(calls.CreateTopic(name="orders"))
        await client.call(access_calls.SetQuota(namespace="shop", topics=1))
        await shop.call(pipeline_calls.ReportPipeline(name="totals", run="1", state="running"))
        await shop.call(stage_calls.PublishStages(query="totals", batch=7, stages=[]))
        await shop.call(calls.CommitOffsets(group="readers", offsets=[_first("orders")]))
        await shop.open_queue("#", group="workers")
        forgotten: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        record = client.broker.topics._log.record

        async def recorded(facts: dict[str, Any], *, now_us: int) -> None:
            await record(facts, now_us=now_us)
            if "namespace/shop" in facts:
                forgotten.set_result(None)
                await asyncio.Event().wait()  # the machine goes down

        monkeypatch.setattr(client.broker.topics._log, "record", recorded)
        going = asyncio.ensure_future(client.call(calls.DeleteNamespace(name="shop", force=True)))
        await forgotten
        going.cancel()
        client = await after_power_cut(client, storage)
        shop = await inside(client)
        quota = await client.call(access_calls.ShowQuota(namespace="shop"))
        assert isinstance(quota, access_calls.QuotaInfo)
        assert quota.topics == 0
        assert await shop.call(pipeline_calls.ListPipelines()) == []
        assert await shop.call(stage_calls.ListStages()) == []
        assert await shop.call(calls.ListGroups()) == []
        await shop.call(calls.CreateTopic(name="orders"))
        assert client.broker.queues.registry.on_topic(client.broker.topics.registry.get("shop", "orders")) == []

    run(scenario)


def test_a_namespace_that_is_made_again_at_once_keeps_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage())
        await inside(client)
        forget, made = client.broker.mqtt.forget_namespace, []

        async def make_again() -> None:
            await client.call(calls.CreateNamespace(name="shop"))
            await client.call(access_calls.SetQuota(namespace="shop", topics=7))

        async def forget_while_it_is_made(namespace: str) -> None:
            await forget(namespace)
            if namespace not in client.broker.topics.registry.namespaces:
                made.append(asyncio.ensure_future(make_again()))
                await asyncio.wait(made, timeout=0.1)  # as long as it may take; it may have to wait for us

        monkeypatch.setattr(client.broker.mqtt, "forget_namespace", forget_while_it_is_made)
        await client.call(calls.DeleteNamespace(name="shop", force=True))
        await made[0]
        quota = await client.call(access_calls.ShowQuota(namespace="shop"))
        assert isinstance(quota, access_calls.QuotaInfo)
        assert quota.topics == 7

    run(scenario)


def test_a_webhook_that_is_made_while_its_namespace_goes_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        shop = await inside(client)
        await shop.call(calls.CreateTopic(name="orders"))
        hooks = client.broker.webhooks
        record, recording, go = hooks._record, asyncio.Event(), asyncio.Event()

        async def record_late(webhook: Webhook) -> None:
            recording.set()
            await go.wait()
            await record(webhook)

        monkeypatch.setattr(hooks, "_record", record_late)
        making = asyncio.ensure_future(shop.call(CreateWebhook(topic="orders", url="http://127.0.0.1:9/")))
        await recording.wait()
        await client.call(calls.DeleteNamespace(name="shop", force=True))
        go.set()
        with pytest.raises(NamespaceNotFound):
            await making
        shop = await inside(client)
        assert await shop.call(ListWebhooks()) == []
        client = await after_kill(client, storage)
        assert await within(client).call(ListWebhooks()) == []

    run(scenario)


def test_groups_of_a_topic_go_with_it_although_that_was_refused_at_first() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        await client.open_queue(group="workers")
        storage.inject(Fault.WRITE_ERROR, when=lambda operation: operation.path.startswith("state/queues"))
        with pytest.raises(StorageFailed):
            await client.call(calls.DeleteTopic(name="orders", force=True))
        await client.call(calls.DeleteTopic(name="orders", force=True))
        await client.call(calls.CreateTopic(name="orders"))
        client = await after_kill(client, storage)
        assert client.broker.queues.registry.on_topic(client.broker.topics.registry.get("default", "orders")) == []

    run(scenario)


def test_a_topic_that_is_refused_leaves_no_namespace_behind() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        shop = within(client)
        with pytest.raises(InvalidName):
            await shop.call(calls.CreateTopic(name="no name"))
        storage.inject(Fault.WRITE_ERROR, when=lambda operation: operation.path.startswith("state/topics"))
        with pytest.raises(StorageFailed):
            await shop.call(calls.CreateTopic(name="orders"))
        assert await client.call(calls.ListNamespaces()) == ["default"]
        await shop.call(calls.CreateTopic(name="orders"))
        assert await client.call(calls.ListNamespaces()) == ["default", "shop"]

    run(scenario)


def test_a_topic_whose_files_are_being_removed_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much a namespace stores is measured meanwhile."""

    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"x"])
        await client.call(access_calls.SetQuota(namespace="default", storage_bytes=1_000_000))
        removing, go = asyncio.Event(), threading.Event()
        loop, remove_tree = asyncio.get_running_loop(), storage.remove_tree

        def remove_slowly(directory: str) -> None:
            loop.call_soon_threadsafe(removing.set)
            go.wait(10)
            remove_tree(directory)

        def is_gone(path: str) -> int:
            raise FileNotFoundError(path)

        monkeypatch.setattr(storage, "remove_tree", remove_slowly)
        going = asyncio.ensure_future(client.call(calls.DeleteTopic(name="orders")))
        await removing.wait()
        monkeypatch.setattr(storage, "size", is_gone)
        try:
            await client.broker.quotas.measure()
        finally:
            go.set()
        await going

    run(scenario)


def _refuse(_: str) -> None:
    raise OSError(5, "Input/output error")


def _first(topic: str) -> calls.OffsetEntry:
    return calls.OffsetEntry(topic=topic, partition=0, offset=0)
