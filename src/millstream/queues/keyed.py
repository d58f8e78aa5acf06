"""ordering=key: of each key at most one message is out at a time, and keys do not wait for each other.

A key is held from the moment one of its messages is handed out until that message is settled, through failures and
waits.  Messages of held keys are passed over and remembered; when the key is free, the first of them is next.

Several messages of a key can be out at a time if they were handed out before the group had this rule, or were claimed
again by their consumer (`retake`).  When such messages come back they are handed out one by one, in order: each only
when the one before it is settled.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from millstream.queues.intake import LOOKS_PER_BATCH, Front, Pick, Request, rows
from millstream.queues.key_names import NameSet, names_of
from millstream.queues.lookahead import SEEN_MAX, OffsetQueue, free_offsets, picks_of
from millstream.queues.ranges import RangeSet, lowest, offsets_of, pack
from millstream.queues.records import BatchView, LogSource
from millstream.records import Columns

__all__ = ["OnePerKey"]

#: How many offsets are looked at in one go, at least.
_WINDOW: Final = 128
#: What is out is kept in pieces of so many offsets.
_SHIFT: Final = 6
_INSIDE: Final = (1 << _SHIFT) - 1
_NONE: Final = array("q", bytes(8 << _SHIFT))

_OFFSETS: Final = int(Columns.OFFSETS)


class OnePerKey:
    def __init__(
        self, taken: RangeSet, front: Front, out: Iterable[tuple[int, int]], let_go: Callable[[int], None]
    ) -> None:
        """`out` is what was taken before and is not settled, as (base, bits).

        `let_go` is told of a message that is the first of its key by now, and was behind another one before.
        """
        self._taken = taken
        self._front = front
        self._let_go = let_go
        self._cursor = taken.floor
        # The keys by number.  Of every message that is out, in pieces by offset:
        self._names: dict[int, array[int]] = {}
        self._held = NameSet()
        self._more: dict[
            int, deque[int]
        ] = {}  # keys with more than one message out, and these in order (only of `out`)
        self._passed: dict[int, OffsetQueue] = {}  # messages of held keys
        self._free: deque[int] = deque()  # keys with such messages that are held no longer
        self._seen = 0  # messages in all queues
        self._view: BatchView | None = None  # the batch at which we look, its end, and its keys
        self._view_end = 0
        self._view_names: list[int] | None = None
        self._out = {offset for base, bits in out for offset in offsets_of(base, bits)}

    def pick(self, source: LogSource, request: Request) -> Sequence[Pick] | None:
        self._front.clear(source)
        if not self.find_holders(source):
            return None
        if self._free:
            picks, unread = picks_of(source, self._next_of_free_keys(source, request), self._taken, self._front.gone)
            self._front.put_back(unread)
            return picks
        return self._look_ahead(source, request)

    @property
    def held_up(self) -> int:
        """Messages that were passed over; of each key that is free by now one can go."""
        return max(self._seen - len(self._free), 0)

    def sees(self, offset: int) -> bool:
        """Whether the look ahead may come to a message before some of those that were passed over are taken."""
        return offset < self._cursor or self._seen < SEEN_MAX

    def freed(self, base: int, bits: int) -> None:
        if self._out:
            self._out.difference_update(offsets_of(base, bits))
        if not self._names:
            return
        if not bits & bits + 1:
            gone = self._names_in_run(base, base + bits.bit_length())
        else:
            gone = self._names_at(offsets_of(base, bits))
        if self._more:
            gone = [name for name in dict.fromkeys(gone) if not self._has_more(name)]
        self._held.remove(gone)
        if self._passed:
            self._free.extend([name for name in gone if name in self._passed])

    def _names_at(self, offsets: Iterable[int]) -> list[int]:
        """The keys of messages that are out no longer."""
        gone: list[int] = []
        number, piece = -1, None
        for offset in offsets:
            if offset >> _SHIFT != number:
                self._drop_if_empty(number, piece)
                number = offset >> _SHIFT
                piece = self._names.get(number)
            if piece is not None and (name := piece[offset & _INSIDE]):
                piece[offset & _INSIDE] = 0
                gone.append(name)
        self._drop_if_empty(number, piece)
        return gone

    def _names_in_run(self, start: int, end: int) -> list[int]:
        """As `_names_at`, for consecutive messages, which most are: a piece at a time."""
        gone: list[int] = []
        for number in range(start >> _SHIFT, (end - 1 >> _SHIFT) + 1):
            piece = self._names.get(number)
            if piece is not None:
                low, high = max(start - (number << _SHIFT), 0), end - (number << _SHIFT)
                gone += filter(None, piece[low:high])
                piece[low:high] = _NONE[low:high]
                self._drop_if_empty(number, piece)
        return gone

    def _drop_if_empty(self, number: int, piece: array[int] | None) -> None:
        if piece == _NONE:
            del self._names[number]

    def _has_more(self, name: int) -> bool:
        """Whether another message of the key is out, after one that is so no longer."""
        out = self._more.get(name)
        if out is None:
            return False
        while out and self._name_at(out[0]) != name:
            out.popleft()
        if out:
            self._let_go(out[0])
        else:
            del self._more[name]
        return bool(out)

    @property
    def is_crowded(self) -> bool:
        """Whether several messages of a key are out."""
        return bool(self._more)

    def behind(self, base: int, bits: int) -> int:
        """Which of these messages, that are out, have another one of their key before them."""
        more = self._more
        return pack(
            base,
            [
                offset
                for offset in offsets_of(base, bits)
                if (out := more.get(self._name_at(offset))) is not None and out[0] != offset
            ],
        )

    def _name_at(self, offset: int) -> int:
        piece = self._names.get(offset >> _SHIFT)
        return 0 if piece is None else piece[offset & _INSIDE]

    def holder_of(self, source: LogSource, offset: int) -> int | None:
        """The message that is out and holds the key of this one."""
        view = source.batch_at(offset)
        keys = view.keys() if view is not None else None
        if view is None or keys is None:
            return None
        name = next((name for row, _ in rows(view, offset, 1) for name in names_of(keys[row : row + 1])), 0)
        if not name or name not in self._held:
            return None
        return min((number << _SHIFT) + piece.index(name) for number, piece in self._names.items() if name in piece)

    # --- finding

    def find_holders(self, source: LogSource) -> bool:
        """After a restart or a change of rules: what was out before holds its keys too.  False if it cannot be read."""
        if not self._out:
            return True
        picks, unread = picks_of(source, list(self._out), self._taken, self._front.gone)
        if unread:
            return False  # any of them may hold any key
        self._out = set()
        out: dict[int, list[int]] = {}
        for pick in picks:
            names = names_of(pick.view.keys() or ())
            for row, offset in rows(pick.view, pick.base, pick.bits) if names else ():
                if name := names[row]:
                    self._piece(offset >> _SHIFT)[offset & _INSIDE] = name
                    out.setdefault(name, []).append(offset)
        self._held.add(out)
        self._more = {name: deque(offsets) for name, offsets in out.items() if len(offsets) > 1}
        return True

    def _next_of_free_keys(self, source: LogSource, request: Request) -> list[int]:
        offsets: list[int] = []
        names: list[int] = []
        held = self._held.around(waiting := list(islice(self._free, request.messages)))
        for name in waiting:
            self._free.popleft()
            if name in held:
                continue
            queue = self._passed[name]
            self._seen -= queue.skip_below(self._taken.floor)  # purged, or removed by retention
            found = None
            while found is None and queue:
                offset = queue.pop()
                self._seen -= 1
                if offset not in self._taken:
                    found = offset
            if not queue:
                del self._passed[name]
            if found is not None:
                held.add(name)
                names.append(name)
                self._piece(found >> _SHIFT)[found & _INSIDE] = name
                offsets.append(found)
                if len(offsets) == 1 and (view := source.batch_at(found)) is not None and request.fit(view) < 2:
                    break  # large messages: one at a time, so that their bytes are counted
        self._held.add(names)
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
            keys = view.keys()
            self._view, self._view_end = view, view.next_offset
            self._view_names = None if keys is None else names_of(keys)
        count = request.fit(view)
        end = min(view.next_offset, cursor + max(_WINDOW, 2 * count))
        free = free_offsets(view, cursor, end, self._taken)
        names = self._view_names
        in_a_row = bool(free) and not free & free + 1
        if names is None or (in_a_row and self._hold_all(view, cursor, min(free.bit_length(), count))):
            bits = lowest(free, count)
            self._cursor = cursor + bits.bit_length() if bits != free else end
        else:
            bits = self._pass(view, names, free, count, cursor, end)
        request.looks -= LOOKS_PER_BATCH + self._cursor - cursor
        self._taken.add_bits(cursor, bits)
        return (Pick(view, cursor, bits),) if bits else ()

    def _hold_all(self, view: BatchView, start: int, count: int) -> bool:
        """Take consecutive messages at once, if their keys are all different and free."""
        if self._view_names is None or view.flags & _OFFSETS:
            return False
        row = start - view.base_offset
        names = self._view_names[row : row + count]
        different = set(names)
        if len(different) != count or 0 in different or self._held.among(names):
            return False
        self._held.add(different)
        at = 0
        while at < count:
            low = start + at & _INSIDE
            some = array("q", names[at : at + len(_NONE) - low])
            self._piece(start + at >> _SHIFT)[low : low + len(some)] = some
            at += len(some)
        return True

    def _pass(self, view: BatchView, names: list[int], free: int, count: int, cursor: int, end: int) -> int:
        """Take what is free to go and pass over the rest, up to `count` messages or the end of the window."""
        chosen: list[int] = []
        found: list[int] = []  # their keys
        near = names if view.flags & _OFFSETS else names[cursor - view.base_offset : end - view.base_offset]
        held, passed = self._held.around(near), self._passed
        number, piece = -1, _NONE
        for row, offset in rows(view, cursor, free):
            if len(chosen) == count:
                self._cursor = offset
                break
            name = names[row]
            if not name:
                chosen.append(offset)
            elif name not in held:  # nor are older ones waiting: they are dealt with before we look ahead
                held.add(name)
                found.append(name)
                if offset >> _SHIFT != number:
                    number = offset >> _SHIFT
                    piece = self._piece(number)
                piece[offset & _INSIDE] = name
                chosen.append(offset)
            else:
                queue = passed.get(name)
                if queue is None:
                    queue = passed[name] = OffsetQueue()
                queue.push(offset)
                self._seen += 1
        else:
            self._cursor = end
        self._held.add(found)
        if chosen and chosen[-1] - chosen[0] + 1 == len(chosen):
            return (1 << len(chosen)) - 1 << chosen[0] - cursor
        return pack(cursor, chosen)

    def _piece(self, number: int) -> array[int]:
        piece = self._names.get(number)
        if piece is None:
            piece = self._names[number] = array("q", _NONE)
        return piece
