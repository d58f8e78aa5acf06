"""The trie of patterns finds exactly what the patterns say, one regular expression at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.names import check_pattern, compile_pattern
from millstream.traffic.patterns import PatternTrie

# Few names, so that patterns and topics meet often.
level = st.sampled_from(["a", "b", "ab", "-", "_a"])
topics = st.lists(level, min_size=1, max_size=5).map(".".join)
patterns = st.one_of(
    st.just("#"),
    st.tuples(st.lists(st.one_of(level, st.just("*")), min_size=1, max_size=5), st.booleans()).map(
        lambda drawn: ".".join(drawn[0]) + (".#" if drawn[1] else "")
    ),
)
changes = st.lists(st.tuples(st.booleans(), patterns, st.integers(0, 3)), max_size=30)


@given(changes=changes, wanted=st.lists(topics, min_size=1, max_size=8))
def test_the_trie_agrees_with_the_patterns_after_any_changes(
    changes: list[tuple[bool, str, int]], wanted: list[str]
) -> None:
    trie: PatternTrie[int] = PatternTrie()
    held: set[tuple[str, int]] = set()
    for inserts, pattern, subscriber in changes:
        check_pattern(pattern)
        if inserts:
            trie.insert(pattern, subscriber)
            held.add((pattern, subscriber))
        else:
            trie.remove(pattern, subscriber)
            held.discard((pattern, subscriber))
        for topic in wanted:  # in between, so that what is remembered must be forgotten in time
            expected = {who for what, who in held if compile_pattern(what).fullmatch(topic)}
            assert trie.match(topic) == expected
    assert trie.is_empty == (not held)


@given(held=st.sets(st.tuples(patterns, st.integers(0, 3)), max_size=20))
def test_nothing_stays_behind_when_everybody_leaves(held: set[tuple[str, int]]) -> None:
    trie: PatternTrie[int] = PatternTrie()
    for pattern, subscriber in held:
        trie.insert(pattern, subscriber)
    for pattern, subscriber in held:
        trie.remove(pattern, subscriber)
    assert trie.is_empty
