"""Where time comes from, and how a moment is said.  UTC, in whole microseconds; components take a Clock or a number."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Final, Protocol

__all__ = ["Clock", "SystemClock", "clock_text", "monotonic_ms"]


#: Where there is no such clock, a machine that has slept seems to have been set ahead.
_COUNTS_SLEEP: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    def now_us(self) -> int:
        """Microseconds since the Unix epoch.  May jump when an operator sets the clock."""

    def monotonic_ms(self) -> int:
        """Milliseconds from an arbitrary point; never goes back.  For time-outs."""

    def elapsed_ms(self) -> int:
        """As `monotonic_ms`, but it goes on while the machine sleeps.  For what grows old."""


class SystemClock:
    """The machine's own clocks."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic_ms(self) -> int:
        return monotonic_ms()

    def elapsed_ms(self) -> int:
        return time.clock_gettime_ns(_COUNTS_SLEEP) // 1_000_000


def monotonic_ms() -> int:
    """The machine's own, for those who live in no other time: clients."""
    return time.monotonic_ns() // 1_000_000


def clock_text(time_ms: int) -> str:
    """A moment in a sentence.  What people may write reaches further than the calendar of Python."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"
