"""Building the batches of a compacted segment: what survives of many small ones goes into few large ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from millstream.records import PRIORITY_DEFAULT, Batch, Columns, encode_batch, stamp

__all__ = ["Merger"]

_T = TypeVar("_T")

_OPTIONS: Final = int(Columns.OPTIONS)
_MERGED_BYTES: Final = 1024 * 1024
_MERGED_COUNT: Final = 65_536
MERGED_US: Final = 1_000_000
_DELTA_MAX: Final = 0xFFFF_FFFF  # the offset column holds u32


@dataclass(slots=True)
class _Columns:
    """The columns of the batch being built; absent values stand as their defaults."""

    offsets: list[int] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    headers: list[bytes] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    deliver_at_us: list[int] = field(default_factory=list)
    expiry_us: list[int] = field(default_factory=list)
    timestamps_us: list[int] = field(default_factory=list)
    options: bool = False


class Merger:
    """Collects surviving messages in the order of their offsets and emits whole, stamped batches.

    Batches are merged only if they were appended within the same second (or `merged_us`) of the clock.  A grid, not a
    distance: merging what was merged before must not stretch the time that a batch stands for.
    """

    def __init__(self, emit: Callable[[bytes | bytearray, int, int], None], *, merged_us: int = MERGED_US) -> None:
        """`emit` gets each batch with its base offset and append time."""
        self._emit = emit
        self._merged_us = merged_us
        self._columns = _Columns()
        self._bytes = 0
        self._append_time_us = 0
        self._leader_epoch = 0
        self._codec = 0

    def add(self, batch: Batch, places: Sequence[int]) -> None:
        """Add the messages at some places of a batch."""
        if not places:
            return
        header, count = batch.header, batch.count
        values, keys, headers = batch.values(), batch.keys(), batch.raw_headers()
        priorities, deliver_at, expiry = batch.priorities(), batch.deliver_at_us(), batch.expiry_us()
        timestamps, offsets = batch.timestamps_us(), batch.offsets()
        length = len(batch.block) if header.codec else header.length
        # In pieces: with offsets and times of their own, many tiny messages of one large batch may outgrow a frame.
        step = max(1, min(_MERGED_COUNT, _MERGED_BYTES * count // length))
        for first in range(0, len(places), step):
            piece = places[first : first + step]
            # Not only their share: what survives may be the largest messages of many batches, and what was packed may
            # go into a batch that is not.  A batch that has outgrown a frame cannot be read by anybody.
            size = max(length * len(piece) // count, _bytes_at((values, keys, headers), piece))
            if self._columns.offsets and not self._fits(batch, offsets[piece[-1]], size):
                self.flush()
            if not self._columns.offsets:
                self._leader_epoch, self._codec = header.leader_epoch, header.codec
            self._append_time_us = header.append_time_us
            self._bytes += size
            columns = self._columns
            columns.options = columns.options or bool(header.flags & _OPTIONS)
            columns.offsets += [offsets[i] for i in piece]
            columns.values += _pick(values, None, count, piece)
            columns.keys += _pick(keys, None, count, piece)
            columns.headers += [raw or b"" for raw in _pick(headers, b"", count, piece)]
            columns.priorities += _pick(priorities, PRIORITY_DEFAULT, count, piece)
            columns.deliver_at_us += _pick(deliver_at, 0, count, piece)
            columns.expiry_us += _pick(expiry, 0, count, piece)
            columns.timestamps_us += _pick(timestamps, header.base_timestamp_us, count, piece)

    def _fits(self, batch: Batch, last_offset: int, size: int) -> bool:
        return (
            self._bytes + size <= _MERGED_BYTES
            and len(self._columns.offsets) < _MERGED_COUNT
            and batch.append_time_us // self._merged_us == self._append_time_us // self._merged_us
            and batch.header.leader_epoch == self._leader_epoch
            and last_offset - self._columns.offsets[0] <= _DELTA_MAX
        )

    def flush(self) -> None:
        """Emit what was collected."""
        columns, self._columns, self._bytes = self._columns, _Columns(), 0
        if not columns.offsets:
            return
        base_offset = columns.offsets[0]
        timestamps = columns.timestamps_us
        built = encode_batch(
            columns.values,
            keys=columns.keys if any(key is not None for key in columns.keys) else None,
            headers=columns.headers if any(columns.headers) else None,
            priorities=columns.priorities if set(columns.priorities) != {PRIORITY_DEFAULT} else None,
            deliver_at_us=columns.deliver_at_us if any(columns.deliver_at_us) else None,
            expiry_us=columns.expiry_us if any(columns.expiry_us) else None,
            timestamps_us=timestamps if timestamps.count(timestamps[0]) < len(timestamps) else None,
            offsets=[offset - base_offset for offset in columns.offsets],
            base_timestamp_us=timestamps[0],
            options=columns.options,
            codec=self._codec,
        )
        stamp(
            memoryview(built),
            0,
            base_offset=base_offset,
            append_time_us=self._append_time_us,
            leader_epoch=self._leader_epoch,
        )
        self._emit(built, base_offset, self._append_time_us)


def _bytes_at(columns: Iterable[Sequence[bytes | None] | None], places: Sequence[int]) -> int:
    return sum(len(column[i] or b"") for column in columns if column is not None for i in places)


def _pick(column: Sequence[_T] | None, default: _T, count: int, places: Sequence[int]) -> Sequence[_T]:
    """The entries of a column at some places; a column that is absent has its default everywhere."""
    if column is None:
        return [default] * len(places)
    return column if len(places) == count else [column[i] for i in places]
