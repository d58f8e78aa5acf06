"""Who gets a message of a topic."""

from __future__ import annotations

import time

import pytest

from millstream.errors import InvalidName
from millstream.traffic.patterns import PatternTrie


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("orders.*.created", ["orders.payments.created"], ["orders.created", "orders.payments.items.created"]),
        ("orders.#", ["orders", "orders.created", "orders.payments.items.created"], ["inventory.created"]),
        ("sensors.*.#", ["sensors.room1", "sensors.room1.temperature.celsius"], ["sensors"]),
        ("#", ["a", "a.b.c"], []),
        ("orders", ["orders"], ["orders.eu", "order"]),
    ],
)
def test_patterns_match_what_the_guide_says(pattern: str, matching: list[str], others: list[str]) -> None:
    trie: PatternTrie[str] = PatternTrie()
    trie.insert(pattern, "me")
    assert all(trie.match(topic) == {"me"} for topic in matching)
    assert not any(trie.match(topic) for topic in others)


@pytest.mark.parametrize("pattern", ["a.#.b", "#.a", "a.*.", "a..b", "", "a.b*"])
def test_what_is_not_a_pattern_is_refused_and_leaves_nothing_behind(pattern: str) -> None:
    trie: PatternTrie[str] = PatternTrie()
    with pytest.raises(InvalidName):
        trie.insert(pattern, "me")
    assert trie.is_empty


def test_a_subscriber_with_several_matching_patterns_is_found_once() -> None:
    trie: PatternTrie[str] = PatternTrie()
    for pattern in ("orders.#", "*.created", "orders.created"):
        trie.insert(pattern, "me")
    assert list(trie.match("orders.created")) == ["me"]


def test_a_lookup_among_a_hundred_thousand_patterns_takes_microseconds() -> None:
    trie: PatternTrie[int] = PatternTrie()
    for number in range(100_000):
        kind = number % 4
        trie.insert((f"a.{number}.c", f"a.{number}.*", f"b.{number}.#", f"*.{number}")[kind], number)
    topics = [f"a.{number}.c" for number in range(2_000)]
    best_s = min(_time_s(trie, topics) for _ in range(5)) / len(topics)
    assert best_s < 100e-6, f"{best_s * 1e6:.1f} us for a lookup"


def _time_s(trie: PatternTrie[int], topics: list[str]) -> float:
    trie.insert("nobody.here", -1)  # forget what was found before
    started_s = time.perf_counter()
    for topic in topics:
        trie.match(topic)
    return time.perf_counter() - started_s
