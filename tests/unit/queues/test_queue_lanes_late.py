"""A backlog is delivered while its priorities are still being read; nothing may be passed over for that."""

from __future__ import annotations

import pytest

from tests.queue_log import FakeLog, granted, make_ledger


@pytest.mark.parametrize("before", [5, 8, 12, 20])
def test_messages_whose_priority_is_found_late_are_delivered_all_the_same(before: int) -> None:
    log, ledger = FakeLog(), make_ledger()
    log.add(10, priorities=[0, 4] * 5)
    log.add(10)  # so it seems at first
    log.add(10, priorities=[0, 4] * 5)
    seen = granted(ledger.lease(log, consumer="c", want=before, now_us=1))
    log.lanes.note(range(10, 20), [0, 4] * 5)
    log.lanes.late += 1
    seen += granted(ledger.lease(log, consumer="c", want=30, now_us=2))
    assert sorted(seen) == list(range(30))


@pytest.mark.parametrize("before", [1800, 1950, 2040])
def test_looking_again_passes_over_nothing_wherever_batches_begin(before: int) -> None:
    log, ledger = FakeLog(), make_ledger(lanes=())
    for _ in range(20):
        log.add(700, priorities=[0, 4] * 350)
    seen = granted(ledger.lease(log, consumer="c", want=before, now_us=1))
    log.lanes.late += 1
    while some := granted(ledger.lease(log, consumer="c", want=1000, now_us=2)):
        seen += some
    assert sorted(seen) == list(range(14_000))
