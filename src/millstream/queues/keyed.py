"""ordering=key: of each key at most one message is out at a time, and keys do not wait for each other.

A key is held from the moment one of its messages is handed out until that message is settled, through failures and
waits.  Messages of held keys are passed over and remembered; when the key is free, the first of them is next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from millstream.queues.intake import LOOKS_PER_BATCH, Front, Pick, Request, rows
from millstream.queues.lookahead import SEEN_MAX, OffsetQueue, free_offsets, picks_of
from millstream.queues.ranges import RangeSet, lowest, offsets_of, pack
from millstream.queues.records import BatchView, LogSource

__all__ = ["OnePerKey"]

#: How many offsets are looked at in one go, at least.
_WINDOW: Final = 128


class OnePerKey:
    def __init__(self, taken: RangeSet, front: Front, out: Iterable[tuple[int, int]]) -> None:
        """`out` is what was taken before and is not settled, as (base, bits)."""
        self._taken = taken
        self._front = front
        self._cursor = taken.floor
        self._keys: dict[int, bytes] = {}  # the key of every message that is out
        self._held: dict[bytes, int] = {}  # how many messages of a key are out (more than one only after `out`)
        self._passed: dict[bytes, OffsetQueue] = {}  # messages of held keys
        self._free: deque[bytes] = deque()  # keys with such messages that are held no longer
        self._seen = 0  # messages in all queues
        self._view: BatchView | None = None  # the batch at which we look, its end, and its keys
        self._view_end = 0
        self._view_keys: Sequence[bytes | None] | None = None
        self._out = {offset for base, bits in out for offset in offsets_of(base, bits)}

    def pick(self, source: LogSource, request: Request) -> Sequence[Pick] | None:
        self._front.clear(source)
        if self._out:
            self._out = set(self._find_holders(source, list(self._out)))
            if self._out:
                return None  # one of them may hold any key
        if self._free:
            picks, unread = picks_of(source, self._next_of_free_keys(source, request), self._taken, self._front.gone)
            self._front.put_back(unread)
            return picks
        return self._look_ahead(source, request)

    def freed(self, base: int, bits: int) -> None:
        if self._out:
            self._out.difference_update(offsets_of(base, bits))
        if not self._keys:
            return
        for offset in offsets_of(base, bits):
            key = self._keys.pop(offset, None)
            if key is None:
                continue
            left = self._held[key] - 1
            if left:
                self._held[key] = left
                continue
            del self._held[key]
            if key in self._passed:
                self._free.append(key)

    def holder_of(self, source: LogSource, offset: int) -> int | None:
        """The message that is out and holds the key of this one."""
        view = source.batch_at(offset)
        keys = view.keys() if view is not None else None
        if view is None or keys is None:
            return None
        key = next((keys[row] for row, _ in rows(view, offset, 1)), None)
        return min((out for out, held in self._keys.items() if held == key), default=None)

    # --- finding

    def _find_holders(self, source: LogSource, out: list[int]) -> list[int]:
        """After a restart or a change of rules: what was out before holds its keys too.  Returns the unread."""
        picks, unread = picks_of(source, out, self._taken, self._front.gone)
        for pick in picks:
            keys = pick.view.keys()
            for row, offset in rows(pick.view, pick.base, pick.bits) if keys is not None else ():
                key = keys[row] if keys is not None else None
                if key is not None:
                    self._hold(key, offset)
        return unread

    def _next_of_free_keys(self, source: LogSource, request: Request) -> list[int]:
        offsets: list[int] = []
        while self._free and len(offsets) < request.messages:
            key = self._free.popleft()
            if key in self._held:
                continue
            queue = self._passed[key]
            found = None
            while found is None and queue:
                offset = queue.pop()
                self._seen -= 1
                if offset not in self._taken:
                    found = offset
            if not queue:
                del self._passed[key]
            if found is not None:
                self._hold(key, found)
                offsets.append(found)
                if len(offsets) == 1 and (view := source.batch_at(found)) is not None and request.fit(view) < 2:
                    break  # large messages: one at a time, so that their bytes are counted
        return offsets

    def _look_ahead(self, source: LogSource, request: Request) -> Sequence[Pick] | None:
        if self._seen >= SEEN_MAX:
            return None
        cursor = self._cursor = max(self._cursor, self._taken.floor)
        view = source.batch_at(cursor) if cursor < source.end else None
        if view is None:
            return None
        cursor = max(cursor, view.base_offset)
        if view is not self._view or view.next_offset != self._view_end:
            self._view, self._view_end, self._view_keys = view, view.next_offset, view.keys()
        count = request.fit(view)
        end = min(view.next_offset, cursor + max(_WINDOW, 2 * count))
        free = free_offsets(view, cursor, end, self._taken)
        if self._view_keys is None:
            bits = lowest(free, count)
            self._cursor = cursor + bits.bit_length() if bits != free else end
        else:
            bits = self._pass(rows(view, cursor, free), self._view_keys, count, cursor, end)
        request.looks -= LOOKS_PER_BATCH + self._cursor - cursor
        self._taken.add_bits(cursor, bits)
        return (Pick(view, cursor, bits),) if bits else ()

    def _pass(
        self, offsets: Iterable[tuple[int, int]], keys: Sequence[bytes | None], count: int, cursor: int, end: int
    ) -> int:
        """Take what is free to go and pass over the rest, up to `count` messages or the end of the window."""
        chosen: list[int] = []
        held, passed = self._held, self._passed
        for row, offset in offsets:
            if len(chosen) == count:
                self._cursor = offset
                break
            key = keys[row]
            if key is None:
                chosen.append(offset)
            elif key not in held:  # nor are older ones waiting: they are dealt with before we look ahead
                held[key] = 1
                self._keys[offset] = key
                chosen.append(offset)
            else:
                queue = passed.get(key)
                if queue is None:
                    queue = passed[key] = OffsetQueue()
                queue.push(offset)
                self._seen += 1
        else:
            self._cursor = end
        return pack(cursor, chosen)

    def _hold(self, key: bytes, offset: int) -> None:
        self._keys[offset] = key
        self._held[key] = self._held.get(key, 0) + 1
