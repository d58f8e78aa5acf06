"""A network between clients and the broker: it cuts connections, or falls silent for a while.

The doors of the proxy stay where they are, whatever becomes of the broker.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Proxy"]

_CHUNK_BYTES: Final = 65_536


@dataclass
class _Door:
    """One port of the broker."""

    target: int = 0
    port: int = 0
    writers: set[asyncio.StreamWriter] = field(default_factory=set)


class Proxy:
    """Doors by name; runs on a thread of its own."""

    def __init__(self, *names: str) -> None:
        self._doors = {name: _Door() for name in names}
        self._open = asyncio.Event()
        self._over = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.cuts = 0

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10), "the proxy does not start"

    def stop(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self._doors[name].port}"

    def lead_to(self, name: str, port: int) -> None:
        """Where the broker has this door."""
        self._doors[name].target = port

    # --- faults --------------------------------------------------------------------------------------------------

    def cut(self, name: str, rng: random.Random) -> None:
        """End connections as a network does: some of them or all, without a farewell."""
        share = rng.choice((0.3, 1.0))
        self._do(lambda: self._cut(self._doors[name], share, rng))

    def hush(self) -> None:
        """Let nothing through, and say nothing about it."""
        self._do(self._open.clear)

    def speak(self) -> None:
        self._do(self._open.set)

    def _do(self, work: Callable[[], object]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(work)

    def _cut(self, door: _Door, share: float, rng: random.Random) -> None:
        for writer in list(door.writers):
            if rng.random() <= share:
                self.cuts += 1
                writer.transport.abort()

    # --- on its own thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open.set()
        servers = []
        for door in self._doors.values():
            server = await asyncio.start_server(self._handler(door), "127.0.0.1", 0)
            door.port = server.sockets[0].getsockname()[1]
            servers.append(server)
        self._ready.set()
        await self._over.wait()
        for server in servers:
            server.close()
        for door in self._doors.values():
            for writer in list(door.writers):
                writer.transport.abort()

    def _handler(self, door: _Door) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self._open.wait()
                inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", door.target)
            except OSError:
                writer.transport.abort()
                return
            door.writers.add(writer)
            try:
                ways = [
                    asyncio.ensure_future(self._pass(reader, inner_writer)),
                    asyncio.ensure_future(self._pass(inner_reader, writer)),
                ]
                _, left = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                # Half of a connection is of no use to any of these protocols.
                for way in left:
                    way.cancel()
                    with suppress(asyncio.CancelledError):
                        await way
            finally:
                door.writers.discard(writer)
                for each in (writer, inner_writer):
                    each.close()

        return handle

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
