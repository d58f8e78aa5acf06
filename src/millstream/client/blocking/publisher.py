"""Publishing one batch at a time, again and again until it is stored, refused for good, or out of time.

Nearly every batch is stored at the first try, so that is written out straight; what it takes to go on after an error is
made when there is one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from millstream.client.backoff import Backoff
from millstream.client.blocking.connection import Connection
from millstream.client.blocking.link import Link
from millstream.client.delivery import after_refusal
from millstream.client.flow import FlowNotices
from millstream.client.forks import belongs_to_one_process
from millstream.client.metadata import Topic
from millstream.client.publishing import PLACES_MAX, SEQUENCE_MASK, Attempt, Identity
from millstream.entries import AnyEntry, encode_entries
from millstream.errors import (
    ConnectionLost,
    MillstreamError,
    OutOfSequence,
    PartitionNotFound,
    RequestTimeout,
    ShuttingDown,
    StorageFailed,
    TopicNotFound,
)
from millstream.wire import calls
from millstream.wire.messages import PublishResult

__all__ = ["Publisher"]


class Publisher:
    """What `publish` and `publish_many` send with; safe to share between threads."""

    def __init__(self, link: Link, topics: dict[str, Topic], timeout_s: float) -> None:
        self._link = link
        #: What the client knows; a topic that turns out to be gone is forgotten.
        self._topics = topics
        self._timeout_s = timeout_s
        #: Those that no thread is using.
        self._identities: list[Identity] = []
        #: What the broker says about how fast to publish.
        self.flow = FlowNotices()
        belongs_to_one_process(self)

    def _forked(self) -> None:
        self._identities.clear()

    def connected(self) -> None:
        """There is another connection."""
        self.flow.forget()
        self._topics.clear()  # the broker may have been restarted, and what it keeps in memory has other partitions

    def new_identity(self) -> int:
        answer: calls.ProducerIdentity = self._link.call(calls.NewProducer(), calls.ProducerIdentity)
        return answer.producer_id << 16 | answer.epoch

    def publish(self, topic: Topic, partition: int, entries: Sequence[AnyEntry], fsync: int) -> PublishResult:
        """Raises what `Client.publish` raises."""
        if self.flow:
            time.sleep(self.flow.delay_s(topic.name))
        deadline_s = time.monotonic() + self._timeout_s
        try:
            identity = self._identities.pop()
        except IndexError:
            identity = Identity(self.new_identity())
        place = topic.place(partition)
        sequence = identity.sequences.get(place, 0)
        head, tail = encode_entries(
            entries,
            base_timestamp_us=time.time_ns() // 1000,
            producer=identity.producer,
            first_sequence=sequence,
        )
        connection: Connection | None = None
        failure: MillstreamError | None = None
        try:
            connection = self._link.get(deadline_s)
            result = connection.publish(topic.raw_name, partition, fsync, head, tail, deadline_s)
        except MillstreamError as error:
            failure = error
        if failure is not None:
            if connection is None and self._link.closed:
                raise failure  # nothing was sent: there is nothing to wonder about
            attempt = Attempt(topic, partition, fsync, head, tail, identity, sequence)
            result = self._insist(attempt, connection, failure, deadline_s)
            identity, sequence = attempt.identity, attempt.sequence
        sequences = identity.sequences
        sequences[place] = (sequence + len(entries)) & SEQUENCE_MASK
        if len(sequences) < PLACES_MAX:
            self._identities.append(identity)
        return result

    def _insist(
        self, attempt: Attempt, connection: Connection | None, error: MillstreamError, deadline_s: float
    ) -> PublishResult:
        """Try again until it succeeds, or trying makes no sense: then the error is raised."""
        backoff = Backoff()
        while True:
            self._prepare(attempt, connection, error, backoff, deadline_s)
            try:
                connection = self._link.get(deadline_s)
                return connection.publish(
                    attempt.topic.raw_name, attempt.partition, attempt.fsync, attempt.head, attempt.tail, deadline_s
                )
            except MillstreamError as problem:
                error = problem

    def _prepare(
        self,
        attempt: Attempt,
        connection: Connection | None,
        error: MillstreamError,
        backoff: Backoff,
        deadline_s: float,
    ) -> None:
        """Do what an error asks for before the next try, or raise it.

        The identity of a batch that may be stored is not used again: the next one must not be taken for a repetition.
        """
        if isinstance(error, OutOfSequence):
            attempt.renew(Identity(self.new_identity()))
        elif isinstance(error, RequestTimeout):
            raise after_refusal(error, attempt.refusal)
        elif isinstance(error, ConnectionLost | ShuttingDown):
            attempt.doubtful |= isinstance(error, ConnectionLost) and connection is not None
            if connection is not None and connection.usable:
                connection.retire()
            if time.monotonic() >= deadline_s or self._link.closed:
                state = "may or may not be" if attempt.doubtful else "was not"
                lost = ConnectionLost(f"{error}; the message {state} stored")
                raise after_refusal(lost, attempt.refusal)
        else:
            attempt.doubtful |= isinstance(error, StorageFailed)
            wait_s = backoff.next_s()
            if not error.retriable or time.monotonic() + wait_s >= deadline_s:
                if not attempt.doubtful:
                    self._identities.append(attempt.identity)
                if isinstance(error, TopicNotFound | PartitionNotFound):
                    self._topics.pop(attempt.topic.name, None)
                raise error
            attempt.refusal = error
            time.sleep(wait_s)
