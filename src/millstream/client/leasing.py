"""What a consumer of a queue asks for, and what comes back.  No sockets, no clock, no threads.

What was asked for plus what is held and not settled never exceeds `prefetch`; as long as there is room, the next
request is under way before the last answer is used up.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from millstream.client.backoff import backoff_ms
from millstream.client.leases import ClosedMarks, Owner, QueueMessage, make_lease
from millstream.client.settings import QueueSettings
from millstream.client.settling import LOOK_MS, Item, QueueStats, Settling, Ticket, is_lost
from millstream.errors import ConnectionLost, MillstreamError, SubscriptionNotFound
from millstream.wire import queue_calls
from millstream.wire.frames import FrameType, encode_frame
from millstream.wire.leases import (
    LeaseRequest,
    Settle,
    Settled,
    SettleEntry,
    decode_lease_result,
    encode_lease,
    encode_settle,
    waited_ms,
)

__all__ = ["LEASE_MESSAGES_MAX", "LEASE_WAIT_MS", "Frame", "Leasing", "QueueStats", "Settled", "Ticket"]

#: How long the broker keeps a request that finds nothing.
LEASE_WAIT_MS: Final = 10_000
#: What fits a LEASE: one that cannot be sent would count as under way for ever.
LEASE_MESSAGES_MAX: Final = 0x7FFF_FFFF
_REQUESTS_MAX: Final = 4
_ENTRIES_MAX: Final = 4_096
#: Topics of a pattern whose partitions are remembered: they may come and go, and are quickly looked up again.
_TOPICS_MAX: Final = 1_000
_M = TypeVar("_M", bound=QueueMessage)


class Frame(NamedTuple):
    correlation: int
    data: bytes


class _Said(NamedTuple):
    """A SETTLE under way."""

    items: list[Item]
    sent_ms: int


class _Requested(NamedTuple):
    """A LEASE under way; with a ticket its messages belong to whoever holds that."""

    amount: int
    ticket: Ticket | None
    sent_ms: int


class Leasing(Settling):
    """The state of one queue.  The caller sees to it that one thread at a time uses it."""

    def __init__(
        self,
        settings: QueueSettings,
        owner: weakref.ref[Owner],
        kind: type[QueueMessage],
        *,
        next_correlation: Callable[[], int],
        jitter: Callable[[], float],
    ) -> None:
        super().__init__(settings, owner)
        self._kind = kind
        self._next_correlation = next_correlation
        self._jitter = jitter
        self._consumer = 0
        self._expected: dict[int, _Requested | _Said | Ticket] = {}
        self._requested = 0
        self._requests = 0
        self._attempts = 0
        self._retry_at_ms = 0
        self._uids: dict[str, list[int]] = {}
        self._nameless: list[list[QueueMessage]] = []
        #: Given to every message, for `message.reply`.
        self.reply: Callable[..., object] | None = None

    # --- looking -------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """An answer is under way."""
        return bool(self._expected)

    @property
    def says(self) -> bool:
        """Something was said, and the broker's answer is under way."""
        return any(isinstance(waiting, _Said) for waiting in self._expected.values())

    @property
    def unknown(self) -> list[str]:
        """Topics whose partitions must be looked up before their messages have ids."""
        return sorted({messages[0].topic for messages in self._nameless}) if self._nameless else []

    def retry_in_ms(self, now_ms: int) -> int | None:
        return self._retry_at_ms - now_ms if self._retry_at_ms > now_ms else None

    # --- connection ----------------------------------------------------------------------------------------------

    def opened(self, consumer: int) -> None:
        """A connection is there, with a consumer on it."""
        self._consumer = consumer
        self._retry_at_ms = self._attempts = 0
        self._uids.clear()  # a topic may be another one of the same name by now
        self.stats.connections += 1

    def disconnected(self, error: ConnectionLost) -> None:
        """The broker has taken everything back, and nothing that is under way will be answered."""
        for lease in list(self._leases.values()):
            self._lose(lease)
        expected, self._expected = self._expected, {}
        self._requested = self._requests = 0
        for waiting in expected.values():
            for ticket in _tickets(waiting):
                ticket.finish(error=ConnectionLost(str(error)))
        items, self._items = self._items, []
        for item in items:
            self._refuse(item)
            if item.ticket is not None:
                item.ticket.finish(error=ConnectionLost(str(error)))

    def closed(self) -> None:
        """The queue is closed: nobody can settle any more."""
        self.wanted = False
        leases = list(self._leases.values())
        self.disconnected(ConnectionLost("the queue is closed"))
        for lease in leases:
            lease.marks = ClosedMarks()

    def learn(self, asked: Iterable[str], uids: Mapping[str, list[int]]) -> None:
        """The partitions of topics.  Those asked for and still unknown are gone, and so are their messages' ids."""
        if len(self._uids) >= _TOPICS_MAX:
            self._uids.clear()
        self._uids |= uids
        nameless, self._nameless = self._nameless, []
        for messages in nameless:
            topic = messages[0].topic
            if topic not in asked and topic not in self._uids:
                self._nameless.append(messages)  # it came meanwhile, and is looked up next
                continue
            uid = self._uid(topic, messages[0].partition)
            for message in messages:
                message.source.uid = uid or 0

    def kept(self, most: int, now_ms: int) -> list[Any]:
        """Messages that came ahead and are acked already (auto_ack): nobody else would get them."""
        return self._take(most, now_ms) if self._settings.auto_ack and not self.unknown else []

    def _take(self, most: int, now_ms: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < most and self.refill(now_ms):
            found += islice(self.pending, most - len(found))
        return found

    def still_held(self, messages: list[_M]) -> list[_M]:
        """Those whose lease is ours still: while their ids were looked up the connection may have been lost."""
        if self._settings.auto_ack:
            return messages
        return [message for message in messages if message.source.lease.nonce in self._leases]

    def _uid(self, topic: str, partition: int) -> int | None:
        uids = self._uids.get(topic, ())
        return uids[partition] if partition < len(uids) else None

    # --- out -----------------------------------------------------------------------------------------------------

    def outgoing(self, now_ms: int, *, everything: bool) -> list[Frame]:
        """What to send now: settles that are due (or everything there is to say), and requests within the credit."""
        if everything:
            for lease in list(self._leases.values()):
                self._collect(lease)
        frames = []
        while self._items:
            items, self._items = self._items[:_ENTRIES_MAX], self._items[_ENTRIES_MAX:]
            self._unsaid = 0
            correlation = self._next_correlation()
            self._expected[correlation] = _Said(items, now_ms)
            frames.append(Frame(correlation, encode_settle([item.entry for item in items], correlation)))
        while self.wanted and self._requests < _REQUESTS_MAX and self._retry_at_ms <= now_ms:
            credit = self._settings.prefetch - self._requested - self._unsettled
            # Less than a whole request is only worth it when nothing else is coming.
            if credit < 1 or (credit < self._size and (self._requests or self._ready)):
                break
            frames.append(self.request(min(credit, self._size), LEASE_WAIT_MS, now_ms))
        return frames

    def request(self, amount: int, wait_ms: int, now_ms: int, ticket: Ticket | None = None) -> Frame:
        correlation = self._next_correlation()
        self._expected[correlation] = _Requested(amount, ticket, now_ms)
        self._requested += amount
        self._requests += 1
        request = LeaseRequest(self._consumer, amount, self._settings.max_bytes, wait_ms)
        return Frame(correlation, encode_lease(request, correlation))

    def ask(self, amount: int, wait_ms: int, now_ms: int, ticket: Ticket) -> Frame | None:
        """As `request`, for whoever waits for the answer; None when what was kept is one, which the ticket has then.

        It may have come after somebody looked: the broker would have nothing left to answer with.
        """
        if self._settings.auto_ack and (found := self._take(amount, now_ms)):
            ticket.finish(found)
            return None
        return self.request(amount, wait_ms, now_ms, ticket)

    def abandon(self, ticket: Ticket) -> None:
        """Whoever asked for these messages has gone: cancelled, interrupted or out of time.  What came goes back, and
        so does what still comes; kept, its lease would be made longer for nobody.  What is acked (auto_ack) is kept."""
        ticket.abandoned = True
        given: list[QueueMessage] = ticket.result or []
        if self._settings.auto_ack:
            self.pending = iter([*given, *self.pending])
            self.pending_until_s = math.inf
            return
        self.settle(Settle.RELEASE, [message for message in given if not is_lost(message.source.lease)], 0, "", None)

    def goodbye(self, ticket: Ticket) -> Frame:
        """The consumer ends; the answer proves that everything said before has been heard."""
        correlation = self._next_correlation()
        self._expected[correlation] = ticket
        call = msgspec.json.encode(queue_calls.CloseQueue(consumer=self._consumer))
        return Frame(correlation, encode_frame(FrameType.CALL, call, correlation))

    # --- in ------------------------------------------------------------------------------------------------------

    def accept(self, correlation: int, payload: memoryview, now_ms: int) -> None:
        """Take in an answer.  Raises what the user must know; ConnectionLost: the consumer must be opened again."""
        waiting = self._expected.pop(correlation, None)
        if isinstance(waiting, _Requested):
            self._requested -= waiting.amount
            self._requests -= 1
            try:
                self._deliver(waiting, payload, now_ms)
            except MillstreamError as error:
                self._request_failed(waiting, error, now_ms)
        elif isinstance(waiting, _Said):
            self._settled(waiting.items, payload, waiting.sent_ms, now_ms)
        elif waiting is not None:
            waiting.finish()

    def _deliver(self, waiting: _Requested, payload: memoryview, now_ms: int) -> None:
        given: list[QueueMessage] = []
        parts = decode_lease_result(payload)
        auto_ack = self._settings.auto_ack
        # The rest of the time it may have been on its way here, or lain unread.
        granted_ms = min(now_ms, waiting.sent_ms + waited_ms(payload))
        self.lay_unread = self.lay_unread or now_ms - granted_ms >= LOOK_MS
        for part in parts:
            ticket = waiting.ticket
            unwanted = not self.wanted if ticket is None else ticket.abandoned or ticket.done
            if unwanted and not auto_ack:
                self._items.append(Item(SettleEntry(Settle.RELEASE, part.nonce), None, 0))
                continue
            uid = self._uid(part.topic, part.partition)
            lease = make_lease(part, uid or 0, self._kind, self._owner, self.reply)
            if not lease.count:
                self._items.append(Item(SettleEntry(Settle.ACK, part.nonce), None, 0))  # compaction took them
                continue
            lease.last(granted_ms, now_ms, lease.length_ms)
            if auto_ack:
                self._keep(lease)
            elif lease.begin_by_ms <= now_ms:  # it was too long on its way
                self._items.append(Item(SettleEntry(Settle.RELEASE, part.nonce), None, 0))
                continue
            else:
                self._hold(lease, now_ms)
            if uid is None:
                self._nameless.append(lease.messages)
            if waiting.ticket is None or (unwanted and auto_ack):
                self._ready.append(lease)
            else:
                given += lease.messages
                lease.messages = []
                if auto_ack:
                    self._unsettled -= lease.count
        self._attempts = 0
        if waiting.ticket is not None:
            waiting.ticket.finish(given)
        if auto_ack:
            self._hand_over(now_ms)

    def _hand_over(self, now_ms: int) -> None:
        """What is kept goes to who waits in `lease`: its own request finds nothing of what others have taken."""
        for asked in list(self._expected.values()):
            if not isinstance(asked, _Requested) or asked.ticket is None or asked.ticket.abandoned or asked.ticket.done:
                continue
            if not (found := self._take(asked.amount, now_ms)):
                return
            asked.ticket.finish(found)

    def _request_failed(self, waiting: _Requested, error: MillstreamError, now_ms: int) -> None:
        if waiting.ticket is not None:
            waiting.ticket.finish(error=error)
        elif isinstance(error, SubscriptionNotFound):
            raise ConnectionLost(f"the broker has forgotten this consumer: {error}") from None
        elif error.retriable:
            self._attempts += 1
            self._retry_at_ms = now_ms + backoff_ms(self._attempts, self._jitter())
        else:
            self._retry_at_ms = now_ms + 1000
            raise error


def _tickets(waiting: _Requested | _Said | Ticket) -> list[Ticket]:
    if isinstance(waiting, Ticket):
        return [waiting]
    if isinstance(waiting, _Requested):
        return [] if waiting.ticket is None else [waiting.ticket]
    return [item.ticket for item in waiting.items if item.ticket is not None]
