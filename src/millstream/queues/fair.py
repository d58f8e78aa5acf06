"""fair_by: every tenant that has messages waiting gets its turn, however many messages the others have.

Messages are looked at ahead of their delivery and remembered by the tenant they belong to (a header, or the beginning
of the key); then one message of each tenant is handed out in turn.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from millstream.errors import BatchDamaged
from millstream.headers import decode_headers
from millstream.queues.intake import LOOKS_PER_BATCH, Front, Pick, Request, rows
from millstream.queues.lookahead import SEEN_MAX, OffsetQueue, free_offsets, picks_of
from millstream.queues.ranges import RangeSet
from millstream.queues.records import BatchView, LogSource

__all__ = ["Turns"]

#: Whom each message of a batch belongs to, in the order of its columns.
_Names = Callable[[BatchView], Sequence[bytes]]


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
        if not self._turns:
            return None
        offsets = self._next(1)
        if not offsets:
            return ()  # all that was seen is settled by now
        view = source.batch_at(offsets[0])
        if view is not None:
            offsets += self._next(request.fit(view) - 1)  # what is larger than these goes over the limit, but once
        picks, unread = picks_of(source, offsets, self._taken, self._front.gone, only_free=True)
        self._front.put_back(unread)
        return picks

    def _next(self, count: int) -> list[int]:
        """The next messages in turn: so many, or all that were seen."""
        turns = self._turns
        found: list[int] = []
        while turns and count > len(found):
            left = count - len(found)
            # As many rounds at once as all can have: one after the other would give each the same.
            rounds = max(left // len(turns), 1)
            for _ in range(min(left, len(turns))):
                name = turns.popleft()
                queue = self._queues[name]
                self._seen -= queue.skip_below(self._taken.floor)  # purged, or removed by retention
                found += queue.take(rounds)
                if queue:
                    turns.append(name)
                else:
                    del self._queues[name]
        self._seen -= len(found)
        return found

    def _look_ahead(self, source: LogSource, request: Request) -> bool:
        cursor = max(self._cursor, self._taken.floor)
        view = source.batch_at(cursor) if cursor < source.end and self._seen < SEEN_MAX else None
        if view is None:
            return False
        cursor = max(cursor, view.base_offset)
        names = self._names(view)
        found: dict[bytes, list[int]] = defaultdict(list)
        for row, offset in rows(view, cursor, free_offsets(view, cursor, view.next_offset, self._taken)):
            found[names[row]].append(offset)
        for name, offsets in found.items():
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = OffsetQueue()
                self._turns.append(name)
            queue.extend(offsets)
            self._seen += len(offsets)
        request.looks -= LOOKS_PER_BATCH + view.next_offset - cursor
        self._cursor = view.next_offset
        return True


def _names_by(fair_by: str) -> _Names:
    kind, _, detail = fair_by.partition(":")
    return _by_header(detail) if kind == "header" else _by_key(detail.encode())


def _by_key(mark: bytes) -> _Names:
    def names(view: BatchView) -> Sequence[bytes]:
        keys = view.keys() or [None] * view.count
        return [key.partition(mark)[0] if key else b"" for key in keys]

    return names


def _by_header(wanted: str) -> _Names:
    def name_of(raw: bytes | None) -> bytes:
        try:
            return next((value for name, value in decode_headers(raw) if name == wanted), b"")
        except BatchDamaged:
            return b""

    return lambda view: [name_of(raw) for raw in view.raw_headers() or [None] * view.count]
