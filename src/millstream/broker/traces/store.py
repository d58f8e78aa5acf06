"""Records of traces on disk: a log like any other, written a few times a second by nobody who waits.

What a crash takes is the last moment.  A disk that fails costs the traces and nobody anything else; one that has room
again gets those that come then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec
import structlog

from millstream.broker.messages.reading import Backward, Forward
from millstream.broker.opening import PartitionOpener
from millstream.broker.partition import Partition
from millstream.broker.state import hand_over
from millstream.config import TraceSettings
from millstream.errors import MillstreamError
from millstream.log.retention import Retention
from millstream.records import Batch, Codec, encode_batch
from millstream.traces.records import Record, Search, decode_record, encode_record

__all__ = ["TraceStore"]

_log = structlog.get_logger("millstream.traces")

_DIRECTORY: Final = "traces"
_SEGMENT_BYTES_MAX: Final = 4 * 1024 * 1024
_READ_BYTES: Final = 256 * 1024
#: A record is written this long after what it tells, at most.
_LATE_MS: Final = 10_000
_TIDY_EVERY_US: Final = 10_000_000
#: How long nothing is written after the disk has refused something.
_TRY_AGAIN_US: Final = 1_000_000
#: Compressing less takes longer than writing it.
_COMPRESSED_FROM: Final = 20


class TraceStore:
    """All methods are called on the event loop."""

    def __init__(self, opener: PartitionOpener, settings: TraceSettings) -> None:
        self._opener = opener
        self._settings = settings
        self._partition: Partition | None = None
        self._tidied_us = 0
        #: Why the last try failed, and when that was.
        self._trouble = ""
        self._failed_us = 0

    def write(self, records: Sequence[Record], now_us: int) -> bool:
        """Hand records to the operating system; False when they are lost."""
        if self._trouble and abs(now_us - self._failed_us) < _TRY_AGAIN_US:
            return False
        codec = Codec.ZSTD if len(records) >= _COMPRESSED_FROM else Codec.NONE
        batch = encode_batch([encode_record(record) for record in records], base_timestamp_us=now_us, codec=codec)
        try:
            hand_over(self._open(), batch)
        except (OSError, MillstreamError) as error:
            self._failed(error, now_us)
            return False
        if self._trouble:
            self._trouble = ""
            _log.info("what happens to messages is recorded again")
        return True

    def tidy(self, now_us: int) -> None:
        """Let go of what is too old or too much, now and then."""
        if self._partition is None or abs(now_us - self._tidied_us) < _TIDY_EVERY_US:
            return
        self._tidied_us = now_us
        retention = Retention(max_age_ms=self._settings.retention_ms or None, max_bytes=self._settings.max_bytes)
        try:
            log = self._partition.log
            if retention.decide_roll(log.segments, now_us=now_us):
                log.roll()
            log.retain(retention, now_us)
        except (OSError, MillstreamError) as error:  # it is tried again
            _log.warning("old records of messages could not be removed", reason=str(error))

    def close(self) -> None:
        """Let go of the files."""
        if self._partition is not None:
            try:
                self._partition.log.close()
            except (OSError, MillstreamError) as error:
                _log.warning("the records of messages could not be closed in order", reason=str(error))
            self._partition = None

    def _open(self) -> Partition:
        if self._partition is None:
            segment_bytes = max(64 * 1024, min(_SEGMENT_BYTES_MAX, self._settings.max_bytes // 8))
            self._partition = self._opener.open(_DIRECTORY, 0, segment_bytes=segment_bytes, counted=False)
        return self._partition

    def _failed(self, error: Exception, now_us: int) -> None:
        if not self._trouble:
            _log.warning("what happens to messages is not recorded for now", reason=str(error))
        self._trouble, self._failed_us = str(error), now_us

    # --- reading -------------------------------------------------------------------------------------------------

    @property
    def end(self) -> int:
        return self._open().high_watermark if self._exists() else 0

    def _exists(self) -> bool:
        return self._partition is not None or bool(self._opener.storage.names(_DIRECTORY))

    async def forward(self, search: Search) -> AsyncIterator[list[Record]]:
        """The records that match, the oldest first, those of one write at a time."""
        if not self._exists():
            return
        log = self._open().log
        reader = Forward(self._open, log.offset_at_time(search.from_ms * 1000), _READ_BYTES)
        while (batch := await reader.peek()) is not None:
            yield [record for _, record in _matching(batch, search)]
            reader.drop()
            await asyncio.sleep(0)

    async def backward(self, search: Search, end: int) -> AsyncIterator[tuple[int, list[tuple[int, Record]]]]:
        """The records that match before an offset, the newest first, with their offsets; each time where that went."""
        if not self._exists():
            return
        log = self._open().log
        if search.until_ms:
            end = min(end, log.offset_at_time((search.until_ms + _LATE_MS) * 1000))
        first = max(log.start_offset, log.offset_at_time(search.from_ms * 1000))
        reader = Backward(self._open, end, first, _READ_BYTES)
        while (batch := await reader.peek()) is not None:
            found = [(offset, record) for offset, record in _matching(batch, search) if reader.covers(offset)]
            reader.drop()
            yield reader.position, found[::-1]
            await asyncio.sleep(0)


def _matching(batch: Batch, search: Search) -> list[tuple[int, Record]]:
    block = batch.block
    assert isinstance(block, bytes), "what is read from a log is bytes"
    if not search.may_match(block):
        return []
    found = []
    for offset, value in zip(batch.offsets(), batch.values(), strict=True):
        if value is None or not search.may_match(value):
            continue
        try:
            record = decode_record(value)
        except msgspec.MsgspecError:
            continue  # of a version that is not this one
        if search.matches(record):
            found.append((offset, record))
    return found
