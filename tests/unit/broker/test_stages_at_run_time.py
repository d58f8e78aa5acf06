"""Stages: nobody sees what is staged, and then everybody sees all of it, once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millstream.broker.broker import Broker
from millstream.broker.partition import Partition
from millstream.config import Settings
from millstream.errors import (
    InvalidName,
    OutOfSequence,
    PartitionNotFound,
    PayloadTooLarge,
    QueueFull,
    QuotaExceeded,
    ReadOnly,
    StageLost,
    TopicNotFound,
)
from millstream.ids import SCHEDULES
from millstream.records import Batch
from millstream.testing.skipping import SkippingClock
from millstream.testing.storage import SimulatedStorage
from millstream.wire.calls import CreateNamespace, CreateTopic, DeleteNamespace, DeleteTopic
from millstream.wire.stage_calls import AbortStages, ListStages, OpenStage, QueryInfo, StagePart, StagesAborted
from millstream.wire.subscription_calls import SetMode
from tests.simulated_broker import Client
from tests.staging import open_stage, publish, put, seen, stage_values


def in_broker(scenario: Callable[[Client], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        made = Settings.model_validate({"storage": {"free_bytes_min": 0}, "stages": settings})
        broker = Broker(made, SimulatedStorage(), clock=SkippingClock())
        await broker.start()
        client = Client(broker)
        await client.call(CreateTopic(name="orders"))
        await scenario(client)
        await broker.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_query_whose_disk_has_failed_keeps_no_other_from_expiring() -> None:
    async def scenario(client: Client) -> None:
        failed = await stage_values(client, 0, [b"a"], query="failed")
        await stage_values(client, 0, [b"b"], query="other")
        client.broker.stages._of_stage[failed.stage].log.fail("the disk failed to sync")
        clock = client.broker._clock
        assert isinstance(clock, SkippingClock)
        clock.advance("2m")
        await client.broker.stages.sweep()
        assert {query.query: len(query.stages) for query in await queries(client)} == {"failed": 1, "other": 0}

    in_broker(scenario, ttl_ms="1m")


async def queries(client: Client, **options: Any) -> list[QueryInfo]:
    found = await client.call(ListStages(**options))
    assert isinstance(found, list)
    return found


def test_what_is_staged_is_seen_when_it_is_published_and_not_before() -> None:
    async def scenario(client: Client) -> None:
        one = await stage_values(client, 0, [b"a", b"b"], [b"c"], task=0)
        two = await stage_values(client, 0, [b"d"], task=1)
        assert await client.read_all() == []
        answer = await publish(client, 0, one, two)
        assert (answer.published, answer.already, answer.messages, answer.lost) == (True, False, 4, 0)
        assert [(it.topic, it.partition, it.first, it.until) for it in answer.offsets] == [("orders", 0, 0, 4)]
        assert await client.read_all() == [b"a", b"b", b"c", b"d"]

    in_broker(scenario)


def test_a_batch_is_published_once_however_often_it_is_asked_for() -> None:
    async def scenario(client: Client) -> None:
        one = await stage_values(client, 3, [b"a"])
        first = await publish(client, 3, one)
        again = await publish(client, 3, one)
        assert (again.already, again.offsets) == (True, first.offsets)
        assert (await publish(client, 2)).already, "batches come in the order of their numbers"
        opened = await client.call(OpenStage(query="q", batch=3))
        assert opened.already  # type: ignore[attr-defined]
        assert await client.read_all() == [b"a"]
        await publish(client, 4, await stage_values(client, 4, [b"b"]))
        assert await client.read_all() == [b"a", b"b"]

    in_broker(scenario)


def test_two_who_publish_the_same_batch_at_once_publish_it_once() -> None:
    async def scenario(client: Client) -> None:
        one, two = await stage_values(client, 0, [b"a"]), await stage_values(client, 0, [b"a"])
        answers = await asyncio.gather(publish(client, 0, one), publish(client, 0, two))
        assert [answer.already for answer in answers] == [False, True]
        assert await client.read_all() == [b"a"]

    in_broker(scenario)


def test_attempts_that_are_not_named_are_forgotten() -> None:
    async def scenario(client: Client) -> None:
        loser = await stage_values(client, 0, [b"half"])
        winner = await stage_values(client, 0, [b"whole"])
        await publish(client, 0, winner)
        assert await client.read_all() == [b"whole"]
        with pytest.raises(StageLost):
            put(client, loser.stage, [b"late"])
        (query,) = await queries(client)
        assert (query.published, query.stages, query.bytes) == (0, [], 0)

    in_broker(scenario)


def test_a_stage_that_is_not_what_its_task_says_is_not_published() -> None:
    async def scenario(client: Client) -> None:
        part = await stage_values(client, 0, [b"a"])
        for wrong in (
            StagePart(stage=part.stage, batches=2, messages=2),
            StagePart(stage="1-0", batches=1, messages=1),
        ):
            with pytest.raises(StageLost):
                await publish(client, 0, wrong)
        with pytest.raises(StageLost, match="batch 0"):
            await publish(client, 1, part)
        assert await client.read_all() == []
        await publish(client, 0, part)
        assert await client.read_all() == [b"a"]

    in_broker(scenario)


def test_a_batch_without_messages_is_a_batch() -> None:
    async def scenario(client: Client) -> None:
        empty = StagePart(stage=await open_stage(client, 0), batches=0, messages=0)
        assert (await publish(client, 0, empty)).messages == 0
        assert (await publish(client, 1)).published
        assert (await queries(client))[0].published == 1

    in_broker(scenario)


def test_queries_do_not_know_of_each_other() -> None:
    async def scenario(client: Client) -> None:
        parts = {query: await stage_values(client, 0, [query.encode()], query=query) for query in ("a", "b")}
        with pytest.raises(StageLost):
            await publish(client, 0, parts["b"], query="a")
        for query, part in parts.items():
            assert not (await publish(client, 0, part, query=query)).already
        assert await client.read_all() == [b"a", b"b"]
        assert {query.query for query in await queries(client)} == {"a", "b"}
        assert [query.query for query in await queries(client, query="b")] == ["b"]

    in_broker(scenario)


def test_what_is_put_again_is_in_the_stage_once() -> None:
    async def scenario(client: Client) -> None:
        stage = await open_stage(client)
        sent = [put(client, stage, [b"a", b"b"], producer=1 << 16, first_sequence=0) for _ in range(2)]
        assert await asyncio.gather(*sent) == [0, 0], "the second came while the first was on its way"
        assert await put(client, stage, [b"c"], producer=1 << 16, first_sequence=2) == 2
        assert await put(client, stage, [b"a", b"b"], producer=1 << 16, first_sequence=0) == 0
        with pytest.raises(OutOfSequence):
            put(client, stage, [b"e"], producer=1 << 16, first_sequence=4)
        await publish(client, 0, StagePart(stage=stage, batches=2, messages=3))
        assert await client.read_all() == [b"a", b"b", b"c"]

    in_broker(scenario)


def test_a_batch_goes_to_many_topics_and_partitions_with_all_it_has() -> None:
    async def scenario(client: Client) -> None:
        await client.call(CreateTopic(name="other", partitions=3))
        stage = await open_stage(client)
        await put(client, stage, [b"x", b"y"], topic="other", partition=2, priorities=[1, 4], keys=[b"k", None])
        await put(client, stage, [b"a"])
        answer = await publish(client, 0, StagePart(stage=stage, batches=2, messages=3))
        assert [(it.topic, it.partition, it.messages) for it in answer.offsets] == [("orders", 0, 1), ("other", 2, 2)]
        log = client.broker.topics.partition("default", "other", 2).log
        batch = Batch.parse(log.read(0, 1 << 20, before=2).buffers[0])
        assert (batch.values(), list(batch.priorities() or ()), batch.keys()) == ([b"x", b"y"], [1, 4], [b"k", None])

    in_broker(scenario)


def test_scheduled_messages_come_when_they_are_due() -> None:
    async def scenario(client: Client) -> None:
        now_us = client.broker.now_us()
        stage = await open_stage(client)
        await put(client, stage, [b"later"], partition=SCHEDULES, deliver_at_us=[now_us + 200_000])
        await publish(client, 0, StagePart(stage=stage, batches=1, messages=1))
        assert await client.read_all() == []
        await seen(client, 1)
        assert client.broker.now_us() >= now_us + 200_000
        assert await client.read_all() == [b"later"]

    in_broker(scenario)


def test_what_could_not_be_stored_is_refused_when_it_is_put() -> None:
    async def scenario(client: Client) -> None:
        stage = await open_stage(client)
        with pytest.raises(TopicNotFound):
            put(client, stage, [b"a"], topic="nowhere")
        with pytest.raises(PartitionNotFound):
            put(client, stage, [b"a"], partition=7)
        with pytest.raises(PayloadTooLarge):
            put(client, stage, [b"a" * (2 << 20)])
        with pytest.raises(StageLost):
            put(client, "no-such", [b"a"])
        assert await put(client, stage, [b"a"]) == 0, "the stage is as good as before"

    in_broker(scenario)


def test_an_abort_forgets_stages_unless_they_are_published() -> None:
    async def scenario(client: Client) -> None:
        one, two = await stage_values(client, 0, [b"a"], task=0), await stage_values(client, 0, [b"b"], task=1)
        assert await client.call(AbortStages(query="q", batch=0, stages=[one.stage])) == StagesAborted(aborted=1)
        with pytest.raises(StageLost):
            await publish(client, 0, one, two)
        await publish(client, 0, two)
        answer = await client.call(AbortStages(query="q", batch=0))
        assert answer == StagesAborted(aborted=0, published=True)
        assert await client.call(AbortStages(query="never", batch=0)) == StagesAborted(aborted=0)
        assert await client.read_all() == [b"b"]

    in_broker(scenario)


def test_stages_expire_and_long_silent_queries_are_forgotten_with_their_files() -> None:
    async def scenario(client: Client) -> None:
        stages, storage = client.broker.stages, client.broker._life.storage
        part = await stage_values(client, 0, [b"a"])
        clock = client.broker._clock
        assert isinstance(clock, SkippingClock)
        clock.advance("59s")
        await put(client, part.stage, [b"b"])
        clock.advance("59s")
        await stages.sweep()
        assert (await queries(client))[0].messages == 2, "what is still being filled stays"
        clock.advance("61s")
        await stages.sweep()
        assert client.broker.metrics.stages_expired == 1
        with pytest.raises(StageLost):
            await publish(client, 0, part)
        await stages.sweep()
        assert storage.names("stages") == [], "nothing is staged, so there is nothing to keep"
        await publish(client, 0, await stage_values(client, 0, [b"c"]))
        assert (await queries(client))[0].published == 0
        clock.advance("2h")
        await stages.sweep()
        assert await queries(client) == []
        assert storage.names("stages") == []

    in_broker(scenario, ttl_ms="1m", query_ttl_ms="1h")


def test_limits_are_kept() -> None:
    async def scenario(client: Client) -> None:
        stage = await open_stage(client)
        await put(client, stage, [b"a" * 700_000])
        with pytest.raises(QuotaExceeded, match=r"stages\.bytes_max"):
            put(client, stage, [b"a" * 700_000])
        await open_stage(client, query="second")
        with pytest.raises(QuotaExceeded, match=r"stages\.stages_max"):
            await open_stage(client)
        with pytest.raises(QuotaExceeded, match=r"stages\.queries_max"):
            await open_stage(client, query="third")
        await client.call(AbortStages(query="second", batch=0))
        await open_stage(client, query="third")
        assert {query.query for query in await queries(client)} == {"q", "third"}

    in_broker(scenario, bytes_max="1MiB", stages_max=2, queries_max=2)


def test_jobs_without_a_name_make_room_before_those_that_may_come_back() -> None:
    async def scenario(client: Client) -> None:
        clock = client.broker._clock
        assert isinstance(clock, SkippingClock)

        async def job(name: str) -> None:
            clock.advance("1s")
            await publish(client, 0, await stage_values(client, 0, [b"a"], query=name), query=name)

        drawn = [f"spark-{number:032x}" for number in range(3)]
        for name in ("backfill", drawn[0], "daily", drawn[1]):
            await job(name)
        clock.advance("10m")
        await job(drawn[2])
        await job("weekly")
        assert {query.query for query in await queries(client)} == {"backfill", "daily", drawn[2], "weekly"}
        await job("hourly")
        known = {query.query for query in await queries(client)}
        assert known == {"daily", drawn[2], "weekly", "hourly"}, "it may have had no answer yet"

    in_broker(scenario, queries_max=4)


def test_a_full_topic_takes_no_batch_and_the_batch_can_be_published_later() -> None:
    async def scenario(client: Client) -> None:
        await client.call(CreateTopic(name="small", config={"max_depth": 2}))
        first = await open_stage(client)
        await put(client, first, [b"a"], topic="small")
        await publish(client, 0, StagePart(stage=first, batches=1, messages=1))
        stage = await open_stage(client, batch=1)
        await put(client, stage, [b"b", b"c"], topic="small")
        part = StagePart(stage=stage, batches=1, messages=2)
        with pytest.raises(QueueFull):
            await publish(client, 1, part)
        assert (await queries(client))[0].published == 0

    in_broker(scenario)


@pytest.mark.parametrize(("later", "error"), [(False, QueueFull), (True, QuotaExceeded)])
def test_a_batch_for_many_partitions_is_counted_as_a_whole(later: bool, error: type[Exception]) -> None:
    async def scenario() -> None:
        settings = Settings.model_validate({"storage": {"free_bytes_min": 0}, "schedules": {"max_pending": 15}})
        broker = Broker(settings, SimulatedStorage(), clock=SkippingClock())
        await broker.start()
        client = Client(broker)
        await client.call(CreateTopic(name="small", partitions=8, config={"max_depth": 15}))
        await client.send([b"x"], topic="small")
        place, columns = 0, {}
        if later:
            place, columns = SCHEDULES, {"deliver_at_us": [broker.now_us() + 3_600_000_000] * 10}
        many, few = await open_stage(client), await open_stage(client, task=1)
        for stage, partitions in ((many, range(8)), (few, range(1))):
            for number in partitions:
                await put(client, stage, [b"y"] * 10, topic="small", partition=place | number, **columns)
        with pytest.raises(error):
            await publish(client, 0, StagePart(stage=many, batches=8, messages=80))
        assert (await publish(client, 0, StagePart(stage=few, batches=1, messages=10))).messages == 10
        await broker.stop()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_nothing_is_staged_or_published_while_the_broker_takes_no_messages() -> None:
    async def scenario(client: Client) -> None:
        part = await stage_values(client, 0, [b"a"])
        await client.call(SetMode(mode="maintenance"))
        with pytest.raises(ReadOnly):
            put(client, part.stage, [b"b"])
        with pytest.raises(ReadOnly):
            await publish(client, 0, part)
        await client.call(SetMode(mode="normal"))
        assert (await publish(client, 0, part)).messages == 1

    in_broker(scenario)


def test_a_topic_that_is_gone_before_the_batch_is_published_is_said_to_be() -> None:
    async def scenario(client: Client) -> None:
        await client.call(CreateTopic(name="other"))
        stage = await open_stage(client)
        await put(client, stage, [b"x"], topic="other")
        await client.call(DeleteTopic(name="other"))
        with pytest.raises(TopicNotFound):
            await publish(client, 0, StagePart(stage=stage, batches=1, messages=1))

    in_broker(scenario)


def test_what_has_nowhere_to_go_is_counted_and_the_next_batch_is_as_safe_as_ever() -> None:
    async def scenario(client: Client) -> None:
        await client.call(CreateTopic(name="other"))
        stage = await open_stage(client)
        await put(client, stage, [b"a"])
        await put(client, stage, [b"x", b"y"], topic="other")
        topics = client.broker.topics
        resolve = topics.partition

        def gone(namespace: str, name: str, number: int) -> Partition:
            if name == "other":
                raise TopicNotFound("it was deleted in this very moment")
            return resolve(namespace, name, number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(topics, "partition", gone)
            answer = await publish(client, 0, StagePart(stage=stage, batches=2, messages=3))
        assert (answer.published, answer.messages, answer.lost) == (True, 1, 2)
        await publish(client, 1, await stage_values(client, 1, [b"b"]))
        log = topics.partition("default", "orders", 0).log
        batches = [Batch.parse(log.read(offset, 1, before=offset + 1).buffers[0]) for offset in range(2)]
        assert [(batch.values(), batch.header.first_sequence) for batch in batches] == [([b"a"], 0), ([b"b"], 0)]
        assert 0 < batches[0].header.producer < batches[1].header.producer

    in_broker(scenario)


def test_no_topic_is_called_like_a_stage() -> None:
    async def scenario(client: Client) -> None:
        with pytest.raises(InvalidName, match="stages"):
            await client.call(CreateTopic(name="_stage.1-2"))
        with pytest.raises(InvalidName):
            await open_stage(client, query="a b")

    in_broker(scenario)


def test_a_namespace_takes_its_queries_along() -> None:
    async def scenario(client: Client) -> None:
        await client.call(CreateNamespace(name="team"))
        client.session.namespace = "team"
        await client.call(CreateTopic(name="orders"))
        await stage_values(client, 0, [b"a"])
        await client.call(DeleteNamespace(name="team", force=True))
        await client.call(CreateNamespace(name="team"))
        assert await queries(client) == []
        assert client.broker.stages.bytes == 0

    in_broker(scenario)
