"""An asynchronous client belongs to the event loop that it was made in, and says so in every other one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from fake_queues import FakeQueues

from millstream import aio
from millstream.errors import InvalidArgument


@pytest.fixture
def fake() -> Iterator[FakeQueues]:
    with FakeQueues() as fake:
        fake.topic("t")
        yield fake


@pytest.mark.parametrize(
    "use",
    [
        lambda client: client.publish("t", b"known"),
        lambda client: client.publish("t", "known", key="k"),
        lambda client: client.publish("other", b"unknown"),
        lambda client: client.publish_many("t", [b"x", b"y"]),
        lambda client: client.topics(),
        lambda client: client.request("t", b"x", timeout=5),
        lambda client: client.queue("t")._open(),
        lambda client: client.producer("t")._open(),
    ],
)
@pytest.mark.parametrize("ended", [False, True], ids=["beside the other loop", "after it"])
def test_a_client_refuses_another_event_loop(
    fake: FakeQueues, use: Callable[[Any], Coroutine[Any, Any, Any]], ended: bool
) -> None:
    clients = []

    def use_elsewhere() -> None:
        async def elsewhere() -> None:
            async with asyncio.timeout(10):
                await use(clients[0])

        with pytest.raises(InvalidArgument, match="this client belongs to another event loop"):
            asyncio.run(elsewhere())

    async def main() -> None:
        clients.append(await aio.connect(fake.address))
        await clients[0].publish("t", b"first")
        if not ended:
            await asyncio.to_thread(use_elsewhere)
            await clients[0].publish("t", b"last")  # nothing has come to harm
            await clients[0].close()

    asyncio.run(main())
    if ended:
        use_elsewhere()


@pytest.mark.parametrize("kind", ["queue", "stream"])
def test_so_does_what_it_has_opened(fake: FakeQueues, kind: str) -> None:
    async def main() -> None:
        async with aio.connect(fake.address) as client:
            reader = await getattr(client, kind)("t")

            def read() -> None:
                with pytest.raises(InvalidArgument, match="belongs to another event loop"):
                    asyncio.run(reader.next(5))

            await asyncio.to_thread(read)

    asyncio.run(main())
