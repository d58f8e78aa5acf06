"""Many stored batches at once: their headers as rows of a table, their columns as arrays over all of their messages.

What `records.Batch` does for one batch with the standard library, this does for any number of batches with numpy: a
fixed number of array operations for all of them, whatever columns each has, and two checksums for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.compression import decompress
from millstream.errors import BatchDamaged
from millstream.records import COUNT_MAX, HEADER_BYTES, PRIORITY_DEFAULT, Columns

__all__ = ["BadBatch", "StoredBatches"]

Longs: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

_PRIORITY, _DELIVER_AT = int(Columns.PRIORITY), int(Columns.DELIVER_AT)
_EXPIRY, _TIMESTAMPS = int(Columns.EXPIRY), int(Columns.TIMESTAMPS)
_KEYS, _KEY_NULLS = int(Columns.KEYS), int(Columns.KEY_NULLS)
_HEADERS, _VALUE_NULLS = int(Columns.HEADERS), int(Columns.VALUE_NULLS)
_OFFSETS = int(Columns.OFFSETS)
_UNKNOWN: Final = 0xFFFF & ~int(sum(Columns))
#: From so many messages per batch on, a step for each batch costs less than an index for each message.
_LONG_ROWS: Final = 200
_HEADER: Final = np.dtype(
    [
        ("magic", "<u2"),
        ("version", "u1"),
        ("codec", "u1"),
        ("length", "<u4"),
        ("crc", "<u4"),
        ("epoch", "<u4"),
        ("base_offset", "<i8"),
        ("append_us", "<i8"),
        ("stamp_crc", "<u4"),
        ("count", "<u4"),
        ("producer", "<u8"),
        ("base_us", "<i8"),
        ("sequence", "<u4"),
        ("flags", "<u2"),
        ("priorities", "u1"),
        ("zero", "u1"),
    ]
)
assert _HEADER.itemsize == HEADER_BYTES
_HEADER_WORDS: Final = np.arange(HEADER_BYTES // 4)


class BadBatch(Exception):
    """One of the batches is not what it must be; those before it are."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


