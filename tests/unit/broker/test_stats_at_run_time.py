"""What the broker counts and measures, in virtual time: totals that only grow, ages that are right after a pause."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from millstream import aio
from millstream.config import Settings
from millstream.testing import virtual_broker, virtual_time


async def samples(client: aio.Client) -> dict[str, float]:
    """Of the topic `orders`, by metric; of several groups the last."""
    text = await client.metrics()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("topic") == "orders"
    }


@virtual_time
async def test_a_queue_group_that_is_deleted_does_not_take_its_share_of_the_topics_totals_along() -> None:
    """Prometheus would take a total that goes back for a restart, and count all that is left of it once more."""
    async with virtual_broker() as broker:
        client = await broker.connect()
        await client.publish_many("orders", [b"1", b"2", b"3", b"4"])
        for group in ("billing", "audit"):
            async with await client.queue("orders", group=group) as queue:
                good, bad = await queue.lease(2, wait=5)
                await good.ack(wait=True)
                await bad.reject("no", wait=True)
        before = await client.overview()
        assert (before.totals.acked, before.totals.failed, before.totals.dead_lettered) == (2, 2, 2)
        assert (await samples(client))["millstream_consumed_total"] == 4
        await client.queues.delete("orders", "audit")
        after = await client.overview()
        assert after.totals == before.totals
        assert (await samples(client))["millstream_consumed_total"] == 4
        assert after.queue_groups == before.queue_groups - 1


@pytest.mark.parametrize("pause_s", [600, pytest.param(5 * 3600, marks=pytest.mark.slow)])
@virtual_time
async def test_the_last_message_before_a_pause_is_as_old_as_the_pause_is_long(pause_s: int) -> None:
    """It seemed to have come in the middle between the messages around it that the broker remembers."""
    async with virtual_broker() as broker:
        client = await broker.connect()
        for value in (b"first", b"last"):
            await client.publish("orders", value)
        queue = await client.queue("orders")
        message = await queue.next(timeout_s=5)
        assert message is not None
        await message.ack(wait=True)
        await broker.clock.advance(pause_s)
        for _ in range(200):  # more than there are marks
            await client.publish("orders", b"later")
            await broker.clock.advance("1s")
        (group,) = (await client.overview()).furthest_behind
        assert abs(group.oldest_ms - (pause_s + 200) * 1000) < 1000


@virtual_time
async def test_a_new_topic_takes_no_series_from_an_older_one_of_another_namespace() -> None:
    settings = Settings.model_validate({"server": {"port": 9092}, "metrics": {"series_max": 2}})
    async with virtual_broker(settings) as broker:
        client = await broker.connect()
        await client.create_namespace("shop")
        other = await broker.connect(namespace="shop")
        for owner, name in ((client, "first"), (other, "second"), (client, "third")):
            await owner.create_topic(name)
            await broker.clock.advance("1s")
        families = text_string_to_metric_families(await client.metrics())
        (shown,) = [family.samples for family in families if family.name == "millstream_messages"]
        assert [sample.labels["topic"] for sample in shown] == ["first", "second", "_other"]


@virtual_time
async def test_what_happens_during_a_measurement_is_in_it_or_in_the_next_one() -> None:
    for steps in range(8):
        async with virtual_broker() as broker:
            client = await broker.connect()
            running = broker._machine.broker
            assert running is not None
            await broker.clock.advance("12s")
            measuring = asyncio.ensure_future(running.stats.sample())
            for _ in range(steps):
                await asyncio.sleep(0)
            running.metrics.latency.publish.observe(1_000_000)
            await measuring
            await broker.clock.advance("6s")
            history = await client.history("publish_p99_ms")
            assert max(point.max for point in history.points) > 500, f"after {steps} steps"


@virtual_time
async def test_a_stream_group_that_is_paused_is_shown_as_paused() -> None:
    async with virtual_broker() as broker:
        client = await broker.connect()
        await client.publish("orders", b"1")
        async with client.stream("orders", group="billing", start="earliest") as stream:
            message = await stream.next(timeout_s=5)
            assert message is not None
            await stream.commit(message)
            await client.pause_group("billing")
            await client.publish("orders", b"2")
            await broker.clock.advance("10s")
            (group,) = (await client.overview()).furthest_behind
            assert (group.lag, group.state) == (1, "paused")
            await client.resume_group("billing")
            await broker.clock.advance("10s")
            (group,) = (await client.overview()).furthest_behind
            assert group.state == "active"


@virtual_time
async def test_dead_letters_of_a_topic_with_a_name_of_its_own_are_counted_after_a_restart() -> None:
    """Without what was purged, also when somebody reads the topic."""
    async with virtual_broker() as broker:
        client = await broker.connect()
        await client.create_topic("orders", config={"dead_letter_topic": "graves"})
        queue = await client.queue("orders")
        for value, name in ((b"1", "purged"), (b"2", "kept")):
            await client.publish("orders", value)
            message = await queue.next(timeout_s=5)
            assert message is not None
            await message.reject(name, wait=True)
            await broker.clock.advance("1s")
        await client.dead_letters.purge(error="purged")
        assert (await client.overview()).dead_letters == 1
        await broker.restart()
        await broker.clock.advance("20s")
        assert (await client.overview()).dead_letters == 1
        assert len([letter async for letter in client.stream("graves", start="earliest", timeout_s=1)]) == 2
        assert (await client.overview()).dead_letters == 1


@virtual_time
async def test_the_history_of_a_queue_group_is_not_that_of_a_stream_group_of_its_name() -> None:
    async with virtual_broker() as broker:
        client = await broker.connect()
        await client.create_topic("orders")
        await client.queue("orders", group="billing")
        await client.publish_many("orders", [b"x"] * 50)
        for group, read in (("billing", 47), ("audit", 45)):
            async with client.stream("orders", group=group, commit="manual", start="earliest") as stream:
                for _ in range(read):
                    await stream.next(timeout_s=5)
                await stream.commit()
        await broker.clock.advance("12s")
        for group, lag in (("billing", 50), ("audit", 5)):
            history = await client.history("lag", topic="orders", group=group)
            assert history.points[-1].avg == lag
