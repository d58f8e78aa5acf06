"""Subscriptions of the asynchronous client: they find back to a broker that was away, and end when they are dropped."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import deque
from collections.abc import Iterator

import pytest
from async_scenarios import run
from fake_broker import FakeSubscriptions

from millstream import aio
from millstream.errors import MillstreamError, ShuttingDown, Throttled, Unauthorized
from tests.waiting import eventually_async


@pytest.fixture
def fake() -> Iterator[FakeSubscriptions]:
    with FakeSubscriptions() as broker:
        yield broker


def test_a_dropped_subscription_keeps_no_connection(fake: FakeSubscriptions) -> None:
    async def scenario(client: aio.Client) -> None:
        subscription = await client.subscribe("t.#")
        assert await subscription.next(0.01) is None
        before = len(fake._peers)
        del subscription
        gc.collect()
        await eventually_async(lambda: len(fake._peers) == before - 1)

    run(fake, scenario)


def test_who_only_polls_is_subscribed_again_after_a_lost_connection(fake: FakeSubscriptions) -> None:
    async def scenario(client: aio.Client) -> None:
        async with client.subscribe("t.#") as subscription:
            fake.drop_all()

            async def poll() -> bool:
                assert await subscription.next(timeout_s=0) is None
                return fake.subscribed == 2 and subscription.reconnects == 1

            await eventually_async(poll)

    run(fake, scenario)


@pytest.mark.parametrize("refusal", [Throttled("slow down"), ShuttingDown("bye"), None])
def test_a_subscription_outlives_a_broker_that_cannot_take_it_yet(
    fake: FakeSubscriptions, refusal: MillstreamError | None
) -> None:
    never = threading.Event()

    async def scenario(client: aio.Client) -> None:
        async with client.subscribe("t.#") as subscription:
            if refusal is not None:
                fake.call_errors["OpenSubscription"] = deque([refusal])
            else:
                fake.before["OpenSubscription"] = lambda: never.wait(20)  # this one is not answered in time
            ended = asyncio.ensure_future(anext(aiter(subscription), None))
            fake.drop_all()
            await eventually_async(lambda: fake.subscribed >= 2 and subscription.reconnects == 1)
            assert not ended.done()
            await subscription.close()
            assert await ended is None

    run(fake, scenario, timeout_s=10 if refusal is not None else 1)
    never.set()


def test_a_subscription_ends_with_a_refusal_that_is_final(fake: FakeSubscriptions) -> None:
    async def scenario(client: aio.Client) -> None:
        async with client.subscribe("t.#") as subscription:
            fake.call_errors["OpenSubscription"] = deque([Unauthorized("not you")])
            fake.drop_all()
            with pytest.raises(Unauthorized):
                await subscription.next(10)

    run(fake, scenario)
