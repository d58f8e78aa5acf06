"""Batches on their way to the broker: what may be sent, what an answer means, what is sent again.  No sockets here.

Each partition is a `Line`.  Its batches are numbered when they are sealed and leave in that order; the broker stores a
batch only if its number follows the one before, so a retry is never stored twice and nothing overtakes anything:

* A lost connection puts everything unanswered back to the front of its line, with the same numbers.
* A refusal that can pass (`retriable`) stalls the line.  What was sent behind it comes back as OUT_OF_SEQUENCE; when
  all of it is answered the line goes again from the refused batch on.
* A refusal for good, or running out of time, takes a batch out of its line.  If it is certain that it is not stored,
  those behind it move up and are renumbered.  If it is *in doubt* (an answer for it was lost) nothing is renumbered:
  the next batch goes out alone, and its acceptance proves that the doubtful one was stored.
* OUT_OF_SEQUENCE for the first unconfirmed batch means that the one before it is not stored: a doubtful one was not, or
  the broker lost what it had confirmed (a power cut under a weak fsync policy).  Then nothing behind it is stored
  either, and the line takes a new identity and counts from 0 again.

Until the first confirmation on a connection only one batch of a line is under way: a broker that does not know a
producer accepts any number, so a second batch could be stored although the first was refused.  The same holds when the
last confirmation is some time ago: a broker forgets who was silent for a day, or while thousands of others published.

A signal's handler may raise after any call.  So nothing is called while a batch passes from one place to another, and
it is always in one of them; the owner, when it is interrupted, tells us that we are disconnected.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from millstream.client.backoff import backoff_ms
from millstream.errors import MillstreamError, OutOfSequence, RequestTimeout, StorageFailed
from millstream.wire.messages import PublishResult

__all__ = ["WINDOW_MAX", "Delivery", "Line", "SealedBatch", "Settled", "after_refusal", "renumbered"]

#: The broker recognises a repetition of a producer's last 16 batches per partition.
WINDOW_MAX: Final = 16

#: For how long after a confirmation the broker is taken to know the producer.  It forgets who was silent longest among
#: ten thousand; so many do not publish to one partition in a second.
_KNOWN_MS: Final = 1000

_SEQUENCE: Final = 0xFFFF_FFFF
_U32: Final = Struct("<I")
_U64: Final = Struct("<Q")
# Positions in a batch (see records.py); the second of its two pieces begins where the checksum does.
_CRC_AT, _CRC_FROM, _PRODUCER_AT, _SEQUENCE_AT = 8, 36, 40, 56


def renumbered(head: bytes, tail: bytes, *, producer: int, first_sequence: int) -> tuple[bytes, bytes]:
    """The same messages under another number."""
    body = bytearray(tail)
    _U64.pack_into(body, _PRODUCER_AT - _CRC_FROM, producer)
    _U32.pack_into(body, _SEQUENCE_AT - _CRC_FROM, first_sequence)
    front = bytearray(head)
    _U32.pack_into(front, _CRC_AT, crc32c(body))
    return bytes(front), bytes(body)


def after_refusal(error: MillstreamError, refusal: MillstreamError | None) -> MillstreamError:
    """How the last try has ended, with what the broker had said to an earlier one: that is why it took so long."""
    if refusal is None:
        return error
    told = type(error)(f"{error}; before that it was refused: {refusal}")
    told.__cause__ = refusal
    return told


def _precedes(one: int, other: int) -> bool:
    """Whether a sequence number comes before another; they wrap around."""
    return (one - other) & _SEQUENCE > _SEQUENCE >> 1


class SealedBatch:
    """Messages that travel together."""

    __slots__ = (
        "count",
        "deadline_ms",
        "doubtful",
        "error",
        "first_sequence",
        "head",
        "line",
        "place",
        "refusal",
        "sent_ms",
        "settled",
        "size",
        "tail",
        "ticket",
    )

    def __init__(
        self, line: Line, head: bytes, tail: bytes, count: int, first_sequence: int, deadline_ms: int, ticket: Any
    ) -> None:
        self.line = line
        self.head = head
        self.tail = tail
        self.size = len(head) + len(tail)
        self.count = count
        self.first_sequence = first_sequence
        self.deadline_ms = deadline_ms
        self.sent_ms: int | None = None
        #: How many were in front of it on their way when it was refused.
        self.place = 0
        #: It may be stored: it was sent, and the answer was lost or said nothing.
        self.doubtful = False
        #: The refusal after which it waits to be sent again.
        self.error: MillstreamError | None = None
        #: The last one of an earlier try, which is why there were later ones.
        self.refusal: MillstreamError | None = None
        #: Whatever the owner wants back with the outcome.
        self.ticket = ticket
        self.settled = False


class Settled(NamedTuple):
    """The end of a batch's way: a result, or an error."""

    batch: SealedBatch
    result: PublishResult | None
    error: MillstreamError | None

    @property
    def in_doubt(self) -> bool:
        """Whether the messages may be stored in spite of the error."""
        return self.error is not None and self.batch.doubtful


