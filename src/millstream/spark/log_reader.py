"""Where messages come from: two ways with equal rows, through a broker or straight from its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from millstream.errors import InvalidArgument, OffsetOutOfRange, PartitionNotFound, TopicNotFound
from millstream.spark.columns import Columns
from millstream.spark.offsets import Extent, Offsets, Place, Range
from millstream.spark.options import Bound, SourceOptions

__all__ = ["LogReader", "open_log", "resolve"]


class LogReader(Protocol):
    """What batch and streaming reads ask for.  Nothing of it changes anything."""

    def survey(self, *, durable: bool = False) -> dict[Place, Extent]:
        """The partitions that the options choose, as far as they exist, and what each of them holds now.

        `durable`: up to where no power cut takes it any more, which only a broker can see to.
        """

    def uids(self, places: Mapping[Place, Any]) -> dict[Place, int]:
        """The part of message ids that says where a message is."""

    def at_times(self, times_ms: Mapping[Place, int]) -> Offsets:
        """For each partition the first offset that was appended at a time or later, else its end."""

    def wait(self, ends: Mapping[Place, int], wait_s: float) -> None:
        """Return when there is more than this, or when the time is up."""

    def read(self, part: Range, columns: Columns) -> Iterator[Any]:
        """Record batches with exactly the messages of a range."""


def open_log(options: SourceOptions) -> LogReader:
    """Nothing is connected or opened before it is needed."""
    if options.path is not None:
        from millstream.spark.directory_reader import DirectoryReader

        return DirectoryReader(options)
    from millstream.spark.broker_reader import BrokerReader

    return BrokerReader(options)


def check_existing(options: SourceOptions, extents: Mapping[Place, Extent]) -> None:
    """For reads that end: what they name must be there."""
    if options.topics.places is not None:
        for place in sorted(options.topics.places - extents.keys()):
            raise PartitionNotFound(f"there is no partition {place}")
    for name in sorted(set(options.topics.names) - {place.topic for place in extents}):
        raise TopicNotFound(f"topic {name!r} does not exist")


def resolve(
    bound: Bound, which: str, log: LogReader, extents: Mapping[Place, Extent], *, fail_on_data_loss: bool
) -> Offsets:
    """The offsets that an option means, now.  Offsets that somebody wrote must lie in the log."""
    if bound.at == "earliest":
        return {place: extent.start for place, extent in extents.items()}
    if bound.at == "latest":
        return {place: extent.end for place, extent in extents.items()}
    if bound.at == "time":
        return _by_time(bound, which, log, extents)
    named = _complete(bound.places, f"{which}Offsets", extents)
    offsets: Offsets = {}
    for place, extent in extents.items():
        wanted = {-2: extent.start, -1: extent.end}.get(named[place], named[place])
        if not extent.start <= wanted <= extent.end:
            if fail_on_data_loss:
                raise OffsetOutOfRange(
                    f"{which}Offsets has {place} at {wanted}, but its log holds {extent.start} to {extent.end - 1}; "
                    "set failOnDataLoss to false to read what there is"
                )
            wanted = min(max(wanted, extent.start), extent.end)
        offsets[place] = wanted
    return offsets


def _by_time(bound: Bound, which: str, log: LogReader, extents: Mapping[Place, Extent]) -> Offsets:
    if bound.time_ms is not None:
        times = dict.fromkeys(extents, bound.time_ms)
    else:
        times = _complete(bound.places, f"{which}OffsetsByTimestamp", extents)
    offsets = log.at_times(times)
    if not bound.late_is_latest:
        late = sorted(place for place in offsets if offsets[place] >= extents[place].end)
        if late:
            raise OffsetOutOfRange(
                f"nothing was appended to {late[0]} at {times[late[0]]} ms or later; with "
                "startingOffsetsByTimestampStrategy=latest its reading begins at the end"
            )
    # The log may have grown since the survey, which is what this read goes by.
    return {place: min(offset, extents[place].end) for place, offset in offsets.items()}


def _complete(given: Mapping[Place, int], option: str, extents: Mapping[Place, Extent]) -> dict[Place, int]:
    """As in Spark's Kafka source: either all partitions are named, or it is a mistake."""
    unknown = sorted(given.keys() - extents.keys())
    if unknown:
        raise InvalidArgument(f"option {option} names {unknown[0]}, which is not among what is read")
    missing = sorted(extents.keys() - given.keys())
    if missing:
        raise InvalidArgument(f"option {option} says nothing about {missing[0]}; name all partitions")
    return {place: given[place] for place in extents}
