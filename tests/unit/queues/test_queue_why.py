"""Why is my message not delivered?  One sentence for each answer there is."""

from __future__ import annotations

import pytest

from millstream.queues import keyed
from millstream.queues.ledger import Ledger
from millstream.queues.records import Reason, Rules, Situation
from tests.queue_log import SECOND, FakeLog, granted, make_ledger

BUSY = Situation(consumers=2, requests=1)
NOON_US = 1_700_000_000 * SECOND


def why(ledger: Ledger, log: FakeLog, offset: int, situation: Situation = BUSY, now_us: int = NOON_US) -> Reason:
    return ledger.explain(offset, log, situation, now_us)


def plain(count: int = 5) -> FakeLog:
    log = FakeLog()
    log.add(count)
    return log


def test_leased() -> None:
    log, ledger = plain(), make_ledger()
    ledger.lease(log, consumer="worker-7", want=1, now_us=NOON_US)
    reason = why(ledger, log, 0)
    assert reason.state == "leased"
    assert reason.sentence == "It is leased by worker-7 until 2023-11-14T22:13:50.000Z (in 30s), delivery 1."
    assert reason.facts["consumer"] == "worker-7"
    assert reason.facts["deadline_ms"] == NOON_US // 1000 + 30_000


def test_waiting_for_a_retry() -> None:
    log, ledger = plain(), make_ledger()
    (lease,) = ledger.lease(log, consumer="ann", want=1, now_us=NOON_US).leases
    ledger.nack(lease.nonce, now_us=NOON_US, reason="db down")
    reason = why(ledger, log, 0)
    assert reason.state == "waiting"
    assert reason.sentence == "It waits for retry 1 at 2023-11-14T22:13:21.000Z (in 1s); last error: db down."
    assert reason.facts["retry"] == 1


def test_what_consumers_say_stays_in_its_place_in_the_sentence() -> None:
    log, ledger = plain(), make_ledger()
    (lease,) = ledger.lease(log, consumer="\u202ennA\x1b[2J", want=1, now_us=NOON_US).leases
    assert why(ledger, log, 0).sentence.startswith("It is leased by \\u202ennA\\x1b[2J until 2023")
    ledger.nack(lease.nonce, now_us=NOON_US, reason="\u2069\u202edb\n  down\x07")
    reason = why(ledger, log, 0)
    assert reason.sentence.endswith("(in 1s); last error: \\u2069\\u202edb down\\x07.")
    assert reason.facts["last_error"] == "\u2069\u202edb\n  down\x07", "programs get it as it was said"


def test_settled_and_not_there() -> None:
    log, ledger = plain(), make_ledger()
    (lease,) = ledger.lease(log, consumer="ann", want=1, now_us=0).leases
    ledger.ack(lease.nonce)
    assert why(ledger, log, 0).sentence == "Offset 0 is settled: it was acked."
    assert why(ledger, log, 77).state == "gone"
    for offset in (0, 77):
        assert not {"deliveries", "failures"} & why(ledger, log, offset).facts.keys(), "nobody remembers how many"


def test_ready_and_nobody_or_nothing_to_take_it() -> None:
    log, ledger = plain(), make_ledger()
    assert "no consumer is connected; 3 messages are before it" in why(ledger, log, 3, Situation()).sentence
    assert "the group is paused" in why(ledger, log, 3, Situation(consumers=1, paused=True)).sentence
    assert "disk is full" in why(ledger, log, 3, Situation(consumers=1, quota="disk is full")).sentence
    assert (
        "as many messages as it asked for; 1 message is before" in why(ledger, log, 1, Situation(consumers=1)).sentence
    )
    assert why(ledger, log, 2).sentence == "It is ready; 2 messages are before it."
    assert why(ledger, log, 0).sentence == "It is ready and will be delivered next."


def test_its_key_is_held() -> None:
    log = FakeLog()
    log.add(3, keys=[b"a", b"b", b"a"])
    ledger = make_ledger(ordering="key")
    ledger.lease(log, consumer="ann", want=3, now_us=0)
    reason = why(ledger, log, 2)
    assert reason.sentence == "Its key is held by offset 0, which is not settled yet."
    assert reason.facts["held_by"] == 0


def test_it_came_back_and_another_one_of_its_key_that_was_out_goes_first() -> None:
    log = FakeLog()
    log.add(3, keys=[b"a", b"b", b"a"])
    ledger = make_ledger()
    ledger.lease(log, consumer="ann", want=3, now_us=0)
    ledger.configure(Rules(ordering="key"))
    ledger.return_consumer("ann", 0)
    ledger.lease(log, consumer="bob", want=3, now_us=0)
    assert why(ledger, log, 2).sentence == "Its key is held by offset 0, which is not settled yet."


def test_one_at_a_time() -> None:
    log, ledger = plain(), make_ledger(ordering="strict")
    ledger.lease(log, consumer="ann", want=1, now_us=0)
    assert "one message at a time and waits for offset 0" in why(ledger, log, 4).sentence


def test_one_at_a_time_of_those_that_were_out_together() -> None:
    log, ledger = plain(), make_ledger()
    ledger.lease(log, consumer="ann", want=2, now_us=NOON_US)
    ledger.configure(Rules(ordering="strict"))
    ledger.return_consumer("ann", NOON_US)
    assert "one message at a time and waits for offset 0" in why(ledger, log, 1).sentence
    assert "kept for another consumer" in why(ledger, log, 0).sentence


def test_its_lane_waits_its_turn() -> None:
    log = FakeLog()
    log.add(6, priorities=[3, 0, 3, 0, 3, 0])
    ledger = make_ledger()
    ledger.lease(log, consumer="ann", want=1, now_us=0)
    reason = why(ledger, log, 4)
    assert reason.sentence == "Its lane (low) waits for its turn; 2 messages are before it in that lane."
    assert reason.facts["lane"] == "low"


def test_it_is_kept_for_somebody_else() -> None:
    log, ledger = plain(), make_ledger()
    ledger.lease(log, consumer="ann", want=1, now_us=NOON_US)
    ledger.return_consumer("ann", NOON_US)
    assert "kept for another consumer than ann, which had it last, until" in why(ledger, log, 0).sentence
    assert "delivered next" in why(ledger, log, 0, now_us=NOON_US + 2 * SECOND).sentence


def test_behind_so_many_that_wait_for_their_keys_that_it_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed, "SEEN_MAX", 3)
    log, ledger = FakeLog(), make_ledger(ordering="key")
    log.add(6, keys=[b"same"] * 6)
    log.add(1, keys=[b"other"])
    ledger.lease(log, consumer="ann", want=5, now_us=NOON_US)
    reason = why(ledger, log, 6)
    assert reason.sentence == (
        "It is not looked for yet: too many before it wait for their keys; 5 messages are before it."
    )
    assert reason.facts["beyond"] is True
    assert why(ledger, log, 3).facts["held_by"] == 0
    ledger.purge(6)
    assert granted(ledger.lease(log, consumer="ann", want=5, now_us=NOON_US)) == [6]
