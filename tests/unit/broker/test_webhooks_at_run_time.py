"""Webhooks under concurrency: one that is deleted sends nothing more, whatever was under way."""

from __future__ import annotations

import asyncio

import pytest

from millstream.broker.webhooks import webhooks
from millstream.broker.webhooks.runner import Runner
from millstream.errors import StorageFailed, WebhookNotFound
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls, queue_calls, webhook_calls
from tests.simulated_broker import Client, after_kill, run, started
from tests.waiting import eventually_async


async def create(client: Client) -> str:
    await client.call(calls.CreateTopic(name="orders"))
    made = await client.call(webhook_calls.CreateWebhook(topic="orders", group="g", url="http://127.0.0.1:9/"))
    assert isinstance(made, webhook_calls.WebhookCreated)
    return made.webhook.id


async def consumers(client: Client) -> list[str]:
    """Who would be given the messages of the group."""
    info = await client.call(queue_calls.DescribeQueue(topic="orders", group="g"))
    assert isinstance(info, queue_calls.QueueInfo)
    return [consumer.client_id for consumer in info.consumers]


def test_a_webhook_that_was_deleted_before_it_could_begin_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue could not be opened after a start, which is tried again and again."""
    tries: list[str] = []
    healed = asyncio.Event()
    open_queue = Runner.open

    async def opening(runner: Runner, start: str = "") -> None:
        tries.append(runner.webhook.id)
        if not healed.is_set():
            raise StorageFailed("the disk cannot be read just now")
        await open_queue(runner, start)

    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        made = await create(client)
        monkeypatch.setattr(Runner, "open", opening)
        monkeypatch.setattr(webhooks, "_RETRY_S", 0.01)
        client = await after_kill(client, storage)
        await eventually_async(lambda: tries)
        await client.call(webhook_calls.DeleteWebhook(id=made))
        healed.set()
        await eventually_async(lambda: not client.broker.webhooks._tasks)
        assert await consumers(client) == []

    run(scenario)


def test_a_webhook_that_is_deleted_and_resumed_at_the_same_time_stays_deleted() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        made = await create(client)
        assert len(await consumers(client)) == 1
        paused, deleted, resumed = await asyncio.gather(
            client.call(webhook_calls.PauseWebhook(id=made, paused=True)),
            client.call(webhook_calls.DeleteWebhook(id=made)),
            client.call(webhook_calls.PauseWebhook(id=made, paused=False)),
            return_exceptions=True,
        )
        assert isinstance(paused, webhook_calls.WebhookInfo)
        assert deleted is None
        assert isinstance(resumed, WebhookNotFound)
        assert await consumers(client) == []
        client = await after_kill(client, storage)
        assert await client.call(webhook_calls.ListWebhooks()) == []

    run(scenario)
