"""What a consumer says to the broker is what its user said: whatever was acked, nacked or held, in whatever order.

The broker is a model that applies every SETTLE, entry by entry, to the leases it has granted, as long as they last.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from millstream.client.leases import Lease, QueueMessage
from millstream.client.leasing import Frame, Leasing
from millstream.client.settings import QueueOptions, QueueSettings
from millstream.errors import ConnectionLost
from millstream.records import encode_batch, stamp
from millstream.wire.frames import FrameReader, FrameType
from millstream.wire.leases import (
    LeasePart,
    Scope,
    Settle,
    Settled,
    decode_lease,
    decode_settle,
    encode_lease_result,
    encode_settle_result,
)
from tests.examples import examples

LEASE_MS = 10_000


class Consumer:
    """A driver without a socket: what it sends, the model broker hears at once."""

    group = "g"

    def __init__(self, prefetch: int, *, auto_extend: bool = True, max_processing: str = "5m") -> None:
        self.prefetch = prefetch
        options: QueueOptions = {"lease": "10s", "auto_extend": auto_extend, "max_processing": max_processing}
        settings = QueueSettings.of("t", "g", prefetch, options)
        numbers = count(1)
        self.leasing = Leasing(
            settings, weakref.ref(self), QueueMessage, next_correlation=lambda: next(numbers), jitter=lambda: 0.5
        )
        self.leasing.opened(1)
        self.leasing.learn(["t"], {"t": [7]})
        self.leasing.wanted = True
        self.now_ms = 0
        # the model
        self.next_offset = 0
        self.granted: dict[int, dict[int, str]] = {}  # nonce -> offset -> what became of it
        self.requests: list[tuple[int, int, int]] = []  # correlation, amount, when
        self.ends_ms: dict[int, int] = {}  # by nonce
        self.extended: list[tuple[int, int]] = []  # offset, for how long

    def _due(self, lease: Lease) -> None:
        self.leasing.due(lease)
        if self.leasing.urgent:
            self.say(everything=False)

    def _settle(self, kind: Settle, messages: Iterable[QueueMessage], value: int, reason: str, *, wait: bool) -> None:
        assert not wait
        self.leasing.settle(kind, messages, value, reason, None)
        if self.leasing.urgent:
            self.say(everything=False)

    def _history(self, message: QueueMessage) -> Any:
        raise NotImplementedError

    def say(self, *, everything: bool) -> None:
        self.hear(self.leasing.outgoing(self.now_ms, everything=everything))

    def hear(self, frames: list[Frame]) -> None:
        for frame in frames:
            for kind, correlation, payload in FrameReader(shared=bytearray(1 << 16)).feed(frame.data):
                assert correlation == frame.correlation
                if kind == FrameType.LEASE:
                    self.requests.append((correlation, decode_lease(payload).max_messages, self.now_ms))
                    self.check_credit()
                else:
                    results = [self.settle(entry) for entry in decode_settle(payload)]
                    self.accept(encode_settle_result(correlation, results))

    def check_credit(self) -> None:
        asked = sum(amount for _, amount, _ in self.requests)
        assert asked + self.leased() <= self.prefetch, "more was asked for than may be held"

    def leased(self) -> int:
        """How many messages are neither settled nor somebody else's."""
        return sum(
            fate == "leased" and self.lasts(nonce) for nonce, lease in self.granted.items() for fate in lease.values()
        )

    def lasts(self, nonce: int) -> bool:
        return self.now_ms < self.ends_ms[nonce]

    def settle(self, entry: Any) -> int:
        lease = self.granted.get(entry.nonce, {})
        offsets = [offset for offset, fate in lease.items() if fate == "leased"]
        if entry.scope == Scope.ONE:
            offsets = [entry.offset]
        elif entry.scope == Scope.BITMAP:
            offsets = [entry.offset + i for i in range(entry.bits.bit_length()) if entry.bits >> i & 1]
        if not lease or not self.lasts(entry.nonce) or any(lease.get(offset) != "leased" for offset in offsets):
            return Settled.INVALID
        if entry.kind == Settle.EXTEND:
            self.ends_ms[entry.nonce] = max(self.ends_ms[entry.nonce], self.now_ms + entry.value)
        for offset in offsets:
            if entry.kind == Settle.EXTEND:
                self.extended.append((offset, entry.value))
            else:
                lease[offset] = Settle(entry.kind).name.lower()
        return Settled.DONE

    def accept(self, frame: bytes) -> None:
        for _, correlation, payload in FrameReader(shared=bytearray(1 << 16)).feed(frame):
            assert correlation is not None
            self.leasing.accept(correlation, payload, self.now_ms)

    def grant(self, holes: list[bool], late_ms: int = 0) -> bool:
        """Answer the oldest request with as many offsets, less those that are somebody else's."""
        if not self.requests:
            return False
        correlation, amount, asked_ms = self.requests.pop(0)
        wanted = holes[:amount]
        chosen = [self.next_offset + i for i, mine in enumerate(wanted) if mine]
        if not chosen:
            self.accept(b"".join(encode_lease_result(correlation, [])))
            return True
        start, span = chosen[0], chosen[-1] - chosen[0] + 1
        data = encode_batch([b"v"] * len(wanted), base_timestamp_us=1)
        stamp(memoryview(data), 0, base_offset=self.next_offset, append_time_us=1, leader_epoch=0)
        self.next_offset += len(wanted)
        nonce = len(self.granted) + 1
        self.granted[nonce] = dict.fromkeys(chosen, "leased")
        bits = sum(1 << (offset - start) for offset in chosen)
        mask = b"" if len(chosen) == span else bits.to_bytes(span + 7 >> 3, "little")
        self.ends_ms[nonce] = self.now_ms + LEASE_MS
        part = LeasePart("t", 0, nonce, LEASE_MS, 1, 0, start, span, mask, [bytes(data)])
        answer = b"".join(encode_lease_result(correlation, [part], self.now_ms - asked_ms))
        self.now_ms += late_ms
        self.accept(answer)
        return True

    def later(self, ms: int) -> None:
        """Time passes, and leases are looked after."""
        self.now_ms += ms
        self.leasing.tend(self.now_ms)
        self.say(everything=False)

    def fates(self) -> dict[int, str]:
        return {offset: fate for lease in self.granted.values() for offset, fate in lease.items()}


