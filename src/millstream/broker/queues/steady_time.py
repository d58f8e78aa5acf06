"""The time for leases and for waits before a retry, which must neither end early nor hang when the clock is set.

How old a message is, and whether it has expired, is judged by the machine's clock itself: it has stamped the message,
clients go by it, and it is all that a restart knows of.  There, only jumps ahead are held back; see `PatientClock`.
"""

from __future__ import annotations

from typing import Final

from millstream.clock import Clock

__all__ = ["SteadyTime"]

#: Daemons that keep clocks right correct less than this at a time.
_JUMP_US: Final = 1_000_000
#: What a jump left is made up for at this share of the time that passes: a lease of 30 s then lasts 27 s or 33 s.
_CATCH_UP: Final = 10


class SteadyTime:
    """UTC in microseconds that takes no part in jumps of the clock, and then slowly comes back to it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wall_us = clock.now_us()
        self._monotonic_ms = clock.monotonic_ms()
        self._ahead_us = 0  # of the clock

    @property
    def behind_us(self) -> int:
        """How far the clock is behind since it was set back, or less than 0: ahead, since it was set ahead."""
        return self._ahead_us

    def now_us(self) -> int:
        wall_us, monotonic_ms = self._clock.now_us(), self._clock.monotonic_ms()
        passed_us = (monotonic_ms - self._monotonic_ms) * 1000
        jumped_us = wall_us - self._wall_us - passed_us
        self._wall_us, self._monotonic_ms = wall_us, monotonic_ms
        if abs(jumped_us) > _JUMP_US:
            self._ahead_us -= jumped_us
        elif self._ahead_us:
            most = passed_us // _CATCH_UP
            self._ahead_us -= max(-most, min(most, self._ahead_us))
        return wall_us + self._ahead_us
