"""Who subscribed to a topic, and with what."""

from __future__ import annotations

import time

from millstream.mqtt import filters
from millstream.mqtt.filters import FilterTrie


def test_a_subscriber_is_found_once_with_the_value_of_each_filter_that_matches() -> None:
    trie: FilterTrie[str] = FilterTrie()
    trie.insert("a/+", "me", 1)
    trie.insert("a/#", "me", 2)
    trie.insert("a/b", "me", 3)
    trie.insert("a/c", "me", 4)
    trie.insert("#", "you", 5)
    found = {subscriber: sorted(values) for subscriber, values in trie.match("a/b")}
    assert found == {"me": [1, 2, 3], "you": [5]}
    assert len(trie.match("a/b")) == 2


def test_mqtt_3_8_4_3_the_same_filter_again_takes_the_place_of_the_first() -> None:
    trie: FilterTrie[str] = FilterTrie()
    trie.insert("a/#", "me", "QoS 0")
    assert trie.match("a") == (("me", ("QoS 0",)),)
    trie.insert("a/#", "me", "QoS 2")
    assert trie.match("a") == (("me", ("QoS 2",)),)


def test_mqtt_4_7_2_1_wildcards_do_not_find_dollar_topics() -> None:
    trie: FilterTrie[str] = FilterTrie()
    for topic_filter in ("#", "+", "+/uptime", "+/#"):
        trie.insert(topic_filter, "curious", topic_filter)
    assert trie.match("$SYS/uptime") == ()
    trie.insert("$SYS/#", "admin", 0)
    assert trie.match("$SYS/uptime") == trie.match("$SYS") == (("admin", (0,)),)


def test_removing_what_is_not_there_changes_nothing() -> None:
    trie: FilterTrie[str] = FilterTrie()
    trie.insert("a/b", "me", 1)
    version = trie.version
    trie.remove("a/b", "you")
    trie.remove("a/#", "me")
    trie.remove("a/b/c", "me")
    assert trie.version == version
    assert trie.match("a/b") == (("me", (1,)),)
    trie.remove("a/b", "me")
    assert trie.version != version
    assert trie.is_empty
    assert trie.match("a/b") == ()


def test_what_is_remembered_is_bounded_by_names_and_subscribers() -> None:
    trie: FilterTrie[int] = FilterTrie()
    for subscriber in range(1000):
        trie.insert("#", subscriber, None)
    assert trie.match("t") is trie.match("t"), "found once, then remembered"
    for number in range(1000):
        assert len(trie.match(f"t/{number}")) == 1000
    assert sum(1 + len(found) for found in trie._remembered.values()) <= filters._REMEMBERED_MAX


def test_long_names_are_remembered_as_well_and_count_for_what_they_take() -> None:
    trie: FilterTrie[str] = FilterTrie()
    trie.insert("#", "me", None)
    for number in range(500):
        long = f"{number}" + "x" * 60_000
        assert trie.match(long) is trie.match(long)
    assert sum(map(len, trie._remembered)) <= 64 * filters._REMEMBERED_MAX


def test_ten_thousand_filters_of_their_own_do_not_slow_a_lookup_down() -> None:
    trie: FilterTrie[int] = FilterTrie()
    for subscriber in range(10_000):
        trie.insert(f"devices/{subscriber}/+", subscriber, 1)
    began = time.thread_time()
    for subscriber in range(2000):
        assert trie.match(f"devices/{subscriber}/x") == ((subscriber, (1,)),)
    assert time.thread_time() - began < 0.5
