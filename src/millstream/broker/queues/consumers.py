"""Who takes messages from queues: consumers, and their requests that wait for something to come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from millstream.errors import MillstreamError
from millstream.wire.leases import LeasePart, SettleResults, bytes_in, messages_in
from millstream.wire.queue_calls import ConsumerInfo

if TYPE_CHECKING:
    from millstream.broker.broker import Session
    from millstream.broker.queues.claims import Claimed
    from millstream.broker.queues.group import QueueGroup

__all__ = ["Consumer", "LeaseHandle", "LeaseReply", "SettleReply"]

#: Called once per LEASE.
LeaseReply: TypeAlias = Callable[[Sequence[LeasePart] | MillstreamError], None]
#: Called once per SETTLE, with a result for each entry.
SettleReply: TypeAlias = Callable[[SettleResults | MillstreamError], None]


class Consumer:
    """One consumer of one group; or of several, if it asked for a pattern."""

    __slots__ = (
        "acked",
        "auto_ack",
        "busy_us",
        "by_receipt",
        "claims",
        "delivered",
        "detached",
        "failed",
        "groups",
        "key",
        "lease_ms",
        "name",
        "number",
        "on_settled",
        "orphaned",
        "ready",
        "session",
        "waiting",
    )

    def __init__(self, number: int, session: Session, *, name: str, detached: bool, lease_ms: int) -> None:
        self.number = number
        self.session = session
        self.name = name
        #: Unique while the broker runs, and readable in histories.
        self.key = f"{name}#{number}"
        self.detached = detached
        #: Whether others may settle what it holds, if they have the receipt.
        self.by_receipt = detached
        #: What is sent to it counts as done.
        self.auto_ack = False
        #: Called when something it held was settled.
        self.on_settled: Callable[[], None] | None = None
        self.lease_ms = lease_ms
        self.groups: list[QueueGroup] = []
        #: What it has claimed, by the number of the claim; None unless it is one that claims.
        self.claims: dict[int, Claimed] | None = None
        self.waiting: dict[LeaseHandle, None] = {}
        #: Why there will never be anything for it again.
        self.orphaned: MillstreamError | None = None
        #: If it has several groups, those that may have something.  The one that gave last is the last to be asked
        #: again, so that one busy topic of a pattern does not hide the others.
        self.ready: dict[QueueGroup, None] = {}
        self.delivered = 0
        self.acked = 0
        self.failed = 0
        #: Time between delivery and ack, summed over acked messages.
        self.busy_us = 0

    def take(self, want: int, room: int, now_us: int) -> list[LeasePart]:
        """What there is for it, from all of its groups; see QueueGroup.take."""
        if len(self.groups) == 1:
            return self.groups[0].take(self, want, room, first=True, now_us=now_us)
        found: list[LeasePart] = []
        for group in list(self.ready):
            got = group.take(self, want, room, first=not found, now_us=now_us)
            if got or not group.is_ready:
                del self.ready[group]
            if got and group.is_ready:
                self.ready[group] = None
            found += got
            want -= messages_in(got)
            room -= bytes_in(got)
            if found and (want <= 0 or room <= 0):
                break
        return found

    def held(self, group: QueueGroup | None = None) -> int:
        """Messages that it has and that are not settled; those of one group, or all."""
        groups = self.groups if group is None else [group]
        parts = [part for group in groups for part in group.open_parts()]
        return sum(lease.bits.bit_count() for part in parts for lease in part.ledger.leases_of(self.key))

    def info(self, leased: int) -> ConsumerInfo:
        return ConsumerInfo(
            consumer=self.number,
            name=self.name,
            client_id=self.session.client_id,
            address=self.session.address,
            detached=self.detached,
            leased=leased,
            requested=sum(handle.want for handle in self.waiting),
            delivered=self.delivered,
            acked=self.acked,
            failed=self.failed,
            avg_ms=self.busy_us / self.acked / 1000 if self.acked else 0.0,
        )


class LeaseHandle:
    """A LEASE that found nothing and waits, in line with those of the same group."""

    __slots__ = ("consumer", "max_bytes", "reply", "timer", "want")

    def __init__(self, consumer: Consumer, want: int, max_bytes: int, reply: LeaseReply) -> None:
        self.consumer = consumer
        self.want = want
        self.max_bytes = max_bytes
        self.reply = reply
        self.timer: asyncio.TimerHandle | None = None

    def park(self) -> None:
        self.consumer.waiting[self] = None
        for group in self.consumer.groups:
            group.waiting[self] = None

    def cancel(self) -> None:
        """Leave the line; the request is not answered."""
        if self.timer is not None:
            self.timer.cancel()
        self.consumer.waiting.pop(self, None)
        for group in self.consumer.groups:
            group.waiting.pop(self, None)

    def answer(self, result: Sequence[LeasePart] | MillstreamError) -> None:
        self.cancel()
        self.reply(result)
