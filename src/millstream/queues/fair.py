"""fair_by: whoever has messages waiting gets a turn, however many others have.

Messages are looked at ahead of their delivery and remembered by whom they belong to (a header, or the beginning of the
key); then each in turn gives one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from millstream.errors import BatchDamaged
from millstream.headers import decode_headers
from millstream.queues.intake import LOOKS_PER_BATCH, Front, Pick, Request, rows
from millstream.queues.lookahead import SEEN_MAX, OffsetQueue, free_offsets, picks_of
from millstream.queues.ranges import RangeSet
from millstream.queues.records import BatchView, LogSource

__all__ = ["Turns"]

_Names = Callable[[BatchView], Callable[[int], bytes]]


class Turns:
    def __init__(self, taken: RangeSet, front: Front, fair_by: str) -> None:
        self._taken = taken
        self._front = front
        self._names = _names_by(fair_by)
        self._cursor = taken.floor
        self._queues: dict[bytes, OffsetQueue] = {}
        self._turns: deque[bytes] = deque()  # those who have messages, the next one first
        self._seen = 0

    def pick(self, source: LogSource, request: Request) -> Sequence[Pick] | None:
        self._front.clear(source)
        while request.looks > 0 and self._look_ahead(source, request):
            pass
        offsets: list[int] = []
        while self._turns and len(offsets) < request.messages:
            offset = self._next()
            if offset is None:
                continue
            offsets.append(offset)
            if len(offsets) == 1 and (view := source.batch_at(offset)) is not None and request.fit(view) < 2:
                break  # large messages: one at a time, so that their bytes are counted
        if not offsets:
            return None
        picks, unread = picks_of(source, offsets, self._taken, self._front.gone)
        self._front.put_back(unread)
        return picks

    def _next(self) -> int | None:
        """The next message of whoever's turn it is; None if it was taken otherwise."""
        name = self._turns.popleft()
        queue = self._queues[name]
        offset = queue.pop()
        self._seen -= 1
        if queue:
            self._turns.append(name)
        else:
            del self._queues[name]
        return None if offset in self._taken else offset

    def _look_ahead(self, source: LogSource, request: Request) -> bool:
        cursor = max(self._cursor, self._taken.floor)
        view = source.batch_at(cursor) if cursor < source.end and self._seen < SEEN_MAX else None
        if view is None:
            return False
        cursor = max(cursor, view.base_offset)
        name_of = self._names(view)
        for row, offset in rows(view, cursor, free_offsets(view, cursor, view.next_offset, self._taken)):
            name = name_of(row)
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = OffsetQueue()
                self._turns.append(name)
            queue.push(offset)
            self._seen += 1
        request.looks -= LOOKS_PER_BATCH + view.next_offset - cursor
        self._cursor = view.next_offset
        return True


def _names_by(fair_by: str) -> _Names:
    kind, _, detail = fair_by.partition(":")
    return _by_header(detail) if kind == "header" else _by_key(detail.encode())


def _by_key(mark: bytes) -> _Names:
    def names(view: BatchView) -> Callable[[int], bytes]:
        keys = view.keys()
        return lambda row: (keys[row] or b"").partition(mark)[0] if keys is not None else b""

    return names


def _by_header(wanted: str) -> _Names:
    def name_of(raw: bytes | None) -> bytes:
        try:
            return next((value for name, value in decode_headers(raw) if name == wanted), b"")
        except BatchDamaged:
            return b""

    def names(view: BatchView) -> Callable[[int], bytes]:
        raw_headers = view.raw_headers()
        return lambda row: name_of(raw_headers[row]) if raw_headers is not None else b""

    return names
