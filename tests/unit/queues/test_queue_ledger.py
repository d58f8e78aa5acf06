"""Leases, settles, retries and expiry in log order.  For any history at all see property/test_queue_model.py."""

from __future__ import annotations

import msgspec
import pytest

from millstream.dead_letters import (
    MAX_DELIVERIES_EXCEEDED,
    MAX_RETRIES_EXCEEDED,
    POISON,
    REJECTED,
    TOTAL_TIMEOUT_EXCEEDED,
    TTL_EXPIRED,
)
from millstream.options import LEASE_MS, MAX_RETRIES
from millstream.policies import QueuePolicy
from millstream.queues.ledger import Ledger
from millstream.queues.records import Attempt, Lease, Result, Rules
from millstream.retries import PROFILES, RetryPolicy
from millstream.topics import TopicConfig
from tests.queue_log import SECOND, FakeLog, granted, make_ledger

MS = 1_000


@pytest.fixture
def log() -> FakeLog:
    log = FakeLog()
    log.add(10)
    log.add(10)
    return log


def take(ledger: Ledger, log: FakeLog, want: int = 1, *, consumer: str = "ann", now_us: int = 0) -> Lease:
    """One lease."""
    (lease,) = ledger.lease(log, consumer=consumer, want=want, now_us=now_us, alone=True).leases
    return lease


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_lease_spans_batches_and_is_one_object(log: FakeLog) -> None:
    lease = take(make_ledger(), log, 15)
    assert (lease.base, lease.granted) == (0, 2**15 - 1)
    assert (lease.delivery, lease.failures, lease.deadline_us) == (1, 0, 30 * SECOND)


def test_a_lease_ends_where_its_bytes_are_used_up(log: FakeLog) -> None:
    ledger = make_ledger()
    assert granted(ledger.lease(log, consumer="ann", want=20, now_us=0, bytes_max=350)) == [0, 1, 2]
    assert granted(ledger.lease(log, consumer="ann", want=20, now_us=0, bytes_max=1)) == [3], "one always goes"
    assert granted(ledger.lease(log, consumer="ann", want=20, now_us=0, bytes_max=900)) == list(range(4, 13))


def test_an_ack_in_parts_is_an_ack(log: FakeLog) -> None:
    ledger = make_ledger()
    lease = take(ledger, log, 10)
    assert ledger.ack(lease.nonce, 3).result == Result.DONE
    assert ledger.ack(lease.nonce, 4, 0b1011).result == Result.DONE
    assert (ledger.committed, ledger.counts(20).leased) == (0, 6)
    assert ledger.ack(lease.nonce).result == Result.DONE
    assert (ledger.committed, ledger.counts(20).leased) == (10, 0)


def test_repeating_an_ack_is_a_success_also_when_the_lease_is_over(log: FakeLog) -> None:
    ledger = make_ledger()
    lease = take(ledger, log, 2)
    for _ in range(2):
        assert ledger.ack(lease.nonce, 1).result == Result.DONE
    for _ in range(2):
        assert ledger.ack(lease.nonce).result == Result.DONE
    assert ledger.ack(lease.nonce, 0, 0b11).result == Result.DONE


def test_the_ack_of_a_message_that_became_a_dead_letter_is_too_late(log: FakeLog) -> None:
    """It would be settled twice: done for its consumer, and a dead letter for everybody else."""
    ledger = make_ledger(retry=RetryPolicy(max_retries=0))
    lease = take(ledger, log, 5)
    assert ledger.ack(lease.nonce, 1).result == Result.DONE
    assert ledger.reject(lease.nonce, 2, reason="", now_us=0).result == Result.DEAD
    assert ledger.ack(lease.nonce, 2).result == Result.INVALID
    (dead,) = ledger.expire(lease.deadline_us)
    assert (dead.base, dead.bits) == (0, 0b11001)
    for offset in (0, 2, 3, 4):
        assert ledger.ack(lease.nonce, offset).result == Result.INVALID
    assert ledger.ack(lease.nonce, 1).result == Result.DONE, "that one was acked in time"


