"""Limits hold whichever way messages take, and also for those that are on their way."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from millstream.broker.access import control
from millstream.broker.broker import Broker
from millstream.broker.letters import replays
from millstream.broker.registry import Topic
from millstream.broker.schedules import recurring
from millstream.broker.traffic import subscriptions
from millstream.broker.webhooks import webhooks
from millstream.clock import Clock
from millstream.config import Settings
from millstream.errors import MillstreamError, QuotaExceeded, StorageFailed, Throttled
from millstream.ids import SCHEDULES
from millstream.records import encode_batch
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls
from millstream.wire.access_calls import CreateKey, QuotaInfo, SetQuota, ShowQuota
from millstream.wire.letter_calls import ReplayLetters
from millstream.wire.messages import PublishRequest
from millstream.wire.schedule_calls import Repeat
from millstream.wire.stage_calls import StagePart
from millstream.wire.subscription_calls import OpenInbox, OpenSubscription, Subscribed
from millstream.wire.webhook_calls import CreateWebhook
from tests.simulated_broker import Client, run
from tests.staging import open_stage, publish, put


class SetClock:
    """A clock that somebody sets, on a machine where time passes when the test says so."""

    def __init__(self) -> None:
        self.set_us = 1_700_000_000_000_000
        self.passed_ms = 1_000

    def now_us(self) -> int:
        return self.set_us + self.passed_ms * 1000

    def monotonic_ms(self) -> int:
        return self.passed_ms

    elapsed_ms = monotonic_ms


async def limited(clock: Clock | None = None, **sections: dict[str, Any]) -> Client:
    """A broker with a topic `orders`, and with these settings."""
    settings = Settings.model_validate({"storage": {"free_bytes_min": 0}, **sections})
    broker = Broker(settings, SimulatedStorage(), rng=random.Random(1), clock=clock)
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
        await client.broker._life.committer.drain()
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


def test_what_comes_again_for_a_stage_takes_no_room_in_it() -> None:
    async def scenario() -> None:
        client = await limited()
        stage = await open_stage(client)
        for _ in range(3):
            await put(client, stage, [bytes(10_000)], producer=1 << 16)
        assert client.broker.stages.bytes == client.broker.stages.bytes_in("default") < 11_000

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


def test_a_client_opens_no_more_inboxes_than_it_may_have_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "PATTERNS_MAX", 3)

    async def scenario() -> None:
        client = await limited()
        await client.call(OpenSubscription(patterns=["a"]))
        assert await made_at_once(*(client.call(OpenInbox()) for _ in range(4))) == 2
        with pytest.raises(QuotaExceeded, match="3 patterns and inboxes"):
            await client.call(OpenSubscription(patterns=["b"]))
        assert isinstance(await Client(client.broker).call(OpenInbox()), Subscribed)

    run(scenario)


def test_a_clock_that_is_set_back_keeps_nobody_out() -> None:
    async def scenario() -> None:
        clock = SetClock()
        client = await limited(clock, limits={"requests_per_s_per_address": 2})
        admit = client.broker.access.admit_request
        for _ in range(2):
            admit("10.0.0.1:1")
        with pytest.raises(Throttled):
            admit("10.0.0.1:1")
        clock.set_us -= 3_600_000_000
        clock.passed_ms += 1_000
        admit("10.0.0.1:1")

    run(scenario)


async def made_at_once(*made: Awaitable[object]) -> int:
    """How many of these calls were not refused for being too many."""
    answers = await asyncio.gather(*made, return_exceptions=True)
    assert all(isinstance(answer, QuotaExceeded) or not isinstance(answer, Exception) for answer in answers)
    return sum(not isinstance(answer, Exception) for answer in answers)


def test_keys_and_replays_that_are_made_at_once_are_no_more_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "KEYS_MAX", 2)
    monkeypatch.setattr(replays, "_RUNNING_MAX", 2)

    async def scenario() -> None:
        client = await limited()
        key = CreateKey(name="k", roles=["admin"])
        assert await made_at_once(*(client.call(key) for _ in range(4))) == 2
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await client.send([b"x"] * 3, topic="orders.dlq")
        replay = ReplayLetters(everything=True, target="orders", rate=0.001)
        assert await made_at_once(*(client.call(replay) for _ in range(4))) == 2
        await client.broker.stop()

    run(scenario)


def test_recurring_schedules_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurring, "_SCHEDULES_MAX", 2)

    async def scenario() -> None:
        client = await limited()
        made = (Repeat(name=f"s{number}", topic="orders", cron="0 0 1 1 *", value=b"x") for number in range(4))
        assert await made_at_once(*map(client.call, made)) == 2
        await client.call(Repeat(name="s0", topic="orders", cron="0 0 2 1 *", value=b"y"))  # is there already

    run(scenario)


def test_namespaces_are_no_more_than_there_may_be_also_if_they_are_made_with_their_first_topic() -> None:
    async def scenario() -> None:
        client = await limited(topics={"max_namespaces": 3})
        made = (client.call(calls.CreateNamespace(name=f"shop-{number}")) for number in range(4))
        assert await made_at_once(*made) == 2
        other = client.broker.open_session(namespace="other", client_id="", address="", push=lambda _: None)
        with pytest.raises(QuotaExceeded, match=r"3 namespaces already \(topics.max_namespaces\)"):
            await client.broker.call(other, calls.Metadata(topics=["orders"], create=True))
        await client.call(calls.DeleteNamespace(name="shop-0"))
        await client.broker.call(other, calls.Metadata(topics=["orders"], create=True))
        await client.broker.stop()

    run(scenario)


def test_stream_groups_are_no_more_than_there_may_be_however_they_come() -> None:
    async def scenario() -> None:
        client = await limited(groups={"max_groups": 3})
        offsets = [calls.OffsetEntry(topic="orders", partition=0, offset=0)]
        joined = [calls.JoinGroup(group=f"joined-{number}", topics=["orders"]) for number in range(2)]
        committed = [calls.CommitOffsets(group=f"committed-{number}", offsets=offsets) for number in range(2)]
        assert await made_at_once(*map(client.call, (*joined, *committed))) == 3
        with pytest.raises(QuotaExceeded, match=r"3 stream groups already \(groups.max_groups\)"):
            await client.call(committed[1])
        await client.call(committed[0])  # who is in is not refused
        await client.call(calls.DeleteGroup(name="committed-0"))
        await client.call(committed[1])
        await client.broker.stop()

    run(scenario)


def test_webhooks_that_are_made_at_once_are_no_more_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "_WEBHOOKS_MAX", 2)

    async def scenario() -> None:
        client = await limited(webhooks={"allow_private": True})
        for topic in ("nowhere", "nowhere either"):  # one that is refused for something else takes nobody's place
            with pytest.raises(MillstreamError):
                await client.call(CreateWebhook(topic=topic, url="http://127.0.0.1:9/"))
        webhook = CreateWebhook(topic="orders", url="http://127.0.0.1:9/")
        assert await made_at_once(*(client.call(webhook) for _ in range(4))) == 2
        assert await made_at_once(client.call(webhook)) == 0
        await client.broker.stop()

    run(scenario)


def test_a_topic_that_cannot_be_measured_keeps_no_other_from_being_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        client = await limited()
        for name in ("broken", "well"):
            await client.call(calls.CreateTopic(name=name, config={"throttle_depth": 1}))
            await client.send([b"x"] * 9, topic=name)
        queues = client.broker.queues
        open_topic = queues.open

        async def fail(topic: Topic) -> None:
            if topic.name == "broken":
                raise StorageFailed("cannot open the log")
            await open_topic(topic)

        monkeypatch.setattr(queues, "open", fail)
        await client.broker.flow.sample()
        assert [throttle.controller.depth for throttle in client.broker.flow._throttles.values()] == [0, 9]

    run(scenario)


def test_a_namespace_has_no_more_partitions_than_its_quota_however_it_gets_them() -> None:
    async def scenario() -> None:
        client = await limited()
        await client.call(SetQuota(namespace="default", partitions=10))
        await client.call(calls.CreateTopic(name="wide", partitions=8))
        with pytest.raises(QuotaExceeded, match="9 partitions of its quota of 10, and 2 more are too many"):
            await client.call(calls.CreateTopic(name="more", partitions=2))
        with pytest.raises(QuotaExceeded, match="9 partitions of its quota of 10"):
            await client.call(calls.AlterTopic(name="orders", partitions=3))
        await client.call(calls.AlterTopic(name="orders", partitions=2))
        await client.call(calls.AlterTopic(name="orders", config={"retention_ms": 1000}))  # takes none
        shown = await client.call(ShowQuota(namespace="default"))
        assert isinstance(shown, QuotaInfo)
        assert (shown.partitions, shown.partitions_used, shown.refused) == (10, 10, 2)
        await client.call(calls.DeleteTopic(name="wide"))
        await client.call(calls.CreateTopic(name="more", partitions=8))
        await client.broker.stop()

    run(scenario)


def test_the_broker_holds_so_many_partitions_and_no_more() -> None:
    async def scenario() -> None:
        client = await limited(topics={"max_partitions": 5})
        await client.call(calls.CreateTopic(name="wide", partitions=3))
        with pytest.raises(QuotaExceeded, match=r"holds 4 partitions, .* more than 5 \(topics.max_partitions\)"):
            await client.call(calls.CreateTopic(name="more", partitions=2))
        with pytest.raises(QuotaExceeded, match=r"topics.max_partitions"):
            await client.call(calls.AlterTopic(name="orders", partitions=3))
        await client.call(calls.AlterTopic(name="orders", partitions=2))
        await client.call(calls.DeleteTopic(name="wide"))
        await client.call(calls.CreateTopic(name="more", partitions=3))
        await client.broker.stop()

    run(scenario)
