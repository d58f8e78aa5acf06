"""Streaming reads that are consumers of a queue group: a micro-batch is what the driver has claimed for it.

The offset that Spark keeps in its checkpoint says which messages were claimed, so that a batch that is done again after
a crash reads them again: those that are still ours.  What others have got in the meantime, or what has become a dead
letter, is theirs.

Spark asks for the next batch when the one before it is done and written down; that is when its messages are acked.  The
method `commit` would come too late, with the batch after it.  Of the last batch before a query ends nobody is told;
whoever ends it can have it acked (`acknowledge`), and otherwise the next start does it, if nobody else has got the
messages by then.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from millstream.errors import InvalidArgument, TopicNotFound
from millstream.spark.claims import CLAIM_MAX, Claims
from millstream.spark.columns import Columns, columns_of
from millstream.spark.faults import reached
from millstream.spark.log_reader import LogReader, open_log
from millstream.spark.offsets import Place, Range, split
from millstream.spark.options import SourceOptions
from millstream.wire import queue_calls

__all__ = ["Batch", "ClaimingReader", "acknowledge"]

_DEFAULT_MAX: Final = 100_000
#: How long Spark waits for us when there is nothing to claim: it asks again at once.
_POLL_S: Final = 0.1
#: As long as the broker may take to notice that the query before this one, which held the same messages, is gone.
_PATIENCE_S: Final = 35.0
#: How long to wait for that if the query has just ended in order, and closed its connection.
_ENDED_S: Final = 2.0
#: What lies between two claimed messages is read, too, and left out, if it is no more than this.
_GAP_MAX: Final = 1_000


class Batch(NamedTuple):
    """What was claimed for a micro-batch; as JSON, an offset of Spark."""

    #: Counts: a message that failed may be claimed again, and two batches must not look the same.
    number: int = 0
    ranges: Mapping[str, list[queue_calls.Range]] = {}
    #: Of these topics, as in offsets.Position: one that is made again has other messages at these offsets.
    uids: Mapping[str, int] = {}
    #: When their queue groups were made: one that is made again has other messages to do, at these offsets, too.
    made_us: Mapping[str, int] = {}

    def as_json(self) -> dict[str, Any]:
        """Always in the same order: Spark compares the text."""
        return {
            "claim": self.number,
            "ranges": {topic: [list(each) for each in self.ranges[topic]] for topic in sorted(self.ranges)},
            "uids": {topic: self.uids[topic] for topic in sorted(self.uids)},
            "made_us": {topic: self.made_us[topic] for topic in sorted(self.made_us)},
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Batch:
        if document.keys() - {"uids", "made_us"} != {"claim", "ranges"}:
            raise InvalidArgument(
                "the checkpoint is one of a query without option claim; what is claimed needs a checkpoint of its own"
            )
        ranges = {
            topic: [(part, first, until) for part, first, until in some] for topic, some in document["ranges"].items()
        }
        return cls(document["claim"], ranges, document.get("uids", {}), document.get("made_us", {}))


class ClaimedPart(NamedTuple):
    """What one task reads: some messages of one partition, and how to read them."""

    whole: Range
    pieces: list[tuple[int, int]]


class ClaimingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One of these lives in the driver as long as its query; others go to the executors, where they only read."""

    def __init__(self, options: SourceOptions, columns: Columns) -> None:
        _check(options)
        self._options = options
        self._columns = columns
        self._log: LogReader | None = None
        self._claims: Claims | None = None
        #: The batch whose messages are held, if any.
        self._batch: Batch | None = None
        #: With Trigger.AvailableNow: how many messages of each topic are still to be claimed.
        self._pinned: dict[str, int] | None = None
        #: Whether the groups are made where they are to begin.
        self._begun = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_log": None, "_claims": None, "_batch": None}

    # --- offsets -----------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        # Once: a topic that appears before Spark asks again is one of those that appear later, with all that it has.
        if not self._begun:
            self._open()
            self._begun = True
            if self._pinned is not None:
                self._pin()
        return Batch().as_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.offsets_per_trigger_max or _DEFAULT_MAX)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        before = Batch.from_json(start)
        if self._batch is not None and self._batch.number == before.number + 1:
            return self._batch.as_json()  # claimed, and not begun
        self._finish(before, _PATIENCE_S)
        most = self._options.offsets_per_trigger_max or _DEFAULT_MAX
        batch = self._next(before, CLAIM_MAX if isinstance(limit, ReadAllAvailable) else most)
        if batch is None:
            if self._pinned is None:
                time.sleep(_POLL_S)
            return before.as_json()
        self._batch = batch
        reached("after_claim")
        return batch.as_json()

    def _next(self, before: Batch, most: int) -> Batch | None:
        claims = self._opened()
        ranges: dict[str, list[queue_calls.Range]] = {}
        made_us: dict[str, int] = {}
        topics = self._topics()
        turn = before.number % len(topics) if topics else 0
        for topic in topics[turn:] + topics[:turn]:  # every topic is the first one sometimes
            wanted = most if self._pinned is None else min(most, self._pinned.get(topic, 0))
            if wanted <= 0:
                continue
            taken, made_then_us = claims.take(topic, wanted)
            if taken:
                ranges[topic], made_us[topic] = taken, made_then_us
            messages = sum(until - first for _, first, until in taken)
            most -= messages
            if self._pinned is not None:  # without any, what is left of it is in other hands
                self._pinned[topic] = self._pinned[topic] - messages if taken else 0
        return Batch(before.number + 1, ranges, self._uids(ranges), made_us) if ranges else None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        # Nothing is opened here: in a query that goes on, a topic without the group is one that has appeared since.
        self._pin()

    def _pin(self) -> None:
        topics = self._topics()
        self._pinned = self._opened().ready(topics)
        if any(topic not in self._pinned for topic in topics):
            there: Counter[str] = Counter()
            for place, extent in self._reader().survey().items():
                there[place.topic] += extent.end - extent.start
            self._pinned = {**there, **self._pinned}

    # --- reading -----------------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:  # noqa: ARG002
        batch = Batch.from_json(end)
        if self._batch is None or self._batch.number != batch.number:  # it was begun before this query was restarted
            held = self._opened().retake(self._kept(batch), batch.made_us, patience_s=_PATIENCE_S)
            self._batch = Batch(batch.number, held, batch.uids, batch.made_us)
        batch = self._batch  # what is ours of it, also when Spark asks once more
        log = self._reader()
        extents = log.survey()
        by_place: dict[Place, list[tuple[int, int]]] = {}
        for topic, ranges in sorted(batch.ranges.items()):
            for partition, first, until in sorted(ranges):
                by_place.setdefault(Place(topic, partition), []).append((first, until))
        uids = log.uids(by_place) if "id" in self._columns and by_place else {}
        # Tasks are cut as if the messages of a partition lay side by side.
        rows = [
            Range(
                *place, 0, sum(until - first for first, until in pieces), uids.get(place, 0), _size(extents.get(place))
            )
            for place, pieces in by_place.items()
        ]
        options = self._options
        tasks = split(rows, at_least=options.partitions_min, messages_max=options.records_per_partition_max)
        return [InputPartition(_part(task, by_place[task.place])) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        part: ClaimedPart | None = partition.value
        if part is None:
            return
        log = self._reader()
        names = self._columns.names
        columns = self._columns if "offset" in names else Columns((*names, "offset"), self._columns.nullable)
        for some in _clusters(part.pieces):
            whole = part.whole._replace(first=some[0][0], until=some[-1][1])
            if len(some) == 1:
                yield from log.read(whole, self._columns)
                continue
            for rows in log.read(whole, columns):
                chosen = _within(rows, some)
                if chosen.num_rows:
                    yield chosen if columns is self._columns else chosen.select(names)

    # --- progress ----------------------------------------------------------------------------------------------------

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is left to do, as a rule."""
        self._finish(Batch.from_json(end), _PATIENCE_S)

    def _finish(self, batch: Batch, patience_s: float) -> None:
        """Ack the messages of a batch that is done."""
        if not batch.number or (self._batch is not None and self._batch.number != batch.number):
            return
        claims = self._opened()
        if self._batch is None:
            # Done before this query was restarted, and perhaps not acked; otherwise there is nothing to take.
            claims.retake(self._kept(batch), batch.made_us, patience_s=patience_s)
        claims.acknowledge()
        self._batch = Batch(batch.number)

    def finish_last(self, end: dict[str, Any]) -> None:
        """For a reader of its own, when the query is over: what its last batch has claimed of these topics is done."""
        batch, topics = Batch.from_json(end), set(self._topics())
        mine = {topic: ranges for topic, ranges in batch.ranges.items() if topic in topics}
        self._finish(batch._replace(ranges=mine), _ENDED_S)

    def stop(self) -> None:
        if self._claims is not None:
            self._claims.close()
            self._claims = None
        self._log = self._batch = None

    def _kept(self, batch: Batch) -> dict[str, list[queue_calls.Range]]:
        """What was claimed of topics that are still the same, as far as is known."""
        uids = self._uids(batch.ranges)
        return {
            topic: ranges
            for topic, ranges in batch.ranges.items()
            if topic in uids and batch.uids.get(topic, uids[topic]) == uids[topic]
        }

    # --- the broker --------------------------------------------------------------------------------------------------

    def _uids(self, topics: Iterable[str]) -> dict[str, int]:
        """Of those that there are."""
        found: dict[str, int] = {}
        for topic in topics:
            with suppress(TopicNotFound):
                first = Place(topic, 0)
                found[topic] = self._reader().uids({first: None})[first]
        return found

    def _reader(self) -> LogReader:
        if self._log is None:
            self._log = open_log(self._options)
        return self._log

    def _opened(self) -> Claims:
        if self._claims is None:
            assert self._options.claim is not None
            self._claims = Claims(self._options.target, self._options.claim)
        return self._claims

    def _open(self) -> None:
        latest = self._options.starting.at == "latest"
        self._opened().open(self._topics(), "latest" if latest else "earliest")

    def _topics(self) -> list[str]:
        topics = self._options.topics
        if topics.pattern is None:
            return list(topics.names)
        return sorted({place.topic for place in self._reader().survey()})


def acknowledge(options: SourceOptions, end: dict[str, Any]) -> None:
    """The batch that ends here is committed, and the query that claimed it has ended."""
    reader = ClaimingReader(options, columns_of())
    try:
        reader.finish_last(end)
    finally:
        reader.stop()


def _check(options: SourceOptions) -> None:
    for name, given in (
        ("assign", options.topics.places),
        ("groupId", options.group),
        ("maxBytesPerTrigger", options.bytes_per_trigger_max),
        ("minOffsetsPerTrigger", options.offsets_per_trigger_min),
    ):
        if given is not None:
            raise InvalidArgument(f"option {name} does not go with claim: the queue says what is next")
    if options.starting.at not in ("earliest", "latest"):
        raise InvalidArgument("with option claim, startingOffsets is earliest or latest, and only for a new group")
    if (options.offsets_per_trigger_max or 0) > CLAIM_MAX:
        raise InvalidArgument(f"with option claim, maxOffsetsPerTrigger is at most {CLAIM_MAX}")


def _size(extent: Any) -> float:
    return 1.0 if extent is None else float(extent.message_bytes)


def _part(task: Range, pieces: list[tuple[int, int]]) -> ClaimedPart:
    """The messages that a task reads, counted among those of its partition, as offsets."""
    ends = list(accumulate(until - first for first, until in pieces))
    mine = []
    for (first, until), end in zip(pieces, ends, strict=True):
        begin = end - (until - first)
        low, high = max(task.first, begin), min(task.until, end)
        if low < high:
            mine.append((first + low - begin, first + high - begin))
    return ClaimedPart(task._replace(first=mine[0][0], until=mine[-1][1]), mine)


def _clusters(pieces: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Pieces that are near enough to each other to be read at once."""
    some: list[tuple[int, int]] = []
    for first, until in pieces:
        if some and first - some[-1][1] > _GAP_MAX:
            yield some
            some = []
        some.append((first, until))
    if some:
        yield some


def _within(rows: pa.RecordBatch, pieces: list[tuple[int, int]]) -> pa.RecordBatch:
    """The rows whose offset is in one of the pieces, which are sorted."""
    firsts, untils = np.array(pieces, np.int64).T
    offsets = rows.column("offset").to_numpy()
    piece = np.searchsorted(firsts, offsets, "right") - 1
    return rows.filter(pa.array((piece >= 0) & (offsets < untils[piece])))
