"""The facts of an entity that nobody has claimed yet: in order, whole, and small."""

from __future__ import annotations

import tracemalloc

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker import journal
from millstream.broker.journal import Facts

pack = msgspec.msgpack.encode

_facts = st.recursive(
    st.none() | st.integers(0, 2**63) | st.text() | st.binary(), lambda inner: st.lists(inner, max_size=4), max_leaves=8
)


@given(st.lists(_facts, min_size=1))
def test_facts_come_back_in_the_order_in_which_they_were_written(known: list[object]) -> None:
    facts = Facts()
    for fact in known:
        facts.append(pack(fact))
    assert list(facts) == known
    assert list(facts.packed()) == [pack(fact) for fact in known]
    assert (len(facts), facts.last) == (len(known), known[-1])


def test_what_nobody_claims_takes_little_more_than_on_disk() -> None:
    packed = [pack(["ack", offset, offset + 1]) for offset in range(100_000, 120_000)]
    tracemalloc.start()
    try:
        facts = Facts()
        for fact in packed:
            facts.append(fact)
        # Not all that was traced: threads that other tests have left behind allocate as well.
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, journal.__file__)])
    finally:
        tracemalloc.stop()
    assert len(facts) == len(packed)
    held = sum(trace.size for trace in ours.traces)
    assert held < 2 * sum(map(len, packed)), "as objects they would take six times as much"
