"""A message's passport: what is known about it in several places, put together in the order in which it happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from millstream.traces.records import KINDS, Kind, Record

__all__ = ["Event", "Passport", "attempt_events", "record_events"]

_ORDER: Final = {kind: place for place, kind in enumerate(KINDS)}
#: How queues name what ended a delivery.
_ATTEMPTS: Final[dict[str, Kind]] = {
    "nack": "nacked",
    "reject": "rejected",
    "timeout": "timeout",
    "returned": "returned",
}
#: What ends a delivery, and therefore tells when it began.
_ENDINGS: Final = frozenset(("acked", *_ATTEMPTS.values()))


class Event:
    """Something that happened to the message, once."""

    __slots__ = ("consumer", "error", "group", "kind", "link", "note", "time_ms")

    def __init__(
        self,
        kind: Kind,
        time_ms: int,
        *,
        group: str = "",
        consumer: str = "",
        error: str = "",
        note: str = "",
        link: str = "",
    ) -> None:
        self.kind = kind
        self.time_ms = time_ms
        self.group = group
        self.consumer = consumer
        self.error = error
        self.note = note
        self.link = link


def record_events(record: Record) -> Iterator[Event]:
    """What a record says happened."""
    if record.kind in _ENDINGS and record.since_ms:
        yield Event("leased", record.since_ms, group=record.group, consumer=record.consumer)
    yield Event(
        record.kind,
        record.time_ms,
        group=record.group,
        consumer=record.consumer,
        error=record.error,
        note=record.note,
        link=record.link,
    )


def attempt_events(
    kind: str, group: str, consumer: str, delivered_ms: int, ended_ms: int, reason: str
) -> Iterator[Event]:
    """What a queue, or a dead letter, remembers of one delivery that came to nothing."""
    yield Event("leased", delivered_ms, group=group, consumer=consumer)
    yield Event(_ATTEMPTS.get(kind, "nacked"), ended_ms, group=group, consumer=consumer, error=reason)


class Passport:
    """Events from several places.  The same event from two of them counts once; what was told first stays."""

    def __init__(self) -> None:
        #: By what tells it from others; the last part numbers events of one place that are all alike.
        self._events: dict[tuple[str, int, str, str, int], Event] = {}

    def add(self, events: Iterable[Event]) -> None:
        """Everything that one place knows."""
        seen: Counter[tuple[str, int, str, str]] = Counter()
        for event in events:
            alike = (event.kind, event.time_ms, event.group, event.link)
            self._events.setdefault((*alike, seen[alike]), event)
            seen[alike] += 1

    def has(self, *kinds: str, group: str | None = None) -> bool:
        return any(event.kind in kinds and group in (None, event.group) for event in self._events.values())

    @property
    def last_ms(self) -> int:
        return max((event.time_ms for event in self._events.values()), default=0)

    def events(self) -> list[Event]:
        """In the order in which they happened."""

        def order(entry: tuple[tuple[str, int, str, str, int], Event]) -> tuple[int, int, int]:
            (_, _, _, _, number), event = entry
            return event.time_ms, number, _ORDER[event.kind]

        return [event for _, event in sorted(self._events.items(), key=order)]
