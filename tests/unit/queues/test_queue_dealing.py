"""What is ready is dealt among those who wait."""

from __future__ import annotations

import pytest

from millstream.queues.dealing import rounds, share
from tests.queue_log import FakeLog, granted, make_ledger


@pytest.mark.parametrize(("ready", "waiting", "each"), [(60, 3, 20), (61, 3, 21), (2, 3, 1), (60, 1, 60), (0, 3, 1)])
def test_everybody_gets_the_same_rounded_up_and_at_least_one(ready: int, waiting: int, each: int) -> None:
    assert share(ready, waiting) == each


def test_nobodys_second_request_comes_before_somebody_elses_first() -> None:
    line = ["a1", "a2", "b1", "c1", "b2", "a3"]
    assert list(rounds(line, lambda request: request[0])) == [["a1", "b1", "c1"], ["a2", "b2"], ["a3"]]
    assert list(rounds([], str)) == []


def test_what_can_go_now_is_what_is_ready() -> None:
    log = FakeLog()
    log.add(10)
    ledger = make_ledger()
    assert ledger.available(log.end) == 10
    (some,) = ledger.lease(log, consumer="ann", want=4, now_us=0).leases
    assert ledger.available(log.end) == 6
    ledger.nack(some.nonce, 0, now_us=0, retry_after_ms=1_000)
    assert ledger.available(log.end) == 6, "it waits"
    ledger.release(some.nonce)
    assert ledger.available(log.end) == 9


def test_what_waits_behind_its_key_cannot_go_now() -> None:
    log = FakeLog()
    log.add(10, keys=[b"a", b"b"] * 5)
    ledger = make_ledger(ordering="key")
    delivery = ledger.lease(log, consumer="ann", want=9, now_us=0)
    assert granted(delivery) == [0, 1]
    assert ledger.available(log.end) == 0
    ledger.ack(delivery.leases[0].nonce, 0)
    assert ledger.available(log.end) == 1, "the next one of one key"
