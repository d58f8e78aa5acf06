"""What happened in a simulated run, seen from outside: by those who published, received and settled.

The checks below know nothing else.  They do not look into the broker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field


class Broken(AssertionError):
    """A promise was broken."""


@dataclass(eq=False)
class Published:
    """One message that somebody tried to publish."""

    id: str
    topic: str
    key: str | None
    #: Where it is, once that was confirmed.
    place: tuple[int, int] | None = None
    confirmed: bool = False
    due_us: int | None = None
    expiry_us: int | None = None
    #: It was confirmed without a sync, and the machine went down since it was published.
    in_doubt: bool = False
    #: Somebody tried to take it back; somebody was told that it is taken back.
    may_come: bool = True
    cancelled: bool = False

    @property
    def must_come(self) -> bool:
        """Whether it was promised to be in the log; what expires before it is due, or was taken back, need not be."""
        promised = self.confirmed and not self.in_doubt
        return promised and self.may_come and (self.due_us is None or self.expiry_us is None)


@dataclass
class History:
    """Notes of a run, in order, and what can be asked about them."""

    now_s: Callable[[], float]
    verbose: bool = False
    published: dict[str, Published] = field(default_factory=dict)
    #: What anybody ever saw at a place: (topic, partition, offset) -> id.
    seen: dict[tuple[str, int, int], str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    #: Topics whose messages are confirmed, and so shown, before they are on disk; and those where they are only shown.
    unsynced: set[str] = field(default_factory=set)
    shown_early: set[str] = field(default_factory=set)
    #: Those of them that may have lost their end: a place may be given to another message then.
    shortened: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._digest = hashlib.sha256()

    def note(self, kind: str, *facts: object) -> None:
        line = f"{self.now_s():11.6f}  {kind:12} {' '.join(map(str, facts))}"
        self._digest.update(line.encode())
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.verbose:
            print(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()[:16]

    # --- publishing and reading ----------------------------------------------------------------------------------

    def publishing(self, message: Published, options: object) -> None:
        self.published[message.id] = message
        self.note("publish", message.topic, message.id, f"key={message.key}", options)

    def confirmed(self, id: str, partition: int, offset: int) -> None:  # noqa: A002
        message = self.published[id]
        message.confirmed = True
        self.note("confirmed", message.topic, id, f"{partition}/{offset}")
        if message.due_us is None:  # otherwise it is among the schedules and will be somewhere else
            message.place = partition, offset
            self.saw(message.topic, partition, offset, id)

    def saw(self, topic: str, partition: int, offset: int, id: str) -> None:  # noqa: A002
        """Somebody was shown a message: from now on nothing else may ever be at this place."""
        if id not in self.published:
            raise Broken(f"{topic}/{partition}/{offset} holds {id!r}, which nobody published")
        if self.published[id].cancelled:
            raise Broken(f"{id} is at {topic}/{partition}/{offset} although it was cancelled")
        before = self.seen.setdefault((topic, partition, offset), id)
        if before != id and topic not in self.shortened:
            raise Broken(f"{topic}/{partition}/{offset} was {before} and is {id} now")

    def lose_ends(self) -> None:
        """The disk forgets what was not synced: of topics that do not wait for that, anything may be gone."""
        self.shortened |= self.unsynced | self.shown_early
        for message in self.published.values():
            if message.topic in self.unsynced and message.due_us is None:
                message.in_doubt = True

    def check_log(self, topic: str, log: dict[tuple[int, int], str]) -> None:
        """The whole log, read at the end: everything confirmed is there, nothing is there twice."""
        places: dict[str, tuple[int, int]] = {}
        for place, id in log.items():  # noqa: A001
            self.saw(topic, *place, id)
            if id in places:
                raise Broken(f"{id} is stored twice: at {places[id]} and at {place}")
            places[id] = place
        for message in self.published.values():
            if message.topic != topic or not message.confirmed:
                continue
            if message.in_doubt:
                if message.id not in places:
                    self.note("lost", message.id)
                continue
            place = places.get(message.id)
            if message.place is not None and place != message.place:
                raise Broken(f"{message.id} was confirmed at {message.place} and is at {place}")
            if place is None and message.must_come:
                raise Broken(f"{message.id} was confirmed for {message.due_us} and never came")
