"""Reading through the broker: whole stored batches by offset, the next ones on their way while these are decoded."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from millstream.errors import (
    ConnectionLost,
    DataDamaged,
    MillstreamError,
    OffsetOutOfRange,
    PartitionNotFound,
    RequestError,
    TopicNotFound,
    UnavailableError,
)
from millstream.names import is_system
from millstream.spark.columns import Columns
from millstream.spark.connection import Answer, BrokerConnection, connect, fetched
from millstream.spark.decoding import BatchDecoder
from millstream.spark.offsets import Extent, Offsets, Place, Range, data_loss
from millstream.spark.options import SourceOptions, Target
from millstream.wire import calls
from millstream.wire.messages import FetchRequest, FetchResult

__all__ = ["BrokerReader", "commit_progress"]

#: How often topics are looked for that match a pattern.
_DISCOVERY_S: Final = 1.0
#: How long a fetch waits that only wants to know when there is more.
_WATCH_MS: Final = 10_000
#: For what should be there: the broker may just have started.
_PATIENCE_MS: Final = 500
_FETCH_BYTES_MIN: Final = 64 * 1024


class BrokerReader:
    """Reads the topics of one set of options."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._connection: BrokerConnection = connect(options.target)
        self._matching: list[str] = []
        self._discovered_s = -_DISCOVERY_S
        #: Fetches that wait for more, with the offset behind which they do.
        self._watches: dict[Place, tuple[int, Answer]] = {}

    # --- what there is -----------------------------------------------------------------------------------------------

    def survey(self, *, durable: bool = False) -> dict[Place, Extent]:
        names = self._names()
        answers = self._connection.calls([calls.DescribeTopic(name=name) for name in names], calls.TopicInfo)
        extents: dict[Place, Extent] = {}
        at_risk: list[Place] = []  # those that show more than is on disk
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, TopicNotFound):
                continue
            if isinstance(answer, MillstreamError):
                raise answer
            for info in answer.partitions:
                place = Place(name, info.partition)
                if self._options.topics.holds(place):
                    extents[place] = Extent(info.start_offset, info.high_watermark, info.size_bytes)
                    if info.durable_offset is not None and info.durable_offset < info.high_watermark:
                        at_risk.append(place)
        if durable and at_risk:
            ends = self._offsets([calls.ListOffsets(topic=topic, at="durable", partitions=[n]) for topic, n in at_risk])
            for place in at_risk:
                extents[place] = extents[place]._replace(end=ends[place])
        return extents

    def _names(self) -> Iterable[str]:
        topics = self._options.topics
        if topics.pattern is None:
            return topics.names
        now_s = time.monotonic()
        if now_s - self._discovered_s >= _DISCOVERY_S:
            matches = re.compile(topics.pattern).fullmatch
            self._matching = [name for name in self._all_topics() if matches(name) and not is_system(name)]
            self._discovered_s = now_s
        return self._matching

    def _all_topics(self) -> Iterator[str]:
        after = ""
        while page := self._connection.call(calls.ListTopics(after=after), list[calls.TopicInfo]):
            yield from (info.name for info in page)
            after = page[-1].name

    def uids(self, places: Mapping[Place, Any]) -> dict[Place, int]:
        names = sorted({place.topic for place in places})
        known = self._connection.call(calls.Metadata(topics=names), list[calls.TopicMetadata])
        uids = {topic.name: topic.partition_uids for topic in known}
        return {place: uids[place.topic][place.partition] for place in places}

    def at_times(self, times_ms: Mapping[Place, int]) -> Offsets:
        return self._offsets(
            [
                calls.ListOffsets(topic=place.topic, at="timestamp", timestamp_ms=time_ms, partitions=[place.partition])
                for place, time_ms in times_ms.items()
            ]
        )

    def _offsets(self, wanted: Sequence[calls.ListOffsets]) -> Offsets:
        offsets: Offsets = {}
        for answer in self._connection.calls(wanted, list[calls.OffsetEntry]):
            if isinstance(answer, MillstreamError):
                raise answer
            offsets.update({Place(entry.topic, entry.partition): entry.offset for entry in answer})
        return offsets

    def wait(self, ends: Mapping[Place, int], wait_s: float) -> None:
        """A fetch per partition waits at the broker until there is more; they stay from one call to the next."""
        deadline_s = time.monotonic() + wait_s
        try:
            for place, end in ends.items():
                watched = self._watches.get(place)
                if watched is None or watched[0] != end or watched[1].lost:
                    if watched is not None:
                        watched[1].forget()
                    self._watches[place] = end, self._connection.begin_fetch(FetchRequest(*place, end, 1, _WATCH_MS))
            for place in self._watches.keys() - ends.keys():
                self._watches.pop(place)[1].forget()
            watching = {place: answer for place, (_, answer) in self._watches.items()}
            self._connection.wait_any(list(watching.values()), wait_s)
            for place, answer in watching.items():
                if answer.payload is not None:
                    del self._watches[place]
        except UnavailableError:
            self._watches.clear()  # the next question connects again, or says why not
        if not self._watches:
            time.sleep(max(0.0, min(wait_s, deadline_s - time.monotonic())))

    # --- messages ----------------------------------------------------------------------------------------------------

    def read(self, part: Range, columns: Columns) -> Iterator[pa.RecordBatch]:
        decoder = BatchDecoder(columns, topic=part.topic, partition=part.partition, uid=part.uid)
        for offset, result in self._results(part):
            # Not what came before: it may be in one batch with this by now, if compaction has joined the two.
            yield from decoder.feed(result.batches, first=offset, until=part.until)
        yield from decoder.finish()

    def _results(self, part: Range) -> Iterator[tuple[int, FetchResult]]:
        """What the broker has of a range, and from where on.  The next answer travels while this one is worked on."""
        offset = part.first
        coming: Answer | None = None
        try:
            while offset < part.until:
                try:
                    result = self._result(part, offset, coming)
                except (OffsetOutOfRange, TopicNotFound, PartitionNotFound) as problem:
                    coming = None
                    offset = self._after_loss(part, offset, problem)
                    continue
                coming = None
                self._check(part, offset, result)
                if result.next_offset <= offset:
                    offset = self._after_loss(part, offset, None)
                    continue
                asked, offset = offset, result.next_offset
                if offset < part.until:
                    coming = self._begin(part, offset)
                yield asked, result
        finally:
            if coming is not None:
                coming.forget()

    def _result(self, part: Range, offset: int, coming: Answer | None) -> FetchResult:
        if coming is not None:
            try:
                return fetched(coming.wait(time.monotonic() + self._options.target.timeout_s))
            except UnavailableError:
                pass  # asked for again, as long as there is time
        return self._connection.fetch(self._request(part, offset))

    def _begin(self, part: Range, offset: int) -> Answer | None:
        try:
            return self._connection.begin_fetch(self._request(part, offset))
        except ConnectionLost:
            return None

    def _request(self, part: Range, offset: int) -> FetchRequest:
        # Not much more than the range: the log goes on behind it.
        expected = int((part.until - offset) * part.message_bytes * 1.25)
        max_bytes = min(self._options.fetch_bytes, max(_FETCH_BYTES_MIN, expected))
        return FetchRequest(part.topic, part.partition, offset, max_bytes, _PATIENCE_MS)

    def _check(self, part: Range, offset: int, result: FetchResult) -> None:
        """Damage in the range is data loss; elsewhere it is none of our business."""
        if result.damaged is None or not self._options.fail_on_data_loss:
            return
        first, until = max(result.damaged[0], offset), min(result.damaged[1], part.until)
        if first < until:
            raise DataDamaged(
                f"{part._replace(first=first, until=until)} cannot be read: it is damaged on the broker's disk.  Set "
                "failOnDataLoss to false to go on without it"
            )

    def _after_loss(self, part: Range, offset: int, problem: RequestError | None) -> int:
        """Where the range goes on when something in it is gone since it was planned."""
        if self._options.fail_on_data_loss:
            raise data_loss([part._replace(first=offset)]) from problem
        extent = self.survey().get(part.place)
        if extent is None or not offset < extent.start < part.until:
            return part.until
        return extent.start


def commit_progress(target: Target, group: str, offsets: Mapping[Place, int]) -> None:
    """Say how far the work has come, as a group does."""
    entries = [
        calls.OffsetEntry(topic=place.topic, partition=place.partition, offset=offset)
        for place, offset in sorted(offsets.items())
    ]
    connect(target).call(calls.CommitOffsets(group=group, offsets=entries))
