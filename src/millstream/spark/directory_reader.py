"""Reading straight from a broker's files: for backups, backfill, and a broker that is not running."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from millstream.errors import OffsetOutOfRange, PartitionNotFound, TopicNotFound
from millstream.names import is_system
from millstream.spark.columns import Columns
from millstream.spark.decoding import BatchDecoder
from millstream.spark.offsets import Extent, Offsets, Place, Range, data_loss
from millstream.spark.options import SourceOptions
from millstream.spark.segments import SegmentDirectory

__all__ = ["DirectoryReader"]


class DirectoryReader:
    """Reads the topics of one set of options."""

    def __init__(self, options: SourceOptions) -> None:
        assert options.path is not None
        self._options = options
        self._topics = Path(options.path, "topics", options.target.namespace)
        self._directory = SegmentDirectory(options.path, namespace=options.target.namespace)

    # --- what there is -----------------------------------------------------------------------------------------------

    def survey(self, *, durable: bool = False) -> dict[Place, Extent]:  # noqa: ARG002
        counts = self._directory.topics()
        places = (Place(name, number) for name in self._names(counts) for number in range(counts.get(name, 0)))
        return {place: self._extent(place) for place in places if self._options.topics.holds(place)}

    def _names(self, known: Iterable[str]) -> Iterable[str]:
        topics = self._options.topics
        if topics.pattern is None:
            return topics.names
        matches = re.compile(topics.pattern).fullmatch
        return [name for name in known if matches(name) and not is_system(name)]

    def _extent(self, place: Place) -> Extent:
        offsets = self._directory.offsets(*place)
        return Extent(offsets.start, offsets.end, sum(map(_size, self._files(place))))

    def _files(self, place: Place) -> Iterator[Path]:
        return (self._topics / place.topic / str(place.partition)).glob("*.log")

    def uids(self, places: Mapping[Place, Any]) -> dict[Place, int]:
        return {place: self._directory.uid(*place) for place in places}

    def at_times(self, times_ms: Mapping[Place, int]) -> Offsets:
        found = {place: self._directory.offset_at(*place, time_ms * 1000) for place, time_ms in times_ms.items()}
        return {
            place: self._directory.offsets(*place).end if offset is None else offset for place, offset in found.items()
        }

    def wait(self, ends: Mapping[Place, int], wait_s: float) -> None:  # noqa: ARG002
        time.sleep(wait_s)  # files tell nobody that they grow

    # --- messages ----------------------------------------------------------------------------------------------------

    def read(self, part: Range, columns: Columns) -> Iterator[pa.RecordBatch]:
        decoder = BatchDecoder(columns, topic=part.topic, partition=part.partition, uid=part.uid)
        for buffer in self._buffers(part):
            yield from decoder.feed(buffer, first=part.first, until=part.until, verify=False)
        yield from decoder.finish()

    def _buffers(self, part: Range) -> Iterator[memoryview]:
        tolerant = not self._options.fail_on_data_loss
        try:
            first = max(part.first, self._directory.offsets(*part.place).start) if tolerant else part.first
            if first < part.until:
                yield from self._directory.read(*part.place, first, part.until, damaged=[] if tolerant else None)
        except (OffsetOutOfRange, TopicNotFound, PartitionNotFound) as problem:
            if not tolerant:
                raise data_loss([part]) from problem


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # removed just now
        return 0