steps = st.sampled_from(
    ["grant", "take", "take", "ack", "ack", "ack", "nack", "reject", "extend", "say", "linger", "time"]
)


@given(
    prefetch=st.integers(1, 12),
    taken=st.integers(0, 6),
    plan=st.lists(st.tuples(steps, st.integers(0, 1000)), min_size=4, max_size=60),
    holes=st.lists(st.booleans(), min_size=6, max_size=6),
    leave=st.booleans(),
)
@examples(75)
def test_the_broker_hears_exactly_what_the_user_said(
    prefetch: int, taken: int, plan: list[tuple[str, int]], holes: list[bool], leave: bool
) -> None:
    consumer = Consumer(prefetch)
    leasing = consumer.leasing
    held: list[QueueMessage] = []
    said: dict[int, str] = {}
    consumer.say(everything=False)
    for step, number in [("grant", 0), *[("take", 0)] * taken, *plan]:
        if step == "grant":
            consumer.grant(holes)
        elif step == "take":
            if leasing.refill(consumer.now_ms):
                held.append(next(leasing.pending))
        elif step == "say":
            consumer.say(everything=False)
        elif step == "linger":
            consumer.say(everything=True)
        elif step == "time":
            consumer.later(number)
        elif held:
            message = held[number % len(held)]
            if step == "extend":
                message.extend("20s")
                continue
            getattr(message, step)()
            said.setdefault(message.offset, step)
            if number % 3:  # otherwise it may be settled again, which changes nothing
                held.remove(message)
    handed_out = {message.offset for message in held} | said.keys()
    if leave:
        leasing.give_back()
    consumer.say(everything=True)
    fates = consumer.fates()
    for offset, fate in fates.items():
        if offset in said:
            assert fate == said[offset]
        elif offset in handed_out or not leave:
            assert fate == "leased"
        else:
            assert fate == "release"
    assert leasing.unsettled == sum(fate == "leased" for fate in fates.values())


