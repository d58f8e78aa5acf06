"""How messages ended that nobody acked: the last ones of each kind, for whoever asks what became of them.

Nearly all messages are acked, so acks are not noted: as long as no note was dropped for want of room, a settled message
without a note was acked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from millstream.queues.facts import settled_below, settled_fact
from millstream.queues.records import Fact

__all__ = ["ACKED", "Endings"]

ACKED: Final = "acked"
#: Acks are not noted, what a snapshot does not tell apart cannot be, and what is gone says so itself.
_UNNOTED: Final = frozenset((ACKED, "gone", ""))
#: Notes of each kind; neighbours share one.
_KEPT: Final = 1_000


class _Note:
    """Messages that ended together; without bits all from `start` to `end`."""

    __slots__ = ("bits", "end", "reason", "start")

    def __init__(self, start: int, bits: int, reason: str) -> None:
        self.start = start
        self.end = start + bits.bit_length()
        self.bits = bits if bits & bits + 1 else 0
        self.reason = reason

    def has(self, offset: int) -> bool:
        return self.start <= offset < self.end and (not self.bits or bool(self.bits >> offset - self.start & 1))

    def meets(self, base: int, bits: int) -> bool:
        if self.end <= base or base + bits.bit_length() <= self.start:
            return False
        mine = self.bits or (1 << self.end - self.start) - 1
        return bool((mine << self.start - base if self.start >= base else mine >> base - self.start) & bits)


class Endings:
    __slots__ = ("_notes", "complete")

    def __init__(self) -> None:
        self._notes: dict[str, deque[_Note]] = {}
        #: Whether everything that was not acked is here.
        self.complete = True

    def note(self, how: str, base: int, bits: int, reason: str = "") -> None:
        if how in _UNNOTED:
            return
        notes = self._notes.get(how)
        if notes is None:
            notes = self._notes[how] = deque()
        note = _Note(base, bits, reason)
        if notes:
            last = notes[-1]
            if not last.bits and not note.bits and last.end == base and last.reason == reason:
                last.end = note.end
                return
        notes.append(note)
        if len(notes) > _KEPT:
            notes.popleft()
            self.complete = False

    def of(self, offset: int) -> tuple[str, str]:
        """How a settled message ended, and the reason if there was one; nothing if that is not known any more."""
        for how, notes in self._notes.items():
            for note in reversed(notes):
                if note.has(offset):
                    return how, note.reason
        return (ACKED if self.complete else ""), ""

    def died(self, base: int, bits: int) -> bool:
        """Whether one of these messages became a dead letter, as far as that is known."""
        return any(note.meets(base, bits) for note in self._notes.get("dead", ()))

    def clear(self) -> None:
        self._notes.clear()
        self.complete = True

    def cut(self, end: int) -> None:
        """The log lost everything from there on."""
        for how, notes in self._notes.items():
            for note in notes:
                note.end = min(note.end, end)
                note.bits &= (1 << max(end - note.start, 0)) - 1
            self._notes[how] = deque(note for note in notes if note.start < note.end)

    def facts(self, origin: int) -> Iterator[Fact]:
        """What makes the same notes of messages that are still in the log."""
        for how, notes in self._notes.items():
            for note in notes:
                if note.end > origin:
                    if note.bits:
                        yield settled_fact(how, [(note.start, note.bits)])
                    else:
                        yield settled_below(how, note.start, note.end)
