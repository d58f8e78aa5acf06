"""Retained messages found by filter."""

from __future__ import annotations

from millstream.mqtt.retained import RetainedTrie


def kept(*topics: str) -> RetainedTrie[str]:
    trie: RetainedTrie[str] = RetainedTrie()
    for topic in topics:
        trie.put(topic, topic)
    return trie


def test_mqtt_3_3_1_5_a_newer_message_takes_the_place_of_the_one_before() -> None:
    trie: RetainedTrie[int] = RetainedTrie()
    assert trie.put("a/b", 1) is None
    assert trie.put("a/b", 2) == 1
    assert len(trie) == 1
    assert trie.get("a/b") == 2
    assert list(trie.match("a/+")) == [2]


def test_what_is_removed_is_not_found() -> None:
    trie = kept("a", "a/b", "a/b/c")
    assert trie.remove("a/b") == "a/b"
    assert trie.remove("a/b") is None
    assert trie.remove("x/y") is None
    assert trie.get("a/b") is None
    assert list(trie.match("#")) == ["a", "a/b/c"]
    assert len(trie) == 2
    trie.remove("a/b/c")
    trie.remove("a")
    assert trie._root.children is None, "nothing stays behind"


def test_refs_come_in_the_order_of_topics_level_by_level() -> None:
    assert list(kept("b", "a-b", "a/c", "a", "a/b/x", "a/b").match("#")) == ["a", "a/b", "a/b/x", "a/c", "a-b", "b"]


def test_mqtt_4_7_2_1_wildcards_do_not_find_what_is_retained_under_dollar() -> None:
    trie = kept("$SYS/uptime", "x/$y", "$SYS")
    assert list(trie.match("#")) == ["x/$y"]
    assert list(trie.match("+/+")) == ["x/$y"]
    assert list(trie.match("$SYS/#")) == ["$SYS", "$SYS/uptime"]
    assert sorted(trie) == ["$SYS", "$SYS/uptime", "x/$y"], "whoever looks after them finds all"


def test_messages_may_come_and_go_while_somebody_is_reading() -> None:
    trie = kept("a", "b", "c/d", "e")
    reading = trie.match("#")
    assert next(reading) == "a"
    trie.remove("b")
    trie.remove("c/d")
    trie.put("f", "f")
    assert [ref for ref in reading if ref != "f"] == ["e"]
