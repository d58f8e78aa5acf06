"""Whether the event loop gets to everybody in time.

A clock that rings ten times a second and notes when it was late: whatever keeps the loop, in whichever path, shows
here and costs that path nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from millstream.broker.logs import SLOW_MS, Sparing

__all__ = ["Stalls"]

_log = structlog.get_logger("millstream.loop")

_RING_MS: Final = 100


class Stalls:
    """Rings until it is stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, now_ms: Callable[[], int]) -> None:
        self._loop = loop
        self._now_ms = now_ms
        self._sparing = Sparing(now_ms)
        self._due_ms = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._due_ms = self._now_ms() + _RING_MS
        self._timer = self._loop.call_later(_RING_MS / 1000, self._ring)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        late_ms = self._now_ms() - self._due_ms
        if late_ms > SLOW_MS:
            hint = "a slow call, a busy machine, or a process that was stopped"
            self._sparing.write(_log.warning, "the event loop stood still", at_least_ms=late_ms, hint=hint)
        self.start()
