"""The fake broker with queues: one group, leases in memory, and every SETTLE on record."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from fake_broker import FakeBroker

from millstream.errors import MillstreamError, SubscriptionNotFound
from millstream.records import Batch
from millstream.wire import queue_calls
from millstream.wire.connection import SettleRequest
from millstream.wire.leases import (
    LeasePart,
    LeaseRequest,
    Scope,
    Settle,
    Settled,
    SettleEntry,
    encode_lease_result,
    encode_settle_result,
)
from millstream.wire.messages import encode_error


@dataclass
class Held:
    """A lease as the broker sees it."""

    topic: str
    partition: int
    start: int
    bits: int
    consumer: int
    deadline_s: float
    peer: Any
    settled: int = 0

    @property
    def left(self) -> int:
        return self.bits & ~self.settled


@dataclass
class FakeQueues(FakeBroker):
    """Messages are published as usual; what is ready, leased and settled can be looked at."""

    lease_ms: int = 30_000
    opened: list[queue_calls.OpenQueue] = field(default_factory=list)
    closed_consumers: list[int] = field(default_factory=list)
    leases: dict[int, Held] = field(default_factory=dict)
    settles: list[SettleEntry] = field(default_factory=list)
    lease_requests: list[LeaseRequest] = field(default_factory=list)
    lease_errors: list[MillstreamError] = field(default_factory=list)
    settle_errors: list[MillstreamError] = field(default_factory=list)
    acked: list[tuple[str, int, int]] = field(default_factory=list)
    nacked: list[tuple[int, str, int]] = field(default_factory=list)
    rejected: list[tuple[int, str]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    extended: list[SettleEntry] = field(default_factory=list)
    deliveries: dict[tuple[str, int, int], int] = field(default_factory=dict)
    #: While this is not set, LEASE requests wait.
    open_gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._free: dict[tuple[str, int], list[int]] = {}
        self._known: dict[tuple[str, int], int] = {}
        self._consumers: dict[int, tuple[str, Any]] = {}
        self._nonces = 0
        self._state = threading.RLock()
        self.open_gate.set()
        FakeBroker.__init__(self)

    def handle_other(self, peer: Any, correlation: int, body: Any) -> bool:
        if isinstance(body, LeaseRequest):
            self.lease_requests.append(body)
            threading.Thread(target=self._lease, args=(peer, correlation, body), daemon=True).start()
        elif isinstance(body, SettleRequest) and self.settle_errors:
            peer.send(encode_error(self.settle_errors.pop(0), correlation))
        elif isinstance(body, SettleRequest):
            with self._state:
                results = [self._settle(entry) for entry in body.entries]
            peer.send(encode_settle_result(correlation, results))
            self._note()
        else:
            return False
        return True

    def _answer(self, peer: Any, call: Any) -> Any:
        if isinstance(call, queue_calls.OpenQueue):
            self.opened.append(call)
            number = len(self.opened)
            self._consumers[number] = (call.topic, peer)
            self.topic(call.topic)
            return queue_calls.QueueOpened(consumer=number, topics=[call.topic])
        if isinstance(call, queue_calls.CloseQueue):
            self.closed_consumers.append(call.consumer)
            self._take_back(lambda held: held.consumer == call.consumer)
            return None
        return super()._answer(peer, call)

    def consumer_is_gone(self, number: int) -> bool:
        """Whether its connection has ended."""
        return number in self._consumers and self._consumers[number][1] not in self._peers

    # --- leases --------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """All leases end now."""
        self._take_back(lambda held: True)
        self._note()

    def _take_back(self, which: Any) -> None:
        with self._state:
            for nonce, held in list(self.leases.items()):
                if which(held):
                    del self.leases[nonce]
                    free = self._free[held.topic, held.partition]
                    free += [held.start + i for i in range(held.bits.bit_length()) if held.left >> i & 1]
                    free.sort()

    def _ready(self, topic: str) -> tuple[int, list[int]] | None:
        now_s = time.monotonic()
        self._take_back(lambda held: held.peer not in self._peers or held.deadline_s < now_s)
        for number, partition in enumerate(self.topics[topic]):
            place = (topic, number)
            free = self._free.setdefault(place, [])
            free += range(self._known.get(place, 0), partition.next_offset)
            self._known[place] = partition.next_offset
            if free:
                return number, free
        return None

    def _lease(self, peer: Any, correlation: int, request: LeaseRequest) -> None:
        if self.lease_errors:
            peer.send(encode_error(self.lease_errors.pop(0), correlation))
            return
        known = self._consumers.get(request.consumer)
        if known is None or known[1] is not peer:
            peer.send(encode_error(SubscriptionNotFound("no such consumer"), correlation))
            return
        asked_s = time.monotonic()
        deadline_s = asked_s + request.wait_ms / 1000
        while True:
            with self._state:
                found = self._ready(known[0]) if self.open_gate.is_set() and peer in self._peers else None
                if found is not None or time.monotonic() >= deadline_s or peer not in self._peers:
                    parts = [] if found is None else [self._grant(known[0], *found, request, peer)]
                    waited_ms = int((time.monotonic() - asked_s) * 1000)
                    # Before anybody else is granted something: what was granted first also arrives first.
                    peer.send(b"".join(encode_lease_result(correlation, parts, waited_ms)))
                    break
            with self.changed:
                self.changed.wait(0.005)
        self._note()

    def _grant(self, topic: str, number: int, free: list[int], request: LeaseRequest, peer: Any) -> LeasePart:
        # One lease holds what was delivered equally often.
        count = self.deliveries.get((topic, number, free[0]), 0)
        chosen = [at for at in free if self.deliveries.get((topic, number, at), 0) == count][: request.max_messages]
        for at in chosen:
            free.remove(at)
            self.deliveries[topic, number, at] = count + 1
        start, span = chosen[0], chosen[-1] - chosen[0] + 1
        bits = sum(1 << (at - start) for at in chosen)
        self._nonces += 1
        lease_ms = self.opened[request.consumer - 1].lease_ms or self.lease_ms
        self.leases[self._nonces] = Held(
            topic, number, start, bits, request.consumer, time.monotonic() + lease_ms / 1000, peer
        )
        stored = self.topics[topic][number].batches
        overlapping = [
            data
            for data in stored
            if Batch.parse(data).next_offset > start and Batch.parse(data).base_offset < start + span
        ]
        whole = len(chosen) == span
        return LeasePart(
            topic,
            number,
            self._nonces,
            lease_ms,
            count + 1,
            count,
            start,
            span,
            b"" if whole else bits.to_bytes(span + 7 >> 3, "little"),
            overlapping,
        )

    def _settle(self, entry: SettleEntry) -> int:
        self.settles.append(entry)
        held = self.leases.get(entry.nonce)
        if held is None or held.deadline_s < time.monotonic():
            return Settled.INVALID
        bits = held.left
        if entry.scope == Scope.ONE:
            bits = 1 << (entry.offset - held.start)
        elif entry.scope == Scope.BITMAP:
            bits = entry.bits << (entry.offset - held.start)
        if bits & ~held.left:
            return Settled.DONE if entry.kind == Settle.ACK else Settled.INVALID
        if entry.kind == Settle.EXTEND:
            self.extended.append(entry)
            held.deadline_s = time.monotonic() + entry.value / 1000
            return Settled.DONE
        held.settled |= bits
        offsets = [held.start + i for i in range(bits.bit_length()) if bits >> i & 1]
        result = Settled.DONE
        if entry.kind == Settle.ACK:
            self.acked += [(held.topic, held.partition, at) for at in offsets]
        elif entry.kind == Settle.NACK:
            self.nacked += [(at, entry.reason, entry.value) for at in offsets]
            self._free[held.topic, held.partition] += offsets
            result = Settled.RETRIED
        elif entry.kind == Settle.REJECT:
            self.rejected += [(at, entry.reason) for at in offsets]
            result = Settled.DEAD
        else:
            self.released += offsets
            for at in offsets:
                self.deliveries[held.topic, held.partition, at] -= 1
            self._free[held.topic, held.partition] += offsets
        self._free[held.topic, held.partition].sort()
        if not held.left and entry.kind != Settle.ACK:
            del self.leases[entry.nonce]
        return result
