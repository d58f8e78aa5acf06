"""Consumers that come and go while others wait: nobody is bothered for nothing, and nothing that is ready is missed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from millstream.broker.queues.group import QueueGroup
from millstream.broker.queues.queues import Queues
from millstream.queues.ledger import Ledger
from millstream.wire import calls, queue_calls
from millstream.wire.leases import LeaseRequest, Settle
from tests.native import Delivered
from tests.simulated_broker import Client
from tests.unit.broker.test_queue_hazards_at_run_time import parked
from tests.unit.broker.test_queues_at_run_time import lives, publish
from tests.waiting import eventually_async

Leasing = asyncio.Task[list[Delivered]]


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[None]:
    """Grows by one whenever a method is called."""
    called: list[None] = []
    method = getattr(owner, name)

    def counting(*details: Any, **more: Any) -> Any:
        called.append(None)
        return method(*details, **more)

    monkeypatch.setattr(owner, name, counting)
    return called


def test_a_consumer_of_a_pattern_that_comes_and_goes_has_nobody_look_for_what_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(client: Client) -> None:
        for number in range(20):
            await client.call(calls.CreateTopic(name=f"orders.{number}"))
        waiting = await parked(client, await client.open_queue("orders.#"))
        looks = counted(monkeypatch, QueueGroup, "take")
        other = await client.open_queue("orders.#")
        await client.call(queue_calls.CloseQueue(consumer=other))
        assert not looks
        await publish(client, [b"x"], topic="orders.7")
        (message,) = await asyncio.wait_for(waiting, 5)
        assert message.part.topic == "orders.7"
        assert len(looks) == 1, "the other topics have nothing, and are not asked"

    lives(work)


def test_a_lease_over_http_has_nobody_look_for_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", partitions=16))
        polls = [
            asyncio.ensure_future(client.call(queue_calls.LeaseMessages(topic="orders", group="g", wait_ms=10_000)))
            for _ in range(5)
        ]
        await eventually_async(lambda: sum(len(some.waiting) for some in client.broker.queues._consumers.values()) == 5)
        looks, serves = counted(monkeypatch, Ledger, "lease"), counted(monkeypatch, QueueGroup, "_available")
        assert await client.call(queue_calls.LeaseMessages(topic="orders", group="g", wait_ms=0)) == []
        assert not looks
        assert not serves
        await publish(client, [b"x"], partition=11)
        done, _ = await asyncio.wait(polls, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert [len(poll.result()) for poll in done] == [1]
        for poll in polls:
            poll.cancel()

    lives(work)


def test_a_busy_topic_of_a_pattern_does_not_hide_the_others() -> None:
    async def work(client: Client) -> None:
        for name in ("orders.a", "orders.b", "orders.c"):
            await client.call(calls.CreateTopic(name=name))
        consumer = await client.open_queue("orders.*")
        for name, count in (("orders.a", 100), ("orders.b", 2), ("orders.c", 1)):
            await publish(client, [b"x"] * count, topic=name)
        found = [(await client.lease(consumer, 1))[0].part.topic for _ in range(6)]
        assert sorted(found[:3]) == ["orders.a", "orders.b", "orders.c"]
        assert sorted(found[3:]) == ["orders.a", "orders.a", "orders.b"]
        assert len(await client.lease(consumer, 1000)) == 97

    lives(work)


def test_a_group_that_a_consumer_gets_later_is_asked_as_well() -> None:
    """The first group of a pattern is its only one until another topic comes."""

    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders.a"))
        consumer = await client.open_queue("orders.*")
        await publish(client, [b"1"], topic="orders.a")
        await client.call(calls.CreateTopic(name="orders.b"))
        assert [message.value for message in await client.lease(consumer)] == [b"1"]
        waiting = await parked(client, consumer)
        await publish(client, [b"2"], topic="orders.b")
        assert [message.value for message in await asyncio.wait_for(waiting, 5)] == [b"2"]
        await client.call(calls.DeleteTopic(name="orders.b", force=True))
        waiting = await parked(client, consumer)
        await publish(client, [b"3"], topic="orders.a")
        assert [message.value for message in await asyncio.wait_for(waiting, 5)] == [b"3"]

    lives(work)


def test_what_is_kept_from_one_is_for_who_comes_and_for_who_is_alone() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        first, second = await client.open_queue(), await client.open_queue()
        await publish(client, [b"x"])
        (message,) = await client.lease(first)
        await client.settle(Settle.NACK, message, value=0)
        waiting = await parked(client, first)
        await client.call(queue_calls.CloseQueue(consumer=second))
        (message,) = await asyncio.wait_for(waiting, 0.5)
        third = await client.open_queue()
        await client.settle(Settle.NACK, message, value=0)
        waiting = await parked(client, first)
        assert len(await client.lease(third)) == 1
        assert not waiting.done()

    lives(work)


class Company:
    """Consumers of three topics, by name and by pattern, who do whatever chance says."""

    def __init__(self, client: Client, draw: random.Random, policy: dict[str, Any]) -> None:
        self._client = client
        self._draw = draw
        self._policy = policy
        self._consumers: list[int] = []
        self._waiting: list[tuple[int, Leasing]] = []
        self._held: list[tuple[int, Delivered]] = []

    async def step(self) -> None:
        steps = [self._come, self._go, self._ask, self._ask, self._publish, self._settle, self._settle]
        await self._draw.choice(steps)()
        for _ in range(3):
            await asyncio.sleep(0)
        for consumer, leasing in [some for some in self._waiting if some[1].done()]:
            self._waiting.remove((consumer, leasing))
            self._held += [(consumer, message) for message in leasing.result()]

    async def _come(self) -> None:
        topic = self._draw.choice(["orders.a", "orders.b", "orders.*", "orders.*"])
        detached = self._draw.random() < 0.3
        self._consumers.append(await self._client.open_queue(topic, policy=self._policy, detached=detached))

    async def _go(self) -> None:
        if len(self._consumers) > 1:
            consumer = self._consumers.pop(self._draw.randrange(len(self._consumers)))
            await self._client.call(queue_calls.CloseQueue(consumer=consumer))
            self._held = [(owner, message) for owner, message in self._held if owner != consumer]

    async def _ask(self) -> None:
        if self._consumers:
            consumer = self._draw.choice(self._consumers)
            leasing = asyncio.ensure_future(self._client.lease(consumer, self._draw.randint(1, 3), wait_ms=60_000))
            self._waiting.append((consumer, leasing))

    async def _publish(self) -> None:
        keys = [self._draw.choice([b"k", b"l", b"m"]) for _ in range(self._draw.randint(1, 3))]
        topic = f"orders.{self._draw.choice('abc')}"
        await publish(self._client, keys, topic=topic, partition=self._draw.randrange(2), keys=keys)

    async def _settle(self) -> None:
        if self._held:
            _, message = self._held.pop(self._draw.randrange(len(self._held)))
            kind = self._draw.choice([Settle.ACK, Settle.NACK, Settle.NACK, Settle.RELEASE])
            await self._client.settle(kind, message, value=0 if kind == Settle.NACK else -1)


@pytest.mark.parametrize("ordering", ["none", "key", "strict"])
@pytest.mark.parametrize("seed", range(15))
def test_nobody_waits_for_something_that_it_would_get_if_it_asked_anew(
    monkeypatch: pytest.MonkeyPatch, seed: int, ordering: str
) -> None:
    draw = random.Random(f"{seed}/{ordering}")
    now_us = Queues.now_us
    began_us: list[int] = []

    def stopped(queues: Queues) -> int:
        """What is kept for others stays so: no time passes."""
        began_us[:] = began_us or [now_us(queues)]
        return began_us[0]

    monkeypatch.setattr(Queues, "now_us", stopped)

    async def work(client: Client) -> None:
        for name in "abc":
            await client.call(calls.CreateTopic(name=f"orders.{name}", partitions=2))
        policy = {"ordering": ordering, "max_deliveries": 0, "retry": "standard,max_retries=1000"}
        company = Company(client, draw, policy)
        for _ in range(6):
            for _ in range(draw.randint(1, 20)):
                await company.step()
            for group in client.broker.queues.registry.all_groups("default"):
                waiting = list(group.waiting)
                for part in group.open_parts():
                    part.wake()
                assert list(group.waiting) == waiting, "who was waiting got something as soon as everybody was told"

    lives(work)


def test_a_request_with_room_for_nothing_gets_one_message_of_a_pattern_too() -> None:
    async def work(client: Client) -> None:
        for name in ("orders.a", "orders.b"):
            await client.call(calls.CreateTopic(name=name))
        consumer = await client.open_queue("orders.*")
        await publish(client, [b"x", b"y"], topic="orders.b")
        answers: list[Any] = []
        client.broker.lease(client.session, LeaseRequest(consumer, 10, 0, 0), answers.append)
        assert [part.span for part in answers[0]] == [1]

    lives(work)
