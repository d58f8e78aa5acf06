"""Queues in rare company: disks that cannot be read, logs that were rewritten or shortened, clocks that were set."""

from __future__ import annotations

from itertools import count

import pytest

from millstream.queues.ledger import Ledger
from tests.queue_log import SECOND, FakeBatch, FakeLog, granted, make_ledger


def test_in_lanes_what_compaction_took_from_the_front_is_stepped_over() -> None:
    log, ledger = FakeLog(), make_ledger(lanes=())
    log.add(1)  # normal: it stays at the front while the others go
    log.add(2, priorities=[0, 0])
    (lease,) = ledger.lease(log, consumer="c", want=1, now_us=0).leases
    assert lease.base == 1
    log.replace(FakeBatch([1, 2], priorities=[0, 0]))
    ledger.rewritten()
    for some in (lease, *ledger.lease(log, consumer="c", want=10, now_us=0).leases):
        assert 0 not in granted([some])
        ledger.ack(some.nonce)
    ledger.lease(log, consumer="c", want=10, now_us=0)
    assert ledger.committed == 3
    assert ledger.counts(3).ready == 0


def test_a_lane_without_messages_does_not_read_the_backlog_of_another() -> None:
    log, ledger = FakeLog(), make_ledger()
    for _ in range(1000):
        log.add(100, priorities=[0] * 100)
    reads = 0
    read = log.batch_at

    def counted(offset: int) -> FakeBatch | None:
        nonlocal reads
        reads += 1
        return read(offset)

    log.batch_at = counted  # type: ignore[method-assign]
    assert len(granted(ledger.lease(log, consumer="c", want=200, now_us=0))) == 200
    assert reads < 50


@pytest.mark.parametrize(("asked_ms", "set_back_s"), [(200, 3600), (200, 0), (86_400_000, 3600)])
def test_after_a_restart_no_wait_is_longer_than_it_was_when_it_began(asked_ms: int, set_back_s: int) -> None:
    log, ledger = FakeLog(), make_ledger()
    log.add(1)
    failed_us = 10_000 * SECOND
    (lease,) = ledger.lease(log, consumer="c", want=1, now_us=failed_us - SECOND).leases
    ledger.nack(lease.nonce, now_us=failed_us, retry_after_ms=asked_ms)
    now_us = failed_us - set_back_s * SECOND + 100_000
    twin = Ledger(ledger.rules, draw=lambda: 0.0, draw_nonce=count(1).__next__)
    for fact in ledger.drain():
        twin.apply(fact)
    twin.open(now_us)
    due_us = twin.look(0, 1).due_us
    assert due_us <= now_us + asked_ms * 1000
    assert due_us >= min(now_us, failed_us) + asked_ms * 1000 - 100_000, "and it is not cut short either"


def test_what_was_acked_before_a_purge_is_not_counted_as_purged_after_a_restart() -> None:
    log, ledger = FakeLog(), make_ledger()
    log.add(10)
    (lease,) = ledger.lease(log, consumer="c", want=4, now_us=0).leases
    ledger.ack(lease.nonce, 2, 0b11)
    ledger.purge(10)
    twin = Ledger(ledger.rules, draw=lambda: 0.0, draw_nonce=count(1).__next__)
    for fact in ledger.drain():
        twin.apply(fact)
    twin.open()
    assert twin.counts(10).totals == ledger.counts(10).totals == {"acked": 2, "purged": 8}
