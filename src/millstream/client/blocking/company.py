"""Publishes of several threads that travel together.

While one publish to a partition is under way, others for the same partition wait: the broker would not confirm them any
sooner.  When it is answered, the first of them takes along all who wait, in one batch.  So a thread alone never waits
for another, and the more threads there are, the less a message costs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from millstream.client.metadata import Topic
from millstream.entries import AnyEntry, Entry, entry_bytes
from millstream.errors import ConnectionLost, MillstreamError, RequestTimeout
from millstream.wire.messages import PublishResult

__all__ = ["Company"]

_BYTES_MAX: Final = 256 * 1024
_MESSAGES_MAX: Final = 1000

#: What is published together: topic, partition, fsync.
_Way: TypeAlias = tuple[Topic, int, int]
#: Given these, the entries and the time until which it may take.
_Publish: TypeAlias = Callable[[Topic, int, Sequence[AnyEntry], int, float], PublishResult]


class _Traveller:
    """A message whose thread waits."""

    __slots__ = ("bell", "deadline_s", "entry", "error", "index", "party", "result")

    def __init__(self, entry: AnyEntry, deadline_s: float) -> None:
        self.entry = entry
        self.deadline_s = deadline_s
        #: Locked until there is something to know.
        self.bell = threading.Lock()
        self.bell.acquire()
        #: All who travel with us, if it is for us to publish them.
        self.party: list[_Traveller] | None = None
        self.result: PublishResult | None = None
        self.index = 0
        self.error: MillstreamError | None = None


class Company:
    """For all threads of one client."""

    def __init__(self, publish: _Publish, timeout_s: float) -> None:
        self._publish = publish
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        #: Those who wait, for each way on which a publish is under way.
        self._waiting: dict[_Way, deque[_Traveller]] = {}

    def publish(self, topic: Topic, partition: int, entry: AnyEntry, fsync: int) -> tuple[PublishResult, int]:
        """The result for the batch that this message was stored in, and its place there."""
        deadline_s = time.monotonic() + self._timeout_s
        if type(entry) is Entry and entry.dedup_id:
            return self._publish(topic, partition, (entry,), fsync, deadline_s), 0  # such a message is always alone
        way = (topic, partition, fsync)
        traveller = None
        with self._lock:
            waiting = self._waiting.get(way)
            if waiting is None:
                self._waiting[way] = deque()
            else:
                traveller = _Traveller(entry, deadline_s)
                waiting.append(traveller)
        if traveller is None:
            try:
                return self._publish(topic, partition, (entry,), fsync, deadline_s), 0
            finally:
                self._call_next(way)
        self._wait(way, traveller)
        if traveller.party is not None:
            self._lead(way, traveller.party)
        if traveller.result is None:
            raise traveller.error or RequestTimeout(
                f"no answer within {self._timeout_s:g} s; the message may or may not be stored"
            )
        return traveller.result, traveller.index

    def _wait(self, way: _Way, traveller: _Traveller) -> None:
        """Until the message is answered, or it is our turn to publish, or the time is up."""
        try:
            if traveller.bell.acquire(timeout=max(0.0, traveller.deadline_s - time.monotonic())):
                return
        except BaseException:
            self._leave(way, traveller)
            raise
        with self._lock:
            if traveller in self._waiting.get(way, ()):
                self._waiting[way].remove(traveller)
                traveller.error = RequestTimeout(f"not sent within {self._timeout_s:g} s; the message was not stored")

    def _leave(self, way: _Way, traveller: _Traveller) -> None:
        """Our thread was interrupted: the others must not wait for it."""
        with self._lock:
            party = traveller.party
            if party is not None:
                self._waiting[way].extendleft(reversed(party[1:]))
            elif traveller in self._waiting.get(way, ()):
                self._waiting[way].remove(traveller)
        if party is not None:
            self._call_next(way)

    def _lead(self, way: _Way, party: list[_Traveller]) -> None:
        topic, partition, fsync = way
        result: PublishResult | None = None
        error: MillstreamError | None = None
        try:
            # Until the last of them runs out of time; the first has waited for the others, if only for a moment.
            result = self._publish(topic, partition, [each.entry for each in party], fsync, party[-1].deadline_s)
        except MillstreamError as problem:
            error = problem
        except BaseException:  # our thread was interrupted; of the others' messages nothing is known
            error = ConnectionLost("the publish was interrupted; the message may or may not be stored")
            raise
        finally:
            self._call_next(way)
            for each in party:
                each.error = None if error is None else type(error)(str(error))
                each.result = result
                if each.index:
                    each.bell.release()

    def _call_next(self, way: _Way) -> None:
        """The way is free: the first who waits takes the others along."""
        with self._lock:
            waiting = self._waiting[way]
            if not waiting:
                del self._waiting[way]
                return
            party = [waiting.popleft()]
            room = _BYTES_MAX - entry_bytes(party[0].entry)
            while waiting and len(party) < _MESSAGES_MAX and (room := room - entry_bytes(waiting[0].entry)) >= 0:
                party.append(waiting.popleft())
            for index, each in enumerate(party):
                each.index = index
            party[0].party = party
        party[0].bell.release()
