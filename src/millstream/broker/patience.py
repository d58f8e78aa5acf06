"""Time for whatever takes something away for good because it is old.

A machine's clock that is set ahead by mistake makes every message old at once; when it is set right a moment later,
the messages would be gone.  So the clock is compared with one that nobody can set (`elapsed_ms`).  By how far it has
jumped ahead does not count as age until the jump has stood for a while.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import structlog

from millstream.clock import Clock, clock_text
from millstream.durations import format_ms
from millstream.queues.moment import Moment

__all__ = ["WATCH_S", "PatientClock"]

_log = structlog.get_logger("millstream.broker")

#: Daemons that keep clocks right correct less than this at a time.
_JUMP_US: Final = 1_000_000
#: How often to look: without a look nobody can tell a jump from time that has passed.
WATCH_S: Final = 1.0


class _Jump:
    """How far the clock was set ahead, and until when (by `elapsed_ms`) that does not count."""

    __slots__ = ("by_us", "until_ms")

    def __init__(self, by_us: int, until_ms: int) -> None:
        self.by_us = by_us
        self.until_ms = until_ms


class PatientClock:
    """The machine's clock, except that each jump ahead counts only once it has stood for `wait_ms`."""

    def __init__(self, clock: Clock, *, wait_ms: int) -> None:
        self._clock = clock
        self._wait_ms = wait_ms
        self._wall_us = clock.now_us()
        self._elapsed_ms = clock.elapsed_ms()
        #: Jumps that do not count yet, the oldest first; and their sum.
        self._jumps: deque[_Jump] = deque()
        self._held_us = 0
        self._since_us = 0

    def now_us(self) -> int:
        """The time by which to judge the age of anything that was stored before the last jump."""
        moment = self.moment()
        return moment.clock_us - moment.held_us

    def moment(self) -> Moment:
        """The time now, and how much of it does not count yet."""
        wall_us, elapsed_ms = self._clock.now_us(), self._clock.elapsed_ms()
        passed_us = (elapsed_ms - self._elapsed_ms) * 1000
        jumped_us = wall_us - self._wall_us - passed_us
        self._wall_us, self._elapsed_ms = wall_us, elapsed_ms
        if jumped_us > _JUMP_US and self._wait_ms:
            self._ahead(jumped_us, wall_us - min(passed_us, jumped_us))
        elif self._jumps and jumped_us < -_JUMP_US:
            self._back(-jumped_us)
        while self._jumps and elapsed_ms >= self._jumps[0].until_ms:
            stood = self._jumps.popleft()
            self._held_us -= stood.by_us
            _log.warning("the clock stays ahead and counts again", ahead=_in_seconds(stood.by_us // 1000))
        return Moment(wall_us, self._held_us, self._since_us)

    def _ahead(self, by_us: int, since_us: int) -> None:
        self._jumps.append(_Jump(by_us, self._elapsed_ms + self._wait_ms))
        self._held_us += by_us
        self._since_us = since_us
        _log.warning(
            "the clock was set ahead: what is old by that alone is not deleted yet",
            ahead=_in_seconds(by_us // 1000),
            deleted_after=format_ms(self._wait_ms),
        )

    def _back(self, by_us: int) -> None:
        """The clock was set back: take that off the latest jumps, which may have been what it corrects."""
        self._since_us -= by_us
        while self._jumps and by_us > 0:
            last = self._jumps[-1]
            taken_us = min(by_us, last.by_us)
            by_us -= taken_us
            last.by_us -= taken_us
            self._held_us -= taken_us
            if last.by_us <= _JUMP_US:
                self._held_us -= last.by_us
                self._jumps.pop()
        if not self._jumps:
            _log.info("the clock is back: what was old by it alone stays")

    async def watch(self) -> None:
        """Called every WATCH_S."""
        self.moment()

    def complaint(self) -> str:
        """What to tell the operator while a jump does not count yet; empty otherwise."""
        moment = self.moment()
        if not moment.held_us:
            return ""
        left_ms = max(0, self._jumps[0].until_ms - self._elapsed_ms)
        return (
            f"the clock was set ahead by {_in_seconds(moment.held_us // 1000)} to "
            f"{clock_text(moment.since_us // 1000)}; "
            f"what is old by that alone is deleted in {_in_seconds(left_ms)}"
        )


def _in_seconds(ms: int) -> str:
    return format_ms((ms + 500) // 1000 * 1000)
