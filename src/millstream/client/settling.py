"""What a consumer of a queue holds, hands out and has to say about it.  No sockets, no clock, no threads.

Acks are marks in their leases until a quarter of the prefetch is unsaid, the consumer has nothing else to work on, or a
moment (`ack_linger`) has passed; then one SETTLE says all of it.  What is sent is handled in order, so an ack of
"everything left" means what was left when it was said.

Whether a lease is still ours is judged by our own clock.  Shortly before its end, messages that were not begun go back.
After its end its messages do not count against the prefetch any more, and settling them is refused.
"""

from __future__ import annotations

import logging
import math
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from millstream.client.leases import ACKED, AutoMarks, Lease, Owner, QueueMessage, RefusedMarks
from millstream.client.messages import Message
from millstream.client.settings import QueueSettings
from millstream.errors import InvalidArgument, MessageGone, MillstreamError, ReceiptInvalid
from millstream.wire.leases import Scope, Settle, Settled, SettleEntry, decode_settle_result, lasting_ms

__all__ = ["LOOK_MS", "Item", "QueueStats", "Settling", "Ticket", "is_lost", "raise_refused"]

_log = logging.getLogger("millstream.client")

#: Leases of more messages would only keep the first of them waiting.
_LEASE_MESSAGES_MAX: Final = 1_000
_NEVER: Final = 1 << 62
#: Nothing was changed.
_REFUSED: Final = (Settled.INVALID, Settled.GONE)
#: Leases are looked after this often while they last.
_LOOKS: Final = 20
#: After so long the connection may be gone, and nobody has noticed: somebody looks before more is handed out.
LOOK_MS: Final = 10


@dataclass(slots=True)
class QueueStats:
    """Counters of one queue, in messages."""

    delivered: int = 0
    acked: int = 0
    nacked: int = 0
    rejected: int = 0
    released: int = 0
    #: Settled too late, because their lease had ended, or in vain, because the broker failed.  They are delivered again
    #: unless somebody else has settled them.
    refused: int = 0
    #: Settled too late: they are no longer in the log, and are not delivered again.
    gone: int = 0
    #: How often a lease was extended.
    extensions: int = 0
    connections: int = 0


class Ticket:
    """An answer that somebody waits for."""

    __slots__ = ("_missing", "_on_done", "abandoned", "done", "error", "result")

    def __init__(self, on_done: Callable[[Ticket], None] | None = None, missing: int = 1) -> None:
        self.done = False
        #: Nobody waits any more: what comes must not be kept for them.
        self.abandoned = False
        self.error: MillstreamError | None = None
        self.result: Any = None
        self._on_done = on_done
        self._missing = missing

    def finish(self, result: Any = None, error: MillstreamError | None = None) -> None:
        if not self.done:
            self.done, self.result, self.error = True, result, error
            if self._on_done is not None:
                self._on_done(self)

    def settle(self, index: int, result: Settled) -> None:
        """One of several results; the last one finishes."""
        if self.result is None:
            self.result = [result] * self._missing
        self.result[index] = result
        self._missing -= 1
        if not self._missing:
            self.finish(self.result)


class Item(NamedTuple):
    """One entry of a SETTLE and whom it concerns."""

    entry: SettleEntry
    lease: Lease | None
    messages: int
    ticket: Ticket | None = None
    #: Which of the ticket's results this is.
    number: int = 0
    #: It was settled before, by ourselves.
    again: bool = False


