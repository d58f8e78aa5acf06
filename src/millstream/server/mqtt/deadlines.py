"""When to look at which connection again: one ticker for all of them, and nothing per connection but two numbers.

Time is counted in ticks.  Whoever is heard of notes the number of the tick, and is looked at only when its time could
be over; so ten thousand clients that send a ping a minute cost a few hundred looks a second at most, and no timer.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import structlog

__all__ = ["TICK_MS", "Deadlines", "Watched"]

_log = structlog.get_logger("millstream.mqtt")

TICK_MS: Final = 500
#: So many ticks without a tick: the loop, or the machine, stood still, and what came meanwhile has not been read.
_STANDSTILL: Final = 3


class Watched(Protocol):
    """A connection; `due` belongs to the deadlines."""

    #: The tick at which it is looked at; 0 is never.
    due: int

    def look(self) -> None:
        """Called once when it is due."""

    def abort(self) -> None: ...


class Deadlines:
    """Who is due when."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: The number of this tick.
        self.now = self._tick()
        self._due: dict[int, set[Watched]] = {}
        self._stood_still = False

    def _tick(self) -> int:
        return int(self._loop.time() * 1000) // TICK_MS

    def set(self, watched: Watched, tick: int) -> None:
        """Look at it then, and not when it was said before."""
        self.clear(watched)
        watched.due = max(tick, self.now + 1)
        self._due.setdefault(watched.due, set()).add(watched)

    def clear(self, watched: Watched) -> None:
        """Do not look at it."""
        if watched.due:
            others = self._due.get(watched.due)  # none if it is among those who are just being looked at
            if others is not None:
                others.discard(watched)
                if not others:
                    del self._due[watched.due]
            watched.due = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_MS / 1000)
            self.go_on()

    def go_on(self) -> None:
        """Look at everybody who is due.  After a standstill a tick later: what they have sent is read first."""
        before, self.now = self.now, self._tick()
        if self.now - before >= _STANDSTILL and not self._stood_still:
            self._stood_still = True
            return
        self._stood_still = False
        if self._due:
            for tick in sorted(tick for tick in self._due if tick <= self.now):
                for watched in self._due.pop(tick):
                    watched.due = 0
                    self._look_at(watched)

    def _look_at(self, watched: Watched) -> None:
        try:
            watched.look()
        except Exception:
            _log.exception("a connection could not be looked after")
            watched.abort()
