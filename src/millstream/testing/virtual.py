"""A broker in virtual time, for users' tests: hours pass in milliseconds, and machines crash on request.

    @virtual_time
    async def test_an_order_that_nobody_handles_comes_back():
        async with virtual_broker() as broker:
            client = await broker.connect()
            ...
            await broker.clock.advance("30s")
            await broker.crash()

It is the real broker and the real asyncio client, on a simulated disk and without sockets.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from random import Random
from typing import Any, ParamSpec, TypeVar

from millstream import aio
from millstream.config import Settings
from millstream.testing.machine import Machine
from millstream.testing.network import Network
from millstream.testing.virtual_loop import VirtualClock, VirtualLoop, run

__all__ = ["VirtualBroker", "virtual_broker", "virtual_time"]

P = ParamSpec("P")
T = TypeVar("T")


def virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make a test out of a coroutine function: it runs to its end in virtual time, always in the same way."""

    @functools.wraps(test)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(lambda _: test(*args, **kwargs))

    return wrapper


class VirtualBroker:
    """A broker with its machine and the network of its clients.  Use it within `virtual_time` only."""

    def __init__(self, settings: Settings | None = None) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), (
            "a virtual broker needs virtual time: decorate the test with @virtual_time"
        )
        if loop.network is None:
            Network(loop, Random(0))
        self._machine = Machine(loop, settings=settings)
        self._clients: list[aio.Client] = []
        self._clock = VirtualClock(loop)

    @property
    def address(self) -> str:
        return self._machine.address

    @property
    def clock(self) -> VirtualClock:
        """The broker's clock: `advance` lets time pass, `jump` sets its wall clock as an operator would."""
        return self._machine.clock

    async def connect(self, **options: Any) -> aio.Client:
        """Connect a client, as `millstream.aio.connect` does; it is closed with the broker."""
        # Real time has no say in a virtual one.
        client = await aio.connect(self.address, **{"stay_awake": False, **options})
        self._clients.append(client)
        return client

    async def crash(self, *, power: bool = True) -> None:
        """Pull the plug (or only `kill -9` the broker), and start the broker on what the disk has kept."""
        self._machine.cut_power() if power else self._machine.kill()
        await self._machine.start()

    async def restart(self) -> None:
        """Stop the broker as on SIGTERM, and start it again."""
        await self._machine.stop()
        await self._machine.start()

    async def __aenter__(self) -> VirtualBroker:
        await self._machine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        async with AsyncExitStack() as ends:  # a client may raise; the others and the broker end all the same
            ends.push_async_callback(self._machine.stop)
            for client in reversed(self._clients):
                ends.push_async_callback(client.close)


def virtual_broker(settings: Settings | None = None) -> VirtualBroker:
    """`async with virtual_broker() as broker`"""
    return VirtualBroker(settings)