def test_late_foreign_and_invented_settles_change_nothing(log: FakeLog) -> None:
    ledger = make_ledger()
    late = take(ledger, log, 2)
    ledger.expire(late.deadline_us)
    mine = take(ledger, log, 2, consumer="bob", now_us=late.deadline_us)
    before = ledger.counts(20), ledger.snapshot()
    for nonce, consumer in ((late.nonce, "ann"), (mine.nonce, "ann"), (999, None)):
        assert ledger.ack(nonce, consumer=consumer).result == Result.INVALID
        assert ledger.nack(nonce, now_us=0, consumer=consumer).result == Result.INVALID
        assert ledger.reject(nonce, now_us=0, consumer=consumer).result == Result.INVALID
        assert ledger.extend(nonce, 1000, now_us=0, consumer=consumer).result == Result.INVALID
        assert ledger.release(nonce, consumer=consumer).result == Result.INVALID
    # Offsets that the lease does not have, as far away as an offset can be.
    for base, bits in ((mine.base, 0b111), (1 << 60, 1), (0, 1 << 70), (mine.base, 0)):
        assert ledger.ack(mine.nonce, base, bits).result == Result.INVALID
    assert (ledger.counts(20), ledger.snapshot()) == before


def test_what_was_nacked_can_no_longer_be_acked(log: FakeLog) -> None:
    ledger = make_ledger()
    lease = take(ledger, log, 2)
    ledger.nack(lease.nonce, 0, now_us=0)
    assert ledger.ack(lease.nonce, 0, 0b11).result == Result.INVALID
    assert ledger.counts(20).leased == 1, "its neighbour was not acked either"


@pytest.mark.parametrize("ack_first", [True, False])
def test_an_ack_and_a_deadline_at_the_same_instant_never_both_win(log: FakeLog, ack_first: bool) -> None:
    ledger = make_ledger()
    lease = take(ledger, log)
    if ack_first:
        assert ledger.ack(lease.nonce).result == Result.DONE
        ledger.expire(lease.deadline_us)
        assert (ledger.committed, ledger.counts(20).waiting) == (1, 0)
    else:
        ledger.expire(lease.deadline_us)
        assert ledger.ack(lease.nonce).result == Result.INVALID
        assert (ledger.committed, ledger.counts(20).waiting) == (0, 1)


def test_a_lease_is_extended_up_to_the_limit_and_never_shortened(log: FakeLog) -> None:
    ledger = make_ledger(processing_ms=60_000)
    lease = take(ledger, log)
    assert ledger.extend(lease.nonce, 10_000, now_us=1 * SECOND).lasting_ms == 29_000
    assert lease.deadline_us == 30 * SECOND
    assert ledger.extend(lease.nonce, 40_000, now_us=10 * SECOND).lasting_ms == 40_000
    assert lease.deadline_us == 50 * SECOND
    assert ledger.extend(lease.nonce, 40_000, now_us=49 * SECOND).lasting_ms == 11_000
    assert lease.deadline_us == 60 * SECOND
    assert not ledger.expire(59 * SECOND)
    assert ledger.counts(20).leased == 1
    assert ledger.next_wakeup_us() == 60 * SECOND
    ledger.expire(60 * SECOND)
    assert ledger.counts(20).leased == 0


