"""A backlog is delivered while its priorities are still being read; nothing may be passed over for that."""

from __future__ import annotations

from random import Random

import pytest

from tests.queue_log import FakeLog, granted, make_ledger


@pytest.mark.parametrize("before", [5, 8, 12, 20])
def test_messages_whose_priority_is_found_late_are_delivered_all_the_same(before: int) -> None:
    log, ledger = FakeLog(), make_ledger()
    log.add(10, priorities=[0, 4] * 5)
    log.add(10)  # so it seems at first
    log.add(10, priorities=[0, 4] * 5)
    seen = granted(ledger.lease(log, consumer="c", want=before, now_us=1))
    log.lanes.note(range(10, 20), [0, 4] * 5, late=True)
    seen += granted(ledger.lease(log, consumer="c", want=30, now_us=2))
    assert sorted(seen) == list(range(30))


@pytest.mark.parametrize("before", [1800, 1950, 2040])
def test_looking_again_passes_over_nothing_wherever_batches_begin(before: int) -> None:
    log, ledger = FakeLog(), make_ledger(lanes=())
    for _ in range(20):
        log.add(700, priorities=[0, 4] * 350)
    seen = granted(ledger.lease(log, consumer="c", want=before, now_us=1))
    log.lanes.note(range(700), [0, 4] * 350, late=True)
    while some := granted(ledger.lease(log, consumer="c", want=1000, now_us=2)):
        seen += some
    assert sorted(seen) == list(range(14_000))


@pytest.mark.parametrize("seed", range(20))
def test_every_message_is_delivered_once_in_whatever_order_priorities_are_found(seed: int) -> None:
    draw = Random(seed)
    log, ledger = FakeLog(), make_ledger(lanes=draw.choice([(), (50, 25, 15, 7, 3)]))
    log.add(10, priorities=[4] * 10)
    for _ in range(40):
        log.add(300)
    found_late = list(range(40))
    draw.shuffle(found_late)
    seen: list[int] = []
    while found_late or len(seen) < log.end:
        for number in [found_late.pop() for _ in range(min(draw.randrange(3), len(found_late)))]:
            start = 10 + 300 * number
            log.lanes.note(range(start, start + 300), [draw.randrange(5) for _ in range(300)], late=True)
        seen += granted(ledger.lease(log, consumer="c", want=draw.randrange(1, 1200), now_us=2))
    assert sorted(seen) == list(range(log.end))
