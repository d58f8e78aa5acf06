"""Priorities: five lanes through one log, by deficit round robin or strictly.

A lane is a cursor: its next messages are the first ones behind it that are in the lane (a bitmap knows) and not taken.
A lane's turn gives it its weight in messages; with all lanes full, a round has exactly the shares that the weights say.
A lane whose oldest message has waited too long since the lane was last served is served once, out of turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from millstream.queues.intake import LOOKS_PER_BATCH, Front, Pick, Request, present
from millstream.queues.ranges import RangeSet, lowest, normal
from millstream.queues.records import BatchView, LaneStatistics, LogSource, Rules
from millstream.topics import LANES

__all__ = ["Lanes"]

#: How far a lane looks at a time, in offsets.
_WINDOW: Final = 4096


class _Lane:
    """Where one lane stands."""

    __slots__ = ("ahead", "base", "bits", "cursor", "last_served_us", "number", "seen", "served", "starving_us", "view")

    def __init__(self, number: int, starving_us: int) -> None:
        self.number = number
        # Messages of the lane that were found and not taken yet, all in one batch; bit i stands for `base` + i.
        self.view: BatchView | None = None
        self.base = 0
        self.bits = 0
        # What the maps say of what follows: bit i stands for `cursor` + i, and nothing else before `seen` is free.
        self.cursor = 0
        self.ahead = 0
        self.seen = 0
        self.served = 0
        self.last_served_us = 0
        #: The lane cannot be starving before this.
        self.starving_us = starving_us

    def look_again(self) -> None:
        """Forget what was found and not taken."""
        if self.bits or self.ahead:
            self.seen = self.base if self.bits else self.cursor
            self.bits = self.ahead = 0


class Lanes:
    def __init__(self, taken: RangeSet, front: Front, rules: Rules, now_us: int) -> None:
        self._taken = taken
        self._front = front
        self._weights = rules.lanes
        self._starvation_us = rules.starvation_ms * 1000
        # A backlog that is old when we begin is not starving: nobody was served at all.
        self._lanes = [_Lane(number, now_us + self._starvation_us) for number in range(LANES)]
        #: How many messages a round has when no lane is empty.
        self.round = sum(rules.lanes)
        self._turn = 0
        self._deficit = rules.lanes[0] if rules.lanes else 0
        self._late = 0

    def pick(self, source: LogSource, request: Request) -> Sequence[Pick] | None:
        self._front.clear(source)
        if self._late != source.lanes.late:
            self._look_again_from(source.lanes.late_from(self._late))
            self._late = source.lanes.late
        pick = self._starved(source, request) if self._starvation_us else None
        if pick is None:
            if self._weights and (picks := self._whole_rounds(source, request)):
                return picks
            pick = self._next_in_turn(source, request) if self._weights else self._highest(source, request)
        return None if pick is None else (pick,)

    def forget(self) -> None:
        """Messages were settled out of turn: what was found may not be free any more."""
        for lane in self._lanes:
            lane.look_again()

    def _look_again_from(self, offset: int) -> None:
        """The priorities of messages from this offset on have become known; until now they passed for normal ones."""
        for lane in self._lanes:
            if lane.seen > offset:
                lane.look_again()
                lane.seen = min(lane.seen, offset)

    def rewritten(self) -> None:
        """Batches were replaced: those that were looked at may not be in the log any more."""
        self.forget()
        for lane in self._lanes:
            lane.view = None

    def statistics(self, source: LogSource, leased: Sequence[int]) -> list[LaneStatistics]:
        ready = [0] * LANES
        for start in range(self._taken.floor, source.end, 1 << 16):
            size = min(1 << 16, source.end - start)
            free = ~self._taken.bits(start, size)
            for number in range(LANES):
                ready[number] += (source.lanes.bits(number, start, size) & free).bit_count()
        return [
            LaneStatistics(lane.number, ready[lane.number], leased[lane.number], lane.served, lane.last_served_us)
            for lane in self._lanes
        ]

    # --- whose turn it is

    def _starved(self, source: LogSource, request: Request) -> Pick | None:
        now_us = request.now_us
        for lane in self._lanes:
            if now_us < lane.starving_us:
                continue
            # What comes into an empty lane later has its whole time before it.
            waits_since_us = now_us
            if self._look(source, lane, request) and lane.view is not None:
                waits_since_us = max(lane.view.append_time_us, lane.last_served_us)
                if now_us - waits_since_us >= self._starvation_us:
                    return self._take(lane, 1, request)
            lane.starving_us = waits_since_us + self._starvation_us
        return None

    def _whole_rounds(self, source: LogSource, request: Request) -> list[Pick]:
        """As many rounds as fit the request, from the lane on whose turn it is.

        Turn by turn each lane would get the same messages: so often its weight, or as many as it has.  In the middle of
        a turn they would come in another order, which only matters for requests of up to a round.
        """
        for _ in range(LANES):
            if self._deficit > 0 and self._look(source, self._lanes[self._turn], request):
                break
            self._next_turn()
        size = room = 0
        lanes: list[_Lane] = []
        for lane in self._lanes[self._turn :] + self._lanes[: self._turn]:
            weight = self._weights[lane.number]
            if weight and self._look(source, lane, request) and lane.view is not None:
                lanes.append(lane)
                size += weight
                room += weight * lane.view.length // lane.view.count
        if len(lanes) == 1:
            return [self._take(lanes[0], request.messages, request)]  # turn after turn is its own
        if not lanes or (request.messages <= self.round and self._deficit != self._weights[self._turn]):
            return []
        rounds = request.messages // size
        if request.limited:
            rounds = min(rounds, request.bytes // max(room, 1))
        picks: list[Pick] = []
        room = request.bytes
        for lane in lanes:
            left = rounds * self._weights[lane.number]
            while left > 0 and self._look(source, lane, request):
                pick = self._take(lane, left, request)
                picks.append(pick)
                count = pick.bits.bit_count()
                left -= count
                if request.limited:
                    room -= pick.view.length * count // pick.view.count
                    if room <= 0:
                        return picks  # what is further on is larger than what we saw of it
        return picks

    def _next_turn(self) -> None:
        # What an empty lane did not use is lost, as in every round robin.
        self._turn = (self._turn + 1) % LANES
        self._deficit = self._weights[self._turn]

    def _next_in_turn(self, source: LogSource, request: Request) -> Pick | None:
        # Once round and back to where we stopped, which may have been left with less than its whole turn.
        for _ in range(LANES + 1):
            lane = self._lanes[self._turn]
            if self._deficit > 0 and self._look(source, lane, request):
                pick = self._take(lane, self._deficit, request)
                self._deficit -= pick.bits.bit_count()
                return pick
            self._next_turn()
        return None

    def _highest(self, source: LogSource, request: Request) -> Pick | None:
        for lane in self._lanes:
            if self._look(source, lane, request):
                return self._take(lane, request.messages, request)
        return None

    # --- the next messages of a lane

    def _take(self, lane: _Lane, count: int, request: Request) -> Pick:
        """Some of what `_look` has found."""
        view, base = lane.view, lane.base
        assert view is not None
        bits = lowest(lane.bits, min(count, request.fit(view)))
        lane.bits ^= bits
        self._taken.add_bits(base, bits)
        lane.served += bits.bit_count()
        lane.last_served_us = request.now_us
        lane.starving_us = request.now_us + self._starvation_us
        return Pick(view, base, bits, lane.number)

    def _look(self, source: LogSource, lane: _Lane, request: Request) -> bool:
        """Find the next messages of a lane, if none are found yet."""
        if lane.bits:
            return True
        while lane.ahead or self._look_at_maps(source, lane):
            cursor, bits = normal(lane.cursor, lane.ahead)
            view = lane.view
            if view is None or not view.base_offset <= cursor < view.next_offset:
                view = source.batch_at(cursor)
                request.looks -= LOOKS_PER_BATCH
                if view is None:
                    break
                lane.view = view
            # A gap before the batch is stepped over by whoever comes to the front.
            base = max(cursor, view.base_offset)
            bits >>= base - cursor
            size = view.next_offset - base
            lane.cursor, lane.ahead = base + size, bits >> size
            lane.base, lane.bits = base, bits & present(view, base)
            if lane.bits:
                return True
        return False

    def _look_at_maps(self, source: LogSource, lane: _Lane) -> bool:
        """Find the next messages by the bitmaps: an empty lane must not read the backlog of the others."""
        taken, end = self._taken, source.end
        cursor = max(lane.seen, taken.floor)
        while cursor < end:
            candidate = source.lanes.next_in(lane.number, cursor)
            cursor = end if candidate is None else taken.next_out(candidate)
            if cursor >= end:
                break
            size = min(_WINDOW, end - cursor)
            lane.cursor = cursor
            lane.ahead = source.lanes.bits(lane.number, cursor, size) & ~taken.bits(cursor, size)
            cursor += size
            if lane.ahead:
                break
        lane.seen = cursor
        return bool(lane.ahead)
