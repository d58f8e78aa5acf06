"""What a group member may hold, holds, and has to give up.  No threads, no network; times are monotonic seconds.

Three views of the same partitions have to be brought together: what the broker has granted, what the stream reads, and
what the next heartbeat says.  The broker passes a partition on when a heartbeat no longer lists it, so it is listed
until the stream has let go of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final, NamedTuple

from millstream.client.messages import TopicPartition
from millstream.wire.calls import Assignment, TopicPartitions

__all__ = ["Changes", "Ownership"]

#: Of all streams of this process: what one of them has read says nothing about what another one holds.
_holdings: Final = itertools.count(1)


class Changes(NamedTuple):
    """What the stream has to do to follow the group."""

    take: set[TopicPartition]
    give_up: set[TopicPartition]
    lost: set[TopicPartition]
    epoch: int


class Ownership:
    """One member's partitions."""

    def __init__(self) -> None:
        self.generation = 0
        #: Counts how often everything was lost; what a stream read in an earlier epoch is no longer its own.
        self.epoch = 0
        #: More partitions are coming, once others have let go of them.
        self.awaiting = False
        self._owned: set[TopicPartition] = set()
        #: The stream looks up where to begin with these.  One that is taken away meanwhile leaves this set and does not
        #: come back by being granted again: what was looked up is out of date, somebody else may have read on.
        self._taking: set[TopicPartition] = set()
        self._giving_up: dict[TopicPartition, float] = {}  # until when we wait for the handler
        #: With the number of the holding: a partition that went and came back is held anew, as others may have read on.
        self._held: dict[TopicPartition, int] = {}
        self._forced: set[TopicPartition] = set()  # given up behind the stream's back

    # --- the broker's word ---------------------------------------------------------------------------------------

    def follow(self, assignment: Assignment, *, patience_until_s: float) -> tuple[bool, bool]:
        """Take in what the broker allows.  Returns whether the stream has something to do, and the next heartbeat."""
        if assignment.generation < self.generation:
            return False, False  # overtaken by a newer answer
        self.generation = assignment.generation
        self.awaiting = bool(assignment.pending)
        allowed = {
            TopicPartition(entry.topic, number) for entry in assignment.partitions for number in entry.partitions
        }
        granted = allowed - self._owned
        self._owned |= granted
        for place in allowed:
            self._giving_up.pop(place, None)  # taken back: it may stay
        asked = released = False
        for place in self._owned - allowed:
            if place not in self._held:
                self._owned.discard(place)  # the stream has not even begun with it
                self._taking.discard(place)
                released = True
            elif place not in self._giving_up:
                self._giving_up[place] = patience_until_s
                asked = True
        return bool(granted) or asked, released

    def listing(self) -> list[TopicPartitions]:
        """What the next heartbeat says."""
        topics: dict[str, list[int]] = {}
        for topic, partition in sorted(self._owned):
            topics.setdefault(topic, []).append(partition)
        return [TopicPartitions(topic=topic, partitions=numbers) for topic, numbers in topics.items()]

    def lose_everything(self) -> None:
        """The broker does not know us any more."""
        self.epoch += 1
        self.generation = 0
        self.awaiting = False
        self._owned.clear()
        self._taking.clear()
        self._giving_up.clear()
        self._held.clear()
        self._forced.clear()

    # --- the stream's side ---------------------------------------------------------------------------------------

    def changes(self, held: set[TopicPartition], epoch: int) -> Changes:
        """What a stream that reads these partitions, and has followed up to `epoch`, has to do.

        It says so again until it is done.
        """
        lost = held if epoch != self.epoch else (held - self._owned) | (held & self._forced)
        giving_up = set(self._giving_up)
        self._taking = self._owned - giving_up - (held - lost)
        return Changes(set(self._taking), giving_up - lost, set(lost), self.epoch)

    def took(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The stream is ready to read these.  Returns those it still may, each with the number of its holding.

        It must not touch the others.
        """
        held = {place: next(_holdings) for place in sorted(self._taking & set(places))}
        self._taking -= held.keys()
        self._held |= held
        return held

    def dropped(self, places: Iterable[TopicPartition], *, lost: bool) -> None:
        """The stream has stopped reading these: because it was asked to, or because they were lost."""
        for place in places:
            self._held.pop(place, None)
            self._forced.discard(place)
            if not lost:
                self._owned.discard(place)
                self._giving_up.pop(place, None)

    def holds(self, place: TopicPartition, holding: int | None = None) -> bool:
        """Whether the stream reads this; with a number, whether it has done so without a break since then."""
        return place in self._owned and place in self._held and holding in (None, self._held[place])

    # --- patience ------------------------------------------------------------------------------------------------

    def patience_ends_s(self) -> float | None:
        return min(self._giving_up.values(), default=None)

    def late(self, now_s: float) -> set[TopicPartition]:
        """Partitions the handler should have let go of by now."""
        return {place for place, until_s in self._giving_up.items() if until_s <= now_s}

    def force(self, places: Iterable[TopicPartition]) -> None:
        """Give up without the stream; it learns of it as a loss."""
        for place in places:
            self._giving_up.pop(place, None)
            self._owned.discard(place)
            self._held.pop(place, None)
            self._forced.add(place)