class Settling:
    """One half of the state of a queue: the leases.  The other half, the requests, is `Leasing`."""

    def __init__(self, settings: QueueSettings, owner: weakref.ref[Owner]) -> None:
        self._settings = settings
        self._owner = owner
        #: How many messages are asked for at a time.
        self._size = max(1, min(_LEASE_MESSAGES_MAX, (settings.prefetch + 1) // 2))
        self._quarter = max(1, self._size // 2)
        self._leases: dict[int, Lease] = {}
        self._ready: deque[Lease] = deque()
        #: What is left of the lease that is being handed out.
        self.pending: Iterator[QueueMessage] = iter(())
        self._current: Lease | None = None
        #: How often to `tend`: often enough for the shortest lease.
        self.pace_ms = self._pace_ms(settings.lease_ms or _NEVER)
        #: `refill` before the next message is handed out if it is later than this.
        self.pending_until_s = 0.0
        #: Something was lost: `refill` before the next message is handed out.
        self.disturbed = False
        #: What came last lay unread for a while: the end of its connection, which took it away, may be right behind it.
        self.lay_unread = False
        #: Somebody wants messages; otherwise what still comes goes back.
        self.wanted = False
        self._items: list[Item] = []
        #: Messages that `_items` settle.
        self._unsaid = 0
        self._unsettled = 0
        self._told_of_second_words = False
        self.stats = QueueStats()

    @property
    def ready(self) -> bool:
        """There are messages to hand out."""
        return bool(self._ready) or operator.length_hint(self.pending) > 0

    @property
    def ready_count(self) -> int:
        return operator.length_hint(self.pending) + sum(len(lease.messages) for lease in self._ready)

    @property
    def urgent(self) -> bool:
        """What there is to say should be said now: it is much, or the consumer may be waiting for its effect."""
        return bool(self._items) and (self._unsaid >= self._quarter or not self.ready)

    @property
    def holds(self) -> bool:
        return bool(self._leases or self._items)

    @property
    def unsettled(self) -> int:
        return self._unsettled

    def _hold(self, lease: Lease, now_ms: int) -> None:
        """A lease has come, and it is early enough to begin with it."""
        self._leases[lease.nonce] = lease
        self._unsettled += lease.count
        self.stats.delivered += lease.count
        lease.left = min(lease.count, self._quarter)
        self.pace_ms = min(self.pace_ms, self._pace_ms(lease.length_ms))
        lease.received_ms = now_ms
        lease.extend_at_ms = now_ms + lease.length_ms // 2 if self._settings.auto_extend else _NEVER

    def _keep(self, lease: Lease) -> None:
        """A lease has come whose messages are done already: it has no end, and only waits to be handed out."""
        lease.marks = AutoMarks()
        lease.begin_by_ms = _NEVER
        self._unsettled += lease.count
        self.stats.delivered += lease.count
        self.stats.acked += lease.count

    def _pace_ms(self, length_ms: int) -> int:
        return max(1, min(self._settings.ack_linger_ms, length_ms // _LOOKS))

    # --- handing out ---------------------------------------------------------------------------------------------

    def refill(self, now_ms: int) -> bool:
        """Make sure that `pending` has a message; False when there is none."""
        if self.disturbed:
            self.disturbed = False
            if self._current is not None and is_lost(self._current):
                self.pending = iter(())
        if self._current is not None and self._current.begin_by_ms <= now_ms:
            self._return_rest(self._current)
        if operator.length_hint(self.pending):
            self._set_until(now_ms)
            return True
        while self._ready:
            if self._ready[0].begin_by_ms <= now_ms:
                self._return_rest(self._ready[0])
                continue
            lease = self._ready[0]
            pending = iter(lease.messages)
            # From here on nothing is called: Python does not look for signals in between, so all of it is done or none.
            self._current, self.pending, lease.messages = lease, pending, []
            del self._ready[0]
            if self._settings.auto_ack:
                self._unsettled -= lease.count  # in hand; there is room for others
            self._set_until(now_ms)
            return True
        return False

    def _set_until(self, now_ms: int) -> None:
        """For how long messages are handed out without a look at what has become of them."""
        if self._settings.auto_ack or self._current is None:
            self.pending_until_s = math.inf  # they are done already, whatever happens
        else:
            self.pending_until_s = min(self._current.begin_by_ms, now_ms + LOOK_MS) / 1000

    def give_back(self) -> None:
        """Nothing more is wanted: what was not handed out goes back, or is kept if nobody else would get it."""
        self.wanted = False
        if self._settings.auto_ack:
            return
        if self._current is not None:
            self._return_rest(self._current)
        for lease in list(self._ready):
            self._return_rest(lease)

    def _return_rest(self, lease: Lease) -> None:
        """Give back what was not handed out of a lease."""
        rest = lease.messages
        if rest:
            lease.messages = []
            self._ready.remove(lease)
        elif lease is self._current:
            rest = list(self.pending)
        if rest and not is_lost(lease):
            bits = 0
            for message in rest:
                bits |= 1 << (message.offset - lease.start)
            self._decide(lease, bits, Settle.RELEASE)

    # --- settling ------------------------------------------------------------------------------------------------

    def due(self, lease: Lease) -> None:
        """A lease has counted down: collect what there is to say if it is complete, or much."""
        if is_lost(lease) or lease.nonce not in self._leases:
            return
        marked = lease.marked
        if marked == lease.count or lease.acked_bits() | lease.decided == lease.granted:
            self._collect(lease)
            return
        lease.left = max(1, lease.open - (marked - lease.acked))
        if self._unsaid + sum(held.marked - held.acked for held in self._leases.values()) >= self._size:
            for held in list(self._leases.values()):
                self._collect(held)

    def checked(self, kind: Settle, messages: Iterable[QueueMessage], reason: str) -> list[QueueMessage]:
        """The messages, if all of them can be settled here; raises before anything is said about any.

        Changes nothing, so that any thread may ask.
        """
        if not isinstance(reason, str):  # found out when it is sent, it would cost everything that travels with it
            raise InvalidArgument(f"a reason is text, not {reason!r}")
        if isinstance(messages, Message) or not isinstance(messages, Iterable):
            raise InvalidArgument(f"a queue settles messages that are given as a list, not {messages!r}")
        chosen = list(messages)
        for message in chosen:
            if not isinstance(message, QueueMessage):
                raise InvalidArgument(f"a queue settles messages that it has delivered, not {message!r}")
            lease = message.source.lease
            if lease.owner is not self._owner:
                raise InvalidArgument(f"{message!r} was delivered by another queue, which must settle it")
            if isinstance(lease.marks, AutoMarks) and kind != Settle.ACK:
                raise ReceiptInvalid(f"{message!r} was acked when it was sent, as its queue has auto_ack")
        return chosen

    def settle(
        self,
        kind: Settle,
        messages: Iterable[QueueMessage],
        value: int,
        reason: str,
        ticket: Ticket | None,
    ) -> None:
        """One entry for each message, all of them `checked`; the caller sends them.

        A message whose lease was lost is refused here.
        """
        for index, message in enumerate(messages):
            lease = message.source.lease
            place = message.offset - lease.start
            if isinstance(lease.marks, AutoMarks):
                if ticket is not None:
                    ticket.settle(index, Settled.DONE)
                continue
            if is_lost(lease):
                lease.marks[place] = ACKED  # counts it as refused, or raises
                if ticket is not None:
                    ticket.settle(index, Settled.INVALID)
                continue
            self._collect(lease)  # what was said before comes first
            entry = SettleEntry(kind, lease.nonce, Scope.ONE, message.offset, value, 0, reason)
            self._items.append(Item(entry, lease, 1, ticket, index, lease.settled_before(message.offset)))
            if kind == Settle.EXTEND:
                continue
            if not lease.decided >> place & 1:
                lease.left = max(1, lease.left - 1)
                self._note_decided(lease, 1 << place, kind)
            lease.announced.discard(place)

    def tend(self, now_ms: int) -> None:
        """Make leases longer that are half over: what the user works on, and what waits for the user.

        A lease that has reached its limit is made longer no more; of what waits in it others should get their chance.
        So they should when it is nearly over.  And when it is over, it is lost.
        """
        for lease in list(self._leases.values()):
            if lease.ends_ms <= now_ms:
                self._collect(lease)  # said in time, or so we think: the broker knows
                self._lose(lease)
                continue
            if lease.begin_by_ms <= now_ms:
                self._return_rest(lease)
            if lease.extend_at_ms > now_ms:
                continue
            left_ms = lease.received_ms + self._settings.max_processing_ms - now_ms
            last = left_ms <= lease.length_ms
            lease.extend_at_ms = _NEVER if last else now_ms + lease.length_ms // 2
            if last:
                self._return_rest(lease)
            if left_ms > 0 and lease.open:
                value = min(left_ms, lease.length_ms)
                self._items.append(Item(SettleEntry(Settle.EXTEND, lease.nonce, value=value), lease, 0))
                self.stats.extensions += 1
        lengths = (lease.length_ms for lease in self._leases.values())
        self.pace_ms = self._pace_ms(min(lengths, default=self._settings.lease_ms or _NEVER))

    def _collect(self, lease: Lease) -> None:
        """Say what the marks of a lease say."""
        marked = lease.marked
        if marked > lease.acked:
            lease.acked = marked
            self._decide(lease, lease.unsaid_bits(), Settle.ACK)

    def _decide(self, lease: Lease, bits: int, kind: Settle) -> None:
        if not bits:
            return
        if lease.decided | bits == lease.granted:
            entry = SettleEntry(kind, lease.nonce)
        else:
            entry = SettleEntry(kind, lease.nonce, Scope.BITMAP, lease.start, 0, bits)
        self._items.append(Item(entry, lease, bits.bit_count()))
        self._note_decided(lease, bits, kind)

    def _note_decided(self, lease: Lease, bits: int, kind: Settle) -> None:
        count = bits.bit_count()
        lease.decided |= bits
        lease.said |= bits
        self._unsettled -= count
        self._unsaid += count
        self._count(kind, count)
        if lease.decided == lease.granted:
            self._leases.pop(lease.nonce, None)

    def _count(self, kind: Settle, count: int) -> None:
        stats = self.stats
        if kind == Settle.ACK:
            stats.acked += count
        elif kind == Settle.NACK:
            stats.nacked += count
        elif kind == Settle.REJECT:
            stats.rejected += count
        elif kind == Settle.RELEASE:
            stats.released += count

    # --- loss ----------------------------------------------------------------------------------------------------

    def _lose(self, lease: Lease) -> None:
        """A lease is not ours any more.  Its owner looks before it hands out more of it."""
        if self._leases.pop(lease.nonce, None) is None:
            return
        self._unsettled -= lease.open
        unsaid = lease.unsaid_bits()
        lease.decided = lease.granted
        lease.marks = RefusedMarks(self._note_refused, lease.said)
        self.disturbed = True
        if unsaid:
            self._note_refused(unsaid.bit_count())
        if lease.messages:
            lease.messages = []
            if lease in self._ready:
                self._ready.remove(lease)

    def _refuse(self, item: Item, result: int = Settled.INVALID) -> None:
        """The broker does not take this: the lease is over, or the message was settled before, or is gone."""
        kind, lease = item.entry.kind, item.lease
        if kind not in (Settle.EXTEND, Settle.RELEASE):
            if item.again:
                self._note_second_word()
            elif result == Settled.GONE:
                self._note_gone(item.messages)
            else:
                self._note_refused(item.messages)
        elif kind == Settle.EXTEND and lease is not None and item.entry.scope == Scope.REST:
            self._lose(lease)

    def _note_second_word(self) -> None:
        """Nothing is delivered again because of it, so that nobody needs to count it."""
        if not self._told_of_second_words:
            self._told_of_second_words = True
            _log.warning(
                "queue %s: a message was settled twice; the first word counts, and the second changed nothing; "
                "from now on this is not mentioned",
                self._settings.name,
            )

    def _note_gone(self, count: int) -> None:
        if not self.stats.gone:
            _log.warning(
                "queue %s: a message was settled after retention had removed it, and is not delivered again; "
                "with cleanup=settled on the topic retention waits; from now on this is only counted (stats.gone)",
                self._settings.name,
            )
        self.stats.gone += count

    def _note_refused(self, count: int) -> None:
        if not self.stats.refused:
            _log.warning(
                "queue %s: a message was settled after its lease had ended and is delivered again unless it is gone; "
                "from now on this is only counted (stats.refused)",
                self._settings.name,
            )
        self.stats.refused += count

    def _settled(self, items: list[Item], payload: memoryview, sent_ms: int, now_ms: int) -> None:
        try:
            results = decode_settle_result(payload, len(items))
        except MillstreamError as error:
            _log.warning("queue %s: %d settles failed: %s", self._settings.name, len(items), error)
            for item in items:
                if item.entry.kind not in (Settle.EXTEND, Settle.RELEASE):
                    self.stats.refused += item.messages
                if item.ticket is not None:
                    item.ticket.finish(error=error)
            return
        lasting = iter(lasting_ms(payload))
        for item, result in zip(items, results, strict=True):
            if result in _REFUSED:
                self._refuse(item, result)
            elif item.entry.kind == Settle.EXTEND and item.lease is not None:
                asked_ms = item.entry.value
                length_ms = next(lasting, asked_ms)  # an older broker does not say so
                item.lease.last(sent_ms, now_ms, length_ms)
                if length_ms < asked_ms:
                    item.lease.extend_at_ms = _NEVER  # the group's limit: asking again would not help
            if item.ticket is not None:
                item.ticket.settle(item.number, Settled(result))


def raise_refused(result: Settled, *, again: bool) -> None:
    """Tell somebody who waited for a settle that it was not taken; `again` if they had settled it before."""
    if result not in _REFUSED:
        return
    if again:
        raise ReceiptInvalid("this message was settled before, and the first word counts; nothing was changed")
    if result == Settled.GONE:
        raise MessageGone("this message is not in the log any more, and is not delivered again; nothing was changed")
    raise ReceiptInvalid("the lease of this message had ended; nothing was changed")


def is_lost(lease: Lease) -> bool:
    """It was taken back, its time is over, or the queue is closed."""
    return lease.marks is not lease.kept
