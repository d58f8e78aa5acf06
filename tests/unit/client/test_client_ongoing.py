"""Work that goes on when whoever waited for it has gone."""

from __future__ import annotations

import asyncio

import pytest

from millstream.client.asynchronous.ongoing import Ongoing
from millstream.errors import ConnectionLost


def test_who_comes_later_waits_for_what_somebody_else_began() -> None:
    async def main() -> None:
        begun, go_on = [], asyncio.Event()

        async def begin() -> int:
            begun.append(len(begun))
            await go_on.wait()
            return begun[-1]

        ongoing = Ongoing(begin)
        with pytest.raises(TimeoutError):
            await ongoing.result(0)
        go_on.set()
        assert await ongoing.result() == 0
        assert begun == [0]

    asyncio.run(main())


def test_what_ended_while_nobody_waited_is_not_handed_out_later() -> None:
    async def main() -> None:
        begun, go_on, ended = [], asyncio.Event(), asyncio.Event()

        async def begin() -> int:
            begun.append(len(begun))
            await go_on.wait()
            ended.set()
            return begun[-1]

        ongoing = Ongoing(begin)
        with pytest.raises(TimeoutError):
            await ongoing.result(0)
        go_on.set()
        await ended.wait()
        await asyncio.sleep(0)  # its end is noticed
        assert await ongoing.result() == 1

    asyncio.run(main())


def test_who_waits_for_what_is_cancelled_is_told_and_not_cancelled() -> None:
    async def main() -> None:
        ongoing = Ongoing(lambda: asyncio.sleep(3600))
        waiting = asyncio.ensure_future(ongoing.result())
        await asyncio.sleep(0)
        ongoing.cancel()
        with pytest.raises(ConnectionLost):
            await waiting

    asyncio.run(main())
