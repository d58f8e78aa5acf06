"""The ledger of a queue group on one partition: who holds what, what failed, what is done.

    ledger = Ledger(rules, draw=random.random, draw_nonce=...)
    for fact in journal: ledger.apply(fact)     # nothing for a new group
    ledger.open(now_us)                         # from here on live
    ledger.start_at(offset)                     # a new group only

Every method below `open` decides and applies at once.  The caller collects facts with `drain` and records them; a
`Dead` brings its own.  Times are UTC microseconds, by a time that does not jump when the clock is set
(broker/queues/steady_time.py).  The age of a message is judged by the clock itself, which has stamped it (`moment`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from millstream.dead_letters import (
    MAX_DELIVERIES_EXCEEDED,
    MAX_RETRIES_EXCEEDED,
    POISON,
    REJECTED,
    TOTAL_TIMEOUT_EXCEEDED,
)
from millstream.durations import format_ms
from millstream.queues.book import Book
from millstream.queues.dispenser import Dispenser
from millstream.queues.facts import returned_fact, settled_below, start_fact
from millstream.queues.inspection import first_ready, look, offsets_in, surroundings
from millstream.queues.intake import Request
from millstream.queues.leases import SPAN_MAX, Handout, Leases
from millstream.queues.moment import Moment
from millstream.queues.poison import poison_of
from millstream.queues.ranges import RangeSet, lowest, normal
from millstream.queues.records import (
    DONE,
    FRESH,
    GONE,
    INVALID,
    PLAIN,
    RETRIED,
    Attempt,
    Counts,
    Dead,
    Delivery,
    Fact,
    History,
    LaneStatistics,
    Lease,
    LogSource,
    Outcome,
    Parcel,
    Reason,
    Result,
    Rules,
    Situation,
    Terms,
    Whereabouts,
)
from millstream.queues.why import Surroundings, explain
from millstream.topics import LANES

__all__ = ["Ledger"]

#: Leases that were acked whole and whose ack may be repeated, or that retention took: so many of the last ones are
#: remembered at least.
_ENDED_KEPT: Final = 4_096
#: How many offsets are looked at in one go.
_WINDOW: Final = 65_536


class Ledger:
    """See the module.  `draw` gives numbers from 0 to 1, `draw_nonce` u64 to name leases, seldom one twice.

    `moment` says what the time that the ledger is told is by the clock that stamps messages.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        draw: Callable[[], float],
        draw_nonce: Callable[[], int],
        moment: Callable[[int], Moment] = Moment,
    ) -> None:
        self.rules = rules
        self._moment = moment
        self._draw = draw
        self._draw_nonce = draw_nonce
        self._book = Book()
        #: Told of every delivery that came to nothing: first offset, bits, and how it went.
        self.on_attempt: Callable[[int, int, Attempt], None] | None = None
        self._leases = Leases()
        self._ended: dict[int, Outcome] = {}
        self._ended_before: dict[int, Outcome] = {}
        self._dispenser = Dispenser(self._book, rules, ())

    # --- facts ---------------------------------------------------------------------------------------------------

    def apply(self, fact: Fact) -> None:
        """Take over a fact: one of the past, or one that somebody else has recorded (a replay settles dead letters)."""
        self._book.apply(fact)
        self._drop_settled()

    def open(self, now_us: int | None = None) -> None:
        """The last fact of the journal was applied.  Leases are gone; what they held is ready.

        With the time, waits that go on are no longer than they were when they began, whatever the clock says.
        """
        self._book.open(now_us)
        self._make_dispenser()

    def drain(self) -> list[Fact]:
        """The facts since the last call, in order, acks in bulk; to be recorded."""
        return self._book.drain()

    def announce_to(self, told: Callable[[str, int, int], None]) -> None:
        """Tell somebody what is expired, evicted or purged: how, first offset and bits."""
        self._book.told.append(told)

    def keep_dead_if(self, asked: Callable[[], bool]) -> None:
        """Ask, when messages are given up on, whether they are dead letters: these are set aside and stay."""
        self._book.keeps_dead = asked

    def snapshot(self) -> list[Fact]:
        """Facts that make a new ledger like this one, without its leases."""
        return self._book.snapshot(Parcel(some.base, some.bits, some.history, some.terms) for some in self._leases)

    # --- deliver -------------------------------------------------------------------------------------------------

    def lease(
        self,
        source: LogSource,
        *,
        consumer: str,
        want: int,
        now_us: int,
        lease_ms: int = 0,
        alone: bool = False,
        bytes_max: int = 0,
    ) -> Delivery:
        """Hand out at most `want` messages of about `bytes_max` stored bytes (0 = no limit; one message always goes).

        What came back goes first, oldest first, for one second only to another consumer than the one that had it last,
        unless that is `alone`.  `consumer` is unique and readable.  `lease_ms` is the consumer's wish; a message's own
        wins, and the rules' holds where there is none.  There may be more than one call gets: who gets something may
        ask again.  Nothing here knows of `paused`: do not call.
        """
        rules = self.rules
        book = self._book
        lease_ms = lease_ms or rules.lease_ms
        if book.returned.waiting or book.returned.ready:
            book.returned.due(now_us)
        else:
            start = book.taken.floor
            size = self._dispenser.run(source, want, bytes_max)
            if size:
                # As most leases are: fresh messages in log order that are all alike.
                deadline_us = now_us + 1000 * lease_ms
                bits = (1 << size) - 1
                return Delivery([self._grant(start, bits, consumer, FRESH, PLAIN, now_us, deadline_us)])
        moment = self._moment(now_us)
        request = Request(consumer, want, now_us, moment=moment, lease_ms=lease_ms, alone=alone, bytes_max=bytes_max)
        handout = Handout(request, self._grant)
        dead: list[Dead] = []
        if rules.ordering == "strict":
            request.messages = 0 if len(self._leases) else min(want, 1)
            dead += self._dispenser.hand_out_first(source, request, handout)
        else:
            if book.returned.ready:
                dead += self._dispenser.hand_out_again(source, request, handout)
            if request.messages > 0:
                dead += self._dispenser.hand_out_fresh(source, request, handout)
        return Delivery(handout.finish(), dead)

    def retake(
        self,
        source: LogSource,
        wanted: Sequence[tuple[int, int]],
        *,
        consumer: str,
        now_us: int,
        lease_ms: int = 0,
    ) -> Delivery:
        """Hand out just these messages (from one offset to before another), except those that somebody else has.

        For a consumer that had them before and must have them again, and not others: whether they wait for a retry or
        whose turn it is does not matter.  In a strict queue there is one at a time, as ever.
        """
        strict = self.rules.ordering == "strict"
        if strict:
            first = self._book.settled.floor
            alone = not len(self._leases) and any(start <= first < end for start, end in wanted)
            wanted = [(first, first + 1)] if alone else []
        request = Request(
            consumer,
            sum(end - start for start, end in wanted),
            now_us,
            moment=self._moment(now_us),
            lease_ms=lease_ms or self.rules.lease_ms,
        )
        handout = Handout(request, self._grant)
        dead = self._dispenser.hand_out_wanted(source, wanted, request, handout)
        leases = handout.finish()
        if self.rules.ordering == "key":
            self._make_dispenser()  # which finds out anew whose keys are held
        return Delivery(leases, dead)

    def _grant(
        self, base: int, bits: int, consumer: str, history: History, terms: Terms, now_us: int, deadline_us: int
    ) -> Lease:
        nonce = self._draw_nonce()
        while self._leases.get(nonce) is not None or self.ending_of(nonce) is not INVALID:
            nonce = self._draw_nonce()  # chance gave one that names another lease, or one that was acked just now
        lease = Lease(nonce, base, bits, consumer, history, terms, now_us, deadline_us)
        self._leases.add(lease)
        return lease

    def next_wakeup_us(self) -> int | None:
        """When to call `expire` and serve waiting consumers again.  0 = now: a look ahead had no time to find any."""
        if self._dispenser.more:
            return 0
        deadline_us, due_us = self._leases.next_deadline_us(), self._book.returned.next_due_us()
        if deadline_us is None or due_us is None:
            return due_us if deadline_us is None else deadline_us
        return min(deadline_us, due_us)

    # --- settle --------------------------------------------------------------------------------------------------
    # `base` < 0 means everything that is left of the lease; otherwise bit i of `bits` is the message `base` + i.

    def ack(self, nonce: int, base: int = -1, bits: int = 1, *, consumer: str | None = None) -> Outcome:
        """The messages are done; to say so again is a success.  `consumer`, if given, must hold the lease."""
        lease = self._leases.get(nonce)
        if lease is None:
            return self.ending_of(nonce) if base < 0 else DONE if self._acked_before(base, bits) else INVALID
        chosen = lease.bits if base < 0 and consumer is None else self._chosen(lease, base, bits, consumer)
        if chosen is None:
            return INVALID
        left = chosen & lease.bits
        if left != chosen:
            # Some have left the lease: acked before, which is fine, or given back, and then they are not its any more.
            again = chosen ^ left
            if not self._book.acked(lease.base, again):
                return INVALID
        if left:
            base = lease.base
            self._leases.take(lease, left)
            self._book.ack(base, left)
            if not lease.bits:
                self._remember(nonce, DONE)
        return DONE

    def nack(
        self,
        nonce: int,
        base: int = -1,
        bits: int = 1,
        *,
        now_us: int,
        reason: str = "",
        retry_after_ms: int | None = None,
        consumer: str | None = None,
    ) -> Outcome:
        """The messages failed: they are tried again, by the retry policy or after `retry_after_ms`, or are dead."""
        lease, chosen = self._held(nonce, base, bits, consumer)
        if lease is None:
            return INVALID
        return self._fail(lease, chosen, "nack", reason, retry_after_ms, now_us)

    def reject(
        self,
        nonce: int,
        base: int = -1,
        bits: int = 1,
        *,
        now_us: int,
        reason: str = "",
        cause: str = REJECTED,
        consumer: str | None = None,
    ) -> Outcome:
        """The messages will never succeed: dead at once.  `cause` is one of millstream.dead_letters.REASONS."""
        lease, chosen = self._held(nonce, base, bits, consumer)
        if lease is None:
            return INVALID
        attempt = Attempt(lease.consumer, lease.granted_us, now_us, "reject", reason)
        history = lease.history.after(attempt, failed=True)
        self._leases.take(lease, chosen)
        self._tell(lease, chosen, attempt)
        return Outcome(Result.DEAD, self._book.bury(lease.base, chosen, cause, reason, history))

    def extend(self, nonce: int, ms: int, *, now_us: int, consumer: str | None = None) -> Outcome:
        """The lease, all of it, lasts until `ms` from now, but never longer than processing_ms since it was granted.

        Less than 0 stands for as long as it was given out for.
        It is never made shorter: a lease has one deadline, and others of its messages may rely on it.
        """
        lease, _ = self._held(nonce, -1, 0, consumer)
        if lease is None:
            return INVALID
        deadline_us = now_us + (ms * 1000 if ms >= 0 else lease.length_us)
        if self.rules.processing_ms:
            deadline_us = min(deadline_us, lease.granted_us + self.rules.processing_ms * 1000)
        lease.deadline_us = max(lease.deadline_us, deadline_us)
        return Outcome(Result.DONE, lasting_ms=max(0, lease.deadline_us - now_us) // 1000)

    def release(self, nonce: int, base: int = -1, bits: int = 1, *, consumer: str | None = None) -> Outcome:
        """Give back what was not begun, as if it had never been delivered."""
        lease, chosen = self._held(nonce, base, bits, consumer)
        if lease is None:
            return INVALID
        self._leases.take(lease, chosen)
        self._book.returned.add_ready(Parcel(*normal(lease.base, chosen), lease.history, lease.terms))
        return DONE

    def _held(self, nonce: int, base: int, bits: int, consumer: str | None) -> tuple[Lease | None, int]:
        """The lease and its messages that are meant; no lease if one of them is not in it, or not any more."""
        lease = self._leases.get(nonce)
        if lease is None:
            return None, 0
        chosen = self._chosen(lease, base, bits, consumer)
        return (None, 0) if not chosen or chosen & ~lease.bits else (lease, chosen)

    def _chosen(self, lease: Lease, base: int, bits: int, consumer: str | None) -> int | None:
        """The bits of the granted messages that are meant; None if others are, or it is another consumer's lease."""
        if consumer is not None and consumer != lease.consumer:
            return None
        if base < 0:
            return lease.bits
        place = base - lease.base
        # Sizes first: a wrong offset must not make us shift by billions.
        if place < 0 or bits <= 0 or place + bits.bit_length() > lease.granted.bit_length():
            return None
        chosen = bits << place
        return None if chosen & ~lease.granted else chosen

    def _acked_before(self, base: int, bits: int) -> bool:
        return 0 < bits.bit_length() <= SPAN_MAX and self._book.acked(base, bits)

    def ending_of(self, nonce: int) -> Outcome:
        """What became of a lease that is no more: DONE when all of it was acked, GONE when retention took the rest."""
        return self._ended.get(nonce) or self._ended_before.get(nonce, INVALID)

    def _remember(self, nonce: int, ending: Outcome) -> None:
        ended = self._ended
        ended[nonce] = ending
        if len(ended) >= _ENDED_KEPT:
            self._ended_before, self._ended = ended, {}

    # --- failures ------------------------------------------------------------------------------------------------

    def _fail(
        self, lease: Lease, bits: int, kind: str, reason: str, retry_after_ms: int | None, now_us: int
    ) -> Outcome:
        attempt = Attempt(lease.consumer, lease.granted_us, now_us, kind, reason)
        history = lease.history.after(attempt, failed=True)
        # All that is worked out comes first: what has left its lease must be somewhere else.
        cause = self._cause_of_death(history, lease.terms, now_us)
        if retry_after_ms is None:
            retry_after_ms = 0 if cause is not None else self.rules.retry.delay_ms(history.failures, self._draw)
        self._leases.take(lease, bits)
        self._tell(lease, bits, attempt)
        if cause is not None:
            return Outcome(Result.DEAD, self._book.bury(lease.base, bits, *cause, history))
        self._return(lease, bits, history, now_us + retry_after_ms * 1000, now_us)
        return RETRIED

    def _tell(self, lease: Lease, bits: int, attempt: Attempt) -> None:
        if self.on_attempt is not None:
            self.on_attempt(lease.base, bits, attempt)

    def _cause_of_death(self, history: History, terms: Terms, now_us: int) -> tuple[str, str] | None:
        """Reason and error, if the messages have failed for the last time."""
        retry = self.rules.retry
        retries = retry.max_retries if terms.max_retries < 0 else terms.max_retries
        if history.failures > retries:
            return MAX_RETRIES_EXCEEDED, history.last_error
        # When it was published is not noted as long as there is no limit; then its first delivery has to do.
        born_us = terms.born_us
        age_us = self._moment(now_us).of(born_us) - born_us if born_us else now_us - history.first_us
        if retry.total_ms and age_us >= retry.total_ms * 1000:
            return TOTAL_TIMEOUT_EXCEEDED, history.last_error
        if self._delivered_too_often(history):
            return MAX_DELIVERIES_EXCEEDED, history.last_error
        poison = poison_of(history, terms) if self.rules.poison else None
        return None if poison is None else (POISON, poison)

    def _delivered_too_often(self, history: History) -> bool:
        return 0 < self.rules.max_deliveries <= history.deliveries

    def _return(self, lease: Lease, bits: int, history: History, due_us: int, now_us: int) -> None:
        base, bits = normal(lease.base, bits)
        self._book.record(returned_fact(Parcel(base, bits, history, lease.terms, due_us)))
        self._book.returned.due(now_us)

    # --- time and other events -----------------------------------------------------------------------------------

    def expire(self, now_us: int) -> list[Dead]:
        """Leases past their deadline have failed; waits that are over are ready.  Call at `next_wakeup_us`."""
        dead: list[Dead] = []
        self._dispenser.more = False  # who is asking now will look again
        for lease in self._leases.overdue(now_us):
            held_ms = (lease.deadline_us - lease.granted_us) // 1000
            reason = f"no answer within {format_ms(held_ms)}"
            dead += self._fail(lease, lease.bits, "timeout", reason, None, now_us).dead
        self._book.returned.due(now_us)
        return dead

    def return_consumer(self, consumer: str, now_us: int) -> list[Dead]:
        """A consumer went away: all it holds is ready at once.  Dead is what was handed out max_deliveries times."""
        dead: list[Dead] = []
        for lease in self._leases.of_consumer(consumer):
            bits = lease.bits
            attempt = Attempt(consumer, lease.granted_us, now_us, "returned", "its consumer went away")
            history = lease.history.after(attempt, failed=False)
            self._leases.take(lease, bits)
            self._tell(lease, bits, attempt)
            if self._delivered_too_often(history):
                dead += self._book.bury(lease.base, bits, MAX_DELIVERIES_EXCEEDED, history.last_error, history)
            else:
                self._return(lease, bits, history, now_us, now_us)
        return dead

    def sweep(self, source: LogSource, now_us: int) -> list[Dead]:
        """Expire what is at the front of the backlog, also when nobody asks for it.  Now and then is enough.

        After a call that has settled something there may be more.
        """
        return self._dispenser.sweep(source, self._moment(now_us))

    def start_at(self, offset: int) -> None:
        """Begin here (a new group), or begin again (seek): nothing below is delivered, everything from here on is."""
        self._book.record(start_fact(offset, offset))
        self._leases = Leases()
        self._make_dispenser()

    def trim(self, offset: int) -> int:
        """Retention took everything below; returns how many of it were not settled.

        To be called after `open`, too, for what happened before.
        """
        held = [lease.nonce for lease in self._leases]
        removed = self._settle_below(offset, "gone")
        for nonce in held:
            if self._leases.get(nonce) is None:
                self._remember(nonce, GONE)
        self._book.origin = max(self._book.origin, offset)
        return removed

    def rewritten(self) -> None:
        """Compaction took messages out of the log; what was read of it before may not be there any more."""
        self._dispenser.rewritten()

    def purge(self, end: int) -> int:
        """Settle everything below `end`, leased messages too; returns how many."""
        self._book.announce_below("purged", end)
        return self._settle_below(end, "purged")

    def evict(self, source: LogSource, count: int) -> int:
        """Settle the oldest ready messages; returns how many there were."""
        taken, returned = self._book.taken, self._book.returned
        returned.let_all_go()  # whatever goes before it
        evicted = 0
        while evicted < count:
            self._dispenser.front.clear(source)
            fresh, again = taken.floor, returned.oldest()
            if again is not None and (again < fresh or fresh >= source.end):
                parcel = returned.pop("", 0, alone=True)
                assert parcel is not None
                # One at a time: what comes next may be in another parcel, or fresh.
                base, some = parcel.base, 1
                if parcel.bits != some:
                    parcel.base, parcel.bits = normal(base, parcel.bits ^ some)
                    returned.add_ready(parcel)
            elif fresh < source.end:
                end = source.end if again is None else min(source.end, again)
                base, size = fresh, min(_WINDOW, end - fresh)
                some = lowest(~taken.bits(base, size) & (1 << size) - 1, count - evicted)
            else:
                break
            self._book.discard("evicted", base, some)
            evicted += some.bit_count()
        self._dispenser.forget()
        return evicted

    def configure(self, rules: Rules) -> None:
        """The rules changed; leases and waits go on as they were granted."""
        self.rules = rules
        self._make_dispenser()

    def _settle_below(self, end: int, how: str) -> int:
        settled = self._book.settled
        before, floor = settled.total, settled.floor
        if end <= floor:
            return 0
        self._book.record(settled_below(how, floor, end))
        self._drop_settled()
        return settled.total - before

    def _drop_settled(self) -> None:
        self._dispenser.forget()
        self._leases.drop(self._book.settled)
        if self._book.returned:
            self._book.returned.drop(self._book.settled)

    def _make_dispenser(self) -> None:
        self._dispenser = Dispenser(self._book, self.rules, [(some.base, some.bits) for some in self._leases])

    # --- look ----------------------------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """Everything below is settled."""
        return self._book.settled.floor

    @property
    def settled(self) -> RangeSet:
        """The offsets that are done with; to look at only."""
        return self._book.settled

    @property
    def set_aside(self) -> RangeSet:
        """Dead letters that the group gave up on, settled since or not; to look at only."""
        return self._book.aside

    def counts(self, end: int) -> Counts:
        book = self._book
        settled = book.settled.total - book.origin
        return Counts(self._ready(end), self._leases.messages, self._waiting, settled, dict(book.totals))

    def available(self, end: int) -> int:
        """How many messages could be handed out now, at most: those that are ready and not seen behind their key."""
        return max(self._ready(end) - self._dispenser.held_up, 0)

    def _ready(self, end: int) -> int:
        book = self._book
        settled = book.settled.total - book.origin
        return max(end - book.origin, 0) - settled - self._leases.messages - self._waiting

    @property
    def _waiting(self) -> int:
        """How many messages wait for their next try, or are set aside for good."""
        return self._book.returned.waiting + sum(bits.bit_count() for _, bits in self._book.aside_spans())

    def lanes(self, source: LogSource) -> list[LaneStatistics]:
        """The five lanes; empty as long as nothing with a priority was asked for."""
        if self._dispenser.lanes is None:
            return []
        leased = [0] * LANES
        for lease in self._leases:
            leased[lease.terms.lane] += lease.bits.bit_count()
        return self._dispenser.lanes.statistics(source, leased)

    @property
    def lease_count(self) -> int:
        return len(self._leases)

    @property
    def leased(self) -> int:
        """Messages in the hands of consumers."""
        return self._leases.messages

    @property
    def ready_again(self) -> int:
        """Messages that came back and are ready: only these are for some consumers and not for others."""
        return self._book.returned.ready

    def leases(self) -> Iterable[Lease]:
        return self._leases

    def leases_of(self, consumer: str) -> list[Lease]:
        return self._leases.of_consumer(consumer)

    def lease_of(self, nonce: int) -> Lease | None:
        return self._leases.get(nonce)

    def look(self, offset: int, end: int) -> Whereabouts:
        """Where a message is and what happened to it."""
        return look(self._book, self._leases, offset, end)

    def offsets(self, state: str, end: int) -> Iterator[int]:
        """The offsets that are ready, leased or waiting, in order (for peeking)."""
        return offsets_in(self._book, self._leases, state, end)

    def first_ready(self, end: int) -> int | None:
        return first_ready(self._book, end)

    def explain(self, offset: int, source: LogSource, situation: Situation, now_us: int) -> Reason:
        """Why a message is not being delivered right now."""
        where = self.look(offset, source.end)
        around = Surroundings()
        if where.state in ("ready", "waiting"):
            view = source.batch_at(offset)
            if view is not None and offset not in view.offsets():  # compaction took it, and nobody has come upon that
                where = Whereabouts("gone")
        if where.state == "ready":
            around = surroundings(self._book, self._leases, self._dispenser, offset, source)
        elif source.start <= offset < self._book.origin:
            around = Surroundings(begins=self._book.origin)
        return explain(offset, where, around, situation, now_us)
