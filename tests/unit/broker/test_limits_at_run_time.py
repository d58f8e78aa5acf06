"""Limits hold whichever way messages take, and also for those that are on their way."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from millstream.broker.broker import Broker
from millstream.config import Settings
from millstream.errors import MillstreamError, QuotaExceeded, Throttled
from millstream.ids import SCHEDULES
from millstream.records import encode_batch
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls
from millstream.wire.access_calls import QuotaInfo, SetQuota, ShowQuota
from millstream.wire.messages import PublishRequest
from millstream.wire.stage_calls import StagePart
from millstream.wire.subscription_calls import OpenInbox, Subscribed
from tests.simulated_broker import Client, run
from tests.staging import open_stage, publish, put


async def limited(**sections: dict[str, Any]) -> Client:
    """A broker with a topic `orders`, and with these settings."""
    settings = Settings.model_validate({"storage": {"free_bytes_min": 0}, **sections})
    broker = Broker(settings, SimulatedStorage(), rng=random.Random(1))
    await broker.start()
    client = Client(broker)
    await client.call(calls.CreateTopic(name="orders"))
    return client


def in_an_hour(count: int) -> list[int]:
    return [int((time.time() + 3600) * 1e6)] * count


def test_a_publisher_with_a_window_schedules_no_more_than_may_be_pending() -> None:
    async def scenario() -> None:
        client = await limited(schedules={"max_pending": 10})
        answers: list[MillstreamError | None] = []
        refused = 0
        for _ in range(5):
            batch = encode_batch([b"x"] * 5, base_timestamp_us=1, deliver_at_us=in_an_hour(5))
            request = PublishRequest("orders", SCHEDULES, 1, 0, memoryview(batch))
            try:
                client.broker.publish(client.session, request, lambda error, *_: answers.append(error))
            except QuotaExceeded:
                refused += 1
        client.broker.flush()
        await client.broker._committer.drain()
        assert (answers, refused) == ([None, None], 3)

    run(scenario)


def test_stages_schedule_no_more_than_may_be_pending() -> None:
    async def scenario() -> None:
        client = await limited(schedules={"max_pending": 10})
        stage = await open_stage(client)
        for _ in range(3):
            await put(client, stage, [b"x"] * 5, partition=SCHEDULES, deliver_at_us=in_an_hour(5))
        with pytest.raises(QuotaExceeded, match="max_pending"):
            await publish(client, 0, StagePart(stage=stage, batches=3, messages=15))

    run(scenario)


def test_what_is_staged_counts_to_the_storage_of_its_namespace() -> None:
    async def scenario() -> None:
        client = await limited()
        await client.call(SetQuota(namespace="default", storage_bytes=50_000))
        stage = await open_stage(client)
        for _ in range(4):
            await put(client, stage, [bytes(10_000)])
            await client.broker.quotas.measure()
        with pytest.raises(QuotaExceeded, match="storage_bytes"):
            await put(client, stage, [bytes(10_000)])
        shown = await client.call(ShowQuota(namespace="default"))
        assert isinstance(shown, QuotaInfo)
        assert shown.storage_bytes_used > 40_000

    run(scenario)


def test_replies_to_inboxes_count_to_the_rates_of_their_namespace() -> None:
    async def scenario() -> None:
        client = await limited()
        opened = await client.call(OpenInbox())
        assert isinstance(opened, Subscribed)
        await client.call(SetQuota(namespace="default", publish_messages_per_s=5))
        with pytest.raises(Throttled):
            await asyncio.gather(*(client.send([b"x"], topic=opened.address, label=1) for _ in range(20)))

    run(scenario)
