"""Sets of offsets, and bitmaps of offsets as integers.

A set is a floor, below which everything is in it, and bitmaps of 4096 offsets for what lies above: a bit per offset
where it is scattered and next to nothing where it is not.  Bitmaps are Python integers: one operation handles thousands
of messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import Final

from millstream.columns import marks_of

__all__ = ["RangeSet", "lowest", "normal", "offsets_of", "pack", "runs"]

_SHIFT: Final = 12
_CHUNK: Final = 1 << _SHIFT
_INSIDE: Final = _CHUNK - 1
_FULL: Final = (1 << _CHUNK) - 1


class RangeSet:
    """A set of offsets that fills up from below."""

    __slots__ = ("_chunks", "_top", "above", "floor")

    def __init__(self, floor: int = 0) -> None:
        #: Everything below is in the set; the floor itself never is.
        self.floor = floor
        #: How many are in the set above the floor.
        self.above = 0
        self._chunks: dict[int, int] = {}
        self._top = 0  # no chunk is above this one

    @property
    def total(self) -> int:
        return self.floor + self.above

    def __contains__(self, offset: int) -> bool:
        if offset < self.floor:
            return True
        chunk = self._chunks.get(offset >> _SHIFT)
        return chunk is not None and bool(chunk >> (offset & _INSIDE) & 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeSet) and self.floor == other.floor and self._chunks == other._chunks

    __hash__ = None  # type: ignore[assignment]

    # --- change

    def add(self, start: int, end: int) -> None:
        floor = self.floor
        if start <= floor:
            if end > floor:
                if self._chunks:
                    self._raise(end)
                else:
                    self.floor = end
            return
        while start < end:
            key = start >> _SHIFT
            stop = min(end, key + 1 << _SHIFT)
            size = stop - start
            self._merge(key, _FULL if size == _CHUNK else (1 << size) - 1 << (start & _INSIDE))
            start = stop

    def add_bits(self, base: int, bits: int) -> None:
        """Add `base` + i for every bit i that is set."""
        floor = self.floor
        if base < floor:
            bits >>= floor - base
            base = floor
        if not bits & bits + 1:
            # One run, which most are.
            if base == floor and not self._chunks:
                self.floor = base + bits.bit_length()
            else:
                self.add(base, base + bits.bit_length())
            return
        key = base >> _SHIFT
        reaches_floor = base == floor and bits & 1
        bits <<= base & _INSIDE
        while bits:
            part = bits & _FULL
            if part:
                self._merge(key, part)
            bits >>= _CHUNK
            key += 1
        if reaches_floor:
            self._raise(floor)

    def cut(self, end: int) -> None:
        """Take out everything at and behind an offset."""
        self.floor = min(self.floor, end)
        last = end >> _SHIFT
        for key in [key for key in self._chunks if key >= last]:
            chunk = self._chunks.pop(key)
            kept = chunk & (1 << (end & _INSIDE)) - 1 if key == last else 0
            self.above -= chunk.bit_count() - kept.bit_count()
            if kept:
                self._chunks[key] = kept

    def forget_below(self, offset: int) -> None:
        """Free the memory of what is below, for a set that is not asked about that any more."""
        last = offset >> _SHIFT
        for key in [key for key in self._chunks if key < last]:
            self.above -= self._chunks.pop(key).bit_count()

    def _merge(self, key: int, part: int) -> None:
        old = self._chunks.get(key)
        if old is None:
            self._chunks[key] = part
            self.above += part.bit_count()
            if key > self._top:
                self._top = key
        else:
            new = old | part
            self._chunks[key] = new
            self.above += new.bit_count() - old.bit_count()

    def _raise(self, to: int) -> None:
        """Everything below `to` is in the set; so is what follows it without a gap."""
        chunks = self._chunks
        first, key = self.floor >> _SHIFT, to >> _SHIFT
        below = range(first, key) if key - first <= len(chunks) else [some for some in chunks if some < key]
        for some in below:
            self.above -= chunks.pop(some, 0).bit_count()
        while (chunk := chunks.pop(key, 0)) != 0:
            rest = chunk >> (to & _INSIDE)
            ones = _trailing_ones(rest)
            to += ones
            rest >>= ones
            self.above -= chunk.bit_count() - rest.bit_count()
            if rest:
                chunks[key] = rest << (to & _INSIDE)
                break
            if to & _INSIDE:
                break
            key += 1
        self.floor = to

    # --- look

    def bits(self, start: int, size: int) -> int:
        """Which of `size` offsets from `start` on are in the set; bit i stands for `start` + i."""
        floor = self.floor
        known = floor - start
        if known >= size:
            return (1 << size) - 1
        found = (1 << known) - 1 if known > 0 else 0
        if self.above:
            chunks = self._chunks
            for key in range(max(start, floor) >> _SHIFT, (start + size - 1 >> _SHIFT) + 1):
                chunk = chunks.get(key)
                if chunk is not None:
                    shift = (key << _SHIFT) - start
                    found |= chunk << shift if shift >= 0 else chunk >> -shift
            found &= (1 << size) - 1
        return found

    def next_in(self, offset: int) -> int | None:
        """The first member at or after the offset."""
        if offset < self.floor:
            return offset
        if not self.above:
            return None
        skip = offset & _INSIDE
        for key in range(offset >> _SHIFT, self._top + 1):
            chunk = self._chunks.get(key, 0) >> skip
            if chunk:
                return (key << _SHIFT) + skip + _trailing_zeros(chunk)
            skip = 0
        return None

    def next_out(self, offset: int) -> int:
        """The first offset at or after this one that is not a member."""
        if offset <= self.floor:
            return self.floor
        while (chunk := self._chunks.get(offset >> _SHIFT)) is not None:
            ones = _trailing_ones(chunk >> (offset & _INSIDE))
            offset += ones
            if not ones or offset & _INSIDE:
                break
        return offset

    def spans(self) -> Iterator[tuple[int, int]]:
        """What is above the floor as bitmaps, (base, bits), in order."""
        for key in sorted(self._chunks):
            yield key << _SHIFT, self._chunks[key]


def runs(bits: int) -> Iterator[tuple[int, int]]:
    """The runs of set bits as (first, last + 1), in order."""
    # As text, because shifting a long integer once per run would cost its length each time.
    text = f"{bits:b}"[::-1]
    size = len(text)
    start = text.find("1")
    while start >= 0:
        end = text.find("0", start)
        if end < 0:
            end = size
        yield start, end
        start = text.find("1", end)


def offsets_of(base: int, bits: int) -> Iterable[int]:
    if bits and not bits & bits + 1:
        return range(base, base + bits.bit_length())
    size = bits.bit_length()
    if bits.bit_count() << 4 < size:
        return (offset for start, end in runs(bits) for offset in range(base + start, base + end))
    # Where they are dense, one step in C for each place costs less than one in Python for each run.
    return compress(range(base, base + size), marks_of(bits))


def pack(base: int, offsets: Sequence[int]) -> int:
    """The bitmap of some offsets, none of them below `base`."""
    if not offsets:
        return 0
    bitmap = bytearray((max(offsets) - base >> 3) + 1)
    for offset in offsets:
        place = offset - base
        bitmap[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(bitmap, "little")


def lowest(bits: int, count: int) -> int:
    """The first `count` of the set bits."""
    if bits.bit_count() <= count:
        return bits
    low, high = count, bits.bit_length()
    while low < high:
        middle = low + high >> 1
        if (bits & (1 << middle) - 1).bit_count() < count:
            low = middle + 1
        else:
            high = middle
    return bits & (1 << low) - 1


def normal(base: int, bits: int) -> tuple[int, int]:
    """The same offsets with a base that is one of them; there must be some."""
    zeros = _trailing_zeros(bits)
    return base + zeros, bits >> zeros


def _trailing_zeros(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _trailing_ones(bits: int) -> int:
    return (~bits & bits + 1).bit_length() - 1
