"""What a queue group gives up on where messages are dead letters already: it is set aside and stays."""

from __future__ import annotations

import pytest

from millstream.queues.ledger import Ledger
from millstream.queues.records import NEVER, Result, Situation
from millstream.retries import RetryPolicy
from tests.queue_log import SECOND, FakeLog, granted, make_ledger


def letters(**rules: object) -> Ledger:
    ledger = make_ledger(**rules)
    ledger.keep_dead_if(lambda: True)
    return ledger


def filled(count: int = 4, **columns: object) -> FakeLog:
    log = FakeLog()
    log.add(count, **columns)  # type: ignore[arg-type]
    return log


def give_up(ledger: Ledger, log: FakeLog, how: str) -> None:
    """On the first message."""
    (lease,) = ledger.lease(log, consumer="ann", want=1, now_us=0).leases
    if how == "reject":
        outcome = ledger.reject(lease.nonce, now_us=0, reason="not mine")
        assert (outcome.result, outcome.dead) == (Result.DEAD, ())
    elif how == "nack":
        outcome = ledger.nack(lease.nonce, now_us=0, reason="not yet")
        assert (outcome.result, outcome.dead) == (Result.DEAD, ())
    elif how == "timeout":
        assert ledger.expire(60 * SECOND) == []
    else:
        assert ledger.return_consumer("ann", 0) == []


@pytest.mark.parametrize("how", ["reject", "nack", "timeout", "gone"])
def test_a_letter_that_is_given_up_on_is_neither_settled_nor_delivered_again(how: str) -> None:
    log, ledger = filled(), letters(retry=RetryPolicy(max_retries=0), max_deliveries=1)
    give_up(ledger, log, how)
    assert (0 in ledger.settled, ledger.committed) == (False, 0)
    assert ledger.counts(4)[:4] == (3, 0, 1, 0)
    assert granted(ledger.lease(log, consumer="ben", want=10, now_us=3600 * SECOND)) == [1, 2, 3]
    assert list(ledger.offsets("waiting", 4)) == [0]
    assert ledger.next_wakeup_us() == 3630 * SECOND, "nothing is due because of it"


def test_why_of_a_letter_that_is_set_aside_says_so() -> None:
    log, ledger = filled(), letters()
    give_up(ledger, log, "reject")
    assert ledger.look(0, 4).due_us == NEVER
    reason = ledger.explain(0, log, Situation(), 0)
    assert (reason.state, reason.facts["set_aside"]) == ("waiting", True)
    assert "set aside" in reason.sentence


def test_a_letter_that_is_set_aside_holds_up_nobody() -> None:
    log, strict = filled(), letters(ordering="strict")
    give_up(strict, log, "reject")
    assert granted(strict.lease(log, consumer="ann", want=10, now_us=0)) == [1]
    keyed = letters(ordering="key")
    log = filled(keys=[b"k", b"k", b"l", b"l"])
    give_up(keyed, log, "reject")
    assert granted(keyed.lease(log, consumer="ann", want=10, now_us=0)) == [1, 2]


def test_what_is_set_aside_survives_by_facts_and_by_a_snapshot() -> None:
    log, ledger = filled(), letters(retry=RetryPolicy(max_retries=1, initial_ms=0))
    (lease,) = ledger.lease(log, consumer="ann", want=2, now_us=0).leases
    ledger.nack(lease.nonce, 0, 0b11, now_us=0)
    for again in ledger.lease(log, consumer="ann", want=2, now_us=SECOND, alone=True).leases:
        ledger.nack(again.nonce, now_us=SECOND)
    facts = ledger.drain()
    for past in (facts, ledger.snapshot()):
        copy = Ledger(ledger.rules, draw=lambda: 0.0, draw_nonce=iter(range(100, 200)).__next__)
        for fact in past:
            copy.apply(fact)
        copy.open(2 * SECOND)
        assert copy.counts(4)[:4] == (2, 0, 2, 0)
        assert granted(copy.lease(log, consumer="ann", want=10, now_us=3600 * SECOND)) == [2, 3]
        assert copy.snapshot() == ledger.snapshot()


def test_who_replays_or_purges_settles_what_is_set_aside() -> None:
    log, ledger = filled(), letters()
    give_up(ledger, log, "reject")
    ledger.apply(["settled", "acked", [0, 1]])
    assert ledger.counts(4)[:4] == (3, 0, 0, 1)
    assert ledger.look(0, 4).state == "settled"
    give_up(ledger, log, "reject")
    ledger.purge(4)
    assert ledger.counts(4)[:4] == (0, 0, 0, 4)


def test_a_group_that_begins_again_delivers_what_was_set_aside() -> None:
    log, ledger = filled(), letters()
    give_up(ledger, log, "reject")
    ledger.start_at(0)
    assert granted(ledger.lease(log, consumer="ann", want=10, now_us=0)) == [0, 1, 2, 3]


def test_a_log_that_lost_its_end_has_nothing_set_aside_there() -> None:
    log, ledger = filled(), letters()
    give_up(ledger, log, "reject")
    give_up(ledger, log, "reject")
    copy = Ledger(ledger.rules, draw=lambda: 0.0, draw_nonce=iter(range(100, 200)).__next__)
    for fact in [*ledger.drain(), ["cut", 1]]:
        copy.apply(fact)
    copy.open(0)
    assert copy.counts(4)[:4] == (3, 0, 1, 0)