@given(
    order=st.permutations(range(8)),
    words=st.lists(st.sampled_from(["ack", "nack"]), min_size=8, max_size=8),
    cut=st.integers(0, 8),
)
def test_a_lease_that_is_settled_in_any_order_is_settled_at_once(order: list[int], words: list[str], cut: int) -> None:
    consumer = Consumer(16)
    consumer.say(everything=False)
    consumer.grant([True] * 8)
    assert consumer.leasing.refill(0)
    messages = list(consumer.leasing.pending)
    for number in order[:cut]:
        getattr(messages[number], words[number])()
    consumer.say(everything=True)
    fates = consumer.fates()
    assert {number: fates[number] for number in order[:cut]} == {number: words[number] for number in order[:cut]}
    for number in order[cut:]:
        getattr(messages[number], words[number])()
    # Nothing else is there to be done, so the last one is said without being asked for.
    assert consumer.fates() == dict(enumerate(words))
    assert not consumer.leasing.holds
    assert consumer.leasing.stats.refused == 0


def test_what_is_held_is_extended_at_half_time_up_to_the_limit() -> None:
    consumer = Consumer(4, max_processing="24s")
    consumer.say(everything=False)
    consumer.grant([True] * 2)
    consumer.grant([True] * 2)
    assert consumer.leasing.refill(0)
    message = next(consumer.leasing.pending)
    extended = {}
    for now_ms in range(0, 60_000, 1_000):
        consumer.now_ms = now_ms
        consumer.leasing.wanted = now_ms < 5_000
        consumer.leasing.tend(now_ms)
        consumer.say(everything=True)
        if consumer.extended:
            extended[now_ms // 1000] = consumer.extended
            consumer.extended = []
    everything = [(offset, 10_000) for offset in range(4)]
    # The last extension is for what has been begun; the others go back.
    assert extended == {5: everything, 10: everything, 15: [(message.offset, 9_000)]}
    assert consumer.fates() == {0: "leased", 1: "release", 2: "release", 3: "release"}
    assert consumer.leasing.stats.refused == 0
    assert message.source.lease.ends_ms == 24_000
    # When that was over, the message was given up.
    assert consumer.leasing.unsettled == 0
    message.ack()
    assert consumer.leasing.stats.refused == 1


def take(consumer: Consumer) -> QueueMessage | None:
    """As the drivers do it: what is pending is handed out until its time has come."""
    leasing = consumer.leasing
    if leasing.disturbed or consumer.now_ms / 1000 >= leasing.pending_until_s:
        return next(leasing.pending) if leasing.refill(consumer.now_ms) else None
    return next(leasing.pending, None) or (next(leasing.pending) if leasing.refill(consumer.now_ms) else None)


@given(
    prefetch=st.integers(1, 12),
    auto_extend=st.booleans(),
    max_processing=st.sampled_from(["12s", "25s", "5m"]),
    late_ms=st.integers(0, 2 * LEASE_MS),
    plan=st.lists(
        st.tuples(
            st.sampled_from(["grant", "take", "take", "ack", "extend", "time", "busy"]), st.integers(0, LEASE_MS // 2)
        ),
        min_size=4,
        max_size=60,
    ),
)
@examples(75)
def test_what_is_handed_out_is_ours_and_what_is_over_is_given_up(
    prefetch: int, auto_extend: bool, max_processing: str, late_ms: int, plan: list[tuple[str, int]]
) -> None:
    """Whoever never settles, does so too late, or is not looked after for a while."""
    consumer = Consumer(prefetch, auto_extend=auto_extend, max_processing=max_processing)
    leasing = consumer.leasing
    held: list[QueueMessage] = []
    consumer.say(everything=False)
    for step, number in [("grant", 0), *plan]:
        if step == "grant":
            consumer.grant([True] * prefetch, late_ms)
        elif step == "take":
            message = take(consumer)
            if message is not None:
                assert consumer.lasts(message.source.lease.nonce), "it is somebody else's by now"
                held.append(message)
        elif step == "time":
            consumer.later(number)
        elif step == "busy":
            consumer.now_ms += number
        elif held:
            message = held.pop(number % len(held))
            is_ours = consumer.lasts(message.source.lease.nonce)
            message.ack() if step == "ack" else message.extend("7s")
            consumer.say(everything=True)
            if step == "ack":
                assert (consumer.fates()[message.offset] == "ack") == is_ours
    for _ in range(100):  # beyond all limits, unless what is held is made longer
        consumer.later(LEASE_MS // 10)
    if not auto_extend:
        assert consumer.leased() == 0
    if not consumer.leased():
        assert leasing.unsettled == 0
        assert not leasing.holds
        # Less than half of it is not worth a request of its own.
        assert 2 * sum(amount for _, amount, _ in consumer.requests) >= prefetch, "the credit is free again"


def test_what_waited_until_its_lease_was_nearly_over_goes_back() -> None:
    consumer = Consumer(4, auto_extend=False)
    consumer.say(everything=False)
    consumer.grant([True] * 2)
    consumer.grant([True] * 2)
    assert consumer.leasing.refill(8_999)
    assert [next(consumer.leasing.pending).offset] == [0]
    assert consumer.leasing.pending_until_s == 9.0
    consumer.now_ms = 9_000
    assert not consumer.leasing.refill(9_000)
    assert list(consumer.leasing.pending) == []
    consumer.say(everything=False)
    assert consumer.fates() == {0: "leased", 1: "release", 2: "release", 3: "release"}


def test_a_message_that_is_never_settled_gives_its_credit_back() -> None:
    consumer = Consumer(1, auto_extend=False)
    consumer.say(everything=False)
    consumer.grant([True])
    assert take(consumer) is not None
    consumer.later(9_999)
    assert consumer.requests == []
    consumer.later(1)
    assert len(consumer.requests) == 1
    consumer.grant([True])
    message = take(consumer)
    assert message is not None
    assert message.offset == 1


def test_an_ack_that_was_said_in_time_is_told_even_if_the_lease_is_over() -> None:
    """The broker counts from a later moment on than we can know."""
    consumer = Consumer(2, auto_extend=False)
    consumer.say(everything=False)
    consumer.grant([True])
    message = take(consumer)
    assert message is not None
    consumer.ends_ms[1] = 10_100
    message.ack()
    consumer.later(10_000)
    assert consumer.fates() == {0: "ack"}
    assert consumer.leasing.stats.refused == 0


def test_only_an_extension_that_was_done_makes_a_lease_longer() -> None:
    consumer = Consumer(2, auto_extend=False)
    consumer.say(everything=False)
    consumer.grant([True])
    message = take(consumer)
    assert message is not None
    lease = message.source.lease
    consumer.now_ms = 4_000
    consumer.leasing.settle(Settle.EXTEND, [message], 20_000, "", None)
    (frame,) = consumer.leasing.outgoing(4_000, everything=False)
    assert (lease.begin_by_ms, lease.ends_ms) == (9_000, 10_000)
    consumer.leasing.accept(frame.correlation, memoryview(encode_settle_result(frame.correlation, [0])[16:]), 4_300)
    # Handled at an unknown moment between the two.
    assert (lease.begin_by_ms, lease.ends_ms) == (4_000 + 18_000, 4_300 + 20_000)
    message.extend("1s")
    consumer.now_ms = 5_000
    consumer.say(everything=False)
    assert lease.ends_ms == 24_300, "never shorter"


def test_what_was_lost_is_refused_and_not_handed_out() -> None:
    consumer = Consumer(8)
    consumer.say(everything=False)
    consumer.grant([True] * 4)
    assert consumer.leasing.refill(0)
    first = next(consumer.leasing.pending)
    consumer.leasing.disconnected(ConnectionLost("gone"))
    assert not consumer.leasing.refill(0)
    assert list(consumer.leasing.pending) == []
    assert consumer.leasing.unsettled == 0
    first.ack()
    first.nack()
    assert consumer.leasing.stats.refused == 2
    assert not consumer.leasing.holds
