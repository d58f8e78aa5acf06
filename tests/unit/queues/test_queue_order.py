"""ordering=key, ordering=strict and fair_by."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from millstream.queues.ledger import Ledger
from millstream.queues.lookahead import OffsetQueue
from millstream.queues.ranges import offsets_of
from millstream.queues.records import Rules
from millstream.queues.returned import YIELD_US
from tests.queue_log import SECOND, FakeLog, granted, make_ledger


def keyed(text: str) -> FakeLog:
    """A log with one message per character, which is its key; `-` has none."""
    log = FakeLog()
    log.add(len(text), keys=[None if letter == "-" else letter.encode() for letter in text])
    return log


def lease(ledger: Ledger, log: FakeLog, want: int = 99, now_us: int = 0, consumer: str = "ann") -> list[int]:
    return granted(ledger.lease(log, consumer=consumer, want=want, now_us=now_us, alone=True))


def ack(ledger: Ledger, *offsets: int) -> None:
    for offset in offsets:
        holder = ledger.look(offset, 1 << 40).lease
        assert holder is not None
        ledger.ack(holder.nonce, offset)


def test_one_message_per_key_and_keys_in_parallel() -> None:
    log = keyed("aababbc-a-")
    ledger = make_ledger(ordering="key")
    assert lease(ledger, log) == [0, 2, 6, 7, 9], "messages without a key wait for nobody"
    ack(ledger, 0)
    assert lease(ledger, log) == [1]
    ack(ledger, 2)
    assert lease(ledger, log) == [4]
    assert lease(ledger, log) == []


def test_a_key_waits_through_retries_and_goes_on_after_a_death() -> None:
    log = keyed("aab")
    ledger = make_ledger(ordering="key")
    (some,) = ledger.lease(log, consumer="ann", want=9, now_us=0).leases
    ledger.nack(some.nonce, 0, now_us=0)
    assert lease(ledger, log) == []
    assert lease(ledger, log, now_us=1 * SECOND) == [0]
    holder = ledger.look(0, 3).lease
    assert holder is not None
    ledger.reject(holder.nonce, now_us=1 * SECOND)
    assert lease(ledger, log) == [1]


def test_a_key_is_free_when_its_consumer_is_gone_but_in_order() -> None:
    log = keyed("aa")
    ledger = make_ledger(ordering="key")
    assert lease(ledger, log, consumer="bob") == [0]
    ledger.return_consumer("bob", 0)
    assert lease(ledger, log) == [0]
    ack(ledger, 0)
    assert lease(ledger, log) == [1]


def test_keys_are_held_across_a_restart() -> None:
    log = keyed("aabb")
    ledger = make_ledger(ordering="key")
    (some,) = ledger.lease(log, consumer="ann", want=9, now_us=0).leases
    ledger.nack(some.nonce, 0, now_us=0, retry_after_ms=5_000)
    twin = make_twin(ledger, Rules(ordering="key"))
    assert lease(twin, log) == [2], "b was leased and is ready; a waits"
    assert lease(twin, log, now_us=5 * SECOND) == [0]


def make_twin(ledger: Ledger, rules: Rules) -> Ledger:
    twin = Ledger(rules, draw=lambda: 0.0, draw_nonce=iter(range(1000, 2000)).__next__)
    for fact in ledger.snapshot():
        twin.apply(fact)
    twin.open()
    return twin


def test_a_group_that_turns_to_key_order_respects_what_is_out_already() -> None:
    log = keyed("aaab")
    ledger = make_ledger()
    assert lease(ledger, log, 2) == [0, 1]
    ledger.configure(Rules(ordering="key"))
    assert lease(ledger, log) == [3]
    ack(ledger, 0)
    assert lease(ledger, log) == []
    ack(ledger, 1)
    assert lease(ledger, log) == [2]


def test_what_was_out_together_before_key_order_and_comes_back_goes_one_by_one() -> None:
    log = keyed("aaabab")
    ledger = make_ledger()
    assert lease(ledger, log, 5) == [0, 1, 2, 3, 4]
    ledger.configure(Rules(ordering="key"))
    ledger.return_consumer("ann", 0)
    assert ledger.available(log.end) <= 6
    assert lease(ledger, log) == [0, 3]
    assert ledger.available(log.end) == 0
    assert lease(ledger, log) == []
    ack(ledger, 0)
    assert lease(ledger, log) == [1]
    ack(ledger, 1, 3)
    assert lease(ledger, log) == [2, 5]
    assert list(ledger.offsets("ready", log.end)) == [4]
    ack(ledger, 2)
    assert lease(ledger, log) == [4]


def test_what_comes_back_does_not_overtake_an_older_message_of_its_key_that_waits_for_its_retry() -> None:
    log = keyed("aab")
    ledger = make_ledger()
    (some,) = ledger.lease(log, consumer="ann", want=3, now_us=0).leases
    ledger.configure(Rules(ordering="key"))
    ledger.nack(some.nonce, 0, now_us=0, retry_after_ms=5_000)
    ledger.release(some.nonce, 1)
    assert lease(ledger, log) == []
    assert lease(ledger, log, now_us=5 * SECOND) == [0]
    holder = ledger.look(0, 3).lease
    assert holder is not None
    ledger.reject(holder.nonce, now_us=5 * SECOND)
    assert lease(ledger, log, now_us=5 * SECOND) == [1]


def test_messages_that_were_claimed_again_come_back_one_by_one() -> None:
    log = keyed("aaab")
    ledger = make_ledger(ordering="key")
    assert granted(ledger.retake(log, [(0, 3)], consumer="bob", now_us=0)) == [0, 1, 2]
    ledger.return_consumer("bob", 0)
    assert lease(ledger, log) == [0, 3]
    assert granted(ledger.retake(log, [(1, 2)], consumer="bob", now_us=0)) == [1], "also one that is held back"


def test_what_is_held_back_is_there_after_a_restart_and_under_other_rules() -> None:
    log = keyed("aaa")
    ledger = make_ledger()
    lease(ledger, log)
    ledger.configure(Rules(ordering="key"))
    ledger.return_consumer("ann", 0)
    assert lease(ledger, log, 1) == [0]
    twin = make_twin(ledger, Rules(ordering="key"))
    twin.expire(0)
    for expected in range(3):
        (some,) = twin.lease(log, consumer="ann", want=9, now_us=0, alone=True).leases
        assert (granted([some]), some.delivery) == ([expected], 2)
        twin.ack(some.nonce)
    ledger.configure(Rules())
    assert lease(ledger, log) == [1, 2]


def test_a_strict_queue_does_not_overtake_what_was_out_before_it_was_strict() -> None:
    log = keyed("----")
    ledger = make_ledger()
    (some,) = ledger.lease(log, consumer="ann", want=3, now_us=0).leases
    ledger.configure(Rules(ordering="strict"))
    ledger.nack(some.nonce, 0, now_us=0, retry_after_ms=5_000)
    ledger.release(some.nonce, 1, 0b11)
    assert lease(ledger, log) == []
    for expected in range(4):
        assert lease(ledger, log, now_us=5 * SECOND) == [expected]
        ack(ledger, expected)


def test_a_strict_queue_whose_first_message_is_kept_for_another_consumer_wakes_when_it_is_not_any_more() -> None:
    """And not over and over until then, because of the next one, for which that moment has passed."""
    log = keyed("--")
    ledger = make_ledger()
    first, second = (ledger.lease(log, consumer=who, want=1, now_us=0).leases[0] for who in ("ann", "bob"))
    ledger.configure(Rules(ordering="strict"))
    ledger.nack(second.nonce, now_us=0, retry_after_ms=0)
    ledger.expire(2 * SECOND)
    ledger.nack(first.nonce, now_us=2 * SECOND, retry_after_ms=0)
    ledger.expire(2 * SECOND)
    assert granted(ledger.lease(log, consumer="ann", want=1, now_us=2 * SECOND)) == []
    assert ledger.next_wakeup_us() == 2 * SECOND + YIELD_US
    ledger.expire(2 * SECOND + YIELD_US)
    assert granted(ledger.lease(log, consumer="ann", want=1, now_us=2 * SECOND + YIELD_US)) == [0]


def test_a_queue_that_turns_strict_begins_with_the_oldest_whether_it_was_delivered_or_not() -> None:
    log = FakeLog()
    log.add(3, priorities=[2, 2, 0])
    ledger = make_ledger(lanes=())
    assert lease(ledger, log, 1) == [2]
    ledger.configure(Rules(ordering="strict"))
    ledger.return_consumer("ann", 0)
    for expected in range(3):
        assert lease(ledger, log) == [expected]
        ack(ledger, expected)


@pytest.mark.parametrize("seed", range(20))
def test_orders_hold_from_the_moment_they_are_asked_for_whatever_was_out_before(seed: int) -> None:
    chance = random.Random(seed)
    keys = [chance.choice([b"a", b"b", b"c", None]) for _ in range(120)]
    log = FakeLog()
    for start in range(0, 120, 15):
        log.add(15, keys=keys[start : start + 15])
    ledger = make_ledger()
    ordering, now_us = "none", 0
    out: set[int] = set()
    done: set[int] = set()
    while len(done) < 120:
        now_us += SECOND
        ledger.expire(now_us)
        if chance.random() < 0.05:
            ordering = chance.choice(["none", "key", "strict"])
            ledger.configure(Rules(ordering=ordering))
        if chance.random() < 0.05 and ordering == "key":
            first = chance.randrange(120)
            out.update(granted(ledger.retake(log, [(first, first + 5)], consumer="bob", now_us=now_us)))
        if chance.random() < 0.05:
            ledger.evict(log, 1)
            done.update(offset for offset in range(120) if offset in ledger.settled)
            out -= done
        consumer, want = chance.choice(["ann", "bob"]), chance.randint(1, 20)
        found = granted(ledger.lease(log, consumer=consumer, want=want, now_us=now_us, alone=chance.random() < 0.5))
        for offset in found:
            if ordering == "strict":
                assert offset == min(set(range(120)) - done)
            elif ordering == "key" and keys[offset] is not None:
                mine = {some for some in out | set(found) if keys[some] == keys[offset]}
                assert offset == min(mine), f"{sorted(mine)} are out"
        out.update(found)
        for some in list(ledger.leases()):
            for offset in offsets_of(some.base, some.bits):
                match chance.choice(["ack", "ack", "nack", "release", "hold"]):
                    case "ack":
                        ledger.ack(some.nonce, offset)
                        done.add(offset)
                        out.discard(offset)
                    case "nack" if some.failures < 3:
                        ledger.nack(some.nonce, offset, now_us=now_us)
                    case "release":
                        ledger.release(some.nonce, offset)
        counts = ledger.counts(log.end)
        assert (counts.leased, counts.ready + counts.waiting) == (ledger.leased, 120 - len(done) - ledger.leased)


def test_many_that_come_back_at_once_go_one_by_one_of_each_key() -> None:
    log = FakeLog()
    for _ in range(4):
        log.add(1000, keys=[b"%d" % n for n in range(1000)])
    ledger = make_ledger()
    assert len(lease(ledger, log, 4000)) == 4000
    ledger.configure(Rules(ordering="key"))
    ledger.return_consumer("ann", 0)
    for start in range(0, 4000, 1000):
        leases = ledger.lease(log, consumer="ann", want=4000, now_us=0, alone=True).leases
        assert sorted(granted(leases)) == list(range(start, start + 1000))
        for some in leases:
            ledger.ack(some.nonce)
    assert ledger.committed == 4000


def test_a_flood_of_one_key_is_looked_past_in_steps_and_in_little_memory() -> None:
    log = FakeLog()
    for _ in range(100):
        log.add(1000, keys=[b"flood"] * 1000)
    log.add(1, keys=[b"other"])
    ledger = make_ledger(ordering="key")
    assert lease(ledger, log, 1) == [0]
    steps = 0
    while not (found := lease(ledger, log, 1)):
        assert ledger.next_wakeup_us() == 0, "there is more to look at"
        steps += 1
    assert found == [100_000]
    assert 2 <= steps <= 10


def test_nobody_is_woken_again_and_again_when_nobody_asks() -> None:
    log = FakeLog()
    for _ in range(30):
        log.add(1000, keys=[b"flood"] * 1000)
    ledger = make_ledger(ordering="key")
    assert lease(ledger, log, 1) == [0]
    assert lease(ledger, log, 1) == []
    assert ledger.next_wakeup_us() == 0
    ledger.expire(0)
    assert ledger.next_wakeup_us() == 30 * SECOND


@pytest.mark.parametrize("seed", range(5))
def test_each_key_is_delivered_in_order_whatever_fails(seed: int) -> None:
    chance = random.Random(seed)
    keys = [chance.choice([b"a", b"b", b"c", b"d"]) for _ in range(300)]
    log = FakeLog()
    for start in range(0, 300, 20):
        log.add(20, keys=keys[start : start + 20])
    ledger = make_ledger(ordering="key")
    done: list[int] = []
    now_us = 0
    while len(done) < 300:
        now_us += SECOND
        ledger.expire(now_us)
        for some in ledger.lease(log, consumer="ann", want=chance.randint(1, 5), now_us=now_us, alone=True).leases:
            for offset in granted([some]):
                if chance.random() < 0.3 and some.failures < 3:
                    ledger.nack(some.nonce, offset, now_us=now_us)
                else:
                    ledger.ack(some.nonce, offset)
                    done.append(offset)
    for key in set(keys):
        mine = [offset for offset in done if keys[offset] == key]
        assert mine == sorted(mine)


def test_strict_order_is_one_at_a_time_and_waits_for_retries() -> None:
    log = keyed("abc")
    ledger = make_ledger(ordering="strict")
    assert lease(ledger, log) == [0]
    assert lease(ledger, log, consumer="bob") == []
    holder = ledger.look(0, 3).lease
    assert holder is not None
    ledger.nack(holder.nonce, now_us=0)
    assert lease(ledger, log) == []
    assert lease(ledger, log, now_us=1 * SECOND) == [0]
    ack(ledger, 0)
    assert lease(ledger, log) == [1]


@pytest.mark.parametrize("fair_by", ["key:.", "header:tenant"])
def test_a_flood_does_not_starve_the_others(fair_by: str) -> None:
    names = ["big"] * 4000 + ["small"] * 10 + ["tiny"] * 5
    log = FakeLog()
    for start in range(0, len(names), 500):
        some = names[start : start + 500]
        keys = [f"{name}.{place}".encode() for place, name in enumerate(some)]
        log.add(len(some), keys=keys, headers=[{"tenant": name} for name in some])
    ledger = make_ledger(fair_by=fair_by)
    first = lease(ledger, log, 30)
    assert Counter(names[offset] for offset in first) == {"big": 15, "small": 10, "tiny": 5}
    assert lease(ledger, log, 4) == [15, 16, 17, 18], "alone again, in order"


def test_who_comes_later_gets_a_turn_at_once() -> None:
    log = FakeLog()
    log.add(100, keys=[b"big.x"] * 100)
    ledger = make_ledger(fair_by="key:.")
    lease(ledger, log, 10)
    log.add(1, keys=[b"new.x"])
    assert 100 in lease(ledger, log, 2)


def test_many_at_once_are_those_that_would_come_one_by_one() -> None:
    chance = random.Random(5)
    log = FakeLog()
    for _ in range(20):
        log.add(100, keys=[b"%d.x" % min(int(chance.expovariate(0.5)), 9) for _ in range(100)])
    many, single = make_ledger(fair_by="key:."), make_ledger(fair_by="key:.")
    for want in (1, 7, 30, 500, 3, 900, 559):
        assert lease(many, log, want) == sorted(offset for _ in range(want) for offset in lease(single, log, 1))


def test_what_was_evicted_after_it_was_seen_is_not_handed_out() -> None:
    log = keyed("aaabbb")
    ledger = make_ledger(fair_by="key:.")
    assert lease(ledger, log, 1) == [0]
    assert ledger.evict(log, 3) == 3
    assert lease(ledger, log, 5) == [4, 5]


def test_an_offset_queue_is_a_queue() -> None:
    queue = OffsetQueue()
    chance = random.Random(3)
    model: list[int] = []
    offset = 0
    for _ in range(20_000):
        if chance.random() < 0.6 or not model:
            offset += chance.choice([1, 1, 1, 5])
            queue.push(offset)
            model.append(offset)
        elif chance.random() < 0.1:
            assert list(queue.take(5)) == model[:5]
            del model[:5]
            queue.extend([offset + 1, offset + 4])
            model += [offset + 1, offset + 4]
            offset += 4
        else:
            assert queue.pop() == model.pop(0)
    while queue:
        assert queue.pop() == model.pop(0)
    assert not model
