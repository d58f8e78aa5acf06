"""How fresh messages are found: the rules that all ways share, and the plain way, in log order.

An intake chooses messages that are not taken, marks them as taken and hands them over as *picks*, each within a batch.
What it knows (cursors, what it saw ahead) can be found out again from the log, so nothing of it is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from millstream.errors import BatchDamaged
from millstream.headers import decode_headers
from millstream.options import LEASE_MS, MAX_RETRIES
from millstream.policies import LEASE_MS_MAX, LEASE_MS_MIN
from millstream.queues.moment import Moment
from millstream.queues.poison import LARGE_BYTES
from millstream.queues.ranges import RangeSet, lowest, offsets_of, pack
from millstream.queues.records import PLAIN, BatchView, LogSource, Rules, Terms
from millstream.records import PRIORITY_DEFAULT, Columns
from millstream.retries import RETRIES_MAX
from millstream.topics import LANES

__all__ = ["Front", "Intake", "LogOrder", "Pick", "Request", "expired_of", "present", "rows", "terms_of"]

#: How much one call may look at without finding anything, in messages.  At about 0.2 us each this is a few
#: milliseconds, after which others have their turn.
LOOKS_MAX: Final = 20_000
#: What a look at a batch costs beside its messages.
LOOKS_PER_BATCH: Final = 20
#: What it costs if the batch lies elsewhere in the log: it may have to be read.
LOOKS_PER_JUMP: Final = 200

#: A number in a header that is longer is none; Python refuses to read those of some thousand digits.
_DIGITS_MAX: Final = 18

_OFFSETS: Final = int(Columns.OFFSETS)
_EXPIRY: Final = int(Columns.EXPIRY)
_OPTIONS: Final = int(Columns.OPTIONS)
_CONTROL: Final = int(Columns.CONTROL)
_NOT_PLAIN: Final = _OFFSETS | _EXPIRY | _OPTIONS | _CONTROL
#: The terms of messages that have nothing special but their lane: the same object, so that nobody compares them.
_PLAIN_IN: Final = tuple(PLAIN if lane == PRIORITY_DEFAULT else Terms(lane=lane) for lane in range(LANES))


class Pick(NamedTuple):
    """Messages of one batch that are taken now; bit i stands for `base` + i."""

    view: BatchView
    base: int
    bits: int
    lane: int = PRIORITY_DEFAULT


class Request:
    """What a consumer asks for, how much of it is still open, and how long we go on looking."""

    __slots__ = ("alone", "bytes", "consumer", "lease_ms", "limited", "looks", "messages", "moment", "now_us", "place")

    def __init__(
        self,
        consumer: str,
        messages: int,
        now_us: int,
        *,
        moment: Moment,
        lease_ms: int,
        alone: bool = False,
        bytes_max: int = 0,
    ) -> None:
        self.consumer = consumer
        self.messages = messages
        self.now_us = now_us
        #: By which messages were stamped, and expire.
        self.moment = moment
        self.lease_ms = lease_ms
        self.alone = alone
        self.limited = bytes_max > 0
        self.bytes = bytes_max
        self.looks = LOOKS_MAX
        self.place = -1  # where the batch ends that was looked at last, of those that came back

    def fit(self, view: BatchView) -> int:
        """How many messages of this batch may go; by their mean size, because nobody looks at each."""
        if not self.limited:
            return self.messages
        return min(self.messages, max(1, self.bytes * view.count // view.length))

    def look(self, view: BatchView) -> None:
        """Count a look at a batch that may lie anywhere: the last one once more, the next, or another."""
        costs = {view.next_offset: 1, view.base_offset: LOOKS_PER_BATCH}
        self.looks -= costs.get(self.place, LOOKS_PER_JUMP)
        self.place = view.next_offset

    def fill(self, view: BatchView, messages: int) -> None:
        self.messages -= messages
        if self.limited:
            self.bytes -= view.length * messages // view.count
            if self.bytes * view.count < view.length:  # no room for another one like these
                self.messages = 0


class Intake(Protocol):
    """A way of choosing fresh messages."""

    def pick(self, source: LogSource, request: Request) -> Sequence[Pick] | None:
        """Take some messages, never more than are asked for.

        None = there is nothing to take.  An empty answer = nothing so far; ask again, if `looks` are left.
        """


class Front:
    """Steps over offsets that have no message any more, so that what is settled can grow past them.

    Compaction and damage leave such gaps.  Only a gap with a batch behind it is one: at the end of the log there may be
    something that cannot be seen yet.
    """

    __slots__ = ("_looked", "_taken", "gone", "put_back")

    def __init__(
        self, taken: RangeSet, gone: Callable[[int, int], None], put_back: Callable[[Iterable[int]], None]
    ) -> None:
        self._taken = taken
        #: Tells the book of offsets, as (base, bits), that have no message.
        self.gone = gone
        #: Gives back what was taken and cannot be read just now.
        self.put_back = put_back
        self._looked = -1  # the floor at which there was nothing to step over

    def rewritten(self) -> None:
        """Where there was nothing to step over there may be something now."""
        self._looked = -1

    def clear(self, source: LogSource) -> BatchView | None:
        """The batch of the first message that is not taken; None when there is none, or nothing to be done."""
        taken = self._taken
        while taken.floor < source.end and taken.floor != self._looked:
            floor = taken.floor
            view = source.batch_at(floor)
            if view is None:
                return None
            if view.base_offset > floor:
                self.gone(floor, (1 << view.base_offset - floor) - 1)
                continue
            if view.flags & (_OFFSETS | _CONTROL):
                size = view.next_offset - floor
                missing = ~present(view, floor) & (1 << size) - 1 & ~taken.bits(floor, size)
                if missing & 1:
                    self.gone(floor, missing)
                    continue
            self._looked = floor
            return view
        return None


class LogOrder:
    """Oldest first, a batch at a time whatever its size."""

    __slots__ = ("_front", "_taken")

    def __init__(self, taken: RangeSet, front: Front) -> None:
        self._taken = taken
        self._front = front

    def pick(self, source: LogSource, request: Request) -> Sequence[Pick] | None:
        taken = self._taken
        start = taken.floor
        if start >= source.end:
            return None
        view = self._front.clear(source) or source.batch_at(taken.floor)
        if view is None or taken.floor >= source.end:
            return None
        request.looks -= LOOKS_PER_BATCH
        start = taken.floor
        count = request.fit(view)
        if not taken.above and not view.flags & _OFFSETS:
            end = min(view.next_offset, start + count)
            taken.floor = end
            return (Pick(view, start, (1 << end - start) - 1),)
        free = present(view, start) & ~taken.bits(start, view.next_offset - start)
        bits = lowest(free, count)
        taken.add_bits(start, bits)
        return (Pick(view, start, bits),)

    def run(self, source: LogSource, want: int, bytes_max: int) -> int:
        """Take as many messages as can be taken without a look at any of them; the floor of `taken` moves over them.

        Returns how many: none if the next ones are not plain, or were touched before.  Those need `pick`.
        """
        taken = self._taken
        start = position = taken.floor
        if taken.above:
            return 0
        stop, end = start + want, source.end
        while position < end and position < stop:
            view = source.batch_at(position)
            if view is None or view.flags & _NOT_PLAIN or view.base_offset > position:
                break
            if bytes_max:
                size = view.length // view.count or 1
                stop = min(stop, position + max(bytes_max // size, position == start))
                bytes_max -= size * (min(view.next_offset, stop) - position)
                if bytes_max <= 0:
                    stop = min(stop, view.next_offset)
            position = min(view.next_offset, stop)
        taken.floor = position
        return position - start


# --- what a batch says about its messages ------------------------------------------------------------------------


def present(view: BatchView, start: int) -> int:
    """Which offsets from `start` on, an offset of the batch, have a message for a queue."""
    flags = view.flags
    if flags & _CONTROL:
        return 0
    if not flags & _OFFSETS:
        return (1 << view.next_offset - start) - 1
    return pack(start, [offset for offset in view.offsets() if offset >= start])


def rows(view: BatchView, base: int, bits: int) -> Iterator[tuple[int, int]]:
    """The places of messages in the columns of their batch, with their offsets."""
    if not view.flags & _OFFSETS:
        first = view.base_offset
        return zip(offsets_of(base - first, bits), offsets_of(base, bits), strict=True)
    wanted = set(offsets_of(base, bits))
    return ((row, offset) for row, offset in enumerate(view.offsets()) if offset in wanted)


def expired_of(view: BatchView, base: int, bits: int, ttl_ms: int, moment: Moment) -> int:
    """Which of these messages are past their time."""
    clock_us = moment.of(view.append_time_us)
    if ttl_ms and view.append_time_us + ttl_ms * 1000 <= clock_us:
        return bits
    if not view.flags & _EXPIRY:
        return 0
    expiry = view.expiry_us() or ()
    return pack(base, [offset for row, offset in rows(view, base, bits) if 0 < expiry[row] <= clock_us])


def terms_of(view: BatchView, base: int, bits: int, lane: int, rules: Rules) -> Iterable[tuple[Terms, int]]:
    """The terms of these messages, with those that share them."""
    born_us = view.append_time_us if rules.retry.total_ms else 0
    large = rules.poison and view.length > LARGE_BYTES
    if not view.flags & _OPTIONS and not large:
        return ((Terms(born_us, lane) if born_us else _PLAIN_IN[lane], bits),)
    raw_headers = view.raw_headers() if view.flags & _OPTIONS else None
    values = view.values() if large else None
    found: dict[Terms, list[int]] = {}
    for row, offset in rows(view, base, bits):
        lease_ms, max_retries = _options(raw_headers[row]) if raw_headers is not None else (0, -1)
        is_large = values is not None and len(values[row] or b"") > LARGE_BYTES
        found.setdefault(Terms(born_us, lane, lease_ms, max_retries, is_large), []).append(offset)
    return [(terms, pack(base, offsets)) for terms, offsets in found.items()]


def _options(raw: bytes | None) -> tuple[int, int]:
    """Lease and retries as the headers of a message want them; what makes no sense is not there."""
    lease_ms, max_retries = 0, -1
    try:
        for name, value in decode_headers(raw):
            if not value.isdigit() or len(value) > _DIGITS_MAX:
                continue
            if name == LEASE_MS:
                lease_ms = min(max(int(value), LEASE_MS_MIN), LEASE_MS_MAX)
            elif name == MAX_RETRIES:
                max_retries = min(int(value), RETRIES_MAX)
    except BatchDamaged:
        pass  # the application will see it; a queue must not stop over it
    return lease_ms, max_retries
