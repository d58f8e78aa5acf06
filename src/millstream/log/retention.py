"""Which segments a partition may let go: a pure decision over the numbers in their index headers.

Segments go as whole files and oldest first, so the start of the log is the base offset of the first one that remains,
without any record of its own.  The price is that limits are kept to the accuracy of a segment:

- age: a segment goes when its newest message is too old, so the older messages in it stay a little longer;
- bytes and messages: a segment goes when enough remains without it, so up to a segment more than the limit is kept.

So that this accuracy does not depend on how long a topic takes to fill a file, no segment should hold much more than an
eighth of what a limit allows: an active one that does is rolled early.  That makes at most about eight segments per
limit, and never one that is empty.

The active segment itself stays, with one exception: if all of it is past its age it is rolled and goes too, so that a
quiet topic does not keep its last messages for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

__all__ = ["Removals", "Retainable", "Retention"]

#: A segment is to hold one of so many parts of what a limit allows.  More are more exact, and more files.
_PARTS: Final = 8


class Retainable(Protocol):
    """What a decision needs to know of a segment."""

    @property
    def size(self) -> int: ...

    @property
    def messages(self) -> int: ...

    @property
    def next_offset(self) -> int: ...

    @property
    def first_append_us(self) -> int: ...

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

    def decide_removals(self, segments: Sequence[Retainable], *, now_us: int, below: int | None = None) -> Removals:
        """Look at all segments, oldest first and the active one last.

        With `below` a segment must also lie below that offset as a whole.
        """
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
            if below is not None and segment.next_offset > below:
                return Removals(going, False)
            going += 1
        active = segments[-1]
        if active.size and self._is_too_old(active, now_us) and (below is None or active.next_offset <= below):
            return Removals(going + 1, True)
        return Removals(going, False)

    def decide_roll(self, segments: Sequence[Retainable], *, now_us: int, below: int | None = None) -> bool:
        """Whether the active segment, the last one, should take no more messages, so that it can go in time."""
        active = segments[-1]
        if not active.size or not self.is_coarse(active.size, active.messages, now_us - active.first_append_us):
            return False
        due = self.decide_removals(segments, now_us=now_us)
        # All of it goes: then it is rolled anyway, and there is nothing to seal.  Or what is due must stay because of
        # `below`: more segments would help nobody, and there would be more and more of them.
        return not due.includes_active and due == self.decide_removals(segments, now_us=now_us, below=below)

    def is_coarse(self, size: int, messages: int, span_us: int) -> bool:
        """Whether a segment of this size, number of messages and time would hold too much of what a limit allows."""
        return (
            (self.max_age_ms is not None and span_us * _PARTS > self.max_age_ms * 1000)
            or (self.max_bytes is not None and size * _PARTS >= self.max_bytes)
            or (self.max_messages is not None and messages * _PARTS >= self.max_messages)
        )

    def _is_too_old(self, segment: Retainable, now_us: int) -> bool:
        return self.max_age_ms is not None and segment.last_append_us < now_us - self.max_age_ms * 1000
