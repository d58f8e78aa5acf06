"""One queue group on one partition: its ledger, with a log to take messages from and a journal to remember in.

The ledger decides; here its decisions meet time and bytes.  What it grants is packed as stored batches, what it decides
is recorded in the journal, and when it wants to be woken a timer is set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import structlog

from millstream.broker.journal import EntityFact
from millstream.broker.logs import details
from millstream.broker.queues.burials import Burials
from millstream.dead_letters import REJECTED
from millstream.queues.ledger import Ledger
from millstream.queues.ranges import lowest, normal
from millstream.queues.records import DONE, GONE, Counts, Delivery, Lease, Outcome, Result, Rules
from millstream.wire.leases import PART_BYTES_MAX, LeasePart, Scope, Settle, SettleEntry

if TYPE_CHECKING:
    from millstream.broker.queues.consumers import Consumer
    from millstream.broker.queues.group import QueueGroup
    from millstream.broker.queues.keeper import PartitionKeeper
    from millstream.broker.queues.queues import Queues

__all__ = ["ROUTES_MAX", "ROUTE_SHIFT", "QueuePart", "route_of"]

_log = structlog.get_logger("millstream.queues")

#: A nonce says which part it belongs to, so that a settle finds it: 24 bits of route, 40 bits by chance.
ROUTE_SHIFT: Final = 40
ROUTES_MAX: Final = (1 << 64 - ROUTE_SHIFT) - 1
#: A timer that fires a moment early must not spin.
_TIMER_S_MIN: Final = 0.001


def route_of(partition_uid: int, group: str) -> int:
    """Where a group of this name on this partition is found, after a restart as before it.

    A receipt outlives the broker.  If routes went round, it would find another group, and to ack a message that this
    one has settled would be called a success, while it comes again in its own.
    """
    drawn = blake2b(f"{partition_uid}/{group}".encode(), digest_size=8).digest()
    return int.from_bytes(drawn) % ROUTES_MAX + 1


class QueuePart:
    """See the module.  All methods are called on the event loop."""

    def __init__(self, host: Queues, group: QueueGroup, number: int, keeper: PartitionKeeper, route: int) -> None:
        self.group = group
        self.number = number
        self.keeper = keeper
        self.route = route
        self.entity = f"queue/{group.name}"
        self.closed = False
        self._host = host
        self._source = keeper.source
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0
        self._start = -1
        #: Messages that retention removed before they were settled, since the part was opened; and how many of them
        #: were in `take_removed` already.
        self.removed = 0
        self._removed_told = 0
        rng = host.rng
        self.ledger = Ledger(
            self._rules(),
            draw=rng.random,
            draw_nonce=lambda: route << ROUTE_SHIFT | rng.getrandbits(ROUTE_SHIFT),
            moment=host.moment,
        )
        self.ledger.keep_dead_if(lambda: host.topics.registry.keeps_dead(group.topic))
        for fact in keeper.journal.claim(self.entity, self.ledger.snapshot):
            self.ledger.apply(fact)
        self._settled_before = self.ledger.counts(self.end).totals
        self.burials = Burials(host, self)
        self.ledger.open(host.now_us())
        host.recorder.follow(self)
        self.ledger.announce_to(self._ended)
        #: What came back before the last stop must be readable at once: to the ledger, what is not there is gone.
        self._is_warm = False
        self._halts = 0
        if group.is_new and self._source.start:
            self._start = self._source.start
            self.ledger.start_at(self._start)
            host.touched(self)
        self.follow_log()
        keeper.add(self)
        self._warm_up()
        self.burials.resume()

    def _rules(self) -> Rules:
        return Rules.of(self.group.policy, self.group.topic.config)

    def _warm_up(self) -> None:
        log = self.keeper.partition.log
        cold, checked = [], 0
        if not all(segment.verified for segment in log.segments):
            for offset in self.ledger.offsets("waiting", self.end):
                if offset >= checked:
                    checked = next((s.base_offset for s in log.segments if s.base_offset > offset), self.end)
                    if log.cold_segment(offset) is not None:
                        cold.append(offset)
        self.ledger.expire(self._host.now_us())  # waits may have ended while nobody was there
        self._is_warm = not cold
        if cold:
            self._host.own(self._check(cold))

    async def _check(self, cold: Sequence[int]) -> None:
        for offset in cold:
            await self.keeper.warmed(offset)
        self._is_warm = True
        self.wake()

    def close(self) -> None:
        """Let go of everything; what was recorded stays."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self in self.keeper.parts:
            self.keeper.parts.remove(self)

    def configure(self) -> None:
        """The group's policy or the topic's settings changed."""
        self.ledger.configure(self._rules())
        self.wake()

    def move(self, group: QueueGroup) -> None:
        """Belong to another group from now on: what is known of messages stays, nobody holds any, counting begins."""
        self.group = group
        for lease in list(self.ledger.leases()):
            self.ledger.release(lease.nonce)
        self._settled_before = self.ledger.counts(self.end).totals
        self.removed = self._removed_told = 0
        self.configure()

    @contextmanager
    def halt(self) -> Iterator[None]:
        """Within the block nothing is handed out: messages are being taken away that nobody has."""
        self._halts += 1
        try:
            yield
        finally:
            self._halts -= 1
            self.wake()

    @property
    def _hands_out(self) -> bool:
        return self._is_warm and not self._halts

    # --- messages out --------------------------------------------------------------------------------------------

    def lease(
        self, consumer: Consumer, want: int, room: int, *, alone: bool, first: bool, now_us: int
    ) -> tuple[list[LeasePart], bool]:
        """Hand out what there is for a consumer: at most `want` messages, in an answer with `room` bytes left.

        The first message of an answer always fits.  Also says whether there was more than that.
        """
        if not self._hands_out:
            return [], False
        self.follow_log()
        delivery = self.ledger.lease(
            self._source,
            consumer=consumer.key,
            want=want,
            now_us=now_us,
            lease_ms=consumer.lease_ms,
            alone=alone,
            bytes_max=room,
        )
        parts: list[LeasePart] = []
        is_full = False
        for lease in delivery.leases:
            part, size = self._pack(lease, room, first=first and not parts)
            room -= size
            is_full = is_full or lease.bits != lease.granted
            if part is not None:
                parts.append(part)
        self._handed_out(delivery, now_us)
        return parts, is_full

    def claim(self, consumer: Consumer, want: int, *, alone: bool, now_us: int) -> list[Lease]:
        """Lease messages to a consumer that reads them for itself."""
        leases: list[Lease] = []
        while want > 0 and self._hands_out:
            self.follow_log()
            delivery = self.ledger.lease(
                self._source,
                consumer=consumer.key,
                want=want,
                now_us=now_us,
                lease_ms=consumer.lease_ms,
                alone=alone,
            )
            self._handed_out(delivery, now_us)
            if not delivery.leases:
                break
            leases += delivery.leases
            want -= sum(lease.bits.bit_count() for lease in delivery.leases)
        self._count_claimed(leases)
        return leases

    async def warm(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Have everything checked that an earlier process wrote of these messages.  Raises StorageFailed."""
        for start, end in wanted:
            for segment in list(self.keeper.partition.log.segments):
                if segment.base_offset < end and segment.next_offset > start:
                    await self.keeper.partition.warm(max(segment.base_offset, start, self._source.start))

    def retake(self, consumer: Consumer, wanted: Sequence[tuple[int, int]], now_us: int) -> list[Lease]:
        """Lease just these messages, which are warm, except those that somebody else has."""
        if self._halts:
            return []
        self.follow_log()
        delivery = self.ledger.retake(
            self._source, wanted, consumer=consumer.key, now_us=now_us, lease_ms=consumer.lease_ms
        )
        self._handed_out(delivery, now_us)
        self._count_claimed(delivery.leases)
        return delivery.leases

    def _handed_out(self, delivery: Delivery, now_us: int) -> None:
        """Remember what the ledger found on the way, and wake up when it wants to be."""
        if delivery.dead:
            self.burials.bury(delivery.dead)
        self.keeper.warm()
        self._host.touched(self)
        self.changed(now_us)

    def _count_claimed(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            messages = lease.bits.bit_count()
            self.group.delivered += messages
            if lease.history.deliveries:
                self.group.redelivered += messages

    def _pack(self, lease: Lease, room: int, *, first: bool) -> tuple[LeasePart | None, int]:
        """A lease with its messages, and the bytes they take.  What does not fit is given back, uncounted."""
        base, bits = lease.base, lease.granted
        end = base + bits.bit_length()
        born_us = 0
        batches: list[bytes | memoryview] = []
        used = PART_BYTES_MAX + (end - base >> 3)
        offset = base
        while offset < end:
            run = self._source.batch_at(offset)
            if run is None:
                break  # cannot be, because the ledger has just looked at it; if it is, nobody loses anything
            born_us = born_us or run.append_time_us
            pieces = run.pieces(base, bits)
            size = sum(map(len, pieces))
            if used + size > room:
                if batches or not first:
                    break
                while used + size > room and bits.bit_count() > 1:
                    bits = lowest(bits, bits.bit_count() // 2)
                    pieces = run.pieces(base, bits)
                    size = sum(map(len, pieces))
                end = min(end, base + bits.bit_length())
            used += size
            batches += pieces
            offset = min(run.next_offset, end)
            if offset < end:
                offset, _ = normal(offset, bits >> offset - base)  # there may be runs between that have nothing of it
        kept = lease.granted & (1 << offset - base) - 1
        if kept != lease.granted:
            self.ledger.release(lease.nonce, offset, lease.granted >> offset - base)
        if not kept:
            return None, 0
        if lease.history.deliveries:
            self.group.redelivered += kept.bit_count()
        else:
            self._host.metrics.latency.to_queue.observe(lease.granted_us - born_us, kept.bit_count())
        return self._part(lease, kept, batches), used

    def _part(self, lease: Lease, present: int, batches: Sequence[bytes | memoryview]) -> LeasePart:
        span = present.bit_length()
        mask = b"" if not present & present + 1 else present.to_bytes(span + 7 >> 3, "little")
        return LeasePart(
            self.group.topic.name,
            self.number,
            lease.nonce,
            (lease.deadline_us - lease.granted_us) // 1000,
            lease.delivery,
            lease.failures,
            lease.base,
            span,
            mask,
            batches,
        )

    # --- answers in ----------------------------------------------------------------------------------------------

    def settle(self, entry: SettleEntry, now_us: int) -> Outcome:
        kind, nonce, scope, offset, value, bits, reason, cause = entry
        base, bits = (-1, 1) if scope == Scope.REST else (offset, bits if scope == Scope.BITMAP else 1)
        ledger = self.ledger
        if self._is_gone(nonce, base, bits):
            # To the ledger all of it is settled, whoever did that; to have acked it before makes an ack a success.
            return DONE if kind == Settle.ACK and ledger.ending_of(nonce) is DONE else GONE
        if kind == Settle.ACK:
            outcome = ledger.ack(nonce, base, bits)
        elif kind == Settle.NACK:
            after_ms = None if value < 0 else value
            outcome = ledger.nack(nonce, base, bits, now_us=now_us, reason=reason, retry_after_ms=after_ms)
        elif kind == Settle.REJECT:
            outcome = ledger.reject(nonce, base, bits, now_us=now_us, reason=reason, cause=cause or REJECTED)
        elif kind == Settle.EXTEND:
            outcome = ledger.extend(nonce, value, now_us=now_us)
        else:
            outcome = ledger.release(nonce, base, bits)
        if outcome.result is Result.INVALID:
            return outcome
        self._host.touched(self)
        if kind != Settle.ACK or self.group.is_ordered:
            self.changed(now_us)
            self.wake()
        return outcome

    def _is_gone(self, nonce: int, base: int, bits: int) -> bool:
        """Whether retention took these messages; without a base, what was left of the lease."""
        if base < 0:
            return self.ledger.ending_of(nonce) is GONE
        return base + bits.bit_length() <= self._source.start

    def ack_sent(self, nonce: int) -> None:
        """All of a lease that was granted just now is done."""
        self.ledger.ack(nonce)
        self._host.touched(self)
        if self.group.is_ordered:
            self._host.loop.call_soon(self.wake)  # the next of its key may go; not in the middle of a lease

    def return_from(self, consumer: Consumer, now_us: int) -> None:
        """A consumer is gone: what it holds is ready again, at once."""
        before = self.ledger.leased
        dead = self.ledger.return_consumer(consumer.key, now_us)
        if dead:
            self.burials.bury(dead)
        if before != self.ledger.leased:
            self._host.metrics.leases_returned += 1
            self._host.touched(self)
            self.changed(now_us)
            self.wake()

    # --- time ----------------------------------------------------------------------------------------------------

    def changed(self, now_us: int) -> None:
        """Set the timer to when the ledger wants to be looked at.  One that comes too early does no harm."""
        due_us = self.ledger.next_wakeup_us()
        if due_us is None or (self._timer is not None and self._timer_us <= due_us):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_us = due_us
        delay_s = max((due_us - now_us) / 1e6, _TIMER_S_MIN) if due_us else 0.0
        self._timer = self._host.loop.call_later(delay_s, self._due)

    def _due(self) -> None:
        self._timer = None
        now_us = self._host.now_us()
        before, messages = self.ledger.lease_count, self.ledger.leased
        dead = self.ledger.expire(now_us)
        self._host.metrics.leases_expired += before - self.ledger.lease_count
        self.group.timed_out += messages - self.ledger.leased
        if details.on and before > self.ledger.lease_count:
            _log.debug(
                "leases expired",
                namespace=self.group.topic.namespace,
                topic=self.group.topic.name,
                group=self.group.name,
                partition=self.number,
                leases=before - self.ledger.lease_count,
                messages=messages - self.ledger.leased,
            )
        if dead:
            self.burials.bury(dead)
        self._host.touched(self)
        self.wake()
        is_asked = bool(self.group.waiting) and not self.group.policy.paused
        # When the ledger only wants to look further ahead, it can wait until somebody asks.
        if is_asked or self.ledger.next_wakeup_us():
            self.changed(now_us)

    def sweep(self, now_us: int) -> bool:
        """Expire what nobody asks for, and forget what is no more; whether there was something, and may be more."""
        self.follow_log()
        if not self.keeper.partition.has_expiry and not self.group.topic.config.message_ttl_ms:
            return False  # nothing here is known to expire, and looking means reading
        before = self.ledger.settled.total
        dead = self.ledger.sweep(self._source, now_us)
        if dead:
            self.burials.bury(dead)
        self.keeper.warm()
        self._host.touched(self)
        return self.ledger.settled.total > before

    def _ended(self, how: str, _base: int, bits: int) -> None:
        if how == "expired":
            self._host.metrics.messages_expired += bits.bit_count()

    def evict(self, count: int) -> int:
        """Give up the oldest messages that are ready, as many as are about as old as the first; returns how many."""
        offset = self.ledger.first_ready(self.end)
        run = self._source.batch_at(offset) if offset is not None else None
        if run is not None and offset is not None:
            count = min(count, run.next_offset - offset)
        evicted = self.ledger.evict(self._source, count)
        self._host.touched(self)
        return evicted

    def wake(self) -> None:
        """There may be something for somebody."""
        if not self.closed:
            self.group.woken(self)

    def follow_log(self) -> None:
        """Take note of what retention has removed."""
        start = self._source.start
        if start != self._start:
            self._start = start
            self.removed += self.ledger.trim(start)
            if self.group.is_ordered:
                self._host.loop.call_soon(self.wake)  # what is gone held its key; not in the middle of a lease

    def take_removed(self) -> int:
        """How many messages retention has removed unsettled since this was last asked."""
        self.follow_log()
        told, self._removed_told = self._removed_told, self.removed
        return self.removed - told

    # --- remembering ---------------------------------------------------------------------------------------------

    def record(self) -> None:
        """Hand what was decided to the journal; nobody waits for it."""
        for entity, fact in self._decided():
            self.keeper.journal.record(entity, fact)

    def record_durably(self) -> Awaitable[None]:
        """What was decided until now is on disk when the answer was awaited."""
        # Taken now: until somebody awaits, the next flush could have written them without waiting for the disk.
        return self._write(self._decided())

    def _decided(self) -> list[EntityFact]:
        """What is to be written; nothing of a group that is gone: the next one of its name has its place."""
        facts = self.ledger.drain()
        return [] if self.group.gone is not None else [(self.entity, fact) for fact in facts]

    async def _write(self, facts: list[EntityFact]) -> None:
        if self.group.gone is not None:
            return
        if facts:
            # The ledger goes by them already, so they are written as soon as possible if they cannot be now.
            await self.keeper.journal.record_durably(*facts, holds=True)
        else:
            await self.keeper.journal.sync()  # what is repeated may have been decided a moment ago

    # --- looking -------------------------------------------------------------------------------------------------

    @property
    def end(self) -> int:
        return self._source.end

    def settled_since(self, counts: Counts, how: str) -> int:
        """Messages that were settled in one of the ways, since the part was opened."""
        return counts.totals.get(how, 0) - self._settled_before.get(how, 0)

    def counts(self) -> Counts:
        """How many messages are where, now."""
        self.follow_log()
        return self.ledger.counts(self._source.end)

    def available(self) -> int:
        """About how many messages could be handed out now."""
        return self.ledger.available(self._source.end)

    @property
    def settled_below(self) -> int:
        """Everything below is done with, and nobody needs to read it again."""
        owed = self.burials.first
        return self.ledger.committed if owed is None else min(self.ledger.committed, owed)

    def depth(self) -> int:
        """Messages that are not settled."""
        ready, leased, waiting, _, _ = self.counts()
        return ready + leased + waiting

    def ready_since_us(self) -> int | None:
        """When the oldest message was stored that is ready; None when there is none, or it cannot be read right now."""
        offset = self.ledger.first_ready(self._source.end)
        run = self._source.batch_at(offset) if offset is not None else None
        return run.append_time_us if run is not None else None
