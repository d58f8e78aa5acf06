"""What tests of the asynchronous client begin with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fake_broker import FakeBroker

import millstream
from millstream import aio

__all__ = ["fill", "numbered", "run"]


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%05d" % number for number in range(start, start + count)]


def run(fake: FakeBroker, scenario: Callable[[aio.Client], Awaitable[object]], timeout_s: float = 10) -> None:
    """Run a scenario with a connected client, and see that it leaves no task behind."""

    async def main() -> None:
        async with asyncio.timeout(30), aio.connect(fake.address, timeout_s=timeout_s) as client:
            await scenario(client)
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def fill(fake: FakeBroker, partitions: int = 1, count: int = 30) -> None:
    fake.partitions_default = partitions
    with millstream.connect(fake.address) as client:
        for partition in range(partitions):
            for start in range(0, count, 10):
                client.publish_many(
                    "t", [millstream.Outgoing(value=value, partition=partition) for value in numbered(10, start)]
                )
    fake.grant = [("t", number) for number in range(partitions)]
