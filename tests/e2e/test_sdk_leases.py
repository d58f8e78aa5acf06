"""Leasing by hand: what cannot be asked for, and ids of topics that were not known before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import millstream
from millstream import aio
from millstream.errors import InvalidArgument
from millstream.testing.broker import BrokerForTests


def test_a_lease_that_cannot_be_asked_for_does_not_stop_the_queue(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.publish("t", b"x")
        with client.queue("t") as queue:
            with pytest.raises(InvalidArgument):
                queue.lease(max=1 << 40)
            assert queue.next(2) is not None


def test_a_topic_that_comes_while_another_is_looked_up_has_ids_too(broker: BrokerForTests) -> None:
    async def main() -> None:
        async with aio.connect(broker.address) as client:
            first = await client.publish("t.a", b"a")
            async with client.queue("t.#", prefetch=10) as queue:
                call, published = queue._call, []

                async def slowly(*arguments: Any) -> Any:
                    if not published:
                        published.append(await client.publish("t.b", b"b"))
                        async with asyncio.timeout(5):
                            while queue._leasing.unsettled < 2:  # noqa: ASYNC110 - nobody tells
                                await asyncio.sleep(0.01)
                    return await call(*arguments)

                queue._call = slowly
                ids = set()
                for _ in range(2):
                    message = await queue.next(5)
                    assert message is not None
                    ids.add(message.id)
                assert ids == {first.id, published[0].id}

    asyncio.run(main())