def test_the_lease_time_of_a_message_wins_over_its_consumers(log: FakeLog) -> None:
    log = FakeLog()
    log.add(3, headers=[{}, {LEASE_MS: "5000"}, {LEASE_MS: "soon"}], options=True)
    delivery = make_ledger().lease(log, consumer="ann", want=3, now_us=0, lease_ms=7_000)
    assert sorted((lease.deadline_us // SECOND, granted([lease])) for lease in delivery.leases) == [
        (5, [1]),
        (7, [0, 2]),
    ]


@pytest.mark.parametrize("name", [LEASE_MS, MAX_RETRIES])
def test_a_number_without_end_in_an_option_keeps_nothing_from_being_leased(name: str) -> None:
    log = FakeLog()
    log.add(2, headers=[{name: "9" * 5_000}, {}], options=True)
    assert granted(make_ledger().lease(log, consumer="ann", want=2, now_us=0)) == [0, 1]


def test_what_comes_back_goes_first_and_to_somebody_else(log: FakeLog) -> None:
    ledger = make_ledger()
    take(ledger, log, 3)
    ledger.return_consumer("ann", 0)
    assert granted(ledger.lease(log, consumer="ann", want=1, now_us=0)) == [3], "not to who had it"
    assert granted(ledger.lease(log, consumer="bob", want=2, now_us=0)) == [0, 1], "oldest first"
    assert granted(ledger.lease(log, consumer="ann", want=1, now_us=0, alone=True)) == [2], (
        "unless nobody else is there"
    )


def test_what_comes_back_ends_where_its_bytes_are_used_up(log: FakeLog) -> None:
    ledger = make_ledger()
    take(ledger, log, 20)
    ledger.return_consumer("ann", 0)
    assert granted(ledger.lease(log, consumer="bob", want=20, now_us=0, bytes_max=350)) == [0, 1, 2]


def test_what_nobody_else_takes_within_a_second_is_open_to_all(log: FakeLog) -> None:
    ledger = make_ledger()
    take(ledger, log)
    ledger.return_consumer("ann", 0)
    assert ledger.next_wakeup_us() == 1 * SECOND
    assert granted(ledger.lease(log, consumer="ann", want=1, now_us=1 * SECOND)) == [0]


def test_released_messages_were_never_delivered(log: FakeLog) -> None:
    ledger = make_ledger()
    lease = take(ledger, log, 3)
    ledger.release(lease.nonce, 1, 0b11)
    again = take(ledger, log, 2)
    assert (granted([again]), again.delivery) == ([1, 2], 1)
    assert ledger.drain() == [], "nothing durable has happened"


def test_a_consumer_that_goes_away_returns_its_leases_and_is_no_failure(log: FakeLog) -> None:
    ledger = make_ledger(max_deliveries=3)
    for delivery in (1, 2, 3):
        lease = take(ledger, log, 2, consumer=f"c{delivery}")
        assert (lease.delivery, lease.failures) == (delivery, 0)
        dead = ledger.return_consumer(f"c{delivery}", delivery)
    assert [(some.reason, list(some.offsets())) for some in dead] == [(MAX_DELIVERIES_EXCEEDED, [0, 1])]
    assert [attempt.kind for attempt in dead[0].history.attempts] == ["returned"] * 3


# --- retries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "waits_s"),
    [
        ("standard", [1, 2, 4]),
        ("durable", [5, 10, 20, 40, 80, 160, 300, 300, 300, 300]),
        ("eager", [0, 1, 4, 16, 64]),
        ("simple", [0, 0, 0]),
    ],
)
def test_retries_follow_their_profile_and_end_in_a_dead_letter(log: FakeLog, profile: str, waits_s: list[int]) -> None:
    ledger = make_ledger(retry=PROFILES[profile])
    now_us = 0
    for wait_s in waits_s:
        lease = take(ledger, log, now_us=now_us)
        assert lease.base == 0
        assert ledger.nack(lease.nonce, now_us=now_us, reason="db down").result == Result.RETRIED
        assert ledger.counts(20).waiting == (wait_s > 0)
        if wait_s:
            assert ledger.look(0, 20).due_us == now_us + wait_s * SECOND
            ledger.expire(now_us + wait_s * SECOND - 1)
            assert ledger.counts(20).waiting == 1
        now_us += wait_s * SECOND
        ledger.expire(now_us)
    outcome = ledger.nack(take(ledger, log, now_us=now_us).nonce, now_us=now_us, reason="db gone")
    assert outcome.result == Result.DEAD
    assert (outcome.dead[0].reason, outcome.dead[0].error) == (MAX_RETRIES_EXCEEDED, "db gone")
    assert outcome.dead[0].history.failures == len(waits_s) + 1
    assert ledger.counts(20).totals["dead"] == 1


def test_jitter_takes_its_share_off() -> None:
    log = FakeLog()
    log.add(1)
    ledger = make_ledger(draw=lambda: 0.5, retry=RetryPolicy(jitter=0.4))
    ledger.nack(take(ledger, log).nonce, now_us=0)
    assert ledger.look(0, 1).due_us == 800 * MS


def test_the_wish_of_a_nack_wins_over_the_policy(log: FakeLog) -> None:
    ledger = make_ledger()
    ledger.nack(take(ledger, log).nonce, now_us=0, retry_after_ms=123_000)
    assert ledger.look(0, 20).due_us == 123 * SECOND


def test_a_message_may_say_how_often_it_is_tried(log: FakeLog) -> None:
    log = FakeLog()
    log.add(2, headers=[{MAX_RETRIES: "0"}, {}], options=True)
    ledger = make_ledger()
    results = [
        ledger.nack(some.nonce, now_us=0).result for some in ledger.lease(log, consumer="a", want=2, now_us=0).leases
    ]
    assert results == [Result.DEAD, Result.RETRIED]


