"""Consumers of a group that wait share what comes: a burst does not go to the first of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from millstream.records import encode_batch
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls
from millstream.wire.leases import Settle
from millstream.wire.messages import PublishRequest
from tests.native import Delivered
from tests.simulated_broker import Client, started


def run(work: Callable[[Client], Awaitable[None]], **config: Any) -> None:
    async def live() -> None:
        client = await started(SimulatedStorage(seed=1))
        await client.call(calls.CreateTopic(name="orders", config=config))
        await work(client)
        await client.broker.stop()

    asyncio.run(asyncio.wait_for(live(), 60))


async def waiting(client: Client, consumers: Sequence[int], most: int = 250) -> list[asyncio.Task[list[Delivered]]]:
    """Requests in this order, each of which found nothing."""
    requests = [asyncio.create_task(client.lease(consumer, most, wait_ms=300)) for consumer in consumers]
    await asyncio.sleep(0)
    return requests


async def counts(requests: Sequence[Awaitable[list[Delivered]]]) -> list[int]:
    return [len(await request) for request in requests]


async def publish(client: Client, values: list[bytes], **columns: Any) -> None:
    stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    batch = encode_batch(values, base_timestamp_us=1, **columns)
    client.broker.publish(
        client.session, PublishRequest("orders", 0, 1, 0, memoryview(batch)), lambda *_: stored.set_result(None)
    )
    client.broker.flush()
    await stored


def test_a_burst_is_shared_by_those_who_wait() -> None:
    async def work(client: Client) -> None:
        ann, bob, eve = [await client.open_queue() for _ in range(3)]
        requests = await waiting(client, [ann, ann, bob, bob, eve, eve])
        await client.send([b"%d" % n for n in range(61)])
        got = [await request for request in requests]
        assert [len(messages) for messages in got] == [21, 0, 20, 0, 20, 0]
        assert sorted(message.offset for messages in got for message in messages) == list(range(61))

    run(work)


def test_a_lone_consumer_gets_all_of_it_and_so_does_one_that_waits_alone() -> None:
    async def work(client: Client) -> None:
        ann = await client.open_queue()
        requests = await waiting(client, [ann, ann])
        await client.send([b"x"] * 60)
        assert await counts(requests) == [60, 0]
        await client.open_queue()  # works on something, or sleeps
        requests = await waiting(client, [ann, ann])
        await client.send([b"x"] * 60)
        assert await counts(requests) == [60, 0]

    run(work)


def test_what_is_enough_for_all_is_not_cut_down() -> None:
    async def work(client: Client) -> None:
        ann, bob = [await client.open_queue() for _ in range(2)]
        requests = await waiting(client, [ann, ann, bob], 50)
        await client.send([b"x"] * 180)
        assert await counts(requests) == [50, 50, 50]
        assert len(await client.lease(bob, 250)) == 30, "nobody waits: all that is there"

    run(work)


def test_who_has_room_for_less_leaves_more_for_the_others() -> None:
    async def work(client: Client) -> None:
        ann, bob, eve = [await client.open_queue() for _ in range(3)]
        requests = [*await waiting(client, [ann], 10), *await waiting(client, [bob, eve])]
        await client.send([b"x"] * 60)
        assert await counts(requests) == [10, 25, 25]

    run(work)


def test_messages_that_come_one_by_one_go_to_one_after_the_other() -> None:
    async def work(client: Client) -> None:
        ann, bob = [await client.open_queue() for _ in range(2)]
        requests = await waiting(client, [ann, ann, bob, bob])
        for number in range(3):
            await client.send([b"%d" % number])
        got = [[message.value for message in await request] for request in requests]
        assert got == [[b"0"], [b"2"], [b"1"], []]

    run(work)


def test_a_retry_that_comes_back_with_others_is_shared_as_well() -> None:
    async def work(client: Client) -> None:
        ann, bob, eve = [await client.open_queue() for _ in range(3)]
        await client.send([b"x"] * 40)
        held = await client.lease(ann)
        requests = await waiting(client, [bob, eve])
        client.broker.queues.remove_consumer(client.broker.queues.consumer(client.session, ann))
        assert (len(held), await counts(requests)) == (40, [20, 20])

    run(work)


def test_keys_are_shared_and_each_stays_in_order() -> None:
    async def work(client: Client) -> None:
        ann, bob = [await client.open_queue(policy={"ordering": "key"}) for _ in range(2)]
        keys = [b"%d" % n for n in range(60)]
        requests = await waiting(client, [ann, bob])
        await publish(client, [b"first"] * 60, keys=keys)
        first = [await request for request in requests]
        assert [len(messages) for messages in first] == [30, 30]
        requests = await waiting(client, [ann, bob, ann, bob])
        await publish(client, [b"second"] * 60, keys=keys)
        await publish(client, [b"other"] * 10, keys=[b"o%d" % n for n in range(10)])
        got = [await request for request in requests[:2]]
        assert [[message.value for message in messages] for messages in got] == [[b"other"] * 5] * 2
        await client.settle(Settle.ACK, *first[0])
        assert {message.value for request in requests[2:] for message in await request} == {b"second"}

    run(work)


def test_priorities_keep_their_shares_for_each() -> None:
    async def work(client: Client) -> None:
        ann, bob = [await client.open_queue() for _ in range(2)]
        requests = await waiting(client, [ann, bob])
        await publish(client, [b"n"] * 10 + [b"u"] * 10, priorities=[2] * 10 + [0] * 10)
        assert [[message.value for message in await request] for request in requests] == [[b"u"] * 10, [b"n"] * 10]

    run(work, lanes="strict")


@pytest.mark.parametrize("poison", [False, True])
def test_a_consumer_that_fails_with_most_of_its_messages_has_no_share_where_poison_is_watched(poison: bool) -> None:
    async def work(client: Client) -> None:
        bad = await client.open_queue(policy={"poison": poison, "retry": "simple,max_retries=0"})
        await client.send([b"x"] * 30)
        await client.settle(Settle.NACK, *await client.lease(bad))
        ann, bob = [await client.open_queue() for _ in range(2)]
        requests = await waiting(client, [bad, ann, bob])
        await client.send([b"y"] * 30)
        assert await counts(requests) == ([0, 15, 15] if poison else [10, 10, 10])

    run(work)
