"""A partition as a ledger sees it, without a broker: batches in a list, and time and chance from the test."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from millstream.headers import encode_headers
from millstream.queues.lane_map import LaneMap
from millstream.queues.ledger import Ledger
from millstream.queues.ranges import offsets_of
from millstream.queues.records import Delivery, Lease, Rules
from millstream.records import PRIORITY_DEFAULT, Columns

SECOND = 1_000_000


class FakeBatch:
    def __init__(
        self,
        offsets: Sequence[int],
        *,
        append_time_us: int = 0,
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[dict[str, str]] | None = None,
        priorities: Sequence[int] | None = None,
        expiry_us: Sequence[int] | None = None,
        size: int = 100,
        options: bool = False,
    ) -> None:
        self._offsets = list(offsets)
        self.base_offset, self.next_offset = self._offsets[0], self._offsets[-1] + 1
        self.count = len(self._offsets)
        self.append_time_us = append_time_us
        self.length = size * self.count
        self._size = size
        self._keys, self._expiry, self._priorities = keys, expiry_us, priorities
        self._headers = None if headers is None else [encode_headers(some) for some in headers]
        flags = Columns.OFFSETS if self.next_offset - self.base_offset != self.count else Columns(0)
        flags |= Columns.KEYS if keys else Columns(0)
        flags |= Columns.HEADERS if headers else Columns(0)
        flags |= Columns.EXPIRY if expiry_us else Columns(0)
        flags |= Columns.PRIORITY if priorities else Columns(0)
        flags |= Columns.OPTIONS if options else Columns(0)
        self.flags = int(flags)

    def offsets(self) -> Sequence[int]:
        return self._offsets

    def keys(self) -> Sequence[bytes | None] | None:
        return self._keys

    def raw_headers(self) -> Sequence[bytes | None] | None:
        return self._headers

    def expiry_us(self) -> Sequence[int] | None:
        return self._expiry

    def priorities(self) -> Sequence[int] | None:
        return self._priorities

    def values(self) -> Sequence[bytes | None]:
        return [bytes(self._size)] * self.count


class FakeLog:
    """A LogSource.  What is `cold` cannot be read just now."""

    def __init__(self) -> None:
        self.start = 0
        self.end = 0
        self.lanes = LaneMap()
        self.cold: set[int] = set()
        self._batches: list[FakeBatch] = []
        self._bases: list[int] = []

    def add(self, size: int, **columns: Any) -> FakeBatch:
        """Append a batch of so many messages."""
        return self.add_batch(FakeBatch(range(self.end, self.end + size), **columns))

    def add_batch(self, batch: FakeBatch) -> FakeBatch:
        assert batch.base_offset >= self.end
        priorities = batch.priorities()
        if priorities is not None and set(priorities) != {PRIORITY_DEFAULT}:
            self.lanes.note(batch.offsets(), priorities)
        self._batches.append(batch)
        self._bases.append(batch.base_offset)
        self.end = batch.next_offset
        return batch

    def replace(self, *batches: FakeBatch) -> None:
        """Compaction has left these."""
        self._batches = list(batches)
        self._bases = [batch.base_offset for batch in batches]

    def batch_at(self, offset: int) -> FakeBatch | None:
        place = max(bisect_right(self._bases, offset) - 1, 0)
        for batch in self._batches[place : place + 2]:
            if batch.next_offset > offset:
                return None if batch.base_offset in self.cold else batch
        return None


def make_ledger(draw: Callable[[], float] = lambda: 0.0, **rules: Any) -> Ledger:
    nonces = count(1)
    ledger = Ledger(Rules(**rules), draw=draw, draw_nonce=lambda: next(nonces))
    ledger.open()
    return ledger


def granted(leases: Delivery | Sequence[Lease]) -> list[int]:
    """The offsets that were handed out, in the order of delivery."""
    some = leases.leases if isinstance(leases, Delivery) else leases
    return [offset for lease in some for offset in offsets_of(lease.base, lease.granted)]
