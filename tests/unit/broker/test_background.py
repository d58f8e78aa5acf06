"""What goes on by itself while the broker runs."""

from __future__ import annotations

import asyncio

import pytest

from millstream.broker.background import every
from millstream.testing import virtual_time


class Rhythm:
    """Something that is done every ten seconds and takes `takes_s`."""

    def __init__(self, takes_s: float = 0) -> None:
        self.begun: list[float] = []
        self.ended: list[float] = []
        self._takes_s = takes_s
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._stopping = self._loop.create_task(self._stop.wait())
        self._started_s = self._loop.time()
        self._running = self._loop.create_task(every(10, self.work, self._stopping))

    def _now_s(self) -> float:
        return round(self._loop.time() - self._started_s)

    async def work(self) -> None:
        self.begun.append(self._now_s())
        await asyncio.sleep(self._takes_s)
        self.ended.append(self._now_s())
        if len(self.begun) == 1:
            raise ValueError("the first time it fails")

    async def stop(self) -> float:
        """When it was over."""
        self._stop.set()
        await self._running
        return self._now_s()


@virtual_time
async def test_work_is_done_again_and_again_also_after_it_has_failed() -> None:
    rhythm = Rhythm(takes_s=2)
    await asyncio.sleep(40)
    assert rhythm.begun == [10, 22, 34]
    assert await rhythm.stop() == 40


@virtual_time
async def test_who_stops_while_nothing_is_done_does_not_wait() -> None:
    rhythm = Rhythm()
    await asyncio.sleep(15)
    assert await rhythm.stop() == 15
    await asyncio.sleep(60)
    assert rhythm.begun == [10]


@pytest.mark.parametrize("after_s", [10, 11])
def test_who_stops_in_the_middle_waits_for_the_end_of_the_work(after_s: float) -> None:
    @virtual_time
    async def scenario() -> None:
        rhythm = Rhythm(takes_s=5)
        await asyncio.sleep(after_s + 0.5)
        assert await rhythm.stop() == 15
        assert rhythm.ended == [15]

    scenario()


@virtual_time
async def test_nothing_begins_any_more_once_it_is_over() -> None:
    rhythm = Rhythm()
    assert await rhythm.stop() == 0
    assert not rhythm.begun