def test_the_total_time_ends_retries_before_their_number_does() -> None:
    log = FakeLog()
    log.add(1, append_time_us=SECOND // 2)
    log.add(1, append_time_us=8 * SECOND)
    ledger = make_ledger(retry=RetryPolicy(max_retries=9, total_ms=10_000))
    old, young = ledger.lease(log, consumer="ann", want=2, now_us=9 * SECOND).leases
    assert ledger.nack(old.nonce, now_us=11 * SECOND).dead[0].reason == TOTAL_TIMEOUT_EXCEEDED
    assert ledger.nack(young.nonce, now_us=11 * SECOND).result == Result.RETRIED


def test_a_rejected_message_is_dead_at_once(log: FakeLog) -> None:
    ledger = make_ledger()
    lease = take(ledger, log, 3)
    outcome = ledger.reject(lease.nonce, 1, now_us=5, reason="bad payload")
    assert outcome.result == Result.DEAD
    dead = outcome.dead[0]
    assert (list(dead.offsets()), dead.reason, dead.error) == ([1], REJECTED, "bad payload")
    assert dead.history.attempts == (Attempt("ann", 0, 5, "reject", "bad payload"),)
    assert ledger.drain() == [], "the fact travels with the dead letter"


def test_the_history_of_a_message_is_kept_but_not_all_of_it(log: FakeLog) -> None:
    ledger = make_ledger(retry=RetryPolicy(max_retries=1000, initial_ms=0), max_deliveries=0)
    for number in range(30):
        lease = take(ledger, log, 10, consumer=f"c{number}", now_us=number * SECOND)
        if number % 2:
            ledger.nack(lease.nonce, now_us=number * SECOND + 1, reason=f"reason {number}")
        else:
            ledger.expire(lease.deadline_us)
    history = ledger.look(7, 20).history
    assert (history.deliveries, history.failures, history.first_us) == (30, 30, 0)
    assert [attempt.consumer for attempt in history.attempts] == [f"c{number}" for number in range(10, 30)]
    assert history.attempts[0] == Attempt("c10", 10 * SECOND, 40 * SECOND, "timeout", "no answer within 30s")
    assert history is ledger.look(3, 20).history, "all of a lease share one history"


def test_poison_rules_apply_only_where_they_are_wanted(log: FakeLog) -> None:
    results = {}
    for poison in (False, True):
        ledger = make_ledger(poison=poison, retry=PROFILES["simple"])
        ledger.nack(take(ledger, log, consumer="ann").nonce, now_us=0, reason="no such customer")
        outcome = ledger.nack(take(ledger, log, consumer="bob").nonce, now_us=0, reason="no such customer")
        results[poison] = outcome.dead[0].reason if outcome.dead else outcome.result
    assert results == {False: Result.RETRIED, True: POISON}


def test_messages_that_failed_for_one_reason_share_its_words(log: FakeLog) -> None:
    """There may be a million of them, and each brings words of its own."""
    ledger = make_ledger()
    for number in range(2):
        lease = take(ledger, log, now_us=number)
        ledger.nack(lease.nonce, now_us=number, reason=" ".join(["no", "answer"]), retry_after_ms=1000)
    again = make_ledger()
    for fact in ledger.snapshot():
        again.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(fact)))
    for some in (ledger, again):
        first, second = (some.look(offset, log.end).history.attempts[0] for offset in range(2))
        assert first.reason == "no answer"
        assert first.reason is second.reason
        assert first.consumer is second.consumer


# --- expiry and other ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [False, True])
def test_expired_messages_are_dropped_or_dead_when_they_are_met(dead: bool) -> None:
    log = FakeLog()
    log.add(4, expiry_us=[0, 5 * SECOND, 6 * SECOND, 0])
    ledger = make_ledger(expired_are_dead=dead)
    delivery = ledger.lease(log, consumer="ann", want=4, now_us=5 * SECOND)
    assert granted(delivery) == [0, 2, 3]
    assert [(some.reason, list(some.offsets())) for some in delivery.dead] == ([(TTL_EXPIRED, [1])] if dead else [])
    assert 1 in ledger.settled


def test_a_message_that_waits_for_a_retry_can_expire_too() -> None:
    log = FakeLog()
    log.add(1, expiry_us=[5 * SECOND])
    ledger = make_ledger()
    ledger.nack(take(ledger, log).nonce, now_us=0, retry_after_ms=5_000)
    assert not ledger.lease(log, consumer="ann", want=1, now_us=5 * SECOND, alone=True).leases
    assert ledger.counts(1).totals["expired"] == 1