class Line:
    """The batches of one partition, in order."""

    __slots__ = (
        "attempts",
        "flying",
        "gap_at",
        "known_until_ms",
        "lost",
        "next_sequence",
        "partition",
        "producer",
        "ready",
        "retry_at_ms",
        "stalled",
        "unanswered",
    )

    def __init__(self, partition: int, producer: int) -> None:
        self.partition = partition
        #: Packed identity; 0 sends without numbers.
        self.producer = producer
        self.next_sequence = 0
        self.ready: deque[SealedBatch] = deque()
        self.flying: deque[SealedBatch] = deque()
        self.unanswered = 0
        self.known_until_ms = 0
        self.stalled = False
        self.lost = False
        self.gap_at: int | None = None
        self.attempts = 0
        self.retry_at_ms = 0

    def close_gap(self, at: int) -> None:
        """Number what waits behind a batch that is not stored, from its number on.

        What was sent before it may be stored under the number it has: an answer that waits for the disk comes later
        than a refusal.
        """
        self.renumber(at, sum(_precedes(batch.first_sequence, at) for batch in self.ready))

    def renumber(self, first_sequence: int, skip: int = 0) -> None:
        """Number everything that waits, from here on."""
        sequence = first_sequence
        for batch in itertools.islice(self.ready, skip, None):
            batch.head, batch.tail = renumbered(batch.head, batch.tail, producer=self.producer, first_sequence=sequence)
            batch.first_sequence = sequence
            sequence = (sequence + batch.count) & _SEQUENCE
        self.next_sequence = sequence


