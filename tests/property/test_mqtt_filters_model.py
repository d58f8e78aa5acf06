"""Both tries find exactly what the filters say, one filter and one topic at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.mqtt.filters import FilterTrie
from millstream.mqtt.retained import RetainedTrie
from millstream.mqtt.topics import check_topic_filter, check_topic_name, filter_matches, to_pattern, to_topic
from millstream.names import compile_pattern

# Few names, so that filters and topics meet often; empty levels and `$` in any place.
level = st.sampled_from(["a", "b", "", "$x", "ä ."])
topics = st.lists(level, min_size=1, max_size=5).map("/".join).filter(bool)
filters = (
    st.tuples(st.lists(st.one_of(level, st.just("+")), max_size=5), st.booleans())
    .map(lambda drawn: "/".join([*drawn[0], "#"] if drawn[1] else drawn[0]))
    .filter(bool)
)
#: Whether to insert, which filter, who, and with what value.
changes = st.lists(st.tuples(st.booleans(), filters, st.integers(0, 3), st.integers(0, 9)), max_size=30)


@given(changes=changes, wanted=st.lists(topics, min_size=1, max_size=8))
def test_the_trie_of_filters_agrees_with_the_filters_after_any_changes(
    changes: list[tuple[bool, str, int, int]], wanted: list[str]
) -> None:
    trie: FilterTrie[int] = FilterTrie()
    held: dict[tuple[str, int], int] = {}
    for inserts, topic_filter, subscriber, value in changes:
        check_topic_filter(topic_filter)
        if inserts:
            trie.insert(topic_filter, subscriber, value)
            held[topic_filter, subscriber] = value
        else:
            trie.remove(topic_filter, subscriber)
            held.pop((topic_filter, subscriber), None)
        for topic in wanted:  # in between, so that what is remembered must be forgotten in time
            expected: dict[int, list[int]] = {}
            for (what, who), said in held.items():
                if filter_matches(what, topic):
                    expected.setdefault(who, []).append(said)
            found = trie.match(topic)
            assert {who: sorted(values) for who, values in found} == {who: sorted(v) for who, v in expected.items()}
            assert len(found) == len(expected)
    assert trie.is_empty == (not held)


@given(held=st.sets(st.tuples(filters, st.integers(0, 3)), max_size=20))
def test_nothing_stays_behind_when_everybody_unsubscribes(held: set[tuple[str, int]]) -> None:
    trie: FilterTrie[int] = FilterTrie()
    for topic_filter, subscriber in held:
        trie.insert(topic_filter, subscriber, None)
    for topic_filter, subscriber in held:
        trie.remove(topic_filter, subscriber)
    assert trie.is_empty


@given(
    changes=st.lists(st.tuples(st.booleans(), topics), max_size=30),
    wanted=st.lists(filters, min_size=1, max_size=8),
    after=topics,
)
def test_retained_messages_are_those_whose_topics_match_in_their_order(
    changes: list[tuple[bool, str]], wanted: list[str], after: str
) -> None:
    trie: RetainedTrie[str] = RetainedTrie()
    held: set[str] = set()
    for puts, topic in changes:
        check_topic_name(topic)
        before = topic if topic in held else None
        if puts:
            assert trie.put(topic, topic) == before
            held.add(topic)
        else:
            assert trie.remove(topic) == before
            held.discard(topic)
    assert len(trie) == len(held)
    assert sorted(trie) == sorted(held)
    for topic_filter in wanted:
        expected = [topic for topic in held if filter_matches(topic_filter, topic)]
        expected.sort(key=lambda topic: topic.split("/"))
        assert list(trie.match(topic_filter)) == expected
        rest = [topic for topic in expected if topic.split("/") > after.split("/")]
        assert list(trie.match(topic_filter, after)) == rest
    for topic in held:
        trie.remove(topic)
    assert trie._root.children is None


mappable = st.sampled_from(["a", "b", "A-1", "x_"])


@given(
    topic=st.lists(mappable, min_size=1, max_size=4).map("/".join),
    topic_filter=st.tuples(st.lists(st.one_of(mappable, st.just("+")), max_size=4), st.booleans())
    .map(lambda drawn: "/".join([*drawn[0], "#"] if drawn[1] else drawn[0]))
    .filter(bool),
)
def test_a_filter_and_its_pattern_find_the_same_topics(topic: str, topic_filter: str) -> None:
    name, pattern = to_topic(topic), to_pattern(topic_filter)
    assert name is not None
    assert pattern is not None
    assert bool(compile_pattern(pattern).fullmatch(name)) == filter_matches(topic_filter, topic)
