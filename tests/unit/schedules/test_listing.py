"""Looking at what is scheduled while it fires."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest

from millstream.ids import SCHEDULES
from millstream.schedules.agenda import settled_fact
from millstream.testing.storage import SimulatedStorage
from millstream.wire.calls import CreateTopic
from tests.simulated_broker import Client, run, started
from tests.unit.broker.test_queues_at_run_time import publish

FOREVER_MS = 1 << 62


@pytest.fixture
def impatient_threads() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before_s)


async def scheduled(client: Client, count: int) -> int:
    """So many messages that are due in an hour; returns that time."""
    await client.call(CreateTopic(name="orders"))
    due_ms = client.broker.now_us() // 1000 + 3_600_000
    values = [b"%d" % number for number in range(count)]
    await publish(client, values, partition=SCHEDULES, deliver_at_us=[due_ms * 1000] * count)
    return due_ms


@pytest.mark.usefixtures("impatient_threads")
def test_what_was_moved_is_listed_while_some_of_it_fires() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage())
        due_ms = await scheduled(client, 10)
        (log,) = client.broker.schedules._all()
        await log.loaded()
        for offset in range(200_000):  # all but ten of them for this list only
            log.agenda.apply(("moved", offset, due_ms + 1))
        listing = asyncio.ensure_future(log.upcoming(0, FOREVER_MS, 10, lambda _, message: message.value))
        offset = 200_000
        while not listing.done():
            offset -= 1
            log.agenda.apply(settled_fact("fired", [offset]))
            await asyncio.sleep(0)
        assert await listing == [b"%d" % number for number in range(10)]
        await client.broker.stop()

    run(scenario)