def test_a_topics_ttl_counts_from_the_append_and_a_sweep_finds_what_is_past_it() -> None:
    log = FakeLog()
    log.add(3, append_time_us=0)
    log.add(3, append_time_us=4 * SECOND)
    ledger = make_ledger(message_ttl_ms=5_000)
    ledger.sweep(log, 5 * SECOND)
    assert ledger.committed == 3
    assert granted(ledger.lease(log, consumer="ann", want=9, now_us=5 * SECOND)) == [3, 4, 5]


def test_what_retention_takes_is_nobodys_any_more(log: FakeLog) -> None:
    ledger = make_ledger()
    lease = take(ledger, log, 12)
    ledger.trim(10)
    assert (ledger.committed, ledger.counts(20).leased) == (10, 2)
    assert ledger.ack(lease.nonce).result == Result.DONE
    assert ledger.committed == 12


def test_purge_settles_what_is_leased_and_what_waits(log: FakeLog) -> None:
    ledger = make_ledger()
    take(ledger, log, 2)
    ledger.nack(take(ledger, log, 2).nonce, now_us=0)
    assert ledger.purge(20) == 20
    assert ledger.counts(20)[:4] == (0, 0, 0, 20)
    assert ledger.next_wakeup_us() is None or not ledger.expire(60 * SECOND)


def test_seeking_back_delivers_again(log: FakeLog) -> None:
    ledger = make_ledger()
    ledger.ack(take(ledger, log, 10).nonce)
    held = take(ledger, log, 2)
    ledger.start_at(5)
    assert ledger.ack(held.nonce).result == Result.INVALID
    assert granted(ledger.lease(log, consumer="ann", want=2, now_us=0)) == [5, 6]


def test_gaps_in_the_log_are_stepped_over() -> None:
    log = FakeLog()
    log.add(2)
    log.end = 5  # three messages were lost here
    log.add(2)
    ledger = make_ledger()
    for _ in range(2):
        ledger.ack(take(ledger, log, 9).nonce)
    assert ledger.committed == 7
    assert ledger.counts(7).totals == {"acked": 4, "gone": 3}


def test_what_cannot_be_read_just_now_is_not_gone() -> None:
    log = FakeLog()
    log.add(2)
    log.add(2)
    ledger = make_ledger()
    ledger.nack(take(ledger, log, 4).nonce, now_us=0, retry_after_ms=0)
    log.cold = {0}
    assert not ledger.lease(log, consumer="bob", want=4, now_us=0).leases
    log.cold = set()
    assert granted(ledger.lease(log, consumer="bob", want=4, now_us=0)) == [0, 1, 2, 3]


# --- facts -----------------------------------------------------------------------------------------------------------


def test_acks_of_many_leases_are_one_fact(log: FakeLog) -> None:
    ledger = make_ledger()
    for lease in [take(ledger, log, 5) for _ in range(4)]:
        ledger.ack(lease.nonce)
    assert ledger.drain() == [["settled", "acked", [0, 20]]]
    assert ledger.drain() == []


def test_a_snapshot_of_a_long_queue_is_short() -> None:
    log = FakeLog()
    log.add(100_000)
    ledger = make_ledger()
    first = take(ledger, log, 1)
    while leases := ledger.lease(log, consumer="ann", want=10_000, now_us=0).leases:
        ledger.ack(leases[0].nonce)
    assert ledger.committed == 0
    (start, settled, _) = ledger.snapshot()
    assert start == ["start", 0, 0]
    assert settled == ["settled", "", [1, 99_999]]
    ledger.ack(first.nonce)
    assert len(ledger.snapshot()) == 2


def test_rules_take_from_the_topic_what_the_group_leaves_open() -> None:
    topic = TopicConfig(lease_ms=5_000, retry="eager", message_ttl_ms=9, on_expiry="dead_letter", lanes="strict")
    rules = Rules.of(QueuePolicy(ordering="key"), topic)
    assert (rules.lease_ms, rules.retry, rules.ordering) == (5_000, PROFILES["eager"], "key")
    assert (rules.message_ttl_ms, rules.expired_are_dead, rules.lanes) == (9, True, ())
    assert Rules.of(QueuePolicy(lease_ms=1_000, retry="simple"), topic).retry == PROFILES["simple"]
