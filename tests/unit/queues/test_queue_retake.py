"""Retaking: a consumer that had messages before has the very same ones again."""

from __future__ import annotations

import pytest

from millstream.queues.ledger import Ledger
from millstream.queues.records import Rules
from tests.queue_log import SECOND, FakeLog, granted, make_ledger


@pytest.fixture
def log() -> FakeLog:
    log = FakeLog()
    log.add(10)
    log.add(10)
    return log


def retaken(
    ledger: Ledger, log: FakeLog, *wanted: tuple[int, int], consumer: str = "ann", now_us: int = 0
) -> list[int]:
    return sorted(granted(ledger.retake(log, wanted, consumer=consumer, now_us=now_us)))


def fresh(ledger: Ledger, log: FakeLog, want: int = 20, *, consumer: str = "bob", now_us: int = 0) -> list[int]:
    return granted(ledger.lease(log, consumer=consumer, want=want, now_us=now_us, alone=True))


def test_messages_from_the_middle_are_taken_and_the_others_are_next(log: FakeLog) -> None:
    ledger = make_ledger()
    assert retaken(ledger, log, (3, 5), (12, 14)) == [3, 4, 12, 13]
    assert (ledger.leased, ledger.counts(log.end).ready) == (4, 16)
    assert fresh(ledger, log) + fresh(ledger, log) == [n for n in range(20) if n not in (3, 4, 12, 13)]


def test_what_came_back_is_taken_with_its_history_whether_it_waits_or_not(log: FakeLog) -> None:
    ledger = make_ledger()
    (lease,) = ledger.lease(log, consumer="ann", want=6, now_us=0).leases
    ledger.nack(lease.nonce, 4, 0b11, now_us=0, retry_after_ms=60_000)
    ledger.return_consumer("ann", SECOND)
    assert retaken(ledger, log, (1, 6), now_us=SECOND) == [1, 2, 3, 4, 5]
    counts = ledger.counts(log.end)
    assert (counts.leased, counts.waiting, counts.ready) == (5, 0, 15)
    failures = {offset: some.failures for some in ledger.leases() for offset in granted_by(some)}
    assert failures == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1}
    assert all(some.delivery == 2 for some in ledger.leases())
    assert fresh(ledger, log, 2, now_us=3 * SECOND) == [0, 6], "what is left of what came back goes first"


def granted_by(lease: object) -> list[int]:
    return [lease.base + i for i in range(lease.span) if lease.granted >> i & 1]  # type: ignore[attr-defined]


def test_what_others_have_or_is_settled_is_not_taken(log: FakeLog) -> None:
    ledger = make_ledger()
    (lease,) = ledger.lease(log, consumer="bob", want=4, now_us=0).leases
    ledger.ack(lease.nonce, 0)
    assert retaken(ledger, log, (0, 6)) == [4, 5]
    assert retaken(ledger, log, (0, 6)) == [], "nor is what it holds already"


def test_what_is_not_there_yet_is_not_taken(log: FakeLog) -> None:
    ledger = make_ledger()
    assert retaken(ledger, log, (18, 25)) == [18, 19]
    log.add(10)
    assert fresh(ledger, log, 40) == [*range(18), *range(20, 30)]


def test_keys_of_what_is_taken_are_held() -> None:
    log = FakeLog()
    log.add(4, keys=[b"a", b"b", b"a", b"b"])
    ledger = make_ledger(ordering="key")
    assert retaken(ledger, log, (1, 2)) == [1]
    assert fresh(ledger, log) == [0], "b waits for what was taken"
    (mine,) = ledger.leases_of("ann")
    ledger.ack(mine.nonce)
    assert fresh(ledger, log) == [3]


def test_a_strict_queue_gives_its_first_message_and_no_other() -> None:
    log = FakeLog()
    log.add(5)
    ledger = make_ledger(ordering="strict")
    assert retaken(ledger, log, (2, 4)) == []
    assert retaken(ledger, log, (0, 4)) == [0]
    assert retaken(ledger, log, (0, 4)) == []


def test_priorities_stay_what_they_are() -> None:
    log = FakeLog()
    log.add(4, priorities=[0, 2, 4, 2])
    ledger = make_ledger()
    assert retaken(ledger, log, (0, 3)) == [0, 1, 2]
    assert {granted_by(lease)[0]: lease.terms.lane for lease in ledger.leases()} == {0: 0, 1: 2, 2: 4}
    assert fresh(ledger, log) == [3]


def test_what_has_expired_is_not_taken() -> None:
    log = FakeLog()
    log.add(3, expiry_us=[0, 5, 0])
    ledger = make_ledger()
    assert retaken(ledger, log, (0, 3), now_us=10) == [0, 2]
    assert ledger.settled.bits(0, 3) == 0b010


def test_a_restart_forgets_no_more_than_a_lease(log: FakeLog) -> None:
    ledger = make_ledger()
    retaken(ledger, log, (3, 9))
    (lease,) = ledger.leases()
    ledger.ack(lease.nonce, 4)
    facts = ledger.drain()
    again = Ledger(Rules(), draw=lambda: 0.0, draw_nonce=iter(range(100)).__next__)
    for fact in facts:
        again.apply(fact)
    again.open(0)
    assert retaken(again, log, (3, 9)) == [3, 5, 6, 7, 8]
