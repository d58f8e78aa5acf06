"""Key numbers: a set of them is a set, few or many, in little memory; keys that share one keep their order."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from millstream.queues import key_names, keyed
from millstream.queues.key_names import NameSet, names_of
from millstream.queues.ledger import Ledger
from tests.queue_log import SECOND, FakeLog, granted, make_ledger


def names(first: int, count: int) -> list[int]:
    return names_of([b"key-%d" % number for number in range(first, first + count)])


def test_a_key_has_one_number_and_none_has_none() -> None:
    one, none, again, other = names_of([b"a", None, b"a", b"b"])
    assert one == again != other
    assert none == 0 != one


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("most", [300, 5_000, 20_000])
def test_a_name_set_is_a_set(seed: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_names, "_FEW_MAX", 200)
    monkeypatch.setattr(key_names, "_MOVED", 100)
    # So few low bits that tables begin small, and double often.
    monkeypatch.setattr(key_names, "_LOW_BITS", 5)
    chance = random.Random(seed)
    known = [chance.getrandbits(36) | 1 << 36 for _ in range(most + most // 2)]
    some, model = NameSet(), set[int]()
    for round_ in range(30):
        shrinks = round_ % 10 > 5
        fresh = set(chance.sample(known, most // 8)) - model
        some.add(fresh)
        model |= fresh
        gone = chance.sample(sorted(model), len(model) // (2 if shrinks else 20))
        some.remove(gone)
        model.difference_update(gone)
        assert len(some) == len(model)
        assert some.among(known) == model
        assert all((name in some) == (name in model) for name in known[:100])
    some.remove(list(model))
    assert len(some) == 0
    assert some.among(known) == set()


def test_many_names_take_little_memory() -> None:
    count = 50_000
    some = NameSet()
    tracemalloc.start()
    try:
        for first in range(0, count, 1000):
            some.add(names(first, 1000))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(some) == count
    assert held / count < 30, "a set of Python's takes about a hundred bytes each"
    some.remove(names(0, count))
    assert len(some) == 0


@pytest.mark.parametrize("shared", [False, True], ids=["numbers apart", "numbers shared"])
@pytest.mark.parametrize("seed", range(5))
def test_each_key_is_in_order_and_alone_whatever_fails(
    seed: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_names, "_FEW_MAX", 20)
    monkeypatch.setattr(key_names, "_MOVED", 5)
    if shared:
        monkeypatch.setattr(
            keyed, "names_of", lambda keys: [0 if key is None else 1 << 44 | len(key) * int(key) // 3 for key in keys]
        )
    chance = random.Random(seed)
    keys = [None if chance.random() < 0.1 else b"%d" % chance.randrange(150) for _ in range(1500)]
    log = FakeLog()
    for start in range(0, len(keys), 50):
        log.add(50, keys=keys[start : start + 50])
    ledger = make_ledger(ordering="key")
    out: dict[int, int] = {}  # offset -> nonce
    done: list[int] = []
    now_us = 0
    while len(done) < len(keys):
        now_us += SECOND
        ledger.expire(now_us)
        take(ledger, log, out, chance.randint(1, 80), now_us)
        held = [keys[offset] for offset in out if keys[offset] is not None]
        assert len(held) == len(set(held)), "a key is out twice"
        for offset in chance.sample(sorted(out), len(out) // 2 + len(out) % 2):
            nonce = out.pop(offset)
            lease = ledger.lease_of(nonce)
            assert lease is not None
            if chance.random() < 0.2 and lease.failures < 3:
                ledger.nack(nonce, offset, now_us=now_us)
            else:
                ledger.ack(nonce, offset)
                done.append(offset)
    assert sorted(done) == list(range(len(keys))), "a message was lost"
    for key in set(keys) - {None}:
        mine = [offset for offset in done if keys[offset] == key]
        assert mine == sorted(mine)


def take(ledger: Ledger, log: FakeLog, out: dict[int, int], want: int, now_us: int) -> None:
    for lease in ledger.lease(log, consumer="ann", want=want, now_us=now_us, lease_ms=10**9, alone=True).leases:
        for offset in granted([lease]):
            out[offset] = lease.nonce
