"""Where encoded batches go: into a stage, or straight to their topics.

Many batches are on their way at a time.  They are kept until the broker has confirmed them, and when a connection is
lost all others are sent again, in their order, with the sequence numbers by which the broker knows them.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Final, NamedTuple

from millstream.errors import MillstreamError, StageLost, Throttled, UnavailableError
from millstream.records import assign_producer
from millstream.spark.connection import Answer, BrokerConnection, published
from millstream.spark.encoding import EncodedBatch
from millstream.wire.calls import NewProducer, ProducerIdentity
from millstream.wire.stage_calls import OpenStage, StageOpened, stage_address

__all__ = ["Identity", "Outlet", "StageOutlet", "TopicOutlet"]

#: What may be on its way: enough to keep the broker busy while the next rows are encoded.
_WINDOW_BYTES: Final = 16 * 1024 * 1024
_PAUSE_S, _PAUSE_S_MAX = 0.05, 2.0
_SEQUENCE: Final = 0xFFFF_FFFF
#: In a stage any producer will do: it has no other.
_STAGE_PRODUCER: Final = 1 << 16


class Identity(NamedTuple):
    """By which the broker knows what it has published."""

    query: str
    batch: int

    def __str__(self) -> str:
        return f"batch {self.batch} of query {self.query}"


class _Sent(NamedTuple):
    encoded: EncodedBatch
    answer: Answer | None


class Outlet(ABC):
    """See the module."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self._unconfirmed: deque[_Sent] = deque()
        self._unconfirmed_bytes = 0
        self._progress_s = time.monotonic()
        self._pause_s = _PAUSE_S
        #: Confirmed by the broker.
        self.batches = 0
        self.messages = 0
        #: Nothing more is wanted.
        self.closed = False

    def put(self, encoded: EncodedBatch) -> None:
        """Send a batch, which becomes ours.  Raises the broker's error about this one or one before it."""
        if self.closed or not self._prepare(encoded):
            return
        if not self._unconfirmed:
            self._progress_s = time.monotonic()
        self._unconfirmed.append(_Sent(encoded, None))
        self._unconfirmed_bytes += len(encoded.batch)
        try:
            if self._unconfirmed[0].answer is None:
                self._send_all()
            else:
                # Should the connection be another one by now, this one comes too early: it is refused for its sequence
                # number, and sent again after those that were lost.
                self._unconfirmed[-1] = self._send(encoded)
        except UnavailableError as problem:
            self._again(problem)
        while self._unconfirmed_bytes > _WINDOW_BYTES:
            self._confirm()

    def finish(self) -> None:
        """Return when everything is confirmed."""
        while self._unconfirmed:
            self._confirm()

    @abstractmethod
    def _prepare(self, encoded: EncodedBatch) -> bool:
        """Give a batch its identity.  Whether it is wanted."""

    @abstractmethod
    def _address(self, topic: str) -> str:
        """What the broker knows the place by where messages for a topic go."""

    def _recovers(self, problem: MillstreamError) -> bool:  # noqa: ARG002
        """Whether there is something to be done about an error, and it is done."""
        return False

    def _send(self, encoded: EncodedBatch) -> _Sent:
        address = self._address(encoded.topic)
        return _Sent(encoded, self._connection.begin_publish(address, encoded.partition, memoryview(encoded.batch)))

    def _send_all(self) -> None:
        for place, (encoded, _) in enumerate(self._unconfirmed):
            self._unconfirmed[place] = self._send(encoded)

    def _confirm(self) -> None:
        """Wait for the answer about the batch that was sent first."""
        encoded, answer = self._unconfirmed[0]
        try:
            if answer is None:
                self._send_all()
                return
            published(answer.wait(self._progress_s + self._connection.target.timeout_s))
        except UnavailableError as problem:
            self._again(problem)
        except MillstreamError as problem:
            if not self._recovers(problem):
                raise
        else:
            self._unconfirmed.popleft()
            self._unconfirmed_bytes -= len(encoded.batch)
            self._progress_s, self._pause_s = time.monotonic(), _PAUSE_S
            self.batches += 1
            self.messages += encoded.messages

    def _again(self, problem: UnavailableError) -> None:
        """The broker cannot be reached, or wants nothing right now: have all of it sent again, after a while."""
        pause_s = self._pause_s * (0.5 + random.random() / 2)
        if isinstance(problem, Throttled):
            pause_s = max(pause_s, problem.retry_after_ms / 1000)
        if time.monotonic() + pause_s > self._progress_s + self._connection.target.timeout_s:
            raise problem
        time.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)
        self._have_sent_again()

    def _have_sent_again(self) -> None:
        for place, (encoded, answer) in enumerate(self._unconfirmed):
            if answer is not None:
                answer.forget()
            self._unconfirmed[place] = _Sent(encoded, None)


class StageOutlet(Outlet):
    """Into the stage of a task, which is opened for the first batch."""

    def __init__(self, connection: BrokerConnection, identity: Identity, *, task: int, attempt: int) -> None:
        super().__init__(connection)
        self._identity = identity
        self._task = task
        self._attempt = attempt
        self._sequence = 0
        self.stage = ""

    def _prepare(self, encoded: EncodedBatch) -> bool:
        if not self.stage and not self._open():
            return False
        assign_producer(encoded.batch, _STAGE_PRODUCER, self._sequence)
        self._sequence = (self._sequence + encoded.messages) & _SEQUENCE
        return True

    def _address(self, topic: str) -> str:
        return stage_address(self.stage, topic)

    def _open(self) -> bool:
        """Whether there is something to do: not when this is the repetition of a batch that was published."""
        call = OpenStage(query=self._identity.query, batch=self._identity.batch, task=self._task, attempt=self._attempt)
        opened: StageOpened = self._connection.call(call, StageOpened)
        self.stage, self.closed = opened.stage, opened.already
        if self.closed:
            self._unconfirmed.clear()
            self._unconfirmed_bytes = 0
        return not self.closed

    def _recovers(self, problem: MillstreamError) -> bool:
        """A stage with nothing in it does not survive a power cut; then all there is goes into another one."""
        if not isinstance(problem, StageLost) or self.batches:
            return False
        if self._open():
            self._have_sent_again()
        return True


class TopicOutlet(Outlet):
    """To the topics themselves.  The broker recognises what this task repeats, and not what another attempt repeats."""

    def __init__(self, connection: BrokerConnection) -> None:
        super().__init__(connection)
        self._producer = 0
        self._sequences: dict[tuple[str, int], int] = {}

    def _prepare(self, encoded: EncodedBatch) -> bool:
        if not self._producer:
            identity: ProducerIdentity = self._connection.call(NewProducer(), ProducerIdentity)
            self._producer = identity.producer_id << 16 | identity.epoch
        place = encoded.topic, encoded.partition
        sequence = self._sequences.get(place, 0)
        assign_producer(encoded.batch, self._producer, sequence)
        self._sequences[place] = (sequence + encoded.messages) & _SEQUENCE
        return True

    def _address(self, topic: str) -> str:
        return topic
