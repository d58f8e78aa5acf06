"""Where time comes from.  UTC, in integer microseconds; components take a Clock or a number as an argument."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    def now_us(self) -> int:
        """Microseconds since the Unix epoch.  May jump when an operator sets the clock."""

    def monotonic_ms(self) -> int:
        """Milliseconds from an arbitrary point; never goes back.  For time-outs."""


class SystemClock:
    """The machine's own clocks."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000
