"""Streaming reads: what a micro-batch takes, as offsets that Spark keeps in its checkpoint.

A partition that appears while a query runs is first written into the checkpoint with the offset at which it begins, and
read from the next micro-batch on.  The same holds for one that a query reads from its end, which is somewhere else a
moment later: Spark asks where to begin several times before the first micro-batch is on record.  So both ends of
everything that is read are on record: a batch that is done again after a crash reads the same, and whatever retention
took in the meantime is noticed.  So is a topic that was deleted and made again: the checkpoint says which one it means,
because its offsets say nothing about the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, Final, NamedTuple

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from millstream.errors import MillstreamError, TopicNotFound
from millstream.spark.batch import read_range
from millstream.spark.broker_reader import commit_progress
from millstream.spark.columns import Columns
from millstream.spark.log_reader import LogReader, open_log, resolve
from millstream.spark.offsets import Extent, Offsets, Place, Position, Range, admit, as_json, data_loss, split
from millstream.spark.options import SourceOptions

__all__ = ["StreamReader"]

#: How long Spark waits for us when there is nothing new: it asks again at once, and stops a query no sooner.
_POLL_S: Final = 0.1


class _Seen(NamedTuple):
    """What there is: how much of each partition, and which topics these are."""

    extents: Mapping[Place, Extent]
    uids: Mapping[str, int]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One of these lives in the driver as long as its query; others go to the executors, where they only read."""

    def __init__(self, options: SourceOptions, columns: Columns) -> None:
        self._options = options
        self._columns = columns
        self._opened: LogReader | None = None
        #: With Trigger.AvailableNow: what there was when the query started.
        self._pinned: _Seen | None = None
        self._ends: Offsets = {}
        #: When a micro-batch had something to do, by a clock that only ticks.
        self._triggered_s: float | None = None
        self._published: Offsets = {}
        self._complained = ""
        #: Where the query begins: Spark asks for it several times before it is on record.
        self._initial: Position | None = None
        #: Of the partitions that are read from their end: where that was, until the first micro-batch is on record.
        self._from_end: Offsets = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def _log(self) -> LogReader:
        if self._opened is None:
            self._opened = open_log(self._options)
        return self._opened

    # --- offsets -----------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        if self._initial is None:
            self._initial = self._begin()
        return self._initial.as_json()

    def _begin(self) -> Position:
        options = self._options
        seen = self._look()
        lossless = options.fail_on_data_loss
        offsets = resolve(options.starting, "starting", self._log, seen.extents, fail_on_data_loss=lossless)
        if options.starting.at != "earliest":
            self._from_end = {place: offset for place, offset in offsets.items() if offset == seen.extents[place].end}
        return Position(offsets, seen.uids)

    def _look(self) -> _Seen:
        while True:
            with suppress(TopicNotFound):  # one that was deleted just now is not there when we look again
                extents = self._survey()
                firsts = dict.fromkeys(Place(place.topic, 0) for place in extents)
                uids = self._log.uids(firsts) if firsts else {}
                return _Seen(extents, {place.topic: uid for place, uid in uids.items()})

    def _survey(self) -> Mapping[Place, Extent]:
        """What is there to stay: a checkpoint would go past other messages, if a power cut gave their offsets away."""
        return self._log.survey(durable=True)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """What tells Spark's "everything" (Trigger.Once) from "as much as you like"; the options say how much."""
        options = self._options
        if options.offsets_per_trigger_max is not None:
            return ReadMaxRows(options.offsets_per_trigger_max)
        if options.bytes_per_trigger_max is not None:
            return ReadMaxBytes(options.bytes_per_trigger_max)
        if options.offsets_per_trigger_min is not None:
            return ReadMinRows(options.offsets_per_trigger_min)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        position = Position.from_json(start)
        seen = self._pinned or self._look()
        self._publish(position, seen)  # Spark asks for more when it is done with what it has
        begin = self._kept(position, seen)
        end = self._reachable(begin, seen.extents)
        from_end, self._from_end = self._from_end, {}
        if end == begin and self._pinned is None and not from_end:
            asked_again_s = monotonic() + _POLL_S
            self._log.wait(self._ends, _POLL_S)
            seen = self._look()
            begin = self._kept(position, seen)
            end = self._reachable(begin, seen.extents)
            if end == begin:  # what ended the wait is nothing to read: of a partition that has failed, for example
                sleep(max(0.0, asked_again_s - monotonic()))
        # Nothing is read from there before it is on record: the next one who asks would be told another end.
        end.update({place: offset for place, offset in from_end.items() if begin.get(place) == offset})
        if end != begin and not isinstance(limit, ReadAllAvailable):
            end = self._limited(begin, end, seen.extents)
            if end == begin:
                sleep(_POLL_S)  # there is not enough yet
        return Position(end, {**position.uids, **seen.uids}).as_json()

    def _kept(self, position: Position, seen: _Seen) -> Offsets:
        """Where the query is in topics that are still the same; one that was made again is one that appears."""
        kept = {place: offset for place, offset in position.offsets.items() if position.is_of(place.topic, seen.uids)}
        lost = [Range(*place, offset, offset + 1) for place, offset in position.offsets.items() if place not in kept]
        if lost and self._options.fail_on_data_loss:
            raise data_loss(lost)
        return kept

    def _reachable(self, begin: Offsets, known: Mapping[Place, Extent]) -> Offsets:
        """How far each partition can be read; one that is new only begins."""
        self._ends = {place: extent.end for place, extent in known.items()}
        end = {place: max(offset, self._ends.get(place, offset)) for place, offset in begin.items()}
        lost: list[Range] = []
        doubtful = [place for place, offset in begin.items() if self._ends.get(place, -1) < offset]
        # What was pinned may be older than the offsets with which a query begins.
        now = self._survey() if doubtful and self._pinned is not None else known
        for place in doubtful:
            extent = now.get(place)
            if extent is None and not self._options.topics.chooses(place):
                continue  # it may be there as ever; if it is chosen again, reading goes on here
            if extent is None:
                lost.append(Range(*place, begin[place], begin[place] + 1))
            elif extent.end < begin[place]:
                # The topic was made anew, and the checkpoint does not say which one it means; or it is kept in memory.
                lost.append(Range(*place, extent.end, begin[place]))
                end[place] = extent.start
        if lost and self._options.fail_on_data_loss:
            raise data_loss(lost)
        for place, extent in known.items():
            end.setdefault(place, extent.start)
        return end

    def _limited(self, begin: Offsets, end: Offsets, extents: Mapping[Place, Extent]) -> Offsets:
        options = self._options
        fresh = {place: offset for place, offset in end.items() if offset > begin.get(place, offset)}
        others = {place: offset for place, offset in end.items() if place not in fresh}
        now_s = monotonic()
        available = sum(offset - begin[place] for place, offset in fresh.items())
        if options.offsets_per_trigger_min and self._pinned is None and self._triggered_s is not None:
            waited_s = now_s - self._triggered_s
            if available < options.offsets_per_trigger_min and waited_s < options.trigger_delay_s:
                return begin
        self._triggered_s = now_s
        if options.offsets_per_trigger_max is not None:
            fresh = admit(begin, fresh, options.offsets_per_trigger_max)
        elif options.bytes_per_trigger_max is not None:
            cost = {place: extents[place].message_bytes for place in fresh}
            fresh = admit(begin, fresh, options.bytes_per_trigger_max, cost)
        return others | fresh

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._pinned = self._look()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return as_json(self._ends) if self._ends else None

    # --- reading -----------------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        position, reached = Position.from_json(start), Position.from_json(end)
        begin, seen = position.offsets, self._look()
        extents = {place: extent for place, extent in seen.extents.items() if reached.is_of(place.topic, seen.uids)}
        wanted = {
            place: Range(*place, begin[place], until)
            for place, until in sorted(reached.offsets.items())
            if place in begin and until > begin[place] and position.is_of(place.topic, reached.uids)
            if self._options.topics.chooses(place)
        }
        lost = [gap for part in wanted.values() for gap in _gaps(part, extents.get(part.place))]
        if lost and self._options.fail_on_data_loss:
            raise data_loss(lost)
        there = {place: part for place, part in wanted.items() if place in extents}
        uids = self._log.uids(there) if "id" in self._columns and there else {}
        ranges = [
            part._replace(
                first=max(part.first, extents[place].start),
                until=min(part.until, extents[place].end),
                uid=uids.get(place, 0),
                message_bytes=extents[place].message_bytes,
            )
            for place, part in there.items()
        ]
        options = self._options
        tasks = split(ranges, at_least=options.partitions_min, messages_max=options.records_per_partition_max)
        return [InputPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_range(self._options, self._columns, partition.value)

    # --- progress ----------------------------------------------------------------------------------------------------

    # `commit` comes a batch late, and never for the last one: `latestOffset` has seen to it already.

    def _publish(self, position: Position, seen: _Seen) -> None:
        """Make progress visible as that of a group.  Spark's checkpoint decides, so this may fail."""
        # A checkpoint keeps topics that are gone, and the broker takes all offsets or none.
        offsets = {
            place: offset
            for place, offset in position.offsets.items()
            if place in seen.extents and position.is_of(place.topic, seen.uids)
        }
        if self._options.group is None or not offsets or offsets == self._published:
            return
        self._published = offsets
        try:
            commit_progress(self._options.target, self._options.group, offsets)
        except MillstreamError as problem:
            if str(problem) != self._complained:
                self._complained = str(problem)
                print(
                    f"millstream: the progress of group {self._options.group!r} is not shown: {problem}",
                    file=sys.stderr,
                )

    def stop(self) -> None:
        self._opened = None


def _gaps(part: Range, extent: Extent | None) -> list[Range]:
    """What of a range is not in the log any more."""
    if extent is None:
        return [part]
    gaps = []
    if part.first < extent.start:
        gaps.append(part._replace(until=min(part.until, extent.start)))
    if part.until > extent.end:
        gaps.append(part._replace(first=max(part.first, extent.end)))
    return gaps
