"""The way of batches to the broker, without a network: every rule that delivery.py states."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.client.delivery import Delivery, Line, SealedBatch, Settled, renumbered
from millstream.client.outbox import settled_all
from millstream.errors import MillstreamError, OutOfSequence, QuotaExceeded, RequestTimeout, Throttled
from millstream.records import Batch, check_batch, encode_parts, stamp
from millstream.wire.messages import PublishResult

OK = PublishResult("disk", 0, 0, False)


def make(window: int = 8, timeout_ms: int = 1000, *, confirmed: bool = True) -> Delivery:
    return Delivery(
        window=window,
        delivery_timeout_ms=timeout_ms,
        request_timeout_ms=timeout_ms,
        jitter=lambda: 1.0,
        confirmed=confirmed,
    )


def put(delivery: Delivery, line: Line, value: bytes, now_ms: int = 0, count: int = 1) -> None:
    head, tail = encode_parts(
        [value] * count, base_timestamp_us=1, producer=line.producer, first_sequence=line.next_sequence
    )
    delivery.put(line, head, tail, count, now_ms, value)


def take_all(delivery: Delivery, now_ms: int = 0) -> dict[int, SealedBatch]:
    taken = {}
    while (next_one := delivery.take(now_ms)) is not None:
        taken[next_one[0]] = next_one[1]
    return taken


def numbers(batches: dict[int, SealedBatch]) -> list[tuple[bytes, int]]:
    """Value and sequence of each batch, as a broker would read them."""
    return [
        (batch.ticket, check_batch(batch.head + batch.tail, 0, batch.size).first_sequence) for batch in batches.values()
    ]


def proven_line(delivery: Delivery) -> Line:
    """A line whose first message was confirmed, so that its whole window is open; the next sequence is 1."""
    line = delivery.open_line(0, 77 << 16)
    put(delivery, line, b"first")
    ((correlation, _),) = take_all(delivery).items()
    delivery.answered(correlation, OK, 0)
    return line


def test_renumbering_changes_nothing_but_the_number() -> None:
    head, tail = encode_parts([b"a", b"bb"], keys=[b"k", None], base_timestamp_us=5, producer=1 << 16, first_sequence=9)
    data = bytearray(b"".join(renumbered(head, tail, producer=2 << 16 | 3, first_sequence=0)))
    check_batch(data, 0, len(data))
    stamp(memoryview(data), 0, base_offset=0, append_time_us=0, leader_epoch=0)
    batch = Batch.parse(bytes(data))
    assert (batch.values(), batch.keys()) == ([b"a", b"bb"], [b"k", None])
    assert (batch.header.producer_id, batch.header.producer_epoch, batch.header.first_sequence) == (2, 3, 0)


def test_batches_are_numbered_by_messages_and_the_window_limits_what_is_under_way() -> None:
    delivery = make(window=2)
    line = proven_line(delivery)
    for value in (b"a", b"b", b"c"):
        put(delivery, line, value, count=10)
    flying = take_all(delivery)
    assert numbers(flying) == [(b"a", 1), (b"b", 11)]
    delivery.answered(next(iter(flying)), OK, 0)
    assert numbers(take_all(delivery)) == [(b"c", 21)]


def test_only_one_batch_is_under_way_until_the_broker_knows_the_producer() -> None:
    delivery = make()
    line = delivery.open_line(0, 1 << 16)
    for value in (b"a", b"b", b"c"):
        put(delivery, line, value)
    first = take_all(delivery)
    assert numbers(first) == [(b"a", 0)]
    delivery.answered(next(iter(first)), OK, 0)
    assert numbers(take_all(delivery)) == [(b"b", 1), (b"c", 2)]


def test_only_one_batch_is_under_way_when_the_broker_may_have_forgotten_the_producer() -> None:
    """It had, and accepted the second while it refused the first: that one was stored behind the others."""
    delivery = make()
    line = proven_line(delivery)
    for value in (b"a", b"b", b"c"):
        put(delivery, line, value, now_ms=5000)
    first = take_all(delivery, now_ms=5000)
    assert numbers(first) == [(b"a", 1)]
    delivery.answered(next(iter(first)), Throttled("slow"), 5000)
    again = take_all(delivery, now_ms=6000)
    assert numbers(again) == [(b"a", 1)]
    delivery.answered(next(iter(again)), OK, 6000)
    assert numbers(take_all(delivery, now_ms=6000)) == [(b"b", 2), (b"c", 3)]


def test_a_lost_connection_brings_everything_back_in_order_under_the_same_numbers() -> None:
    delivery = make()
    line = proven_line(delivery)
    for value in (b"a", b"b", b"c"):
        put(delivery, line, value)
    flying = take_all(delivery)
    first, second, _ = flying
    delivery.answered(first, OK, 0)
    delivery.disconnected()
    assert delivery.answered(second, OK, 0) == []  # an answer of the old connection
    again = take_all(delivery)
    assert numbers(again) == [(b"b", 2)]
    delivery.answered(next(iter(again)), OK, 0)
    assert numbers(take_all(delivery)) == [(b"c", 3)]
    assert delivery.retries == 2


def test_a_passing_refusal_stalls_the_line_until_all_is_answered_then_goes_again_in_order() -> None:
    delivery = make()
    line = proven_line(delivery)
    for value in (b"a", b"b", b"c"):
        put(delivery, line, value)
    a, b, c = take_all(delivery)
    delivery.answered(a, Throttled("slow"), 0)
    put(delivery, line, b"d")
    assert delivery.take(0) is None
    delivery.answered(b, OutOfSequence("gap"), 0)
    delivery.answered(c, OutOfSequence("gap"), 0)
    assert delivery.take(99) is None  # back-off
    assert delivery.next_due_ms(0) == 100
    assert numbers(take_all(delivery, 100)) == [(b"a", 1), (b"b", 2), (b"c", 3), (b"d", 4)]
    assert not delivery.wants_identity


def test_a_refusal_for_good_fails_one_batch_and_the_rest_moves_up() -> None:
    delivery = make()
    line = proven_line(delivery)
    for value in (b"a", b"b", b"c"):
        put(delivery, line, value, count=2)
    a, b, c = take_all(delivery)
    (settled,) = delivery.answered(a, QuotaExceeded("full"), 0)
    assert (settled.batch.ticket, type(settled.error), settled.in_doubt) == (b"a", QuotaExceeded, False)
    put(delivery, line, b"d")
    delivery.answered(b, OutOfSequence("gap"), 0)
    delivery.answered(c, OutOfSequence("gap"), 0)
    assert numbers(take_all(delivery)) == [(b"b", 1), (b"c", 3), (b"d", 5)]
    assert not delivery.wants_identity


def test_a_connection_lost_after_a_refusal_for_good_still_closes_the_gap() -> None:
    delivery = make()
    line = proven_line(delivery)
    for value in (b"a", b"b"):
        put(delivery, line, value)
    a, _ = take_all(delivery)
    delivery.answered(a, QuotaExceeded("full"), 0)
    delivery.disconnected()
    assert numbers(take_all(delivery)) == [(b"b", 1)]


def test_what_was_sent_before_a_batch_that_is_refused_keeps_its_number() -> None:
    """A refusal comes at once, an answer waits for the disk; then the connection is lost, with the first one stored."""
    delivery = make()
    line = proven_line(delivery)
    for value in (b"a", b"b", b"c"):
        put(delivery, line, value)
    _, second, _ = take_all(delivery)
    delivery.answered(second, QuotaExceeded("no"), 0)
    delivery.disconnected()
    again = take_all(delivery)
    assert numbers(again) == [(b"a", 1)], "under another number it would be stored twice"
    delivery.answered(next(iter(again)), OK, 0)
    assert numbers(take_all(delivery)) == [(b"c", 2)]


def test_a_passing_refusal_in_front_of_one_for_good_leaves_the_numbers_in_order() -> None:
    delivery = make()
    line = proven_line(delivery)
    for value in (b"a", b"b", b"c"):
        put(delivery, line, value)
    first, second, third = take_all(delivery)
    delivery.answered(first, Throttled("wait"), 0)
    delivery.answered(second, QuotaExceeded("no"), 0)
    delivery.answered(third, OutOfSequence("expected 1"), 0)
    assert numbers(take_all(delivery, now_ms=500)) == [(b"a", 1), (b"c", 2)]


@pytest.mark.parametrize("answered_first", [False, True])
def test_messages_of_a_refused_batch_go_again_in_its_place(answered_first: bool) -> None:
    delivery = make()
    line = proven_line(delivery)
    for value in (b"a", b"b", b"c"):
        put(delivery, line, value, count=2)
    (first, _), (second, refused), (third, _) = take_all(delivery).items()
    put(delivery, line, b"d")
    if answered_first:
        delivery.answered(third, OutOfSequence("expected 3"), 0)
        delivery.answered(first, OK, 0)
    delivery.answered(second, QuotaExceeded("no"), 0)
    parts = [encode_parts([value], base_timestamp_us=1, producer=line.producer) for value in (b"b1", b"b2")]
    delivery.put_instead(refused, [(*parts[0], b"b1"), (*parts[1], b"b2")], 0)
    if not answered_first:
        delivery.answered(third, OutOfSequence("expected 3"), 0)
        delivery.answered(first, OK, 0)
    again = take_all(delivery)
    assert numbers(again) == [(b"b1", 3), (b"b2", 4), (b"c", 5), (b"d", 7)]
    for correlation in again:
        delivery.answered(correlation, OK, 0)
    assert delivery.idle
    assert delivery.buffered_bytes == 0


def test_a_refused_batch_behind_another_goes_again_in_its_place_too() -> None:
    delivery = make()
    line = proven_line(delivery)
    for value, count in ((b"a", 1), (b"b", 2), (b"c", 3), (b"d", 1)):
        put(delivery, line, value, count=count)
    flying = take_all(delivery)
    refused = list(flying.values())[2]
    first, second, third, fourth = flying
    delivery.answered(first, OK, 0)
    delivery.answered(second, QuotaExceeded("no"), 0)
    delivery.answered(fourth, OutOfSequence("expected 2"), 0)
    delivery.answered(third, QuotaExceeded("no"), 0)
    head, tail = encode_parts([b"c1"], base_timestamp_us=1, producer=line.producer)
    delivery.put_instead(refused, [(head, tail, b"c1")], 0)
    assert numbers(take_all(delivery)) == [(b"c1", 2), (b"d", 3)]


def test_a_broker_that_lost_confirmed_messages_meets_a_new_identity() -> None:
    delivery = make()
    line = proven_line(delivery)
    for value in (b"a", b"b"):
        put(delivery, line, value)
    a, b = take_all(delivery)
    delivery.answered(a, OutOfSequence("expected 0"), 0)
    delivery.answered(b, OutOfSequence("expected 0"), 0)
    assert delivery.wants_identity
    assert delivery.take(0) is None
    put(delivery, line, b"c")
    delivery.renew(99 << 16)
    flying = take_all(delivery)
    assert numbers(flying) == [(b"a", 0)], "a broker that does not know an identity takes any number: one at a time"
    (a,) = flying
    delivery.answered(a, OK, 0)
    flying |= take_all(delivery)
    assert numbers(flying) == [(b"a", 0), (b"b", 1), (b"c", 2)]
    assert {check_batch(batch.head + batch.tail, 0, batch.size).producer for batch in flying.values()} == {99 << 16}


def test_what_was_never_sent_times_out_as_not_stored_and_leaves_no_gap() -> None:
    delivery = make(timeout_ms=1000)
    line = delivery.open_line(0, 1 << 16)
    put(delivery, line, b"a", now_ms=0)
    put(delivery, line, b"b", now_ms=500)
    (settled,) = delivery.expire(1000, "nobody listens")
    assert isinstance(settled.error, RequestTimeout)
    assert "were not stored: nobody listens" in str(settled.error)
    assert not settled.in_doubt
    assert numbers(take_all(delivery, 1000)) == [(b"b", 0)]


def test_what_was_refused_before_its_last_try_was_lost_times_out_with_the_refusal() -> None:
    delivery = make(timeout_ms=1000)
    line = delivery.open_line(0, 1 << 16)
    put(delivery, line, b"a")
    ((first, _),) = take_all(delivery).items()
    delivery.answered(first, Throttled("slow down"), 10)
    take_all(delivery, 500)
    delivery.disconnected()
    (settled,) = delivery.expire(1000, "nobody listens")
    assert settled.in_doubt
    assert str(settled.error).endswith(
        "may or may not be stored: nobody listens; before that it was refused: slow down"
    )
    assert isinstance(settled.error.__cause__, Throttled)


def test_the_batch_behind_a_doubtful_one_finds_out_whether_that_was_stored() -> None:
    delivery = make(timeout_ms=1000)
    line = proven_line(delivery)
    put(delivery, line, b"a", now_ms=0)
    put(delivery, line, b"b", now_ms=600)
    take_all(delivery, 600)
    put(delivery, line, b"c", now_ms=700)
    delivery.disconnected()
    (settled,) = delivery.expire(1000)
    assert (settled.batch.ticket, settled.in_doubt) == (b"a", True)
    probe = take_all(delivery, 1000)
    assert numbers(probe) == [(b"b", 2)]  # alone, under its old number

    delivery.answered(next(iter(probe)), OutOfSequence("expected 1"), 1000)  # so "a" was not stored
    assert delivery.wants_identity
    delivery.renew(5 << 16)
    assert numbers(take_all(delivery, 1000)) == [(b"b", 0)]


def test_a_doubtful_batch_that_is_refused_later_is_not_given_up_to_the_next_one() -> None:
    """If its number went to the next batch, the broker would take that for a repetition and drop it."""
    delivery = make()
    line = proven_line(delivery)
    put(delivery, line, b"a")
    put(delivery, line, b"b")
    take_all(delivery)
    delivery.disconnected()
    ((correlation, _),) = take_all(delivery).items()
    (settled,) = delivery.answered(correlation, QuotaExceeded("full"), 0)
    assert settled.in_doubt
    assert numbers(take_all(delivery)) == [(b"b", 2)]


def test_an_answer_that_is_missing_too_long_means_a_dead_connection() -> None:
    delivery = make(timeout_ms=1000)
    line = proven_line(delivery)
    put(delivery, line, b"a", now_ms=0)
    take_all(delivery, 10)
    assert not delivery.overdue(1009)
    assert delivery.overdue(1010)


def test_without_acks_a_batch_is_forgotten_when_it_is_taken() -> None:
    delivery = make(confirmed=False)
    line = delivery.open_line(0, 0)
    put(delivery, line, b"a")
    mark = delivery.marks()[0]
    assert len(take_all(delivery)) == 1
    assert delivery.idle
    assert delivery.buffered_bytes == 0
    assert mark.settled


def test_partitions_take_turns() -> None:
    delivery = make()
    lines = [delivery.open_line(number, 0) for number in range(3)]
    for line in lines:
        for number in range(2):
            put(delivery, line, b"%d" % number)
    order = [batch.line.partition for batch in take_all(delivery).values()]
    assert order == [0, 1, 2, 0, 1, 2]


def test_the_numbers_wrap_around() -> None:
    delivery = make()
    line = delivery.open_line(0, 1 << 16)
    line.next_sequence = 0xFFFF_FFFF
    put(delivery, line, b"a", count=2)
    assert line.next_sequence == 1


class ModelBroker:
    """Stores as the real one does: in sequence, repetitions recognised, an unknown producer starts anywhere."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.known: dict[int, list[tuple[int, int]]] = {}

    def publish(self, batch: SealedBatch) -> PublishResult | MillstreamError:
        header = check_batch(batch.head + batch.tail, 0, batch.size)
        ranges = self.known.setdefault(header.producer, [])
        this = (header.first_sequence, header.first_sequence + header.count)
        if this in ranges[-16:]:
            return OK
        if ranges and ranges[-1][1] != this[0]:
            return OutOfSequence("gap")
        ranges.append(this)
        self.stored.append(batch.ticket)
        return OK


