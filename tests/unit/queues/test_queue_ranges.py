"""Sets of offsets behave like sets, whatever the order in which they fill up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.queues.ranges import RangeSet, lowest, normal, offsets_of, pack, runs

SPANS = st.lists(
    st.tuples(st.integers(0, 13_000), st.one_of(st.integers(1, 40), st.just(4096), st.just(9000)), st.integers(1)),
    max_size=12,
)


def filled(floor: int, spans: list[tuple[int, int, int]]) -> tuple[RangeSet, set[int]]:
    """A RangeSet and the set that it stands for."""
    some, model = RangeSet(floor), set(range(floor))
    for start, size, seed in spans:
        if seed % 3:
            some.add(start, start + size)
            model |= set(range(start, start + size))
        else:
            bits = seed * 0x9E3779B97F4A7C15 & (1 << size) - 1
            some.add_bits(start, bits)
            model |= set(offsets_of(start, bits))
    return some, model


@given(floor=st.sampled_from([0, 5, 4095, 4096]), spans=SPANS, start=st.integers(0, 14_000), size=st.integers(1, 9000))
def test_a_range_set_is_a_set(floor: int, spans: list[tuple[int, int, int]], start: int, size: int) -> None:
    some, model = filled(floor, spans)
    assert some.total == len(model)
    assert some.floor not in model
    assert some.floor == next(offset for offset in range(40_000) if offset not in model)
    assert set(offsets_of(start, some.bits(start, size))) == {o for o in range(start, start + size) if o in model}
    assert (start in some) == (start in model)
    assert some.next_in(start) == min((offset for offset in model if offset >= start), default=None)
    assert some.next_out(start) == next(offset for offset in range(start, 40_000) if offset not in model)
    above = {offset for base, bits in some.spans() for offset in offsets_of(base, bits)}
    assert above == {offset for offset in model if offset > some.floor}


def test_a_long_run_beside_one_hole_costs_next_to_nothing() -> None:
    some = RangeSet()
    some.add(1, 4096 * 1000)
    assert len({id(bits) for _, bits in some.spans()}) <= 2, "full chunks share one number"
    some.add(0, 1)
    assert (some.floor, some.above, list(some.spans())) == (4096 * 1000, 0, [])


def test_the_floor_stops_at_a_hole_before_the_next_chunk() -> None:
    some = RangeSet()
    some.add(1, 10)
    some.add(4096, 4100)
    some.add(0, 1)
    assert (some.floor, some.above) == (10, 4)
    assert 4097 in some


def test_forgotten_memory_is_free() -> None:
    some = RangeSet()
    some.add_bits(1, 0b101)
    some.add_bits(50_001, 0b101)
    some.forget_below(50_000)
    assert [base for base, _ in some.spans()] == [49152]
    assert some.above == 2


@given(bits=st.integers(0, 1 << 200), count=st.integers(1, 50), base=st.integers(0, 1 << 40))
def test_bitmaps_and_offsets_say_the_same(bits: int, count: int, base: int) -> None:
    offsets = [base + place for place in range(bits.bit_length()) if bits >> place & 1]
    assert list(offsets_of(base, bits)) == offsets
    assert pack(base, offsets) == bits
    assert list(offsets_of(base, lowest(bits, count))) == offsets[:count]
    assert [place for first, end in runs(bits) for place in range(first, end)] == [offset - base for offset in offsets]
    if bits:
        first, shifted = normal(base, bits)
        assert first == offsets[0]
        assert list(offsets_of(first, shifted)) == offsets