class Delivery:
    """All lines of one producer."""

    def __init__(
        self,
        *,
        window: int,
        delivery_timeout_ms: int,
        request_timeout_ms: int,
        jitter: Callable[[], float],
        confirmed: bool = True,
        correlations: Iterator[int] | None = None,
    ) -> None:
        """With `confirmed` false (acks "none") a batch is forgotten as soon as it is taken.

        `correlations` is where correlation ids come from, for a connection that carries more than this.
        """
        self._window = min(window, WINDOW_MAX)
        self._delivery_timeout_ms = delivery_timeout_ms
        self._request_timeout_ms = min(request_timeout_ms, delivery_timeout_ms)
        self._jitter = jitter
        self._confirmed = confirmed
        self._lines: list[Line] = []
        self._active: dict[Line, None] = {}  # lines with something ready; the next to be served first
        self._flying: dict[int, SealedBatch] = {}
        self._correlations = itertools.count(1) if correlations is None else correlations
        self._wanting: dict[Line, None] = {}
        self.buffered_bytes = 0
        #: The first error that nobody was told of, and all that `failed` says of batches whose owner wants no outcome.
        self.failure: MillstreamError | None = None
        self.failed: list[Settled] = []
        self.retries = 0
        #: Until then some line waits before it tries again.
        self.retry_until_ms = 0

    # --- in ------------------------------------------------------------------------------------------------------

    def open_line(self, partition: int, producer: int) -> Line:
        line = Line(partition, producer)
        self._lines.append(line)
        return line

    def put(self, line: Line, head: bytes, tail: bytes, count: int, now_ms: int, ticket: Any = None) -> None:
        """Add a batch that was numbered with the line's producer and next sequence."""
        batch = SealedBatch(line, head, tail, count, line.next_sequence, now_ms + self._delivery_timeout_ms, ticket)
        if line.producer:
            line.next_sequence = (line.next_sequence + count) & _SEQUENCE
        line.ready += (batch,)
        self._active[line] = None
        self.buffered_bytes += batch.size

    def put_instead(self, refused: SealedBatch, messages: Sequence[tuple[bytes, bytes, Any]], now_ms: int) -> None:
        """Have messages of a batch go again where that was, each as a batch of its own with a ticket.

        Called as soon as it is refused, when it is certain that neither it nor anything sent behind it is stored.
        """
        line, place, number = refused.line, refused.place, refused.first_sequence
        deadline_ms = now_ms + self._delivery_timeout_ms
        batches = [SealedBatch(line, head, tail, 1, number, deadline_ms, ticket) for head, tail, ticket in messages]
        self.buffered_bytes += sum(batch.size for batch in batches)
        # While answers are missing everything sent is there, and comes back from there in its order.
        waiting = line.flying if line.stalled else line.ready
        first_sequence = waiting[place].first_sequence if place < len(waiting) else line.next_sequence
        waiting.rotate(-place)
        waiting.extendleft(reversed(batches))
        waiting.rotate(place)
        if not line.stalled:
            line.renumber(first_sequence, place)
            self._active.setdefault(line)

    # --- out -----------------------------------------------------------------------------------------------------

    def take(self, now_ms: int) -> tuple[int, SealedBatch] | None:
        """The next batch to send, with its correlation id; None when nothing may be sent now."""
        for line in self._active:
            if line.stalled or line.retry_at_ms > now_ms or line in self._wanting:
                continue
            if line.unanswered >= (self._window if line.known_until_ms > now_ms or not line.producer else 1):
                continue
            return self._launch(line, now_ms)
        return None

    def _launch(self, line: Line, now_ms: int) -> tuple[int, SealedBatch]:
        batch = line.ready[0]
        correlation = next(self._correlations) & 0x7FFF_FFFF
        if not self._confirmed:
            self._settle(batch, None, None)
        else:
            if batch.sent_ms is not None:
                self.retries += 1
            batch.sent_ms = now_ms
            batch.error = None
            line.flying += (batch,)
            line.unanswered += 1
            self._flying[correlation] = batch
        del line.ready[0], self._active[line]
        if line.ready:
            self._active[line] = None  # at the end: every partition gets its turn
        return correlation, batch

    # --- answers -------------------------------------------------------------------------------------------------

    def answered(self, correlation: int, result: PublishResult | MillstreamError, now_ms: int) -> list[Settled]:
        """What an answer means.  An answer nobody waits for any more means nothing."""
        batch = self._flying.pop(correlation, None)
        if batch is None:
            return []
        line = batch.line
        line.unanswered -= 1
        settled: list[Settled] = []
        if isinstance(result, PublishResult):
            settled.append(self._settle(batch, result, None))
            line.flying.remove(batch)
            line.known_until_ms = now_ms + _KNOWN_MS
            line.attempts = 0
        elif isinstance(result, OutOfSequence) or result.retriable:
            if isinstance(result, OutOfSequence) and batch is line.flying[0] and line.gap_at is None:
                line.lost = True
            batch.error = result
            if result.retriable:
                batch.refusal = result
            batch.doubtful |= isinstance(result, StorageFailed)
            line.stalled = True
        else:
            settled += self._refused(line, batch, result)
        if line.stalled and not line.unanswered:
            self._go_again(line, now_ms)
        return settled

    def _refused(self, line: Line, batch: SealedBatch, error: MillstreamError) -> list[Settled]:
        """Take a batch out for good."""
        batch.place = line.flying.index(batch)
        settled = [self._settle(batch, None, error)]
        del line.flying[batch.place]
        if not line.producer:
            return settled
        if batch.doubtful:
            line.known_until_ms = 0  # the next batch finds out
        else:
            line.stalled = True
            if line.gap_at is None or _precedes(batch.first_sequence, line.gap_at):
                line.gap_at = batch.first_sequence
        return settled

    def _go_again(self, line: Line, now_ms: int) -> None:
        """Everything sent is answered: line up what has to be sent again."""
        if any(batch.error is not None and batch.error.retriable for batch in line.flying):
            line.attempts += 1
            line.retry_at_ms = now_ms + backoff_ms(line.attempts, self._jitter())
            self.retry_until_ms = max(self.retry_until_ms, line.retry_at_ms)
        self._bring_back(line)

    def _bring_back(self, line: Line) -> None:
        nothing: deque[SealedBatch] = deque()
        line.ready, line.flying = line.flying + line.ready, nothing
        line.unanswered = 0
        line.stalled = False
        if line.ready:
            self._active.setdefault(line)
        if line.lost:
            line.lost, line.gap_at = False, None
            self._wanting[line] = None
        elif line.gap_at is not None:
            line.close_gap(line.gap_at)
            line.gap_at = None

    def disconnected(self) -> None:
        """The connection is gone, and with it every answer."""
        self._flying.clear()
        for line in self._lines:
            for batch in line.flying:
                # Also one whose answer was about to be taken in.  What was refused, and waits for the others, is not.
                batch.doubtful |= batch.error is None
            line.known_until_ms = 0
            if line.flying or line.stalled:
                self._bring_back(line)

    # --- time ----------------------------------------------------------------------------------------------------

    def expire(self, now_ms: int, why: str = "") -> list[Settled]:
        """Give up on batches that waited longer than they may; `why` is what is known about the reason."""
        settled: list[Settled] = []
        for line in [line for line in self._active if line.ready[0].deadline_ms <= now_ms]:
            if line.flying:
                continue  # what was sent earlier decides first
            settled += self._expire(line, now_ms, why)
            if not line.ready:
                del self._active[line]
        return settled

    def _expire(self, line: Line, now_ms: int, why: str) -> Iterable[Settled]:
        gap_at: int | None = None
        while line.ready and line.ready[0].deadline_ms <= now_ms:
            batch = line.ready.popleft()
            if batch.doubtful:
                line.known_until_ms = 0
            elif gap_at is None:
                gap_at = batch.first_sequence
            reason = f": {batch.error or why}" if batch.error or why else ""
            state = "may or may not be stored" if batch.doubtful else "were not stored"
            error = RequestTimeout(f"{batch.count} messages were not confirmed in time and {state}{reason}")
            # What was refused and waits has the refusal for a reason; a later try may have ended without one.
            yield self._settle(batch, None, error if batch.error else after_refusal(error, batch.refusal))
        if gap_at is not None and line.producer:
            line.renumber(gap_at)

    def overdue(self, now_ms: int) -> bool:
        """Whether an answer is missing for so long that the connection must be dead."""
        for batch in self._flying.values():  # oldest first
            return batch.sent_ms is not None and batch.sent_ms + self._request_timeout_ms <= now_ms
        return False

    def next_due_ms(self, now_ms: int) -> int | None:
        """How long until time alone changes something; None when only an answer can."""
        due = [line.retry_at_ms for line in self._active if line.retry_at_ms > now_ms]
        # Behind what is under way nothing is given up, however late it is.
        due += [line.ready[0].deadline_ms for line in self._active if not line.flying]
        for batch in self._flying.values():
            due.append((batch.sent_ms or 0) + self._request_timeout_ms)
            break
        return max(0, min(due) - now_ms) if due else None

    # --- identity ------------------------------------------------------------------------------------------------

    @property
    def wants_identity(self) -> bool:
        return bool(self._wanting)

    def renew(self, producer: int) -> None:
        """Give every line that wants one a new identity, and count from 0 again."""
        for line in self._wanting:
            line.producer = producer
            line.known_until_ms = 0  # the broker does not know this identity yet
            line.renumber(0)
        self._wanting.clear()

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def flying(self) -> int:
        return len(self._flying)

    @property
    def ready(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._active)

    @property
    def idle(self) -> bool:
        return not self._flying and not self._active

    def marks(self) -> list[SealedBatch]:
        """Everything that is not settled, the oldest last."""
        return [batch for line in self._lines for batch in reversed((*line.flying, *line.ready))]

    def abandon(self, error: MillstreamError) -> list[Settled]:
        """Fail everything: the owner goes away."""
        self.disconnected()
        # First of all: what is taken out and not settled would be in nobody's hands after an interrupt.
        outcomes = [self._settle(batch, None, error) for line in self._lines for batch in line.ready]
        for line in self._lines:
            line.ready.clear()
        self._active.clear()
        return outcomes

    def _settle(self, batch: SealedBatch, result: PublishResult | None, error: MillstreamError | None) -> Settled:
        outcome = Settled(batch, result, error)
        if not batch.settled:  # one that is sent again after an interrupt may be
            # Together, without a call in between: what is settled has been told, or will be.
            if error is not None and batch.ticket is None:
                self.failure = self.failure or error
                self.failed += (outcome,)
            self.buffered_bytes -= batch.size
            batch.settled = True
        return outcome
