"""Time that can be skipped: it passes as always, and a test may jump ahead without waiting.

For tests with real sockets and ordinary clients.  What the broker had set timers for happens on the way, in its order.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final

from millstream.durations import Duration, parse_ms

__all__ = ["SkippingClock", "SkippingLoop"]

#: A long way is made in about so many steps: what happens ten times a second need not happen a million times.
_STRIDES: Final = 250


class SkippingClock:
    """A clock that goes with the machine's and can be moved ahead; see `millstream.clock.Clock`."""

    def __init__(self) -> None:
        self.skipped_us = 0
        #: How whoever waits for this clock is woken on the way; a broker that uses it sets this.
        self.travel: Callable[[int], None] = self.move_to

    def now_us(self) -> int:
        return time.time_ns() // 1000 + self.skipped_us

    def monotonic_ms(self) -> int:
        return (time.monotonic_ns() // 1000 + self.skipped_us) // 1000

    def advance(self, by: Duration) -> None:
        """Skip some time ("30s", "2m", seconds); returns when what was due meanwhile has been done."""
        self.travel(self.skipped_us + parse_ms(by, "by") * 1000)

    def move_to(self, skipped_us: int) -> None:
        self.skipped_us = skipped_us


class SkippingLoop(asyncio.SelectorEventLoop):
    """An ordinary event loop on a SkippingClock."""

    def __init__(self, clock: SkippingClock) -> None:
        self._clock = clock
        super().__init__()
        clock.travel = self._travel

    def time(self) -> float:
        return time.monotonic() + self._clock.skipped_us / 1_000_000

    def _travel(self, skipped_us: int) -> None:
        """Called from the test's thread."""
        arrived = threading.Event()
        stride_us = (skipped_us - self._clock.skipped_us) // _STRIDES
        self.call_soon_threadsafe(self._step, skipped_us, stride_us, arrived)
        arrived.wait()

    def _step(self, skipped_us: int, stride_us: int, arrived: threading.Event) -> None:
        """Move to the next timer, let everything run that it sets off, and so on until the end of the way."""
        if self._ready:  # type: ignore[attr-defined]
            self.call_soon(self._step, skipped_us, stride_us, arrived)
            return
        left_us = skipped_us - self._clock.skipped_us
        if not left_us:
            arrived.set()
            return
        timers = self._scheduled  # type: ignore[attr-defined]
        until_next_us = int((timers[0].when() - self.time()) * 1_000_000) + 1 if timers else left_us
        self._clock.skipped_us += min(left_us, max(1, until_next_us, stride_us))
        # Timers that are due now get ready behind this call, so one more turn lies between.
        self.call_soon(self.call_soon, self._step, skipped_us, stride_us, arrived)
