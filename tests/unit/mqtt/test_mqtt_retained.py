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


def test_who_looks_for_little_among_much_lets_others_have_their_turn() -> None:
    trie = kept(*(f"device{number}/state" for number in range(3_000)), "$SYS/state")
    found = list(trie.match("+/alarm"))
    assert set(found) == {None}
    assert len(found) > 3
    found = list(trie.match("+/state"))
    assert len([ref for ref in found if ref is not None]) == 3_000
    assert None in found


def test_topics_that_come_and_go_do_not_make_a_reader_miss_or_repeat_others() -> None:
    stays = [f"{number:03}/x" for number in range(0, 300, 2)]
    trie = kept(*stays)
    seen: list[str] = []
    for at, ref in enumerate(trie.match("+/x")):
        if ref is not None and int(ref[:3]) % 2 == 0:
            seen.append(ref)
        trie.put(f"{at * 7 % 300 | 1:03}/x", f"{at * 7 % 300 | 1:03}/x")
        trie.remove(f"{at * 11 % 300 | 1:03}/x")
    assert seen == stays