class StoredBatches:
    """Batches whose checksums were checked, or are trusted.  Raises BadBatch for one whose columns do not add up."""

    def __init__(self, view: memoryview, positions: Sequence[int]) -> None:
        at = np.array(positions, np.int64)
        words = np.frombuffer(view, "<u4", len(view) // 4)
        head = words[(at >> 2)[:, None] + _HEADER_WORDS].view(_HEADER).ravel()
        self.head: npt.NDArray[Any] = head
        self.batches = len(at)
        flags = head["flags"].astype(np.int64)
        counts = self.counts = head["count"].astype(np.int64)
        self._check((counts == 0) | (counts > COUNT_MAX) | (flags & _UNKNOWN != 0), "this version cannot read it")
        self._flags = flags
        self._some = int(np.bitwise_or.reduce(flags))
        self._every = int(np.bitwise_and.reduce(flags))
        self.rows = int(counts.sum())
        self.first_rows = np.cumsum(counts) - counts
        self._row_numbers = np.arange(self.rows)
        start = at + HEADER_BYTES
        end = at + head["length"]
        if self._some & _DELIVER_AT:
            start = start + self._sized(_DELIVER_AT, 8)
        self.offsets = self._read_offsets(view, start)
        if self._some & _OFFSETS:
            start = start + self._sized(_OFFSETS, (4 * counts + 7) & ~7)
        self._check(start > end, "it is shorter than its columns")
        codecs = head["codec"]
        if codecs.any():
            view, start, end = self._unpack(view, start, end)
        self._view = view
        self._bytes = np.frombuffer(view, np.uint8)
        self._words = np.frombuffer(view, "<u4", len(view) // 4)
        self._longs = np.frombuffer(view, "<i8", len(view) // 8)
        self._memory = pa.py_buffer(view)
        self._find_sections(start, end)

    def _check(self, bad: Flags, reason: str) -> None:
        if bad.any():
            raise BadBatch(int(bad.argmax()), reason)

    def _has(self, flag: int) -> Flags:
        there: Flags = self._flags & flag != 0
        return there

    def _sized(self, flag: int, size: Longs | int) -> Longs | int:
        """What a section takes in each batch: nothing where it is absent."""
        return size if self._every & flag else np.where(self._has(flag), size, 0)

    def _read_offsets(self, view: memoryview, start: Longs) -> Longs:
        """The offset of every message."""
        head, counts = self.head, self.counts
        base = head["base_offset"]
        if not self._some & _OFFSETS:
            self._check(np.append(False, base[1:] < base[:-1] + counts[:-1]), "its offsets are not in order here")
            dense: Longs = np.repeat(base - self.first_rows, counts) + self._row_numbers
            return dense
        sparse = self._has(_OFFSETS)
        self._check(sparse & (start + 4 * counts > len(view)), "it ends inside its offsets")
        words = np.frombuffer(view, "<u4", len(view) // 4)
        places = self._row_numbers - np.repeat(self.first_rows, counts)
        rows = np.repeat(sparse, counts)
        index = np.repeat(start >> 2, counts) + places
        places[rows] = words[index[rows]]
        offsets: Longs = np.repeat(base, counts) + places
        if (offsets[1:] <= offsets[:-1]).any():
            row = int((offsets[1:] <= offsets[:-1]).argmax()) + 1
            raise BadBatch(self._batch_of(row), "its offsets are not in order here")
        return offsets

    def _unpack(self, view: memoryview, start: Longs, end: Longs) -> tuple[memoryview, Longs, Longs]:
        """The blocks behind each other in a buffer of their own, those that were packed and those that were not."""
        blocks: list[bytes | memoryview] = []
        codecs = self.head["codec"].tolist()
        for number, (codec, first, stop) in enumerate(zip(codecs, start.tolist(), end.tolist(), strict=True)):
            block: bytes | memoryview = view[first:stop]
            if codec:
                try:
                    block = decompress(codec, view[first:stop])
                except BatchDamaged as problem:
                    raise BadBatch(number, str(problem)) from None
            if len(block) & 7:
                raise BadBatch(number, "its columns do not add up to its length")
            blocks.append(block)
        ends = np.cumsum([len(block) for block in blocks], dtype=np.int64)
        starts = np.append(0, ends[:-1])
        return memoryview(blocks[0] if len(blocks) == 1 else b"".join(blocks)), starts, ends

    def _find_sections(self, at: Longs, end: Longs) -> None:
        """As records._Sections does: the sections must fill each block exactly."""
        counts = self.counts
        eights = 8 * counts
        ends = (4 * counts + 11) & ~7
        bits = ((counts + 7 >> 3) + 7) & ~7
        sections: dict[int, Longs] = {}
        for flag, size in (
            (_PRIORITY, (counts + 7) & ~7),
            (_DELIVER_AT, eights),
            (_EXPIRY, eights),
            (_TIMESTAMPS, eights),
            (_KEY_NULLS, bits),
            (_KEYS, ends),
            (_HEADERS, ends),
            (_VALUE_NULLS, bits),
        ):
            if self._some & flag:
                sections[flag] = at
                at = at + self._sized(flag, size)
        self._sections = sections
        self._value_ends = at
        at = at + ends
        self._check(at > end, "its columns are longer than it is")
        self._heaps: dict[int, tuple[Longs, Longs]] = {}
        for flag in (_KEYS, _HEADERS):
            if self._some & flag:
                at = self._find_heap(flag, sections[flag], at)
        at = self._find_heap(0, self._value_ends, at)
        self._check(at != end, "its columns do not add up to its length")

    def _find_heap(self, flag: int, ends_at: Longs, at: Longs) -> Longs:
        sizes = self._words[(ends_at >> 2) + self.counts].astype(np.int64)
        if not self._every & flag and flag:
            sizes = np.where(self._has(flag), sizes, 0)
        self._heaps[flag] = (at, sizes)
        end: Longs = at + ((sizes + 7) & ~7)
        return end

    def _batch_of(self, row: int) -> int:
        return int(np.searchsorted(self.first_rows, row, "right")) - 1

    # What every message has

    def per_message(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What each batch has once, for each of its messages."""
        return np.repeat(values, self.counts)

    def _column(self, flag: int, items: npt.NDArray[Any], shift: int) -> npt.NDArray[Any]:
        """A column of numbers; where a batch has no such column, whatever stands there."""
        if self.batches == 1:
            first = int(self._sections[flag][0]) >> shift
            return items[first : first + self.rows]
        index = np.repeat((self._sections[flag] >> shift) - self.first_rows, self.counts)
        index += self._row_numbers
        # Beyond the end is only what is not used.
        return items[index] if self._every & flag else items.take(index, mode="clip")

    def timestamps_us(self) -> Longs:
        if not self._some & _TIMESTAMPS:
            return self.per_message(self.head["base_us"])
        times = self._column(_TIMESTAMPS, self._longs, 3)
        if self._every & _TIMESTAMPS:
            return times
        return np.where(self.per_message(self._has(_TIMESTAMPS)), times, self.per_message(self.head["base_us"]))

    def priorities(self) -> npt.NDArray[np.int32]:
        if not self._some & _PRIORITY:
            return np.full(self.rows, PRIORITY_DEFAULT, np.int32)
        lanes = self._column(_PRIORITY, self._bytes, 0).astype(np.int32)
        if self._every & _PRIORITY:
            return lanes
        return np.where(self.per_message(self._has(_PRIORITY)), lanes, np.int32(PRIORITY_DEFAULT))

    def keys(self) -> pa.BinaryArray:
        return self._binary(_KEYS, _KEY_NULLS)

    def values(self) -> pa.BinaryArray:
        return self._binary(0, _VALUE_NULLS)

    def raw_headers(self) -> pa.BinaryArray:
        """As headers.py writes them; null where a batch has none."""
        return self._binary(_HEADERS, 0)

    def _binary(self, flag: int, nulls: int) -> pa.BinaryArray:
        if flag and not self._some & flag:
            return pa.nulls(self.rows, pa.binary())
        ends_at = self._sections[flag] if flag else self._value_ends
        heap_at, sizes = self._heaps[flag]
        validity = self._validity(flag, nulls)
        if self.batches == 1:
            return self._in_place(int(ends_at[0]), int(heap_at[0]), int(sizes[0]), validity)
        first = ends_at >> 2
        missing = None if self._every & flag or not flag else self._has(flag) == 0
        self._check((self._words[first] != 0) & (True if missing is None else ~missing), "its ends do not begin at 0")
        if missing is None and self.rows >= _LONG_ROWS * self.batches:
            ends, heap = self._long_ends(first, sizes), self._join_long(heap_at, sizes)
        else:
            ends, heap = self._short_ends(first, missing), self._join_short(heap_at, sizes)
        return pa.BinaryArray.from_buffers(pa.binary(), self.rows, [validity, pa.py_buffer(ends), heap])

    def _long_ends(self, first: Longs, sizes: Longs) -> npt.NDArray[np.int32]:
        """Where each message of the joined heap ends: those of every batch, moved behind the batches before it."""
        ends = np.zeros(self.rows + 1, np.int32)
        stored = self._words.view(np.int32)
        row, moved = 1, 0
        for start, count, size in zip((first + 1).tolist(), self.counts.tolist(), sizes.tolist(), strict=True):
            np.add(stored[start : start + count], moved, out=ends[row : row + count])
            row, moved = row + count, moved + size
        self._check_ends(ends[1:] < ends[:-1])
        return ends

    def _short_ends(self, first: Longs, missing: Flags | None) -> npt.NDArray[np.int32]:
        """As `_long_ends`, by the lengths of all messages, which are 0 where a batch has no such column."""
        index = np.repeat(first - self.first_rows, self.counts)
        index += self._row_numbers
        starts = self._words[index]
        index += 1
        lengths = self._words[index]
        if missing is not None:
            starts[self.per_message(missing)] = lengths[self.per_message(missing)] = 0
        self._check_ends(lengths < starts)
        lengths -= starts
        ends = np.zeros(self.rows + 1, np.int32)
        np.cumsum(lengths, out=ends[1:], dtype=np.int32)
        return ends

    def _check_ends(self, descends: Flags) -> None:
        if descends.any():
            raise BadBatch(self._batch_of(int(descends.argmax())), "its ends descend")

    def _in_place(self, ends_at: int, heap_at: int, size: int, validity: pa.Buffer | None) -> pa.BinaryArray:
        """The column of a single batch: what is stored is what Arrow wants."""
        ends = self._words[ends_at >> 2 : (ends_at >> 2) + self.rows + 1]
        if ends[0] or (ends[1:] < ends[:-1]).any():
            raise BadBatch(0, "its ends descend or do not begin at 0")
        if not ends.flags.aligned:
            ends = ends.copy()
        heap = self._memory.slice(heap_at, size)
        return pa.BinaryArray.from_buffers(pa.binary(), self.rows, [validity, pa.py_buffer(ends), heap])

    def _join_long(self, at: Longs, sizes: Longs) -> pa.Buffer:
        """The bytes of all heaps behind each other, as one heap."""
        pieces = zip(at.tolist(), sizes.tolist(), strict=True)
        return pa.py_buffer(b"".join([self._view[start : start + size] for start, size in pieces]))

    def _join_short(self, at: Longs, sizes: Longs) -> pa.Buffer:
        """As `_join_long`, for many short heaps: Arrow copies them, as items of an array with gaps between."""
        cuts = np.empty(2 * len(at), np.int32)
        cuts[0::2] = at
        cuts[1::2] = at + sizes
        pieces = pa.BinaryArray.from_buffers(pa.binary(), len(cuts) - 1, [None, pa.py_buffer(cuts), self._memory])
        return pieces.take(pa.array(np.arange(0, len(cuts), 2))).buffers()[2] or pa.py_buffer(b"")

    def _validity(self, flag: int, nulls: int) -> pa.Buffer | None:
        """Arrow's bitmap of what is not null; None when nothing is."""
        mixed = flag and not self._every & flag
        if not self._some & nulls and not mixed:
            return None
        if self.batches == 1:
            return self._memory.slice(int(self._sections[nulls][0]), self.rows + 7 >> 3)
        valid = np.ones(self.rows, np.bool_)
        if self._some & nulls:
            with_nulls = self.per_message(self._has(nulls))
            places = (self._row_numbers - np.repeat(self.first_rows, self.counts))[with_nulls]
            index = np.repeat(self._sections[nulls], self.counts)[with_nulls] + (places >> 3)
            valid[with_nulls] = self._bytes[index] >> (places & 7) & 1
        if mixed:
            valid &= self.per_message(self._has(flag))
        return pa.py_buffer(np.packbits(valid, bitorder="little"))
