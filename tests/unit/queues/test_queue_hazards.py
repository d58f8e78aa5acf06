"""Queues in rare company: disks that cannot be read, logs that were rewritten or shortened, clocks that were set."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from millstream.queues.ledger import Ledger
from millstream.queues.records import FRESH, PLAIN, Attempt, History, Parcel, Result, Rules
from millstream.queues.returned import Returned
from millstream.retries import parse_retry
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


def _steps(work: Callable[[], None]) -> int:
    """How many lines of Python it takes."""
    taken = 0

    def count_lines(*_: object) -> Any:
        nonlocal taken
        taken += 1
        return count_lines

    before = sys.gettrace()
    sys.settrace(count_lines)
    try:
        work()
    finally:
        sys.settrace(before)
    return taken


def test_finding_what_comes_next_does_not_ask_everybody_who_had_something() -> None:
    def steps(consumers: int) -> int:
        returned = Returned()
        for number in range(consumers):  # as with detached leases, each of a consumer of its own
            attempt = Attempt(f"c#{number}", 0, 0, "timeout")
            returned.add_ready(Parcel(number, 1, History(1, 1, 0, (attempt,)), PLAIN))

        def take() -> None:
            for number in range(50):
                parcel = returned.pop("c#0", 0, alone=False)
                assert parcel is not None
                assert parcel.base == number + 1, "not its own, for a second"

        return _steps(take)

    assert steps(5_000) < 2 * steps(100)


@pytest.mark.parametrize("how", ["purge", "trim"])
@pytest.mark.parametrize("rules", [{"fair_by": "key:."}, {"ordering": "key"}])
def test_what_was_seen_ahead_and_is_gone_by_now_is_not_looked_at_again(rules: dict[str, Any], how: str) -> None:
    def steps(backlog: int) -> int:
        log, ledger = FakeLog(), make_ledger(**rules)
        log.add(backlog, keys=[b"same"] * backlog)
        (lease,) = ledger.lease(log, consumer="c", want=1, now_us=0).leases
        assert granted(ledger.lease(log, consumer="c", want=1, now_us=0)) == ([] if "ordering" in rules else [1])
        getattr(ledger, how)(backlog)
        ledger.ack(lease.nonce)
        log.add(1, keys=[b"same"])

        def take() -> None:
            assert granted(ledger.lease(log, consumer="c", want=1, now_us=0)) == [backlog]

        return _steps(take)

    assert steps(10_000) < 2 * steps(100)


@pytest.mark.parametrize("seed", range(20))
def test_the_oldest_that_a_consumer_may_have_is_next(seed: int) -> None:
    rng = random.Random(seed)
    returned, model = Returned(), list[Parcel]()
    for number in range(500):
        now_us = number * SECOND // 20
        if rng.random() < 0.55:
            attempt = Attempt(rng.choice("abcd"), 0, 0, "nack")
            history = rng.choice([FRESH, History(1, 1, 0, (attempt,))])
            parcel = Parcel(rng.randrange(1000), 1, history, PLAIN, now_us - rng.randrange(2 * SECOND))
            returned.add_ready(parcel)
            model.append(parcel)
        else:
            consumer = rng.choice("abcd")
            alone = rng.random() < 0.1
            # What a consumer gave back late waits behind what it gave back before.
            firsts = {last: min(its, key=_base) for last, its in _by_consumer(model).items()}
            open_to_it = [
                first for last, first in firsts.items() if alone or last != consumer or now_us >= first.due_us + SECOND
            ]
            expected = min(map(_base, open_to_it), default=None)
            found = returned.pop(consumer, now_us, alone=alone)
            assert (None if found is None else found.base) == expected
            if found is not None:
                model.remove(found)
        assert returned.oldest() == min(map(_base, model), default=None)
        assert returned.ready == len(model)


def _base(parcel: Parcel) -> int:
    return parcel.base


def _by_consumer(parcels: list[Parcel]) -> dict[str, list[Parcel]]:
    found: dict[str, list[Parcel]] = {}
    for parcel in parcels:
        found.setdefault(parcel.history.last_consumer, []).append(parcel)
    return found


def test_a_limit_on_the_total_time_that_is_set_later_does_not_end_what_was_delivered_before() -> None:
    log, ledger = FakeLog(), make_ledger()
    now_us = 1_000_000 * SECOND
    log.add(2, append_time_us=now_us)
    (lease,) = ledger.lease(log, consumer="c", want=2, now_us=now_us).leases
    ledger.configure(Rules(retry=parse_retry("standard,total=1h,max_retries=9")))
    assert ledger.nack(lease.nonce, 0, now_us=now_us + SECOND).result is Result.RETRIED
    assert ledger.nack(lease.nonce, 1, now_us=now_us + 3600 * SECOND).result is Result.DEAD, "counted from its delivery"


def test_two_leases_that_by_chance_draw_the_same_name_have_different_ones() -> None:
    log = FakeLog()
    log.add(10)
    drawn = iter([1, 1, 2, 3, 1, 2, 2, 4, 4, 5])
    ledger = Ledger(Rules(), draw=lambda: 0.0, draw_nonce=lambda: next(drawn))
    ledger.open()
    first, second, third = (ledger.lease(log, consumer="ann", want=1, now_us=0).leases[0] for _ in range(3))
    assert [first.nonce, second.nonce, third.nonce] == [1, 2, 3]
    ledger.ack(first.nonce)
    ledger.nack(third.nonce, now_us=0, retry_after_ms=0)
    # What came back and what is fresh are two leases of one delivery; a late ack of the first must find neither.
    again, fresh = ledger.lease(log, consumer="bob", want=2, now_us=0).leases
    assert [again.nonce, fresh.nonce] == [4, 5]
    assert granted([second, again, fresh]) == [1, 2, 3]
    for lease in (second, again, fresh):
        assert ledger.ack(lease.nonce).result is Result.DONE
    assert ledger.committed == 4


def _scattered(ledger: Ledger, log: FakeLog) -> list[int]:
    """Have every tenth message of many small batches come back, and all others settled."""
    while leases := ledger.lease(log, consumer="ann", want=3000, now_us=0).leases:
        for lease in leases:
            for offset in granted([lease]):
                if offset % 10:
                    ledger.ack(lease.nonce, offset)
                else:
                    ledger.nack(lease.nonce, offset, now_us=0, retry_after_ms=0)
    return list(range(0, 3000, 10))


def test_who_asks_for_what_came_back_does_not_read_all_over_the_log_at_once() -> None:
    log, ledger = FakeLog(), make_ledger()
    for _ in range(3000):
        log.add(1)
    came_back = _scattered(ledger, log)
    found: list[int] = []
    while some := granted(ledger.lease(log, consumer="bob", want=1000, now_us=SECOND)):
        assert len(some) <= 100
        found += some
    assert found == came_back


@pytest.mark.parametrize("rules", [{}, {"fair_by": "key:."}, {"ordering": "key"}])
def test_when_all_that_was_looked_at_has_expired_the_look_goes_on_at_once(rules: dict[str, Any]) -> None:
    log, ledger = FakeLog(), make_ledger(**rules)
    for number in range(3000):
        log.add(1, expiry_us=[10 * SECOND], keys=[b"%d" % number])
    came_back = _scattered(ledger, log)
    log.add(1)
    rounds = 0
    while not (found := granted(ledger.lease(log, consumer="bob", want=1000, now_us=20 * SECOND))):
        assert ledger.next_wakeup_us() == 0, "nobody would ask again before something new comes"
        rounds += 1
    assert found == [3000]
    assert rounds >= len(came_back) // 100 - 1
    assert ledger.counts(log.end).totals["expired"] == len(came_back)


def test_who_had_messages_and_must_have_them_again_gets_them_however_far_apart_they_are() -> None:
    log, ledger = FakeLog(), make_ledger()
    for _ in range(3000):
        log.add(1)
    came_back = _scattered(ledger, log)
    wanted = [(offset, offset + 1) for offset in came_back]
    assert sorted(granted(ledger.retake(log, wanted, consumer="ann", now_us=SECOND))) == came_back


def test_the_oldest_of_many_that_came_back_one_by_one_is_found_at_once() -> None:
    log, ledger = FakeLog(), make_ledger()
    log.add(20_000)
    for _ in range(20_000):
        (lease,) = ledger.lease(log, consumer="c", want=1, now_us=0).leases
        ledger.nack(lease.nonce, now_us=0, retry_after_ms=1000)
    assert ledger.first_ready(log.end) is None
    ledger.expire(2 * SECOND)
    began_s = time.process_time()
    for _ in range(1000):  # as for every publish to a topic that evicts
        assert ledger.first_ready(log.end) == 0
    assert time.process_time() - began_s < 1
