"""Finding messages for a consumer: first those that came back, then fresh ones in whatever order the rules want."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from millstream.dead_letters import TTL_EXPIRED
from millstream.queues.book import Book
from millstream.queues.fair import Turns
from millstream.queues.intake import (
    LOOKS_MAX,
    LOOKS_PER_BATCH,
    Front,
    Intake,
    LogOrder,
    Pick,
    Request,
    expired_of,
    present,
    terms_of,
)
from millstream.queues.keyed import OnePerKey
from millstream.queues.lanes import Lanes
from millstream.queues.leases import SPAN_MAX, Handout
from millstream.queues.lookahead import picks_within
from millstream.queues.moment import Moment
from millstream.queues.ranges import RangeSet, lowest, normal
from millstream.queues.records import FRESH, Dead, History, LogSource, Parcel, Rules, Terms
from millstream.records import PRIORITY_DEFAULT, Columns
from millstream.topics import LANES

__all__ = ["Dispenser"]

_EXPIRY: Final = int(Columns.EXPIRY)
#: Of a parcel so many messages are asked for their keys at a time.
_NEAR: Final = 1024


class Dispenser:
    """Chooses messages for consumers.  Nothing in it is durable: a change of the rules, or a seek, makes a new one."""

    def __init__(self, book: Book, rules: Rules, leased: Iterable[tuple[int, int]]) -> None:
        """`leased` is what consumers hold already, as (base, bits)."""
        self._book = book
        self._rules = rules
        self.front = Front(book.taken, self._gone, self._put_back)
        #: Made when the first message with a priority is there.
        self.lanes: Lanes | None = None
        #: The last look ahead ended before it had seen everything.
        self.more = False
        #: The front of the backlog, if what is there never expires: a sweep need not read it again and again.
        self._lasting = -1
        self.intake: Intake
        self._run: Callable[[LogSource, int, int], int] | None = None
        book.returned.let_all_go()
        if rules.ordering == "key":
            out = [*leased, *((parcel.base, parcel.bits) for parcel in book.returned)]
            self.intake = OnePerKey(book.taken, self.front, out, book.returned.let_go)
        elif rules.fair_by:
            self.intake = Turns(book.taken, self.front, rules.fair_by)
        else:
            self.intake = order = LogOrder(book.taken, self.front)
            if rules.ordering == "none" and not (rules.message_ttl_ms or rules.retry.total_ms or rules.poison):
                self._run = order.run
        self._by_lanes = rules.ordering == "none" and not rules.fair_by
        self.strict = rules.ordering == "strict"
        book.freed = self.intake.freed if isinstance(self.intake, OnePerKey) else None

    def run(self, source: LogSource, want: int, bytes_max: int) -> int:
        """Take fresh messages from the front without a look at any of them, if that is possible; returns how many."""
        if self._run is None or source.lanes.used:
            return 0
        return self._run(source, min(want, SPAN_MAX), bytes_max)

    @property
    def held_up(self) -> int:
        """How many messages are known to wait for others of their key."""
        return self.intake.held_up + self._book.returned.held if isinstance(self.intake, OnePerKey) else 0

    def forget(self) -> None:
        """Messages were settled without having been handed out."""
        if self.lanes is not None:
            self.lanes.forget()

    def rewritten(self) -> None:
        """Compaction has replaced batches of the log."""
        self.front.rewritten()
        if self.lanes is not None:
            self.lanes.rewritten()

    def hand_out_again(self, source: LogSource, request: Request, handout: Handout) -> list[Dead]:
        """What came back and is ready, as far as this consumer may have it."""
        dead: list[Dead] = []
        returned = self._book.returned
        keyed = self.intake if isinstance(self.intake, OnePerKey) else None
        if keyed is not None and not keyed.find_holders(source):
            return dead
        while returned.ready and request.messages > 0 and request.looks > 0:
            parcel = returned.pop(request.consumer, request.now_us, alone=request.alone)
            if parcel is None:
                break
            if keyed is not None and keyed.is_crowded and not self._hold_back(parcel, keyed):
                continue
            found, more = self._hand_out(parcel, source, request, handout)
            dead += more
            if not found:
                break
        return dead

    def _hold_back(self, parcel: Parcel, keyed: OnePerKey) -> bool:
        """Leave in a parcel what may go, of the first messages in it; whether there is any."""
        returned = self._book.returned
        near = lowest(parcel.bits, _NEAR)
        if near != parcel.bits:
            rest = normal(parcel.base, parcel.bits ^ near)
            returned.add_ready(Parcel(*rest, parcel.history, parcel.terms, parcel.due_us))
            parcel.bits = near
        returned.hold(parcel, keyed.behind(parcel.base, near))
        return bool(parcel.bits)

    def hand_out_first(self, source: LogSource, request: Request, handout: Handout) -> list[Dead]:
        """The first message that is not settled, if this consumer may have it now: none overtakes another."""
        dead: list[Dead] = []
        returned, taken = self._book.returned, self._book.taken
        self.more = False
        while request.messages > 0:
            first = None
            if returned:
                self.front.clear(source)  # so that what is at the floor is there
                first = returned.lowest()
            if first is None or taken.floor < first:
                if not self._hand_out_next(self.intake, source, request, handout, dead):
                    break
                continue
            ready = returned.oldest() == first
            parcel = returned.pop(request.consumer, request.now_us, alone=request.alone) if ready else None
            if parcel is None:
                break
            if parcel.base != first:  # which is kept for another consumer
                returned.put_back(parcel)
                break
            found, more = self._hand_out(parcel, source, request, handout)
            dead += more
            if not found:
                break
            if request.looks <= 0:
                self.more = not handout.found
                break
        return dead

    def hand_out_fresh(self, source: LogSource, request: Request, handout: Handout) -> list[Dead]:
        """What has never been delivered."""
        dead: list[Dead] = []
        if request.looks <= 0:  # what came back took all the time there was, and there may be more of it
            self.more = not handout.found
            return dead
        intake = self.intake
        if self._by_lanes and source.lanes.used:
            intake = self.lanes = self.lanes or Lanes(self._book.taken, self.front, self._rules, request.now_us)
            # Up to a round the order is that of the turns, so that any hundred in a row have the shares they should.
            if request.messages > self.lanes.round:
                handout.sort_by_lane()
        self.more = False
        while request.messages > 0 and self._hand_out_next(intake, source, request, handout, dead):
            pass
        return dead

    def _hand_out_next(
        self, intake: Intake, source: LogSource, request: Request, handout: Handout, dead: list[Dead]
    ) -> bool:
        """The next that were never delivered; False when there are none, or no time to look for more."""
        picks = intake.pick(source, request)
        if picks is None:
            return False
        for pick in picks:
            dead += self._admit(pick, FRESH, None, request, handout)
        if request.looks <= 0:
            self.more = not handout.found
            return False
        return True

    def hand_out_wanted(
        self, source: LogSource, wanted: Sequence[tuple[int, int]], request: Request, handout: Handout
    ) -> list[Dead]:
        """Messages from one offset to before another, each as far as nobody has it; in whatever order they were."""
        request.looks = sys.maxsize  # just these, however far apart they are
        dead: list[Dead] = []
        chosen = RangeSet()
        for start, end in wanted:
            chosen.add(start, end)
        for parcel in self._book.returned.take(chosen):
            dead += self._hand_out(parcel, source, request, handout)[1]
        taken, lanes = self._book.taken, source.lanes
        for start, end in wanted:
            end = min(end, source.end)
            for base in range(start, end, SPAN_MAX):
                size = min(SPAN_MAX, end - base)
                fresh = ~taken.bits(base, size) & (1 << size) - 1
                for pick in picks_within(source, base, fresh, self._gone):
                    taken.add_bits(pick.base, pick.bits)
                    for lane in range(LANES) if lanes.used else (PRIORITY_DEFAULT,):
                        some = pick.bits & lanes.bits(lane, pick.base, pick.bits.bit_length())
                        if some:
                            dead += self._admit(pick._replace(bits=some, lane=lane), FRESH, None, request, handout)
        self.forget()
        return dead

    def sweep(self, source: LogSource, moment: Moment) -> list[Dead]:
        """Expire what is at the front of the backlog, as much as takes no longer than any look ahead."""
        dead: list[Dead] = []
        taken = self._book.taken
        position = taken.floor
        if position == self._lasting:
            return dead
        looks = LOOKS_MAX
        while looks > 0:
            view = source.batch_at(position) if position < source.end else None
            if view is None:
                break
            start = max(position, view.base_offset)
            free = present(view, start) & ~taken.bits(start, view.next_offset - start)
            expired = expired_of(view, start, free, self._rules.message_ttl_ms, moment)
            if expired:
                dead += self._expire(start, expired, FRESH)
            elif free:
                if not self._rules.message_ttl_ms and not view.flags & _EXPIRY:
                    self._lasting = taken.floor
                break
            looks -= LOOKS_PER_BATCH + free.bit_count()
            position = view.next_offset
        self.forget()
        return dead

    def _hand_out(
        self, parcel: Parcel, source: LogSource, request: Request, handout: Handout
    ) -> tuple[bool, list[Dead]]:
        """As much of a parcel as is asked for; whether anything could be read, and what is dead of it."""
        dead: list[Dead] = []
        rest, base = parcel.bits, parcel.base
        found = False
        for pick in picks_within(source, base, rest, self._gone):
            found = True
            request.look(pick.view)
            some = lowest(pick.bits, request.fit(pick.view))
            dead += self._admit(pick._replace(bits=some), parcel.history, parcel.terms, request, handout)
            rest ^= some << pick.base - base
            if some != pick.bits or request.messages <= 0 or request.looks <= 0:
                break
        rest &= ~self._book.settled.bits(base, rest.bit_length())  # what was found to be gone
        if rest:
            parcel.base, parcel.bits = normal(base, rest)
            self._book.returned.add_ready(parcel)
        return found or not rest, dead

    def _admit(
        self, pick: Pick, history: History, terms: Terms | None, request: Request, handout: Handout
    ) -> list[Dead]:
        """What was taken goes to the consumer, unless it has expired.  Fresh messages have their terms in the batch."""
        view, base, bits, lane = pick
        rules = self._rules
        dead: list[Dead] = []
        expired = expired_of(view, base, bits, rules.message_ttl_ms, request.moment)
        if expired:
            dead += self._expire(base, expired, history)
            bits ^= expired
            if not bits:
                return dead
        if terms is not None:
            handout.add(base, bits, history, terms)
        else:
            for shared, some in terms_of(view, base, bits, lane, rules):
                handout.add(base, some, history, shared)
        request.fill(view, bits.bit_count())
        return dead

    def _expire(self, base: int, bits: int, history: History) -> tuple[Dead, ...]:
        if self._rules.expired_are_dead:
            return self._book.bury(base, bits, TTL_EXPIRED, history.last_error, history)
        self._book.discard("expired", base, bits)
        return ()

    def _put_back(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self._book.returned.add_ready(Parcel(offset, 1, FRESH, None))

    def _gone(self, base: int, bits: int) -> None:
        self._book.discard("gone", base, bits)
