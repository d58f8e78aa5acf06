"""Committed positions of a group: how far it has read, how far behind it is, and how to send it elsewhere.

A committed offset is the next one to read.  The table changes only by `replay`, live and in recovery alike:
`decide_*` functions look, the caller records one document per (group, topic, partition), then replays it.
Positions outlive the members of a group; they are forgotten with the topic or by an operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from millstream.errors import InvalidArgument, OffsetOutOfRange
from millstream.groups.records import TopicPartition

__all__ = [
    "METADATA_BYTES_MAX",
    "OFFSET_MAX",
    "Bounds",
    "Committed",
    "Lag",
    "OffsetTable",
    "Reset",
    "ResetTo",
    "Shift",
    "ToEarliest",
    "ToLatest",
    "ToOffset",
    "ToTimestamp",
    "committed_from_document",
    "committed_to_document",
    "decide_commit",
    "decide_reset",
]

#: Metadata rides in every commit; a checkpoint reference fits, a checkpoint does not belong here.
METADATA_BYTES_MAX: Final = 4_096
#: Message ids have 48 bits for the offset.
OFFSET_MAX: Final = (1 << 48) - 1


@dataclass(frozen=True, slots=True)
class Committed:
    """Where a group goes on reading a partition."""

    offset: int
    metadata: str = ""
    committed_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The readable part of a partition: `start` is the first offset, `end` one past the last."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a group is behind in one partition; `committed` None means it has never committed there."""

    committed: int | None
    end: int
    messages: int


@dataclass(frozen=True, slots=True)
class ToEarliest:
    pass


@dataclass(frozen=True, slots=True)
class ToLatest:
    pass


@dataclass(frozen=True, slots=True)
class ToOffset:
    offset: int


@dataclass(frozen=True, slots=True)
class Shift:
    """Back (negative) or forth from the committed offset."""

    by: int


@dataclass(frozen=True, slots=True)
class ToTimestamp:
    """To the first message at or after a time; only the log knows which one that is.

    `offsets` says it, per partition; None or absent means there is none, which is the end of the partition.
    """

    offsets: Mapping[TopicPartition, int | None]


ResetTo = ToEarliest | ToLatest | ToOffset | Shift | ToTimestamp


@dataclass(frozen=True, slots=True)
class Reset:
    """One line of a reset plan: `before` None means nothing was committed."""

    partition: TopicPartition
    before: int | None
    after: int


class OffsetTable:
    """The committed positions of one group."""

    def __init__(self, group: str) -> None:
        self.group = group
        self._committed: dict[TopicPartition, Committed] = {}

    def __len__(self) -> int:
        return len(self._committed)

    def __iter__(self) -> Iterator[tuple[TopicPartition, Committed]]:
        """All positions by topic and partition."""
        return iter(sorted(self._committed.items()))

    def get(self, partition: TopicPartition) -> Committed | None:
        return self._committed.get(partition)

    def replay(self, partition: TopicPartition, committed: Committed | None) -> None:
        """Take up a recorded position; None forgets it."""
        if committed is None:
            self._committed.pop(partition, None)
        else:
            self._committed[partition] = committed

    def of_topic(self, topic: str) -> list[TopicPartition]:
        """What to forget when a topic is deleted."""
        return sorted(partition for partition in self._committed if partition.topic == topic)

    def lag(self, bounds: Mapping[TopicPartition, Bounds]) -> dict[TopicPartition, Lag]:
        """How far behind the group is in each of the given partitions.

        Messages that retention has removed do not count, and without a commit everything readable does.
        """
        lags: dict[TopicPartition, Lag] = {}
        for partition, bound in bounds.items():
            committed = self._committed.get(partition)
            position = max(bound.start, committed.offset if committed else bound.start)
            # A position beyond the end is left over from a log that was longer; nothing is waiting there.
            messages = max(0, bound.end - position)
            lags[partition] = Lag(committed.offset if committed else None, bound.end, messages)
        return lags


def decide_commit(offset: int, *, metadata: str = "", now_ms: int) -> Committed:
    """A position fit to be recorded.  It may lie before the last one: a reader may go back and read again."""
    if not 0 <= offset <= OFFSET_MAX:
        raise OffsetOutOfRange(f"offset {offset} is not between 0 and {OFFSET_MAX}")
    size = len(metadata.encode())
    if size > METADATA_BYTES_MAX:
        raise InvalidArgument(f"commit metadata is {size} bytes, the limit is {METADATA_BYTES_MAX}")
    return Committed(offset, metadata, now_ms)


def decide_reset(
    table: OffsetTable,
    to: ResetTo,
    *,
    partitions: Iterable[TopicPartition],
    bounds: Mapping[TopicPartition, Bounds],
) -> list[Reset]:
    """The plan of a reset, by topic and partition; nothing has changed yet, so it also serves a dry run.

    Positions outside a partition become its nearest end.  A shift needs a committed offset to start from and
    raises InvalidArgument where there is none.
    """
    plan: list[Reset] = []
    for partition in sorted(set(partitions)):
        bound = bounds[partition]
        committed = table.get(partition)
        before = committed.offset if committed else None
        wanted = _wanted(table.group, to, partition, before, bound)
        plan.append(Reset(partition, before, min(max(wanted, bound.start), bound.end)))
    return plan


def _wanted(group: str, to: ResetTo, partition: TopicPartition, before: int | None, bound: Bounds) -> int:
    match to:
        case ToEarliest():
            return bound.start
        case ToLatest():
            return bound.end
        case ToOffset(offset):
            return offset
        case Shift(by):
            if before is None:
                raise InvalidArgument(f"group {group} has no offset in {partition} to shift by {by}")
            return before + by
        case ToTimestamp(offsets):
            found = offsets.get(partition)
            return bound.end if found is None else found


def committed_to_document(committed: Committed) -> dict[str, Any]:
    return {
        "offset": committed.offset,
        "metadata": committed.metadata,
        "committed_at_ms": committed.committed_at_ms,
    }


def committed_from_document(document: Mapping[str, Any]) -> Committed:
    """Keys that are missing have defaults: earlier versions did not write them."""
    return Committed(document["offset"], document.get("metadata", ""), document.get("committed_at_ms", 0))
