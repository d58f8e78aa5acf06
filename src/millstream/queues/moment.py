"""The time by which messages grow old."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Moment"]


class Moment(NamedTuple):
    """A time by the clock that stamps messages.

    After that clock was set ahead, what was stamped before does not grow old by the jump alone, for a while: it may
    have been a mistake, and what has expired is gone for good.
    """

    clock_us: int
    #: What is not counted, for messages that were stamped before `since_us`.
    held_us: int = 0
    since_us: int = 0

    def of(self, stamp_us: int) -> int:
        """The time that counts for what has this stamp."""
        return self.clock_us - self.held_us if stamp_us < self.since_us else self.clock_us
