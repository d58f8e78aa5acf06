"""Timers against the simplest thing that could work: a sorted list."""

from __future__ import annotations

from bisect import insort

from hypothesis import given
from hypothesis import strategies as st

from millstream.ids import OFFSET_BITS
from millstream.schedules.timers import Timers


def row(due_ms: int, offset: int) -> int:
    return due_ms << OFFSET_BITS | offset


#: Few seconds and few offsets, so that rows meet in one bucket and in one millisecond.
ROWS = st.builds(row, st.integers(0, 5_000), st.integers(0, 50) | st.just((1 << OFFSET_BITS) - 1))
STEPS = st.lists(
    st.tuples(st.just("add"), st.lists(ROWS, max_size=40))
    | st.tuples(st.just("add_sorted"), st.lists(ROWS, max_size=20).map(sorted))
    | st.tuples(st.just("take"), st.integers(0, 6_000), st.integers(1, 10)),
    max_size=30,
)


@given(STEPS)
def test_rows_come_out_by_due_time_and_offset_whatever_the_order_they_came_in(steps: list[tuple]) -> None:
    timers, model = Timers(), []
    for step in steps:
        if step[0] != "take":
            getattr(timers, step[0])(step[1])
            for added in step[1]:
                insort(model, added)
        else:
            _, now_ms, limit = step
            due = [it for it in model if it >> OFFSET_BITS <= now_ms][:limit]
            assert timers.take(now_ms, limit) == due
            del model[: len(due)]
        assert len(timers) == len(model)
        assert timers.next_due_ms() == (model[0] >> OFFSET_BITS if model else None)


def test_a_row_for_a_second_that_is_being_worked_off_finds_its_place() -> None:
    timers = Timers()
    timers.add([row(1_100, 1), row(1_900, 2)])
    assert timers.take(1_100, 10) == [row(1_100, 1)]
    timers.add([row(1_500, 3), row(400, 4)])
    assert timers.take(2_000, 10) == [row(400, 4), row(1_500, 3), row(1_900, 2)]
    assert timers.next_due_ms() is None


def test_a_million_rows_take_ten_bytes_each() -> None:
    timers = Timers()
    timers.add(row(offset % 600_000, offset) for offset in range(1_000_000))
    size = sum(bucket.itemsize * len(bucket) for bucket in timers._buckets.values())
    assert size == 8_000_000


def test_many_rows_that_come_back_to_the_second_being_worked_off_are_in_order() -> None:
    timers = Timers()
    rows = [row(1_000 + offset // 100, offset) for offset in range(20_000)]
    timers.add(reversed(rows))
    taken = timers.take(1_199, 15_000)
    assert taken == rows[:15_000]
    timers.add(taken[1:])
    assert len(timers) == 19_999
    assert timers.take(1_199, 20_000) == rows[1:]
