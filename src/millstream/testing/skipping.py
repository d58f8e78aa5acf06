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
        #: How far to go, in us, with whoever waits for this clock woken on the way; a broker that uses it sets this.
        self.travel: Callable[[int], None] = self.skip

    def now_us(self) -> int:
        return time.time_ns() // 1000 + self.skipped_us

    def monotonic_ms(self) -> int:
        return (time.monotonic_ns() // 1000 + self.skipped_us) // 1000

    elapsed_ms = monotonic_ms

    def advance(self, by: Duration) -> None:
        """Skip some time ("30s", "2m", seconds); return when what was due meanwhile has been done.

        Threads that call this at once do it one after the other.
        """
        self.travel(parse_ms(by, "by") * 1000)

    def skip(self, by_us: int) -> None:
        self.skipped_us += by_us


class SkippingLoop(asyncio.SelectorEventLoop):
    """An ordinary event loop on a SkippingClock."""

    def __init__(self, clock: SkippingClock) -> None:
        self._clock = clock
        self._travelling = threading.Lock()
        self._arrived = threading.Event()
        super().__init__()
        clock.travel = self._travel

    def close(self) -> None:
        """Nobody is left to be woken: time is skipped at once, also by whoever is on the way."""
        super().close()
        self._clock.travel = self._clock.skip
        self._arrived.set()

    def time(self) -> float:
        return time.monotonic() + self._clock.skipped_us / 1_000_000

    def _travel(self, by_us: int) -> None:
        """Called from the test's threads."""
        assert self._thread_id != threading.get_ident(), (  # type: ignore[attr-defined]
            "the broker cannot skip time for itself: call `clock.advance` from the test, not from what it runs"
        )
        # Two on the way at once would each wait until nothing but the other is left to do.
        with self._travelling:
            self._arrived = threading.Event()
            self.call_soon_threadsafe(self._step, self._clock.skipped_us + by_us, by_us // _STRIDES)
            self._arrived.wait()

    def _step(self, skipped_us: int, stride_us: int) -> None:
        """Move to the next timer, let everything run that it sets off, and so on until the end of the way."""
        if self._ready:  # type: ignore[attr-defined]
            self.call_soon(self._step, skipped_us, stride_us)
            return
        left_us = skipped_us - self._clock.skipped_us
        if not left_us:
            self._arrived.set()
            return
        timers = self._scheduled  # type: ignore[attr-defined]
        until_next_us = int((timers[0].when() - self.time()) * 1_000_000) + 1 if timers else left_us
        self._clock.skipped_us += min(left_us, max(1, until_next_us, stride_us))
        # Timers that are due now get ready behind this call, so one more turn lies between.
        self.call_soon(self.call_soon, self._step, skipped_us, stride_us)
