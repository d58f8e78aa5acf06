"""Runs of due times on disk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.ids import OFFSET_BITS
from millstream.log.due_index import DueIndex
from millstream.log.memory import MemoryStorage

FAR_MS = 1 << 50


def row(due_ms: int, offset: int) -> int:
    return due_ms << OFFSET_BITS | offset


def loaded(storage: MemoryStorage) -> DueIndex:
    index = DueIndex(storage, "due")
    index.load()
    return index


RUNS = st.lists(st.lists(st.integers(0, 100) | st.integers(0, 1 << 55), min_size=1, max_size=30), max_size=5)


@given(RUNS, st.lists(st.integers(0, 120), max_size=5), st.integers(0, 110))
def test_rows_are_read_once_in_order_and_can_be_listed_at_any_time(
    runs: list[list[int]], times: list[int], list_from: int
) -> None:
    storage = MemoryStorage()
    index = loaded(storage)
    rows: list[int] = []
    for due in runs:
        first = len(rows)
        added = [row(due_ms, first + place) for place, due_ms in enumerate(due)]
        index.add(index.write(first, first + len(due), added))
        rows += added
    index = loaded(storage)
    assert index.covered() == [(run.first_offset, run.end_offset) for run in index.runs]
    assert sum(run.count for run in index.runs) == len(rows) == len(index)
    left = sorted(rows)
    for time_ms in [*sorted(times), FAR_MS << 10]:
        read = sorted(it for run in index.runs for it in index.read(run, time_ms))
        expected = [it for it in left if it >> OFFSET_BITS < time_ms]
        assert read == expected
        left = left[len(expected) :]
        assert index.next_due_ms() == (left[0] >> OFFSET_BITS if left else None)
    assert list(index.rows_from(list_from)) == [it for it in sorted(rows) if it >> OFFSET_BITS >= list_from]


def test_a_run_of_many_pieces_is_read_up_to_the_time_asked_for() -> None:
    index = loaded(MemoryStorage())
    rows = [row(offset, offset) for offset in range(20_000)]
    run = index.write(0, 20_000, rows[::-1])
    index.add(run)
    assert index.read(run, 10_000) == rows[:10_000]
    assert run.next_due_ms == 10_000
    assert index.read(run, FAR_MS) == rows[10_000:]
    assert list(index.rows_from(15_000)) == rows[15_000:]


def test_a_damaged_run_is_dropped_so_that_the_log_is_read_instead() -> None:
    storage = MemoryStorage()
    index = loaded(storage)
    index.write(0, 2, [row(5, 0), row(6, 1)])
    index.write(2, 4, [row(5, 2), row(6, 3)])
    index.write(4, 6, [row(5, 4), row(6, 5)])
    first, second, _ = (f"due/{name}" for name in storage.names("due"))
    file = storage.open(first)
    file.write(b"\xff", 40)
    storage.open(second).truncate(50)
    assert loaded(storage).covered() == [(4, 6)]
    assert len(storage.names("due")) == 1, "what cannot be believed is removed"


def test_a_run_whose_messages_are_settled_is_removed() -> None:
    storage = MemoryStorage()
    index = loaded(storage)
    run = index.write(0, 1, [row(5, 0)])
    index.add(run)
    index.remove(run)
    assert storage.names("due") == []
    assert loaded(storage).next_due_ms() is None
