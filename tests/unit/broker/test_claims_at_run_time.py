"""Claims: leases for somebody who reads by offset, with the rules of all leases."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream.errors import InvalidArgument, PartitionNotFound, ReceiptInvalid, StorageFailed
from millstream.records import encode_batch
from millstream.testing.broker import BrokerForTests
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls
from millstream.wire.leases import Settle
from millstream.wire.queue_calls import (
    Claim,
    ClaimExtended,
    ClaimMessages,
    ClaimSettled,
    CloseQueue,
    ConfigureQueue,
    DeleteQueue,
    DescribeQueue,
    Explain,
    Explanation,
    ExtendClaim,
    QueueInfo,
    SettleClaim,
)
from tests.simulated_broker import Client, after_power_cut, run, started


async def world(count: int = 10, **topic: Any) -> Client:
    client = await started(SimulatedStorage(seed=1))
    await client.call(calls.CreateTopic(name="orders", **topic))
    if count:
        await client.send([b"%d" % n for n in range(count)])
    return client


async def claim(client: Client, most: int = 100, **options: Any) -> Claim:
    answer = await client.call(ClaimMessages(topic="orders", max=most, **options))
    assert isinstance(answer, Claim)
    return answer


async def settle(client: Client, number: int, action: Any = "ack", **options: Any) -> ClaimSettled:
    answer = await client.call(SettleClaim(claim=number, action=action, **options))
    assert isinstance(answer, ClaimSettled)
    return answer


async def describe(client: Client) -> QueueInfo:
    info = await client.call(DescribeQueue(topic="orders"))
    assert isinstance(info, QueueInfo)
    return info


def test_a_claim_names_what_is_next_and_an_ack_settles_it() -> None:
    async def scenario() -> None:
        client = await world()
        mine = await claim(client, 6, claimant="query-1")
        assert (mine.ranges, mine.messages) == ([(0, 0, 6)], 6)
        assert 0 < mine.lease_ms <= 30_000
        info = await describe(client)
        assert (info.leased, info.ready) == (6, 4)
        assert [(it.name, it.leased, it.delivered) for it in info.consumers] == [("query-1", 6, 6)]
        assert await settle(client, mine.claim) == ClaimSettled(settled=6, left=0)
        assert (await describe(client)).settled["acked"] == 6
        with pytest.raises(ReceiptInvalid):
            await settle(client, mine.claim)
        assert (await claim(client)).ranges == [(0, 6, 10)]
        nothing = await claim(client)
        assert (nothing.claim, nothing.ranges, nothing.messages, nothing.lease_ms) == (0, [], 0, 0)

    run(scenario)


def test_parts_of_a_claim_are_settled_each_as_it_went() -> None:
    async def scenario() -> None:
        client = await world()
        mine = await claim(client)
        assert await settle(client, mine.claim, ranges=[(0, 0, 4)]) == ClaimSettled(settled=4, left=6)
        again = await settle(client, mine.claim, ranges=[(0, 2, 6)])
        assert again == ClaimSettled(settled=2, left=4), "acking twice is no mistake"
        assert await settle(client, mine.claim, "release", ranges=[(0, 6, 8)]) == ClaimSettled(settled=2, left=2)
        late = await settle(client, mine.claim, ranges=[(0, 7, 9), (0, 50, 52)])
        assert late == ClaimSettled(settled=0, left=2, invalid=[(0, 7, 9), (0, 50, 52)])
        assert await settle(client, mine.claim, "nack", reason="broken", delay_ms=0) == ClaimSettled(settled=2, left=0)
        info = await describe(client)
        assert (info.settled["acked"], info.ready, info.leased) == (6, 4, 0)

    run(scenario)


def test_what_is_left_comes_back_at_once_when_the_connection_ends() -> None:
    async def scenario() -> None:
        client, other = await world(), None
        mine = await claim(client)
        await settle(client, mine.claim, ranges=[(0, 0, 2)])
        other = Client(client.broker)
        assert (await claim(other)).ranges == []
        client.broker.session_closed(client.session)
        assert (await claim(other)).ranges == [(0, 2, 10)]

    run(scenario)


def test_the_very_same_messages_are_had_again() -> None:
    async def scenario() -> None:
        client = await world(20)
        mine = await claim(client, 8)
        await settle(client, mine.claim, ranges=[(0, 0, 2)])
        client.broker.session_closed(client.session)
        thief = Client(client.broker)
        stolen = await claim(thief, 1)
        assert stolen.ranges == [(0, 2, 3)]
        again = Client(client.broker)
        retaken = await claim(again, wanted=[(0, 0, 8), (0, 15, 17), (0, 30, 31)])
        assert retaken.ranges == [(0, 3, 8), (0, 15, 17)]
        assert retaken.settled == [(0, 0, 2)]
        assert retaken.refused == [(0, 2, 3), (0, 30, 31)]
        assert await settle(again, retaken.claim) == ClaimSettled(settled=7, left=0)

    run(scenario)


def test_a_broker_that_was_down_gives_them_again_and_remembers_what_was_acked() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"%d" % n for n in range(10)])
        mine = await claim(client, 6)
        await settle(client, mine.claim, ranges=[(0, 1, 3)])
        client = await after_power_cut(client, storage, lose_everything=True)
        again = await claim(client, wanted=[(0, 0, 6)])
        assert (again.ranges, again.settled, again.refused) == ([(0, 0, 1), (0, 3, 6)], [(0, 1, 3)], [])
        assert (await claim(client)).ranges == [(0, 6, 10)]

    run(scenario)


def test_all_partitions_give_about_the_same() -> None:
    async def scenario() -> None:
        client = await world(0, partitions=3)
        for number in range(3):
            partition = client.broker.topics.partition("default", "orders", number)
            values = [b"x"] * (2 if number == 1 else 30)
            await partition.append_durably(encode_batch(values, base_timestamp_us=1))
        mine = await claim(client, 30)
        assert mine.messages == 30
        assert mine.ranges[1] == (1, 0, 2)
        assert sorted(until - first for _, first, until in mine.ranges) == [2, 14, 14]

    run(scenario)


def test_a_claim_of_messages_with_priorities_takes_them_in_turns() -> None:
    async def scenario() -> None:
        client = await world(0)
        partition = client.broker.topics.partition("default", "orders", 0)
        await partition.append_durably(encode_batch([b"x"] * 6, base_timestamp_us=1, priorities=[4, 0, 4, 0, 4, 0]))
        mine = await claim(client)
        assert (mine.ranges, mine.messages) == ([(0, 0, 6)], 6)
        assert (await settle(client, mine.claim)).settled == 6

    run(scenario)


@pytest.mark.parametrize("partitions", [1, 3])
def test_what_is_scattered_is_claimed_only_as_far_as_it_can_be_wanted_again(
    monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    async def scenario() -> None:
        client = await world(0, partitions=partitions)
        for number in range(partitions):
            partition = client.broker.topics.partition("default", "orders", number)
            await partition.append_durably(encode_batch([b"x"] * 40, base_timestamp_us=1))
        everything = await claim(client, 200)
        odd = [(part, n, n + 1) for part in range(partitions) for n in range(1, 40, 2)]
        await settle(client, everything.claim, "nack", ranges=odd, delay_ms=0)
        await settle(client, everything.claim)
        monkeypatch.setattr("millstream.broker.queues.claims._RANGES_MAX", 8)
        mine = await claim(client)
        assert (mine.messages, len(mine.ranges)) == (8, 8)
        client.broker.session_closed(client.session)
        again = Client(client.broker)
        assert (await claim(again, wanted=mine.ranges)).ranges == mine.ranges

    run(scenario)


def test_what_lies_together_is_claimed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr("millstream.broker.queues.claims._RANGES_MAX", 20)
        client = await world(100)
        assert (await claim(client, 90)).ranges == [(0, 0, 90)]

    run(scenario)


def test_a_claim_that_fails_half_way_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        client = await world(0, partitions=2)
        for number in range(2):
            partition = client.broker.topics.partition("default", "orders", number)
            await partition.append_durably(encode_batch([b"x"] * 4, base_timestamp_us=1))
        sick = client.broker.topics.partition("default", "orders", 1)

        async def broken(_: int) -> None:
            raise StorageFailed("cannot read the log: input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(sick, "warm", broken)
            with pytest.raises(StorageFailed):
                await claim(client, wanted=[(0, 0, 4), (1, 0, 4)])
        assert (await describe(client)).leased == 0
        assert (await claim(client, wanted=[(0, 0, 4), (1, 0, 4)])).messages == 8

    run(scenario)


def test_a_paused_group_gives_nothing() -> None:
    async def scenario() -> None:
        client = await world()
        await claim(client, 1)
        await client.call(ConfigureQueue(topic="orders", policy={"paused": True}))
        assert (await claim(client)).ranges == []
        assert (await claim(client, wanted=[(0, 5, 6)])).refused == [(0, 5, 6)]

    run(scenario)


def test_a_claimant_that_goes_away_in_the_middle_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        client = await world()
        await claim(client, 1)
        asked = asyncio.ensure_future(claim(client))
        await asyncio.sleep(0)
        client.broker.session_closed(client.session)
        with pytest.raises(ReceiptInvalid):
            await asked
        assert (await describe(Client(client.broker))).leased == 0

    run(scenario)


def test_why_says_who_has_claimed_a_message() -> None:
    async def scenario() -> None:
        client = await world()
        await claim(client, 2, claimant="nightly")
        told = await client.call(Explain(topic="orders"))
        assert isinstance(told, Explanation)
        assert (told.state, "nightly" in told.sentence) == ("leased", True)

    run(scenario)


def test_a_closed_claimant_gives_everything_back() -> None:
    async def scenario() -> None:
        client = await world()
        mine = await claim(client)
        await client.call(CloseQueue(consumer=mine.consumer))
        assert (await describe(client)).ready == 10
        with pytest.raises(ReceiptInvalid):
            await settle(client, mine.claim)

    run(scenario)


def test_a_claim_is_nobody_elses() -> None:
    async def scenario() -> None:
        client = await world()
        mine = await claim(client)
        with pytest.raises(ReceiptInvalid):
            await settle(Client(client.broker), mine.claim)
        assert (await describe(client)).leased == 10

    run(scenario)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"most": 0}, InvalidArgument),
        ({"most": 2_000_000}, InvalidArgument),
        ({"lease_ms": 1}, InvalidArgument),
        ({"wanted": [(0, 5, 5)]}, InvalidArgument),
        ({"wanted": [(-1, 0, 5)]}, InvalidArgument),
        ({"wanted": [(0, 0, 2_000_000)]}, InvalidArgument),
        ({"wanted": [(3, 0, 5)]}, PartitionNotFound),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(options: dict[str, Any], error: type[Exception]) -> None:
    async def scenario() -> None:
        client = await world()
        with pytest.raises(error):
            await claim(client, **options)

    run(scenario)


def test_a_claim_runs_out_unless_it_is_extended_and_failures_count(broker: BrokerForTests) -> None:
    async def begin() -> tuple[Client, Claim]:
        client = Client(broker.broker)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"1", b"2"])
        return client, await claim(client, lease_ms=10_000)

    client, mine = broker.run(begin())  # type: ignore[misc]
    broker.clock.advance("8s")
    extended = broker.run(client.call(ExtendClaim(claim=mine.claim)))
    assert isinstance(extended, ClaimExtended)
    assert extended.messages == 2
    assert 9_000 < extended.lease_ms <= 10_000
    broker.clock.advance("8s")
    assert broker.run(describe(client)).leased == 2  # type: ignore[attr-defined]
    broker.clock.advance("30s")
    info = broker.run(describe(client))
    assert info.leased == 0  # type: ignore[attr-defined]
    with pytest.raises(ReceiptInvalid):
        broker.run(client.call(ExtendClaim(claim=mine.claim)))
    again = broker.run(claim(client))
    assert again.ranges == [(0, 0, 2)]  # type: ignore[attr-defined]


def test_who_claims_and_who_leases_share_a_queue() -> None:
    async def scenario() -> None:
        client = await world()
        other = Client(client.broker)
        consumer = await other.open_queue()
        mine = await claim(client, 4)
        theirs = await other.lease(consumer, 100)
        assert [message.offset for message in theirs] == [4, 5, 6, 7, 8, 9]
        waiting = asyncio.ensure_future(other.lease(consumer, wait_ms=5_000))
        await asyncio.sleep(0.01)
        await settle(client, mine.claim, "release")
        assert [message.offset for message in await waiting] == [0, 1, 2, 3]

    run(scenario)


def test_a_claim_of_a_deleted_group_says_nothing_about_the_next_one_of_its_name() -> None:
    """What the old group had decided and not yet written down was written down with it, as the new one's."""

    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"%d" % n for n in range(10)])
        mine = await claim(client, 4)
        other = Client(client.broker)
        await other.settle(Settle.ACK, *await other.lease(await other.open_queue()))
        await client.call(DeleteQueue(topic="orders", force=True))
        await other.open_queue()
        with pytest.raises(ReceiptInvalid):
            await client.call(ExtendClaim(claim=mine.claim))
        late = await settle(client, mine.claim, ranges=mine.ranges)
        assert (late.settled, late.left, late.invalid) == (0, 0, mine.ranges)
        assert (await describe(client)).ready == 10
        await client.broker.stop()
        client = await started(storage)
        assert (await describe(client)).ready == 10
        await client.broker.stop()

    run(scenario)


@pytest.mark.parametrize("place", ["orders", "*"])
def test_a_claim_says_of_which_group_of_its_name_it_is_and_nothing_is_taken_again_of_another(place: str) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        if place != "orders":
            await client.open_queue(place)
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"%d" % n for n in range(10)])
        mine = await claim(client, 4)
        assert mine.made_us
        await client.call(ConfigureQueue(topic=place, policy={"max_deliveries": 7}))
        await client.broker.stop()

        client = await started(storage)
        again = await claim(client, wanted=mine.ranges, made_us=mine.made_us)
        assert (again.ranges, again.made_us) == (mine.ranges, mine.made_us)
        await client.call(DeleteQueue(topic=place, force=True))
        await client.call(CloseQueue(consumer=await client.open_queue(place)))
        nothing = await claim(client, wanted=mine.ranges, made_us=mine.made_us)
        assert (nothing.claim, nothing.ranges, nothing.settled) == (0, [], mine.ranges)
        assert nothing.made_us > mine.made_us
        assert (await claim(client, wanted=mine.ranges)).ranges == mine.ranges, "who does not know gets them"
        await client.broker.stop()

    run(scenario)
