"""Everything about a producer that is neither a socket nor a thread; the synchronous and the asynchronous one share it.

Messages go in through the accumulator, frames come out through `next_frame`, answers go in through `answered`, and
what became of each batch ends in counters, in the first error to raise, and in the list of failures to report.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from millstream.client.accumulator import Accumulator
from millstream.client.delivery import Delivery, SealedBatch, Settled
from millstream.client.flow import FlowNotices
from millstream.client.messages import BatchFailure, ProducerStats
from millstream.client.metadata import METADATA_AGE_S, Topic
from millstream.client.publishing import acks_number, fsync_number
from millstream.client.settings import ProducerSettings
from millstream.clock import monotonic_ms
from millstream.entries import AnyEntry, encode_entries
from millstream.errors import ConnectionLost, MillstreamError, PartitionNotFound
from millstream.ids import SCHEDULES
from millstream.wire.messages import PublishResult, decode_publish_result, encode_publish_head

__all__ = ["Outbox", "left_all", "may_be_lost", "settled_all"]


class Outbox:
    """What one producer has taken and not yet confirmed."""

    def __init__(
        self,
        topic: Topic,
        settings: ProducerSettings,
        identity: int,
        *,
        request_timeout_s: float,
        correlations: Iterator[int] | None = None,
        flow: FlowNotices | None = None,
    ) -> None:
        """`flow` is where the broker's notices are, if others of the same connection look at them, too."""
        partitions = len(topic.uids)
        if settings.partition is not None and not 0 <= settings.partition < partitions:
            raise PartitionNotFound(
                f"topic {topic.name!r} has partitions 0 to {partitions - 1}, not {settings.partition}"
            )
        self.topic = topic
        self.settings = settings
        self.wants_answers = settings.acks != "none"
        self._acks = acks_number(settings.acks)
        self._fsync = fsync_number(settings.fsync)
        self._linger_s = settings.linger_ms / 1000
        self._linger_due_s = 0.0
        self.delivery = Delivery(
            window=settings.window,
            delivery_timeout_ms=round(settings.delivery_timeout_s * 1000),
            request_timeout_ms=round(request_timeout_s * 1000),
            jitter=random.random,
            confirmed=self.wants_answers,
            correlations=correlations,
        )
        self.accumulator = Accumulator(
            topic.name,
            self.delivery,
            partitions=partitions,
            producer=identity,
            batch_bytes=settings.batch_bytes,
            batch_messages=settings.batch_messages,
            buffer_bytes=settings.buffer_bytes,
            message_bytes_max=topic.message_bytes_max,
            codec=settings.codec,
            partition=settings.partition,
            lingers=settings.linger_ms > 0,
        )
        self.flow = FlowNotices() if flow is None else flow
        #: The broker has asked to wait with the next batch until then.
        self._not_before_s = 0.0
        self._stats = ProducerStats()
        #: Why there is no connection, for the errors that this leads to.
        self.trouble = ""

    # --- in ------------------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        return self.delivery.buffered_bytes >= self.settings.buffer_bytes

    def add(self, entry: AnyEntry, partition: int | None, ticket: object = None) -> None:
        self.accumulator.add(entry, partition, now_us=now_us(), now_ms=monotonic_ms(), ticket=ticket)
        if self._linger_s and not self.accumulator.gate_open:
            self.accumulator.open_gate()
            self._linger_due_s = time.monotonic() + self._linger_s

    def send_singly(self, refused: SealedBatch, entries: Iterable[tuple[AnyEntry, object]]) -> None:
        """Send messages of a refused batch again, each by itself; with a ticket each."""
        made_us, producer = now_us(), refused.line.producer
        messages = [
            (*encode_entries((entry,), base_timestamp_us=made_us, producer=producer), [ticket])
            for entry, ticket in entries
        ]
        self.delivery.put_instead(refused, messages, monotonic_ms())

    def knows(self, partition: int | None) -> bool:
        return partition is None or partition < len(self.topic.uids)

    def outdated(self) -> bool:
        """Whether it is time to look whether the topic has more partitions."""
        return time.monotonic() - self.topic.loaded_s > METADATA_AGE_S

    def learn(self, topic: Topic) -> None:
        self.accumulator.limit(topic.message_bytes_max)
        if len(topic.uids) >= len(self.topic.uids):
            self.topic = topic
            self.accumulator.grow(len(topic.uids))

    def seal_all(self) -> None:
        self.accumulator.seal_all(now_us=now_us(), now_ms=monotonic_ms())

    def seal_due(self) -> None:
        """Seal what has waited long enough.  It is everything: no message waits longer than one round of lingering."""
        now_s = time.monotonic()
        if now_s >= self._linger_due_s:
            self.seal_all()
            self._linger_due_s = now_s + self._linger_s

    # --- out -----------------------------------------------------------------------------------------------------

    def next_frame(self) -> tuple[int, bytes, bytes, bytes] | None:
        """The next PUBLISH to send: its correlation id, and the frame in three pieces."""
        if self.flow and time.monotonic() < self._not_before_s:
            return None
        taken = self.delivery.take(monotonic_ms())
        if taken is None:
            return None
        correlation, batch = taken
        if self.flow:
            self._hold_back()
        front = encode_publish_head(
            self.topic.raw_name,
            batch.line.partition,
            acks=self._acks,
            fsync=self._fsync,
            batch_size=batch.size,
            correlation=correlation,
        )
        stats = self._stats
        stats.batches_sent += 1
        stats.messages_sent += batch.count
        stats.bytes_sent += batch.size
        if not self.wants_answers:
            stats.messages_confirmed += batch.count
        return correlation, front, batch.head, batch.tail

    def _hold_back(self) -> None:
        """The next batch waits as long as the broker asks for."""
        delay_s = self.flow.delay_s(self.topic.name)
        self._not_before_s = time.monotonic() + delay_s
        self._stats.throttled_ms += round(delay_s * 1000)

    def answered(self, correlation: int, payload: memoryview) -> list[Settled]:
        result: PublishResult | MillstreamError
        try:
            result = decode_publish_result(payload)
        except MillstreamError as error:
            result = error
        return self.note(self.delivery.answered(correlation, result, monotonic_ms()))

    def expire(self) -> list[Settled]:
        return self.note(self.delivery.expire(monotonic_ms(), self.trouble))

    def abandon(self, error: MillstreamError) -> list[Settled]:
        """Fail everything, also what was never sealed: whatever was taken is confirmed or reported."""
        self.seal_all()
        return self.note(self.delivery.abandon(error))

    def note(self, outcomes: list[Settled]) -> list[Settled]:
        """Count outcomes.  What went wrong is remembered by the delivery; batches with tickets tell their owners."""
        stats = self._stats
        for settled in outcomes:
            batch, _, error = settled
            if error is None:
                stats.batches_confirmed += 1
                stats.messages_confirmed += batch.count
                continue
            stats.messages_failed += batch.count
            if batch.ticket is None:
                self.accumulator.close_gate()  # so that the next message finds out
        return outcomes

    def next_failure(self) -> BatchFailure | None:
        """What `on_error` is to be told next."""
        failed = self.delivery.failed
        if not failed:
            return None
        batch, _, error = settled = failed[0]
        assert error is not None
        partition = batch.line.partition & ~SCHEDULES
        failure = BatchFailure(self.topic.name, partition, batch.count, error, settled.in_doubt)
        del failed[0]
        return failure

    def overdue(self) -> bool:
        """Whether an answer is missing for so long that the connection must be dead."""
        return self.delivery.overdue(monotonic_ms())

    def raise_failure(self) -> None:
        """Raise the first error that nobody was told of, if there is one."""
        delivery = self.delivery
        failure = delivery.failure
        if failure is not None:
            delivery.failure = None
            raise failure  # without a call in between: an interrupt would be all that is heard

    def doubt(self, why: MillstreamError | None) -> None:
        """Without confirmations: the broker has gone, and has not said that it had taken everything."""
        self.delivery.failure = self.delivery.failure or may_be_lost(why)
        self.accumulator.close_gate()  # so that the next message finds out

    def marks(self) -> list[SealedBatch]:
        """What is sealed so far and not settled yet, for `settled_all`."""
        return self.delivery.marks()

    # --- state ---------------------------------------------------------------------------------------------------

    def come_to_rest(self) -> bool:
        """True when there is nothing to do; the gate is closed then, so that the next message is noticed."""
        if not self.delivery.idle or not self.accumulator.empty:
            return False
        self.accumulator.close_gate()
        # In another thread a message may have slipped through before the gate was closed.
        return self.accumulator.empty

    @property
    def waits_for_time(self) -> bool:
        """Whether something is held back: by a refusal that may pass, or because the broker asks to go slower."""
        return monotonic_ms() < self.delivery.retry_until_ms or (
            bool(self.flow) and time.monotonic() < self._not_before_s
        )

    def wait_s(self, longest_s: float) -> float:
        """How long nothing happens unless an answer or a message comes."""
        due_ms = self.delivery.next_due_ms(monotonic_ms())
        wait_s = longest_s if due_ms is None else min(longest_s, due_ms / 1000)
        if self._linger_s:
            wait_s = min(wait_s, self._linger_due_s - time.monotonic())
        held_s = self._not_before_s - time.monotonic()
        if held_s > 0 and self.flow:
            wait_s = min(wait_s, held_s)
        return max(0.0, wait_s)

    def stats(self, connections: int) -> ProducerStats:
        stats = self._stats
        stats.buffered_bytes = self.delivery.buffered_bytes
        stats.retries = self.delivery.retries
        stats.connections = connections
        stats.flow_level = self.flow.level(self.topic.name)
        return ProducerStats(**{name: getattr(stats, name) for name in ProducerStats.__slots__})


def may_be_lost(why: MillstreamError | None) -> ConnectionLost:
    return ConnectionLost(f"what was sent last may be lost: {why}")


class Writes(Protocol):
    """A connection that may have to wait until the broker takes more."""

    @property
    def unsent(self) -> int | bool: ...

    @property
    def drains(self) -> int: ...


def left_all(marks: list[SealedBatch], connection: Callable[[], Writes | None]) -> Callable[[], bool]:
    """To ask whether all of these are settled and none of them waits on our side.

    With confirmations none ever does.  Without, they have left as soon as everything written was sent once: others may
    write more at that moment, and wait again.
    """
    written: tuple[Writes, int] | None = None

    def left() -> bool:
        nonlocal written
        if not settled_all(marks):
            return False
        current = connection()
        if current is None or not current.unsent:
            return True
        now = (current, current.drains)
        written = written or now
        return now != written

    return left


def settled_all(marks: list[SealedBatch]) -> bool:
    """Whether all of them are.  Those that are leave the list: it is asked often, and there may be many."""
    while marks and marks[-1].settled:
        del marks[-1]
    return not marks


def now_us() -> int:
    return time.time_ns() // 1000
