"""Messages of a queue: what was leased together shares one `Lease`, and settling a message is a mark in it.

Nothing is kept per message besides the message itself and one byte.  That byte is written without a lock (storing into
a bytearray is atomic, and doing it twice does no harm), so `ack` may be called from any thread; what the marks say is
worked out when it is time to tell the broker.  A lease that has ended gets other marks, which refuse to be written.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable
from datetime import datetime
from typing import Any, Final, Protocol

from millstream.client.messages import Message, Source, TopicPartition, batches_in, make_messages, moment
from millstream.durations import Duration, parse_ms
from millstream.errors import InvalidArgument, ReceiptInvalid
from millstream.receipts import ReceiptHandle
from millstream.wire.leases import LeasePart, Settle

__all__ = ["ACKED", "AsyncQueueMessage", "AutoMarks", "Lease", "LeaseSource", "QueueMessage", "delay_ms", "make_lease"]

ACKED: Final = 1

#: A message does not keep its queue alive: messages are invisible to the garbage collector, and a queue holds those
#: that are not handed out yet, so one that was dropped would keep and extend their leases for ever.
_GONE: Final = (
    "the queue of this message was closed or dropped, and the message given back: "
    "keep the queue (queue = client.queue(...)) until its messages are settled"
)

_AS_BINARY: Final = bytes([ord("1") if mark == ACKED else ord("0") for mark in range(256)])
#: What a SETTLE has room for, in milliseconds: three weeks.
_DELAY_MS_MAX: Final = 0x7FFF_FFFF


class Owner(Protocol):
    """The queue of a lease."""

    group: str

    def _due(self, lease: Lease) -> None:
        """Many messages of the lease have been acked: look whether the broker should hear of it."""

    def _settle(self, kind: Settle, messages: Iterable[QueueMessage], value: int, reason: str, *, wait: bool) -> Any:
        """Tell the broker."""

    def _history(self, message: QueueMessage) -> Any: ...


class Marks(Protocol):
    def __setitem__(self, index: int, mark: int, /) -> None: ...


class RefusedMarks:
    """Marks of a lease that was lost: what is done to its messages counts for nothing, and is counted.

    What was said in time is not among it: a second word about these messages has no effect, late or not.
    """

    def __init__(self, refuse: Callable[[int], None], said: int) -> None:
        self._refuse = refuse
        self._said = said

    def __setitem__(self, place: int, mark: int, /) -> None:
        if not self._said >> place & 1:
            self._refuse(1)


class ClosedMarks:
    """Marks of a lease whose queue is closed: its messages were given back."""

    def __setitem__(self, _: int, mark: int, /) -> None:
        raise ReceiptInvalid(_GONE)


class AutoMarks:
    """Marks of messages that the broker acked when it sent them: to ack them again changes nothing."""

    def __setitem__(self, _: int, mark: int, /) -> None:
        pass


class Lease:
    """Messages that were delivered together, and what has become of them."""

    __slots__ = (
        "acked",
        "announced",
        "begin_by_ms",
        "count",
        "decided",
        "delivery",
        "ends_ms",
        "extend_at_ms",
        "failures",
        "granted",
        "kept",
        "left",
        "length_ms",
        "marks",
        "messages",
        "nonce",
        "owner",
        "place",
        "received_ms",
        "said",
        "start",
    )

    def __init__(self, part: LeasePart, owner: weakref.ref[Owner]) -> None:
        self.owner = owner
        self.place = TopicPartition(part.topic, part.partition)
        self.nonce = part.nonce
        self.delivery = part.delivery
        self.failures = part.failures
        self.start = part.start
        #: Until they are handed out.
        self.messages: list[QueueMessage] = []
        self.count = 0
        #: Bits of all messages, and of those whose fate is on its way to the broker.
        self.granted = 0
        self.decided = 0
        #: Of these, the bits of those that we have spoken about; the others were lost.
        self.said = 0
        #: How many of the marks that say ACKED were sent.
        self.acked = 0
        #: Places that another thread has spoken about, and the event loop has not heard of yet: the first word counts.
        self.announced: set[int] = set()
        #: Marks are written without a lock; `kept` is the same object for those who read them.
        self.kept = bytearray(part.span)
        self.marks: Marks = self.kept
        #: Counts down to the moment when the owner should look; a hint, as threads may miscount it.
        self.left = 0
        self.length_ms = max(1, part.lease_ms)
        #: By the monotonic clock of this machine.  From `begin_by_ms` on nothing more of it is handed out, at `ends_ms`
        #: it is over for sure.
        self.received_ms = 0
        self.begin_by_ms = 0
        self.ends_ms = 0
        self.extend_at_ms = 0

    @property
    def open(self) -> int:
        """How many messages are not decided."""
        return self.count - self.decided.bit_count()

    @property
    def marked(self) -> int:
        """How many messages are marked as acked."""
        return self.kept.count(ACKED)

    def acked_bits(self) -> int:
        """The messages that are marked as acked."""
        if self.marked == self.count:
            return self.granted
        return int(self.kept[::-1].translate(_AS_BINARY), 2)

    def unsaid_bits(self) -> int:
        """Of these, the messages whose fate is not on its way to the broker."""
        bits = self.acked_bits() & ~self.decided
        for place in tuple(self.announced):
            bits &= ~(1 << place)
        return bits

    def last(self, since_ms: int, until_ms: int, length_ms: int) -> None:
        """It lasts for `length_ms`, counted by the broker from some moment between these two on.  Never shorter.

        Clocks may differ by a tenth: the broker's does for a while after somebody has set it.
        """
        self.begin_by_ms = max(self.begin_by_ms, since_ms + length_ms - length_ms // 10)
        self.ends_ms = max(self.ends_ms, until_ms + length_ms)

    def settled_before(self, offset: int) -> bool:
        """Whether a word about this message is a second one."""
        place = offset - self.start
        acked = self.marks is self.kept and self.kept[place] == ACKED and place not in self.announced
        return acked or bool(self.said >> place & 1)

    def due(self) -> None:
        owner = self.owner()
        if owner is not None:
            owner._due(self)

    def settle(self, kind: Settle, message: QueueMessage, value: int = 0, reason: str = "", *, wait: bool) -> Any:
        owner = self.owner()
        if owner is None:
            raise ReceiptInvalid(_GONE)
        return owner._settle(kind, (message,), value, reason, wait=wait)


class LeaseSource(Source):
    """What all messages of one batch of a lease have in common."""

    __slots__ = ("lease",)

    def __init__(
        self, lease: Lease, uid: int, append_time_us: int, base_timestamp_us: int, reply: Callable[..., Any] | None
    ) -> None:
        super().__init__(lease.place, uid, append_time_us, base_timestamp_us, None, reply)
        self.lease = lease


class QueueMessage(Message, gc=False, eq=False):
    """A message of a queue.  It is yours until its lease ends: settle it with `ack`, `nack`, `reject` or `release`.

    Settling does not wait: settles are sent together, at the latest after the queue's `ack_linger`.  With `wait=True`,
    the call waits for the broker's answer, and raises ReceiptInvalid if the lease had ended.  The first settle of a
    message counts.

    Keep the queue until its messages are settled: a queue that is closed, or that no variable holds, gives its messages
    back.
    """

    source: LeaseSource

    def ack(self, *, wait: bool = False) -> Any:
        """Say that the message is done: it is never delivered to this group again."""
        lease = self.source.lease
        if wait:
            return lease.settle(Settle.ACK, self, wait=True)
        lease.marks[self.offset - lease.start] = ACKED
        lease.left -= 1
        if not lease.left:
            lease.due()
        return None

    def nack(self, reason: str = "", *, retry_after: Duration | None = None, wait: bool = False) -> Any:
        """Say that the message failed.

        It is tried again later, as the retry policy says or after `retry_after`; or never, if it was tried often
        enough.
        """
        value = -1 if retry_after is None else delay_ms("retry_after", retry_after)
        return self.source.lease.settle(Settle.NACK, self, value, reason, wait=wait)

    def reject(self, reason: str = "", *, wait: bool = False) -> Any:
        """Say that the message will never work: it goes to the dead letters at once."""
        return self.source.lease.settle(Settle.REJECT, self, 0, reason, wait=wait)

    def release(self, *, wait: bool = False) -> Any:
        """Give the message back as if it had not been delivered."""
        return self.source.lease.settle(Settle.RELEASE, self, wait=wait)

    def extend(self, duration: Duration, *, wait: bool = False) -> Any:
        """Keep the message, and those that were leased with it, for `duration` from now, as far as the group allows.

        All extensions together reach no further than the group's `processing_ms` (5 minutes) after the delivery.  With
        `wait=True`, the call returns the moment when the lease now ends; `lease_deadline` has it too, as soon as the
        broker has answered.  The queue extends leases by itself unless `auto_extend` is off.
        """
        self._extend(duration, wait=wait)
        return self.lease_deadline if wait else None

    def _extend(self, duration: Duration, *, wait: bool) -> Any:
        return self.source.lease.settle(Settle.EXTEND, self, delay_ms("duration", duration), wait=wait)

    def history(self) -> Any:
        """Ask the broker for the attempts that failed: a list of `AttemptInfo`."""
        owner = self.source.lease.owner()
        if owner is None:
            raise InvalidArgument(_GONE)
        return owner._history(self)

    @property
    def group(self) -> str:
        owner = self.source.lease.owner()
        return "" if owner is None else owner.group

    @property
    def delivery_count(self) -> int:
        """The number of this delivery; 1 = the message was never delivered before."""
        return self.source.lease.delivery

    @property
    def failures(self) -> int:
        """How often the message was nacked or its lease timed out."""
        return self.source.lease.failures

    @property
    def redelivered(self) -> bool:
        return self.source.lease.delivery > 1

    @property
    def lease_deadline(self) -> datetime:
        """When the lease ends, by the clock of this machine."""
        left_us = self.source.lease.ends_ms * 1000 - time.monotonic_ns() // 1000
        return moment(time.time_ns() // 1000 + left_us)

    @property
    def receipt(self) -> str:
        """The right to settle this delivery, as text: for `millstream ack`, or another process."""
        lease = self.source.lease
        return str(ReceiptHandle(lease.place.topic, lease.place.partition, self.offset, lease.delivery, lease.nonce))


class _Done:
    """What needs no waiting can be awaited nevertheless."""

    def __await__(self) -> Generator[Any, None, None]:
        return iter(())  # type: ignore[return-value]


_DONE: Final = _Done()


class AsyncQueueMessage(QueueMessage, gc=False, eq=False):
    """As `QueueMessage`.  Settling may be awaited, and must be with `wait=True`."""

    def ack(self, *, wait: bool = False) -> Any:
        return QueueMessage.ack(self, wait=wait) or _DONE

    def nack(self, reason: str = "", *, retry_after: Duration | None = None, wait: bool = False) -> Any:
        return QueueMessage.nack(self, reason, retry_after=retry_after, wait=wait) or _DONE

    def reject(self, reason: str = "", *, wait: bool = False) -> Any:
        return QueueMessage.reject(self, reason, wait=wait) or _DONE

    def release(self, *, wait: bool = False) -> Any:
        return QueueMessage.release(self, wait=wait) or _DONE

    def extend(self, duration: Duration, *, wait: bool = False) -> Any:
        answer = self._extend(duration, wait=wait)
        return self._extended(answer) if wait else _DONE

    async def _extended(self, answer: Awaitable[None]) -> datetime:
        await answer
        return self.lease_deadline


def delay_ms(name: str, span: Duration) -> int:
    """A length of time that fits a SETTLE."""
    ms = parse_ms(span, name)
    if ms > _DELAY_MS_MAX:
        raise InvalidArgument(f"{name} is 24 days at most; publish the message again with delay= for more")
    return ms


def make_lease(
    part: LeasePart,
    uid: int,
    kind: type[QueueMessage],
    owner: weakref.ref[Owner],
    reply: Callable[..., Any] | None = None,
) -> Lease:
    """A lease with its messages.  Raises BatchDamaged.  Copies what it needs: the part's buffer may be reused."""
    lease = Lease(part, owner)
    first, after = part.start, part.start + part.span
    messages: list[QueueMessage] = []
    for view in part.batches:
        for batch in batches_in(view):
            header = batch.header
            source = LeaseSource(lease, uid, header.append_time_us, header.base_timestamp_us, reply)
            made = make_messages(batch, source, kind)
            if batch.base_offset < first or batch.next_offset > after:
                made = [message for message in made if first <= message.offset < after]
            messages += made
    granted = part.granted
    if part.mask:
        # As text, because shifting a long mask once per message would cost its length each time.
        marks = f"{granted:b}"[::-1].ljust(part.span, "0")
        messages = [message for message in messages if marks[message.offset - first] == "1"]
    if len(messages) != granted.bit_count():  # compaction took some of them
        present = bytearray(b"0" * part.span)
        for message in messages:
            present[message.offset - first] = ord("1")
        granted = int(present[::-1], 2)
    lease.messages = messages
    lease.granted = granted
    lease.count = lease.left = len(messages)
    return lease
