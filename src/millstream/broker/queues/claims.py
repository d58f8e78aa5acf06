"""Claims: leases without messages, for readers that fetch the messages by offset, on other machines and maybe again.

A claim is some leases of one consumer, made, settled and extended together.  It belongs to the connection that made it:
when that ends, what is not settled goes back at once, like all leases of a consumer that went away.  A reader that must
have the very same messages again (a query that was restarted in the middle of a batch) names them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from millstream.broker.queues.consumers import Consumer
from millstream.broker.queues.group import QueueGroup
from millstream.broker.queues.part import QueuePart
from millstream.durations import DURATION_MS_MAX
from millstream.errors import InvalidArgument, MillstreamError, PartitionNotFound, QuotaExceeded, ReceiptInvalid
from millstream.policies import LEASE_MS_MAX, LEASE_MS_MIN
from millstream.queues.leases import SPAN_MAX
from millstream.queues.ranges import RangeSet, normal, runs
from millstream.queues.records import REFUSED, Lease
from millstream.wire import queue_calls
from millstream.wire.leases import REASON_BYTES_MAX, Scope, Settle, SettleEntry
from millstream.wire.queue_calls import Range

if TYPE_CHECKING:
    from millstream.broker.broker import Session
    from millstream.broker.queues.queues import Queues

__all__ = ["Claimed", "Claims"]

_MESSAGES_MAX: Final = 1_000_000
#: What is scattered makes an answer large; a claim ends where it has so many pieces, and nobody may want more of them.
_RANGES_MAX: Final = 50_000
_CLAIMS_MAX: Final = 1_000
_OFFSET_MAX: Final = 2**62
_ACTIONS: Final = {kind.name.lower(): kind for kind in Settle}


class _Held(NamedTuple):
    """A lease of a claim: the messages it began with, as bits from `base` on."""

    part: QueuePart
    nonce: int
    base: int
    bits: int

    @property
    def lease(self) -> Lease | None:
        """The lease itself, unless it has ended, or its group has."""
        return self.part.ledger.lease_of(self.nonce) if self.part.group.gone is None else None


class Claimed:
    """One claim."""

    __slots__ = ("held", "lease_ms")

    def __init__(self, leases: Iterable[tuple[QueuePart, Lease]], lease_ms: int) -> None:
        self.held = [_Held(part, lease.nonce, lease.base, lease.bits) for part, lease in leases]
        #: As it was asked for; 0 = what the group or the topic says.
        self.lease_ms = lease_ms

    @property
    def messages(self) -> int:
        """How many messages of the claim are not settled."""
        return sum(lease.bits.bit_count() for _, lease in self.leases())

    def leases(self) -> Iterator[tuple[QueuePart, Lease]]:
        for held in self.held:
            lease = held.lease
            if lease is not None:
                yield held.part, lease

    def lasts_ms(self, now_us: int) -> int:
        """Until the first of its leases ends."""
        return max(0, min((lease.deadline_us - now_us for _, lease in self.leases()), default=0) // 1000)


class Claims:
    """The calls `queue.claim`, `queue.settle_claim` and `queue.extend_claim`."""

    def __init__(self, queues: Queues, check_serving: Callable[[], None]) -> None:
        """`check_serving` raises when the broker hands out nothing."""
        self._queues = queues
        self._check_serving = check_serving
        self._number = 0

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {
            queue_calls.ClaimMessages: self._claim,
            queue_calls.SettleClaim: self._settle,
            queue_calls.ExtendClaim: self._extend,
        }

    # --- claiming ------------------------------------------------------------------------------------------------

    async def _claim(self, session: Session, call: queue_calls.ClaimMessages) -> queue_calls.Claim:
        if not 1 <= call.max <= _MESSAGES_MAX:
            raise InvalidArgument(f"max must be between 1 and {_MESSAGES_MAX}, not {call.max}")
        wanted = _by_partition(call.wanted or ())
        self._check_serving()
        group = await self._queues.registry.ensure(session.namespace, call.topic, call.group, {})
        for number in wanted:
            if number >= len(group.topic.partitions):
                last = len(group.topic.partitions) - 1
                raise PartitionNotFound(f"topic {call.topic!r} has partitions 0 to {last}, not {number}")
        if call.wanted and call.made_us and group.made_us and call.made_us != group.made_us:
            # What was done for the old group is still to do for this one.
            return queue_calls.Claim(
                claim=0, consumer=0, messages=0, ranges=[], lease_ms=0, settled=call.wanted, made_us=group.made_us
            )
        consumer = self._claimant(session, group, call)
        leases: list[tuple[QueuePart, Lease]] = []
        if not group.policy.paused and call.wanted is None:
            leases = await self._next(group, consumer, call.max)
        elif not group.policy.paused:
            leases = await self._again(group, consumer, wanted)
        if group not in consumer.groups:  # it went away meanwhile, and what it just got must not stay with it
            for part in {part: None for part, _ in leases}:
                part.return_from(consumer, self._queues.now_us())
            raise ReceiptInvalid("the claimant is gone")
        return self._answer(group, consumer, leases, wanted)

    def _claimant(self, session: Session, group: QueueGroup, call: queue_calls.ClaimMessages) -> Consumer:
        """The consumer of this connection that claims from the group, made now if need be."""
        queues = self._queues
        for consumer in queues.consumers_of(session):
            if (
                consumer.claims is not None
                and consumer.groups == [group]
                and call.claimant in ("", consumer.name)
                and call.lease_ms in (0, consumer.lease_ms)
            ):
                # Those that ran out are of no use to anybody.
                consumer.claims = {number: claim for number, claim in consumer.claims.items() if claim.messages}
                if len(consumer.claims) >= _CLAIMS_MAX:
                    raise QuotaExceeded(f"a consumer has {_CLAIMS_MAX} claims at most: settle some")
                return consumer
        consumer = queues.add_consumer(session, name=call.claimant, lease_ms=call.lease_ms)
        consumer.claims = {}
        queues.join(consumer, group)
        return consumer

    async def _next(self, group: QueueGroup, consumer: Consumer, want: int) -> list[tuple[QueuePart, Lease]]:
        """What is next in the queue, from all partitions about the same."""
        found: list[tuple[QueuePart, Lease]] = []
        pieces = 0
        parts = [part for part in group.parts() if part.depth()]
        for part in parts:  # what an earlier process wrote must be checked before it can be read
            await part.keeper.partition.warm(max(part.ledger.committed, part.keeper.source.start))
        while parts and want > 0 and pieces < _RANGES_MAX:
            share, now_us = -(-want // len(parts)), self._queues.now_us()
            for part in list(parts):
                alone = len(group.consumers) <= 1
                most = min(share, want, _RANGES_MAX - pieces)  # each message may be a piece
                leases = part.claim(consumer, most, alone=alone, now_us=now_us)
                messages = sum(lease.bits.bit_count() for lease in leases)
                want -= messages
                pieces += sum(1 for lease in leases for _ in runs(lease.bits))
                found += [(part, lease) for lease in leases]
                if messages < most:
                    parts.remove(part)
            await asyncio.sleep(0)
        return found

    async def _again(
        self, group: QueueGroup, consumer: Consumer, wanted: dict[int, list[tuple[int, int]]]
    ) -> list[tuple[QueuePart, Lease]]:
        """Just these messages; all that can be had, or nothing if one of the partitions cannot be read."""
        found: list[tuple[QueuePart, Lease]] = []
        for number, ranges in wanted.items():  # all of them first: a lease runs from when it is granted
            await group.part(number).warm(ranges)
        try:
            for number, ranges in wanted.items():
                part = group.part(number)
                found += [(part, lease) for lease in part.retake(consumer, ranges, self._queues.now_us())]
        except MillstreamError:
            for part, lease in found:
                part.settle(SettleEntry(Settle.RELEASE, lease.nonce), self._queues.now_us())
            raise
        return found

    def _answer(
        self,
        group: QueueGroup,
        consumer: Consumer,
        leases: list[tuple[QueuePart, Lease]],
        wanted: dict[int, list[tuple[int, int]]],
    ) -> queue_calls.Claim:
        got = _merged((part.number, lease.base, lease.bits) for part, lease in leases)
        settled, refused = _rest(group, wanted, got)
        number = messages = 0
        claim = Claimed(leases, consumer.lease_ms)
        if leases:
            self._number += 1
            number, messages = self._number, claim.messages
            assert consumer.claims is not None
            consumer.claims[number] = claim
            consumer.delivered += messages
            self._queues.metrics.leases_granted += len(leases)
            self._queues.metrics.messages_leased += messages
        return queue_calls.Claim(
            claim=number,
            consumer=consumer.number,
            messages=messages,
            ranges=got,
            lease_ms=claim.lasts_ms(self._queues.now_us()),
            settled=settled,
            refused=refused,
            made_us=group.made_us,
        )

    # --- settling ------------------------------------------------------------------------------------------------

    def _found(self, session: Session, number: int) -> tuple[Consumer, Claimed]:
        for consumer in self._queues.consumers_of(session):
            if consumer.claims is not None and number in consumer.claims:
                return consumer, consumer.claims[number]
        raise ReceiptInvalid(f"this connection has no claim {number}, or nothing is left of it")

    async def _settle(self, session: Session, call: queue_calls.SettleClaim) -> queue_calls.ClaimSettled:
        if call.delay_ms is not None and not 0 <= call.delay_ms <= DURATION_MS_MAX:
            raise InvalidArgument(f"delay_ms must be between 0 and {DURATION_MS_MAX}, not {call.delay_ms}")
        if len(call.reason.encode()) > REASON_BYTES_MAX:
            raise InvalidArgument(f"a reason has {REASON_BYTES_MAX} bytes at most")
        consumer, claim = self._found(session, call.claim)
        chosen, strangers = _chosen(claim, call.ranges, again=call.action == "ack")
        kind = _ACTIONS[call.action]
        value = -1 if call.delay_ms is None else call.delay_ms
        entries = [
            SettleEntry(kind, held.nonce, Scope.BITMAP, held.base, value, held.bits, call.reason) for held in chosen
        ]
        before = claim.messages
        results = await self._settled(session, entries)
        await asyncio.gather(*(part.record_durably() for part in {held.part: None for held in chosen}))
        late = [held for held, result in zip(chosen, results, strict=True) if result in REFUSED]
        left = claim.messages
        if consumer.claims is not None and not left:
            consumer.claims.pop(call.claim, None)
        invalid = _merged([*((held.part.number, held.base, held.bits) for held in late), *strangers])
        return queue_calls.ClaimSettled(settled=before - left, left=left, invalid=invalid)

    async def _settled(self, session: Session, entries: Sequence[SettleEntry]) -> Sequence[int]:
        answered: asyncio.Future[Any] = self._queues.loop.create_future()

        def answer(results: object) -> None:
            if not answered.done():
                answered.set_result(results)

        self._queues.settle(session, entries, answer)
        results = await answered
        if isinstance(results, Exception):
            raise results
        found: Sequence[int] = results
        return found

    async def _extend(self, session: Session, call: queue_calls.ExtendClaim) -> queue_calls.ClaimExtended:
        if call.lease_ms and not LEASE_MS_MIN <= call.lease_ms <= LEASE_MS_MAX:
            raise InvalidArgument(f"lease_ms must be between {LEASE_MS_MIN} and {LEASE_MS_MAX}, not {call.lease_ms}")
        _, claim = self._found(session, call.claim)
        wish_ms = call.lease_ms or claim.lease_ms
        entries = [
            SettleEntry(Settle.EXTEND, lease.nonce, value=wish_ms or part.ledger.rules.lease_ms)
            for part, lease in claim.leases()
        ]
        if not entries:
            raise ReceiptInvalid(f"nothing is left of claim {call.claim}: its leases have ended")
        await self._settled(session, entries)
        return queue_calls.ClaimExtended(messages=claim.messages, lease_ms=claim.lasts_ms(self._queues.now_us()))


# --- ranges --------------------------------------------------------------------------------------------------------


def _by_partition(ranges: Sequence[Range]) -> dict[int, list[tuple[int, int]]]:
    if len(ranges) > _RANGES_MAX:
        raise InvalidArgument(f"a claim has {_RANGES_MAX} ranges at most, not {len(ranges)}")
    found: dict[int, list[tuple[int, int]]] = {}
    for partition, first, until in ranges:
        if partition < 0 or not 0 <= first < until <= _OFFSET_MAX:
            raise InvalidArgument(
                f"[{partition}, {first}, {until}] is not a range: partition, first offset, and the next"
            )
        found.setdefault(partition, []).append((first, until))
    if sum(until - first for _, first, until in ranges) > _MESSAGES_MAX:
        raise InvalidArgument(f"a claim has {_MESSAGES_MAX} messages at most")
    return found


def _merged(pieces: Iterable[tuple[int, int, int]]) -> list[Range]:
    """Bits from an offset on, of partitions, as few ranges as possible."""
    ranges: list[Range] = []
    found = sorted((number, base + start, base + end) for number, base, bits in pieces for start, end in runs(bits))
    for number, start, end in found:
        if ranges and ranges[-1][0] == number and ranges[-1][2] >= start:
            ranges[-1] = (number, ranges[-1][1], max(end, ranges[-1][2]))
        else:
            ranges.append((number, start, end))
    return ranges


def _rest(
    group: QueueGroup, wanted: dict[int, list[tuple[int, int]]], got: list[Range]
) -> tuple[list[Range], list[Range]]:
    """The rest of what was wanted: what is settled, and what others have."""
    done: list[tuple[int, int, int]] = []
    others: list[tuple[int, int, int]] = []
    for number, ranges in wanted.items():
        part, had = group.part(number), RangeSet()
        for partition, first, until in got:
            if partition == number:
                had.add(first, until)
        for first, until in ranges:
            for base in range(first, until, SPAN_MAX):
                size = min(SPAN_MAX, until - base)
                missing = ~had.bits(base, size) & (1 << size) - 1
                over = part.ledger.settled.bits(base, size) | part.ledger.set_aside.bits(base, size)
                settled = missing & over
                done.append((number, base, settled))
                others.append((number, base, missing ^ settled))
    return _merged(done), _merged(others)


def _chosen(
    claim: Claimed, ranges: list[Range] | None, *, again: bool
) -> tuple[list[_Held], list[tuple[int, int, int]]]:
    """The messages of a claim that are meant, by lease; and those that are meant and were never the claim's.

    `again`: also those that were settled before, of which it may be said again.
    """
    meant: dict[int, RangeSet] = {}
    known: dict[int, RangeSet] = {}
    wanted = _by_partition(ranges or ())
    for number, some in wanted.items():
        meant[number], known[number] = RangeSet(), RangeSet()
        for first, until in some:
            meant[number].add(first, until)
    chosen: list[_Held] = []
    for held in claim.held:
        bits = held.bits
        lease = held.lease
        if ranges is not None:
            if held.part.number not in meant:
                continue
            known[held.part.number].add_bits(held.base, bits)
            bits &= meant[held.part.number].bits(held.base, bits.bit_length())
        if (ranges is None or not again) and lease is not None:
            bits &= lease.bits >> held.base - lease.base
        if bits and (ranges is not None or lease is not None):
            base, bits = normal(held.base, bits)
            chosen.append(held._replace(base=base, bits=bits))
    strangers = [
        (number, base, ~known[number].bits(base, size) & (1 << size) - 1)
        for number, some in wanted.items()
        for first, until in some
        for base in range(first, until, SPAN_MAX)
        for size in [min(SPAN_MAX, until - base)]
    ]
    return chosen, strangers
