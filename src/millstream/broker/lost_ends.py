"""Offsets that a power cut gave back: what was remembered about their old messages must not meet their new ones.

Under fsync `interval` and `never`, and in topics with `visible=written`, a message can be delivered and settled before
it is on disk.  A power cut may take the message and leave the settle, which is in another file.  The next message gets
the same offset, and would be taken for settled.  So before anything is appended to a partition, its journal is told
where the log ends.

Positions of readers are in yet other files.  They are compared with the ends of their logs when the broker starts.  A
log that cannot be opened at that moment is compared when it is first opened, before it takes any message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import structlog

from millstream.broker.journal import EntityFact, Fact, Journal
from millstream.broker.registry import Registry, Topic
from millstream.errors import MillstreamError, StorageFailed
from millstream.queues.facts import CUT, START, cut_fact, end_of

if TYPE_CHECKING:
    from millstream.broker.topics import Topics

__all__ = ["UncheckedEnds", "forget_lost", "recovered_end"]

_log = structlog.get_logger("millstream.journal")

_QUEUES: Final = "queue/"
_BURIALS: Final = "burials/"
_LANES: Final = "lanes"


def forget_lost(journal: Journal, end: int) -> None:
    """Take back what an earlier process said about offsets that are not in the log any more."""
    lost: list[EntityFact] = []
    for entity, facts in journal.unclaimed().items():
        is_queue, is_burials = entity.startswith(_QUEUES), entity.startswith(_BURIALS)
        if (is_queue and _end_of_all(facts) > end) or (is_burials and any(_owed_until(fact) > end for fact in facts)):
            lost.append((entity, cut_fact(end)))
        elif entity == _LANES and facts.last[1] > end:
            lost.append((entity, ["seen", end]))
    if lost:
        _log.warning(
            "the log lost its end; what was settled there is forgotten", journal=journal.partition.log.directory
        )
        journal.amend(lost)


def _end_of_all(facts: Iterable[Fact]) -> int:
    """The offset below which lies everything that the facts of a queue speak of."""
    end = 0
    for fact in facts:
        its = end_of(fact)
        end = its if fact[0] == START else min(end, its) if fact[0] == CUT else max(end, its)
    return end


def _owed_until(fact: Fact) -> int:
    return int(fact[2]) + int.from_bytes(fact[3], "little").bit_length() if fact[0] == "owed" else 0


def recovered_end(topics: Topics, topic: Topic, number: int, position: int) -> int | None:
    """Where a log ends after a start, to be compared with the position of one of its readers.

    None when it cannot be opened.  Then the position is remembered in `topics.unchecked`, and compared when it can be.
    """
    try:
        return 0 if topics.is_untouched(topic, number) else topics.partition_of(topic, number).log.next_offset
    except (OSError, MillstreamError) as error:
        topics.unchecked.add(topic, number, position, error)
        return None


class UncheckedEnds:
    """Logs that could not be opened when positions were to be compared with their ends."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        #: The largest of the positions, by the uid of the partition.
        self._positions: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Whether there are any; then the next start has to look again."""
        return any(self._registry.place_of(uid) is not None for uid in self._positions)

    def add(self, topic: Topic, number: int, position: int, error: Exception) -> None:
        uid = topic.partition_uids[number]
        if uid not in self._positions:
            place = {"namespace": topic.namespace, "topic": topic.name, "partition": number}
            _log.error("positions in a log that cannot be opened are not checked", **place, reason=str(error))
        self._positions[uid] = max(position, self._positions.get(uid, 0))

    def check(self, topic: Topic, number: int, end: int) -> None:
        """Compare positions with the end of a log that could not be opened before, and can be now.

        Raises StorageFailed when a reader is beyond the end: new messages would count as read by it.  Only a restart
        can take its position back, because the reader may be at work by now.
        """
        uid = topic.partition_uids[number]
        position = self._positions.get(uid, 0)
        if position > end:
            raise StorageFailed(
                f"partition {number} of topic {topic.name!r} lost its end while it could not be opened: it ends at "
                f"{end}, a reader is at {position}; restart the broker, which puts that right"
            )
        self._positions.pop(uid, None)
