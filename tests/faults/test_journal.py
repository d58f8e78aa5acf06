"""The journal of a partition, and moves between partitions, on a disk that loses power at the worst moments."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream.broker import journal as journal_module
from millstream.broker.broker import Broker
from millstream.broker.journal import Journal
from millstream.broker.partition import Partition
from millstream.broker.transfer import Target
from millstream.errors import MillstreamError, OutOfSequence, StorageFailed, TopicNotFound
from millstream.records import encode_batch
from millstream.testing.storage import Fault, PowerCut, SimulatedStorage
from millstream.wire import calls
from tests.simulated_broker import Client, after_power_cut, run, started


async def with_topics(storage: SimulatedStorage, *names: str) -> Client:
    client = await started(storage)
    for name in names:
        await client.call(calls.CreateTopic(name=name))
    return client


def journal_of(client: Client, topic: str = "orders") -> Journal:
    topics = client.broker.topics
    return topics.journal(topics.registry.get("default", topic), 0)


def moved(*values: bytes) -> bytearray:
    return encode_batch(list(values), base_timestamp_us=1)


def move(broker: Broker, *values: bytes, to: str = "archive", **options: Any) -> Any:
    topic = broker.topics.registry.get("default", "orders")
    return broker.topics.transfer(topic, 0).move(Target("default", to, 0), moved(*values), **options)


def test_durable_facts_survive_a_power_cut_with_everything_recorded_before_them() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await with_topics(storage, "orders")
        journal = journal_of(client)
        journal.record("thing/a", ["ack", 1])
        await journal.record_durably(("thing/a", ["fail", 2]), ("thing/b", {"paused": True}))
        journal.record("thing/a", ["ack", 3])
        client = await after_power_cut(client, storage, lose_everything=True)
        journal = journal_of(client)
        assert sorted(journal.entities) == ["thing/a", "thing/b"]
        assert list(journal.claim("thing/a", list)) == [["ack", 1], ["fail", 2]]
        assert list(journal.claim("thing/b", list)) == [{"paused": True}]

    run(scenario)


def test_facts_that_nobody_waits_for_are_written_by_a_clean_stop() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=2)
        client = await with_topics(storage, "orders")
        journal_of(client).record("thing/a", ["ack", 1])
        await client.broker.stop()
        client = await started(storage)
        assert list(journal_of(client).claim("thing/a", list)) == [["ack", 1]]

    run(scenario)


def test_a_forgotten_entity_does_not_come_back() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=3)
        client = await with_topics(storage, "orders")
        journal = journal_of(client)
        await journal.record_durably(("thing/a", 1), ("thing/b", 2))
        journal.forget("thing/a")
        await journal.record_durably(("thing/b", 3))
        client = await after_power_cut(client, storage, lose_everything=True)
        assert journal_of(client).entities == ["thing/b"]

    run(scenario)


@pytest.mark.parametrize("seed", range(20))
def test_a_snapshot_replaces_what_came_before_and_keeps_what_nobody_claimed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_GROWN_BYTES", 4096)

    async def scenario() -> None:
        storage = SimulatedStorage(seed=seed)
        client = await with_topics(storage, "orders")
        await journal_of(client).record_durably(("thing/idle", "as it was"))
        client = await after_power_cut(client, storage)
        journal = journal_of(client)
        total = 0
        facts = journal.claim("thing/busy", lambda: [["total", total]])
        assert list(facts) == []
        for number in range(200):
            await journal.record_durably(("thing/busy", ["add", number, "x" * 50]))
            total += number
        assert journal.partition.log.start_offset > 0, "nothing was ever removed"
        client = await after_power_cut(client, storage)
        journal = journal_of(client)
        assert list(journal.claim("thing/idle", list)) == ["as it was"]
        (kind, replayed), *added = journal.claim("thing/busy", list)
        assert kind == "total"
        assert replayed + sum(fact[1] for fact in added) == total

    run(scenario)


def test_a_full_disk_delays_facts_and_loses_none() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=4)
        client = await with_topics(storage, "orders")
        journal = journal_of(client)
        journal.record("thing/a", 1)
        storage.inject(Fault.NO_SPACE)
        with pytest.raises(StorageFailed):
            await journal.record_durably(("thing/a", "refused"))
        await journal.record_durably(("thing/a", 2))
        client = await after_power_cut(client, storage, lose_everything=True)
        assert list(journal_of(client).claim("thing/a", list)) == [1, 2]

    run(scenario)


def test_a_move_arrives_once_wherever_the_power_is_cut() -> None:
    """Cut after every single disk operation of a move: afterwards it has happened as a whole, or not at all."""

    async def scenario(cut_after: int) -> bool:
        storage = SimulatedStorage(seed=cut_after)
        client = await with_topics(storage, "orders", "archive")
        await move(client.broker, b"first")
        storage.inject(Fault.POWER_CUT, at=storage.operations + 1 + cut_after)
        recorded = False

        def on_recorded() -> None:
            nonlocal recorded
            recorded = True

        facts = [("thing/a", ["dead", 7])]
        try:
            await asyncio.wait_for(move(client.broker, b"second", facts=facts, on_recorded=on_recorded), 0.2)
            finished = True
        except (MillstreamError, PowerCut, TimeoutError):
            finished = False
        client = await after_power_cut(client, storage)
        settled = list(journal_of(client).claim("thing/a", list)) == [["dead", 7]]
        for task in client.broker._life.tasks[-1:]:
            await task
        arrived = await client.read_all("archive")
        assert arrived == ([b"first", b"second"] if settled else [b"first"])
        assert settled or not recorded
        return finished

    cuts = 0
    while not asyncio.run(asyncio.wait_for(scenario(cuts), 30)):
        cuts += 1
    assert cuts >= 2


def test_moves_to_one_target_arrive_in_the_order_they_were_asked_for() -> None:
    async def scenario() -> None:
        client = await with_topics(SimulatedStorage(seed=5), "orders", "archive")
        values = [b"%d" % number for number in range(50)]
        offsets = await asyncio.gather(*(move(client.broker, value) for value in values))
        assert offsets == list(range(50))
        assert await client.read_all("archive") == values

    run(scenario)


def test_a_move_to_a_topic_that_is_gone_says_so_and_is_not_tried_for_ever() -> None:
    async def scenario() -> None:
        client = await with_topics(SimulatedStorage(seed=6), "orders")
        with pytest.raises(TopicNotFound):
            await move(client.broker, b"lost", to="nowhere")
        assert client.broker.topics.moves_undone == 0

    run(scenario)


def test_a_move_that_its_target_does_not_follow_goes_without_identity_as_often_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    troubles: list[MillstreamError] = [
        OutOfSequence("it lost what it had"),
        StorageFailed("full"),
        StorageFailed("full"),
    ]
    honest = Partition.publish

    def publish(self: Partition, batch: memoryview, **options: Any) -> None:
        if troubles and "archive" in self.log.directory:
            raise troubles.pop(0)
        honest(self, batch, **options)

    async def scenario() -> None:
        client = await with_topics(SimulatedStorage(seed=7), "orders", "archive")
        monkeypatch.setattr(Partition, "publish", publish)
        assert await move(client.broker, b"kept") == 0
        assert await client.read_all("archive") == [b"kept"]
        assert client.broker.topics.moves_undone == 0

    run(scenario)


def test_a_snapshot_of_more_facts_than_a_batch_takes_is_written_all_the_same() -> None:
    """Such as a queue with a hundred thousand messages that wait for a retry."""

    async def scenario() -> None:
        storage = SimulatedStorage(seed=8)
        client = await with_topics(storage, "orders")
        journal = journal_of(client)
        known = [["returned", number] for number in range(120_000)]
        journal.claim("thing/a", lambda: known)
        journal.record("thing/a", ["old"])
        await journal.checkpoint()
        await asyncio.sleep(0)
        assert journal.partition.log.start_offset > 0, "what the snapshot replaces was not removed"
        journal.record("thing/a", ["new"])
        await journal.sync()
        client = await after_power_cut(client, storage, lose_everything=True)
        assert list(journal_of(client).claim("thing/a", list)) == [*known, ["new"]]

    run(scenario)


def test_half_of_a_snapshot_is_none_wherever_the_power_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_BATCH_FACTS", 10)
    told, known = [["add", number] for number in range(25)], [["known", number] for number in range(95)]

    async def scenario(seed: int, cut_after: int) -> tuple[bool, bool]:
        storage = SimulatedStorage(seed=seed)
        client = await with_topics(storage, "orders")
        journal = journal_of(client)
        journal.claim("thing/a", lambda: known)
        for fact in told:
            journal.record("thing/a", fact)
        await journal.sync()
        storage.inject(Fault.POWER_CUT, at=storage.operations + 1 + cut_after)
        try:
            await asyncio.wait_for(journal.checkpoint(), 0.2)
            finished = True
        except (MillstreamError, PowerCut, TimeoutError):
            finished = False
        client = await after_power_cut(client, storage)
        journal = journal_of(client)
        found = list(journal.unclaimed()["thing/a"])
        assert found in (told, known)
        # It goes on from there, also behind what was left of half a snapshot.
        await journal.record_durably(("thing/a", "more"))
        client = await after_power_cut(client, storage)
        assert list(journal_of(client).claim("thing/a", list)) == [*found, "more"]
        return finished, found == known

    outcomes = set()
    for seed in range(5):
        for cut_after in range(12):
            outcomes.add(asyncio.run(asyncio.wait_for(scenario(seed, cut_after), 30)))
    assert {known for _, known in outcomes} == {True, False}


def test_more_facts_than_a_batch_takes_can_wait_for_a_disk_that_refuses() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=9)
        client = await with_topics(storage, "orders")
        journal = journal_of(client)
        for number in range(120_000):
            journal.record("thing/a", number)
        await journal.record_durably(("thing/a", "relied on"))
        client = await after_power_cut(client, storage, lose_everything=True)
        assert list(journal_of(client).claim("thing/a", list)) == [*range(120_000), "relied on"]

    run(scenario)