@given(seed=st.integers(0, 10**9), window=st.integers(1, 16))
def test_any_history_of_faults_stores_each_message_once_and_in_order(seed: int, window: int) -> None:
    """Refusals, lost connections before and after storing, forgetful moments: confirmed = stored, once, in order."""
    source = random.Random(seed)
    delivery, broker = make(window=window, timeout_ms=10**9), ModelBroker()
    line = delivery.open_line(0, 1 << 16)
    sent, confirmed, failed, identity, now_ms = 0, [], [], 1, 0
    wire: list[tuple[int, PublishResult | MillstreamError]] = []
    doubtful: set[bytes] = set()

    def settle(outcomes: list[Settled]) -> None:
        for outcome in outcomes:
            if outcome.batch.count > 1 and isinstance(outcome.error, QuotaExceeded) and not outcome.in_doubt:
                head, tail = encode_parts([b""], base_timestamp_us=1, producer=line.producer)
                delivery.put_instead(outcome.batch, [(head, tail, outcome.batch.ticket)], now_ms)
                continue
            (confirmed if outcome.error is None else failed).append(outcome.batch.ticket)
            if outcome.in_doubt:
                doubtful.add(outcome.batch.ticket)

    while len(confirmed) + len(failed) < 40:
        now_ms += 100
        if source.random() < 0.1 and not any(batch.doubtful for batch in line.ready):
            now_ms += 2000
            broker.known.clear()  # as after a day; what is in doubt longer than that cannot be recognised
        if sent < 40:
            put(delivery, line, b"%03d" % sent, now_ms=now_ms, count=source.randint(1, 3))
            sent += 1
        if delivery.wants_identity:
            identity += 1
            delivery.renew(identity << 16)
        while (taken := delivery.take(now_ms)) is not None:
            correlation, batch = taken
            chance = source.random() if sent < 40 else 1.0
            if chance < 0.05:
                wire.append((correlation, Throttled("slow")))
            elif chance < 0.08:
                wire.append((correlation, QuotaExceeded("no")))
            else:
                wire.append((correlation, broker.publish(batch)))
        if source.random() < 0.5:  # a refusal comes at once, the others wait for the disk
            wire.sort(key=lambda it: isinstance(it[1], PublishResult))
        if sent < 40 and source.random() < 0.15:
            for answer in wire[: source.randint(0, len(wire))]:
                settle(delivery.answered(*answer, now_ms))
            wire.clear()
            delivery.disconnected()
            continue
        for answer in wire:
            settle(delivery.answered(*answer, now_ms))
        wire.clear()
    assert delivery.idle
    assert delivery.buffered_bytes == 0
    assert broker.stored == sorted(set(broker.stored)), "reordered or stored twice"
    assert set(confirmed) <= set(broker.stored), "confirmed but not stored"
    assert set(broker.stored) - set(confirmed) <= doubtful, "stored, but reported as certainly not stored"
    assert sorted(confirmed + failed) == [b"%03d" % number for number in range(40)]


