"""Priorities: exact shares, nobody starves, and nothing of it where nobody uses it."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import pytest

from millstream.queues.lane_map import LaneMap
from tests.queue_log import SECOND, FakeLog, granted, make_ledger


def mixed(count: int, seed: int = 1, lanes: int = 5, size: int = 100) -> tuple[FakeLog, list[int]]:
    """A log of messages with random priorities."""
    chance = random.Random(seed)
    log, priorities = FakeLog(), []
    for _ in range(count // size):
        some = [chance.randrange(lanes) for _ in range(size)]
        log.add(size, priorities=some)
        priorities += some
    return log, priorities


@pytest.mark.parametrize("want", [1, 7, 100])
def test_a_hundred_messages_have_exactly_the_shares_of_the_lanes(want: int) -> None:
    log, priorities = mixed(2000)
    ledger = make_ledger()
    served: list[int] = []
    while len(served) < 300:
        served += granted(ledger.lease(log, consumer="ann", want=min(want, 300 - len(served)), now_us=0))
    for start in (0, 100, 200):
        assert Counter(priorities[offset] for offset in served[start : start + 100]) == {
            0: 50,
            1: 25,
            2: 15,
            3: 7,
            4: 3,
        }


def test_a_large_answer_is_one_lease_per_lane_with_the_same_shares_as_small_ones() -> None:
    log, priorities = mixed(20_000)
    large, small = make_ledger(), make_ledger()
    for want in (150, 1000, 730, 3000, 1000, 1000):
        leases = large.lease(log, consumer="ann", want=want, now_us=0).leases
        assert [priorities[lease.base] for lease in leases] == [0, 1, 2, 3, 4], "the most urgent ones first"
        one_by_one = [granted(small.lease(log, consumer="ann", want=1, now_us=0))[0] for _ in range(want)]
        assert sorted(granted(leases)) == sorted(one_by_one)


def test_lanes_that_run_empty_in_a_large_answer_leave_the_same_to_the_others() -> None:
    log, _ = mixed(3000)
    large, small = make_ledger(), make_ledger()
    for want in (1000, 1000, 700, 290, 10):
        one_by_one = [granted(small.lease(log, consumer="ann", want=1, now_us=0))[0] for _ in range(want)]
        assert sorted(granted(large.lease(log, consumer="ann", want=want, now_us=0))) == sorted(one_by_one)


def test_within_a_lane_the_oldest_goes_first() -> None:
    log, priorities = mixed(1000)
    ledger = make_ledger()
    served = granted(ledger.lease(log, consumer="ann", want=1000, now_us=0))
    for lane in range(5):
        mine = [offset for offset in served if priorities[offset] == lane]
        assert mine == sorted(mine)


def test_an_empty_lane_leaves_its_share_to_the_others() -> None:
    log = FakeLog()
    log.add(100, priorities=[1, 4] * 50)
    ledger = make_ledger(lanes=(50, 2, 15, 7, 1))
    served = granted(ledger.lease(log, consumer="ann", want=9, now_us=0))
    assert Counter(offset % 2 for offset in served) == {0: 6, 1: 3}


def test_an_urgent_message_overtakes_a_long_backlog() -> None:
    log = FakeLog()
    log.add(50_000)
    ledger = make_ledger(lanes=())
    ledger.lease(log, consumer="ann", want=10, now_us=0)
    log.add(3, priorities=[2, 0, 2])
    first = ledger.lease(log, consumer="ann", want=2, now_us=0)
    assert granted(first) == [50_001, 10]


def test_strict_lanes_drain_one_after_the_other() -> None:
    log, priorities = mixed(500)
    served = granted(make_ledger(lanes=()).lease(log, consumer="ann", want=500, now_us=0))
    assert [priorities[offset] for offset in served] == sorted(priorities)


def test_a_starving_lane_is_served_once_and_starves_again() -> None:
    log = FakeLog()
    log.add(400, priorities=[0] * 398 + [4, 4])
    ledger = make_ledger(lanes=(), starvation_ms=30_000)

    def serve(now_s: int) -> int:
        return granted(ledger.lease(log, consumer="ann", want=1, now_us=now_s * SECOND))[0]

    assert [serve(now) for now in (0, 29, 30, 30, 59, 60)] == [0, 1, 398, 2, 3, 399]


def test_a_message_that_has_just_come_does_not_starve() -> None:
    log = FakeLog()
    log.add(3, priorities=[0, 0, 0])
    ledger = make_ledger(lanes=())
    ledger.lease(log, consumer="ann", want=1, now_us=0)
    log.add(1, priorities=[4], append_time_us=100 * SECOND)
    assert granted(ledger.lease(log, consumer="ann", want=1, now_us=101 * SECOND)) == [1]
    assert granted(ledger.lease(log, consumer="ann", want=1, now_us=130 * SECOND)) == [3]


def test_lanes_are_counted() -> None:
    log = FakeLog()
    log.add(4, priorities=[0, 0, 2, 4])
    ledger = make_ledger()
    assert ledger.lanes(log) == []
    leases = ledger.lease(log, consumer="ann", want=3, now_us=7).leases
    ledger.ack(leases[0].nonce, 0)
    statistics = ledger.lanes(log)
    assert [(some.ready, some.leased, some.served, some.last_served_us) for some in statistics] == [
        (0, 1, 2, 7),
        (0, 0, 0, 0),
        (0, 1, 1, 7),
        (0, 0, 0, 0),
        (1, 0, 0, 0),
    ]


def test_a_backlog_with_priorities_costs_bits_and_not_objects() -> None:
    chance = random.Random(5)
    columns = [bytes(chance.choices(range(5), k=1000)) for _ in range(20)]
    log = FakeLog()
    for _ in range(500):
        log.add(1000)
    tracemalloc.start()
    try:
        log.lanes = LaneMap()
        for number in range(500):
            log.lanes.note(range(number * 1000, number * 1000 + 1000), columns[number % 20])
        ledger = make_ledger(lanes=())
        for _ in range(150):
            for lease in ledger.lease(log, consumer="ann", want=1000, now_us=0).leases:
                ledger.ack(lease.nonce)
            ledger.drain()
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < 2 * 500_000, f"{used} bytes for half a million messages"


def test_without_priorities_there_are_no_lanes() -> None:
    log = FakeLog()
    log.add(10, priorities=[2] * 10)
    ledger = make_ledger()
    (lease,) = ledger.lease(log, consumer="ann", want=10, now_us=0).leases
    assert lease.span == 10
    assert ledger.lanes(log) == []
