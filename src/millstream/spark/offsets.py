"""Offsets of many partitions at once: as Spark keeps them, how much of them a micro-batch takes, who reads which part.

Pure: what a log holds is given.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import ceil
from typing import Any, Final, NamedTuple, TypeAlias

from millstream.errors import InvalidArgument, OffsetOutOfRange

__all__ = ["Extent", "Offsets", "Place", "Position", "Range", "admit", "as_json", "data_loss", "from_json", "split"]

#: About how much one task reads, unless options say otherwise; as much as one of Spark's own reads of a file.  Starting
#: a task takes Spark about 10 ms of processor time, whatever it reads.
TASK_BYTES: Final = 128 * 1024 * 1024
_SHOWN_MAX: Final = 10
#: Beside the numbers of partitions in a checkpoint.
_UID: Final = "uid"


class Place(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


#: For each partition the offset that comes next.
Offsets: TypeAlias = dict[Place, int]


class Extent(NamedTuple):
    """What the log of a partition holds."""

    start: int
    end: int
    bytes: int = 0

    @property
    def message_bytes(self) -> float:
        """About how large a message is, as it is stored."""
        return max(1.0, self.bytes / (self.end - self.start)) if self.end > self.start else 1.0


class Range(NamedTuple):
    """What one task reads: always by offset, so that a task that is tried again reads the same."""

    topic: str
    partition: int
    first: int
    until: int
    #: For message ids.
    uid: int = 0
    message_bytes: float = 1.0

    @property
    def place(self) -> Place:
        return Place(self.topic, self.partition)

    def __str__(self) -> str:
        return f"{self.place} {self.first}..{self.until - 1}"


def as_json(offsets: Mapping[Place, int]) -> dict[str, dict[str, int]]:
    """As Spark writes them into its checkpoint: it compares their text, so they are always in the same order."""
    document: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        document.setdefault(topic, {})[str(partition)] = offset
    return document


def from_json(document: object, what: str = "offsets") -> Offsets:
    """The way back, also for what people write into options, or copy from how far a query is.

    Raises InvalidArgument.
    """
    if not isinstance(document, Mapping):
        raise InvalidArgument(f'{what} must look like {{"orders": {{"0": 23}}}}, not {document!r}')
    offsets: Offsets = {}
    for topic, partitions in document.items():
        if not isinstance(partitions, Mapping):
            raise InvalidArgument(f'{what} of topic {topic!r} must look like {{"0": 23}}, not {partitions!r}')
        for partition, offset in partitions.items():
            if partition == _UID:
                continue
            if not str(partition).isdecimal() or not _is_number(offset):
                raise InvalidArgument(
                    f"{what} of topic {topic!r} have partition {partition!r} at {offset!r}: both must be numbers"
                )
            offsets[Place(str(topic), int(partition))] = offset
    return offsets


class Position(NamedTuple):
    """How far a query is, as its checkpoint has it, and in which topics: names may be used again."""

    offsets: Offsets
    #: Topic -> the uid of its first partition.  A checkpoint of an earlier version has none.
    uids: Mapping[str, int]

    def as_json(self) -> dict[str, dict[str, int]]:
        document = as_json(self.offsets)
        for topic, partitions in document.items():
            if topic in self.uids:
                partitions[_UID] = self.uids[topic]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Position:
        """Raises InvalidArgument for what is no checkpoint of ours."""
        if isinstance(document.get("claim"), int):
            raise InvalidArgument("the checkpoint is one of a query with option claim; this one needs one of its own")
        offsets = from_json(document, "the offsets in the checkpoint")
        return cls(offsets, {topic: found[_UID] for topic, found in document.items() if _UID in found})

    def is_of(self, topic: str, uids: Mapping[str, int]) -> bool:
        """Whether a topic is still the one it was, as far as is known."""
        known = self.uids.get(topic)
        return known is None or uids.get(topic, known) == known


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def admit(
    start: Mapping[Place, int], end: Mapping[Place, int], limit: float, cost: Mapping[Place, float] | None = None
) -> Offsets:
    """How far to go at most: each partition by its share of what there is, a message at least.

    `limit` counts messages, or, where `cost` says what a message of each partition costs, that.
    """
    weights = cost or {}
    total = sum(max(0, until - start[place]) * weights.get(place, 1.0) for place, until in end.items())
    if total <= limit:
        return dict(end)
    share = limit / total
    taken: Offsets = {}
    for place, until in end.items():
        messages = until - start[place]
        # Rounded down; but a partition with little in it would never have its turn beside one with much.
        taken[place] = start[place] + (max(1, int(messages * share)) if messages > 0 else 0)
    return taken


def split(ranges: Iterable[Range], *, at_least: int = 0, messages_max: int | None = None) -> list[Range]:
    """Ranges as tasks read them: none larger than allowed, and about as many as were asked for."""
    wanted = [each for each in ranges if each.until > each.first]
    total = sum(each.until - each.first for each in wanted)
    counts: list[int] = []
    for each in wanted:
        messages = each.until - each.first
        pieces = ceil(messages * each.message_bytes / TASK_BYTES)
        if messages_max:
            pieces = max(pieces, ceil(messages / messages_max))
        counts.append(min(messages, max(1, pieces, messages * at_least // total)))
    _round_up(wanted, counts, at_least)
    return [piece for each, count in zip(wanted, counts, strict=True) for piece in _pieces(each, count)]


def _round_up(ranges: list[Range], counts: list[int], at_least: int) -> None:
    """Cut the largest pieces once more as long as there are too few."""
    sizes = [each.until - each.first for each in ranges]
    largest = [(-size / count, number) for number, (size, count) in enumerate(zip(sizes, counts, strict=True))]
    heapq.heapify(largest)
    missing = at_least - sum(counts)
    while missing > 0 and largest:
        number = heapq.heappop(largest)[1]
        if counts[number] < sizes[number]:
            counts[number] += 1
            missing -= 1
            heapq.heappush(largest, (-sizes[number] / counts[number], number))


def _pieces(whole: Range, count: int) -> Iterable[Range]:
    messages = whole.until - whole.first
    cuts = [whole.first + messages * number // count for number in range(count + 1)]
    return (whole._replace(first=first, until=until) for first, until in pairwise(cuts))


def data_loss(lost: Iterable[Range]) -> OffsetOutOfRange:
    """The error about messages that Spark wants to read and that are gone."""
    ranges = [str(each) for each in lost]
    more = f" and {len(ranges) - _SHOWN_MAX} more" if len(ranges) > _SHOWN_MAX else ""
    return OffsetOutOfRange(
        f"messages that were to be read are gone: {', '.join(ranges[:_SHOWN_MAX])}{more}; they were removed by "
        "retention or with their topic.  Set failOnDataLoss to false to go on without them"
    )
