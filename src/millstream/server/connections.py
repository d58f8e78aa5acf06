"""The connections of one door: who is let in, and how all of them are ended politely."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final, Generic, Protocol, TypeVar

import structlog

from millstream.broker.broker import Broker
from millstream.broker.logs import Sparing
from millstream.config import ServerSettings
from millstream.errors import MillstreamError, QuotaExceeded, ShuttingDown

__all__ = ["Connection", "Connections", "Refusals", "peer_of"]

_log = structlog.get_logger("millstream.connections")

#: Turns of an event loop in which it looks at every socket once, whatever it does first in each of them.
_TURNS: Final = 3


def peer_of(transport: asyncio.BaseTransport) -> str:
    """The address at the other end."""
    peer = transport.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer or "")


class Connection(Protocol):
    """One client, as far as its coming and going is concerned."""

    @property
    def address(self) -> str: ...

    @property
    def busy(self) -> bool:
        """Whether it is owed something that would be lost if it were closed now."""

    def say_goodbye(self) -> None:
        """Tell it that the broker stops."""

    def close(self) -> None:
        """After what was sent has arrived."""

    def abort(self) -> None: ...


C = TypeVar("C", bound=Connection)


class Refusals:
    """Says in the log whom a door has turned away, and why; not more often than anybody wants to read."""

    def __init__(self, door: str) -> None:
        self._door = door
        self._sparing = Sparing()

    def note(self, address: str, why: MillstreamError, client: str | None = None) -> None:
        """`client` is who it was, if it had been let in before."""
        event = "connection refused" if client is None else "connection ended"
        who = {} if client is None else {"client": client}
        reason = str(why)
        self._sparing.write(_log.info, event, door=self._door, address=address, **who, code=why.code, reason=reason)


class Connections(Generic[C]):
    """All connections of a door that are open."""

    def __init__(self, broker: Broker, settings: ServerSettings, door: str) -> None:
        """`door` is what metrics call it."""
        self._broker = broker
        self._settings = settings
        self._door = door
        self.refusals = Refusals(door)
        #: In the order in which they came: what is done for all of them is done in the same order in every run.
        self._open: dict[C, None] = {}
        self.draining = False
        self._progress: asyncio.Event | None = None

    def __iter__(self) -> Iterator[C]:
        """Whoever is there now; they may come and go meanwhile."""
        return iter(list(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: C) -> MillstreamError | None:
        """Take a connection in, or say why not."""
        if self.draining:
            return ShuttingDown("the broker is shutting down")
        refusal = self._refusal_of(connection.address)
        if refusal is not None:
            self._broker.metrics.connections_refused += 1
            self.refusals.note(connection.address, refusal)
            return refusal
        self._open[connection] = None
        self._broker.metrics.connections_opened += 1
        self._count()
        return None

    def _refusal_of(self, address: str) -> MillstreamError | None:
        if len(self._open) >= self._settings.max_connections:
            return QuotaExceeded(f"the broker serves {len(self._open)} connections, its limit")
        if (by_mode := self._broker.modes.connect_refusal) is not None:
            return by_mode
        try:
            self._broker.access.admit_connection(address)
        except MillstreamError as refusal:
            return refusal
        return None

    def forget(self, connection: C) -> None:
        self._open.pop(connection, None)
        self.progressed()
        self._count()

    def _count(self) -> None:
        self._broker.metrics.count_connections(self._door, len(self._open))

    def progressed(self) -> None:
        """Something finished; only a closing door waits for that."""
        if self._progress is not None:
            self._progress.set()

    async def end(self) -> None:
        """Tell everybody, let what is under way finish, then close."""
        self.draining = True
        for connection in self:
            connection.say_goodbye()
        for _ in range(_TURNS):
            await asyncio.sleep(0)  # what has arrived by now is read, and counts for who is busy
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_ms / 1000):
                await self._until(lambda: not any(connection.busy for connection in self._open))
                for connection in self:
                    connection.close()  # sends what is still in its buffer, then says that it is lost
                await self._until(lambda: not self._open)
        for connection in self:
            connection.abort()

    async def _until(self, done: Callable[[], bool]) -> None:
        self._progress = asyncio.Event()
        while not done():
            await self._progress.wait()
            self._progress.clear()
