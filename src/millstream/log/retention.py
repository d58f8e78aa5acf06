"""Which segments a partition may let go: a pure decision over the numbers in their index headers.

Segments go as whole files and oldest first, so the start of the log is the base offset of the first one that remains,
without any record of its own.  The price is that limits are kept to the accuracy of a segment:

- age: a segment goes when its newest message is too old, so the older messages in it stay a little longer;
- bytes and messages: a segment goes when enough remains without it, so up to a segment more than the limit is kept.

The active segment stays, with one exception: if all of it is past its age it is rolled and goes too, so that a quiet
topic does not keep its last messages for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Removals", "Retainable", "Retention"]


class Retainable(Protocol):
    """What a decision needs to know of a segment."""

    @property
    def size(self) -> int: ...

    @property
    def messages(self) -> int: ...

    @property
    def last_append_us(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Removals:
    """How many of the oldest segments may go, and whether the active one, which must be rolled first, is among them."""

    segments: int
    includes_active: bool


@dataclass(frozen=True, slots=True)
class Retention:
    """How much of a partition to keep; None means without limit."""

    max_age_ms: int | None = None
    max_bytes: int | None = None
    max_messages: int | None = None

    def decide_removals(self, segments: Sequence[Retainable], *, now_us: int) -> Removals:
        """Look at all segments, oldest first and the active one last."""
        bytes_left = sum(segment.size for segment in segments)
        messages_left = sum(segment.messages for segment in segments)
        going = 0
        for segment in segments[:-1]:
            bytes_left -= segment.size
            messages_left -= segment.messages
            too_many_bytes = self.max_bytes is not None and bytes_left >= self.max_bytes
            too_many_messages = self.max_messages is not None and messages_left >= self.max_messages
            if not (too_many_bytes or too_many_messages or self._is_too_old(segment, now_us)):
                return Removals(going, False)
            going += 1
        active = segments[-1]
        if active.size and self._is_too_old(active, now_us):
            return Removals(going + 1, True)
        return Removals(going, False)

    def _is_too_old(self, segment: Retainable, now_us: int) -> bool:
        return self.max_age_ms is not None and segment.last_append_us < now_us - self.max_age_ms * 1000
