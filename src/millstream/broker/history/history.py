"""History on disk: the rings of tiers.py, written once a minute to logs like any other and read back at the start.

A slot is a message of the log of its ring.  Nobody waits for a disk: what a crash takes is the last minute.  What is
refused is tried again a minute later; a disk that fails costs the history its memory of the past and nobody anything
else.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final

import msgspec
import structlog

from millstream.broker.history.tiers import Point, Series, Tier, Tiers
from millstream.broker.opening import PartitionOpener
from millstream.broker.partition import Partition
from millstream.broker.patience import PatientClock
from millstream.broker.state import all_batches, hand_over
from millstream.errors import MillstreamError
from millstream.log.retention import Retention
from millstream.records import Codec, encode_batch

__all__ = ["KeptHistory", "decode_slot", "encode_slot"]

_log = structlog.get_logger("millstream.history")

_DIRECTORY: Final = "history"
_SEGMENT_BYTES: Final = 1024 * 1024
#: Of one ring on disk, and then its oldest segment goes.
_BYTES_MAX: Final = 16 * 1024 * 1024
#: Batches that are read before others get their turn.
_AT_A_TIME: Final = 16


class _Slot(msgspec.Struct, array_like=True):
    number: int
    series: list[Series]
    #: f32: average, least, most and count of each series.
    points: bytes


def encode_slot(number: int, points: Mapping[Series, Point]) -> bytes:
    numbers = array("f")
    for point in points.values():
        numbers.extend(point)
    return msgspec.msgpack.encode(_Slot(number, list(points), numbers.tobytes()))


def decode_slot(data: bytes) -> tuple[int, dict[Series, Point]]:
    slot = msgspec.msgpack.decode(data, type=_Slot)
    numbers = array("f", slot.points)
    points = zip(numbers[0::4], numbers[1::4], numbers[2::4], map(int, numbers[3::4]), strict=True)
    return slot.number, {series: Point(*point) for series, point in zip(slot.series, points, strict=True)}


class KeptHistory:
    """All rings, in memory and on disk.  All methods are called on the event loop."""

    def __init__(self, opener: PartitionOpener, patience: PatientClock) -> None:
        self.tiers = Tiers()
        self._patience = patience
        self.loaded = asyncio.Event()
        self._opener = opener
        self._logs: dict[Tier, Partition] = {}
        self._unwritten: dict[Tier, deque[int]] = {tier: deque(maxlen=tier.size.slots) for tier in self.tiers.tiers}
        #: Why the last try to read or write failed.
        self._trouble = ""

    async def load(self) -> None:
        """Read what earlier processes have left; measurements count from then on."""
        try:
            for tier in self.tiers.tiers:
                try:
                    if self._opener.storage.names(_directory(tier)):
                        await self._load(tier)
                except (OSError, MillstreamError) as error:
                    self._failed(error)
            now_ms = self._opener.clock.now_us() // 1000
            for tier, numbers in self.tiers.mend().items():
                # The slot of now is written when it is complete.  Until then each start makes it of the fine ones,
                # which it would not do if there were a part of it.
                self._unwritten[tier].extend(n for n in numbers if n != now_ms // tier.size.step_ms)
        finally:
            self.loaded.set()

    async def _load(self, tier: Tier) -> None:
        for count, batch in enumerate(all_batches(self._open(tier).log)):
            for value in batch.values():
                with suppress(msgspec.MsgspecError, ValueError):  # of a version that is not this one
                    tier.put(*decode_slot(value or b""))
            if count % _AT_A_TIME == 0:
                await asyncio.sleep(0)

    def note(self, time_ms: int, values: Mapping[Series, float], *, may_write: bool = True) -> None:
        """Take in measurements; what is complete is written once a minute, unless the disk is needed for more."""
        if not self.loaded.is_set():
            return
        completed = self.tiers.add(time_ms, values)
        for tier, number in completed.items():
            self._unwritten[tier].append(number)
        if self.tiers.tiers[1] in completed and may_write:
            self._write()

    def finish(self) -> None:
        """The broker stops: write everything.  The coarse slots that are not complete follow from the fine ones."""
        finest = self.tiers.tiers[0]
        if self.loaded.is_set() and finest.has(finest.current):
            self._unwritten[finest].append(finest.current)
            self._write()

    def close(self) -> None:
        """Let go of the files; nothing is being synced any more."""
        for partition in self._logs.values():
            try:
                partition.log.close()
            except (OSError, MillstreamError) as error:
                self._failed(error)
        self._logs.clear()

    def _write(self) -> None:
        now_us = self._opener.clock.now_us()
        try:
            for tier, numbers in self._unwritten.items():
                slots = [encode_slot(number, tier.slot(number)) for number in numbers if tier.has(number)]
                if slots:
                    partition = self._open(tier)
                    hand_over(partition, encode_batch(slots, base_timestamp_us=now_us, codec=Codec.ZSTD))
                    numbers.clear()
                    retention = Retention(max_age_ms=tier.size.span_ms, max_bytes=_BYTES_MAX)
                    partition.log.retain(retention, self._patience.now_us())
        except (OSError, MillstreamError) as error:
            self._failed(error)
        else:
            if self._trouble:
                self._trouble = ""
                _log.info("history is written again")

    def _open(self, tier: Tier) -> Partition:
        partition = self._logs.get(tier)
        if partition is None:
            directory = _directory(tier)
            partition = self._opener.open(directory, 0, segment_bytes=_SEGMENT_BYTES, counted=False)
            self._logs[tier] = partition
        return partition

    def _failed(self, error: Exception) -> None:
        if not self._trouble:
            self._trouble = str(error)
            _log.warning("history is kept in memory only for now", reason=self._trouble)

    def subjects(self) -> Iterator[tuple[str, str, str]]:
        """What had a history of its own before: namespace, topic and group."""
        seen = dict.fromkeys(series[1:] for series in sorted(self.tiers.series()) if series.topic)
        yield from seen


def _directory(tier: Tier) -> str:
    return f"{_DIRECTORY}/{tier.size.name}"