@pytest.mark.parametrize("lines", [1, 50])
def test_flush_marks_are_settled_when_everything_before_them_is(lines: int) -> None:
    delivery = make()
    for number in range(lines):
        line = delivery.open_line(number, 0)
        put(delivery, line, b"a")
        put(delivery, line, b"b")
    marks = delivery.marks()
    assert not settled_all(marks)
    for correlation in reversed(take_all(delivery)):
        assert not settled_all(marks)
        delivery.answered(correlation, OK, 0)
    assert settled_all(marks)


def test_a_batch_that_is_refused_for_now_is_waited_for_whatever_was_accepted_behind_it() -> None:
    delivery = make()
    line = proven_line(delivery)
    put(delivery, line, b"a")
    put(delivery, line, b"b")
    marks = delivery.marks()
    refused, accepted = take_all(delivery)
    delivery.answered(refused, Throttled("slow"), 0)
    delivery.answered(accepted, OK, 0)
    assert not settled_all(marks)
    (again,) = take_all(delivery, now_ms=500)
    delivery.answered(again, OK, 500)
    assert settled_all(marks)


def test_a_batch_that_is_late_behind_one_under_way_waits_for_its_answer_and_not_in_circles() -> None:
    """Nothing is due before the missing answer: whoever slept until the passed deadline would never sleep."""
    delivery = make(window=1)
    line = proven_line(delivery)
    put(delivery, line, b"under way")
    put(delivery, line, b"late")
    ((correlation, _),) = take_all(delivery, now_ms=900).items()
    assert delivery.expire(1200) == []
    assert delivery.next_due_ms(1200) == 700, "the answer is missing from 1900 on"
    delivery.answered(correlation, OK, 1300)
    (settled,) = delivery.expire(1300)
    assert isinstance(settled.error, RequestTimeout)
