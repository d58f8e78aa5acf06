"""How much a micro-batch takes, and how ranges become tasks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidArgument
from millstream.spark.offsets import (
    TASK_BYTES,
    Offsets,
    Place,
    Position,
    Range,
    admit,
    as_json,
    data_loss,
    from_json,
    split,
)

PLACES = st.builds(Place, st.sampled_from(["a", "b.c"]), st.integers(0, 11))
OFFSETS = st.dictionaries(PLACES, st.integers(0, 2**40))


@given(OFFSETS)
def test_offsets_have_one_text_whatever_order_they_come_in(offsets: Offsets) -> None:
    backwards = dict(reversed(offsets.items()))
    assert json.dumps(as_json(offsets)) == json.dumps(as_json(backwards))
    assert from_json(json.loads(json.dumps(as_json(offsets)))) == offsets


def test_partitions_are_in_the_order_of_their_numbers() -> None:
    assert list(as_json({Place("a", 10): 1, Place("a", 9): 1})["a"]) == ["9", "10"]


def test_how_far_a_query_is_can_be_where_another_begins() -> None:
    offsets = {Place("orders", 0): 7, Place("orders", 1): 9}
    document = Position(offsets, {"orders": 23}).as_json()
    assert Position.from_json(document) == (offsets, {"orders": 23})
    assert from_json(document) == offsets


@pytest.mark.parametrize("document", [5, "a", {"a": 1}, {"a": {"x": 1}}, {"a": {"0": 1.5}}, {"a": {"0": True}}])
def test_what_are_no_offsets_is_refused(document: object) -> None:
    with pytest.raises(InvalidArgument):
        from_json(document)


@given(st.dictionaries(PLACES, st.tuples(st.integers(0, 1000), st.integers(0, 5000)), min_size=1), st.integers(1, 9000))
def test_a_limit_is_kept_and_everybody_gets_on(spans: dict[Place, tuple[int, int]], limit: int) -> None:
    start = {place: first for place, (first, _) in spans.items()}
    end = {place: first + size for place, (first, size) in spans.items()}
    taken = admit(start, end, limit)
    sizes = {place: taken[place] - start[place] for place in taken}
    assert taken.keys() == end.keys()
    assert all(start[place] <= taken[place] <= end[place] for place in taken)
    # Each partition that has something gets on by one at least.
    assert all(sizes[place] for place in taken if end[place] > start[place])
    assert sum(sizes.values()) <= max(limit, sum(end[place] > start[place] for place in taken)) + len(taken)
    if sum(size for _, size in spans.values()) <= limit:
        assert taken == end


def test_a_limit_is_shared_by_what_there_is() -> None:
    a, b = Place("a", 0), Place("a", 1)
    assert admit({a: 0, b: 0}, {a: 900, b: 100}, 100) == {a: 90, b: 10}
    # The same number of messages, but those of one are nine times as large: half of each fits.
    assert admit({a: 0, b: 0}, {a: 100, b: 100}, 500, {a: 9.0, b: 1.0}) == {a: 50, b: 50}


RANGES = st.lists(
    st.builds(
        lambda number, first, size, weight: Range("a", number, first, first + size, 0, weight),
        st.integers(0, 5),
        st.integers(0, 10**9),
        st.integers(0, 100_000),
        st.sampled_from([1.0, 100.0, 10_000.0]),
    ),
    max_size=6,
)


@given(RANGES, st.integers(0, 40), st.none() | st.integers(100, 10**6))
def test_tasks_read_what_the_ranges_hold_and_no_more_than_they_may(
    ranges: list[Range], at_least: int, messages_max: int | None
) -> None:
    tasks = split(ranges, at_least=at_least, messages_max=messages_max)
    rest = iter(tasks)
    for whole in ranges:
        offset = whole.first
        while offset < whole.until:
            task = next(rest)
            assert task.first == offset < task.until <= whole.until
            assert task._replace(first=whole.first, until=whole.until) == whole
            offset = task.until
    assert next(rest, None) is None
    sizes = [task.until - task.first for task in tasks]
    assert all(size <= (messages_max or size) for size in sizes)
    assert all(task.message_bytes * (size - 1) <= TASK_BYTES for task, size in zip(tasks, sizes, strict=True))
    assert len(tasks) >= min(at_least, sum(each.until - each.first for each in ranges))


def test_few_partitions_make_the_tasks_that_were_asked_for() -> None:
    assert len(split([Range("a", 0, 0, 1000)], at_least=8)) == 8
    assert len(split([Range("a", 0, 0, 900), Range("a", 1, 0, 100)], at_least=10)) == 10
    assert len(split([Range("a", 0, 0, 3)], at_least=10)) == 3
    assert len(split([Range("a", 0, 0, 1000)], messages_max=300)) == 4
    assert len(split([Range("a", 0, 0, 6 * 2**20, 0, 64.0)])) == 3


def test_an_error_about_lost_data_names_the_ranges_but_not_all_of_too_many() -> None:
    text = str(data_loss([Range("orders", 2, 5, 9)]))
    assert "orders[2] 5..8" in text
    assert "failOnDataLoss" in text
    assert "and 2 more" in str(data_loss([Range("orders", number, 5, 9) for number in range(12)]))
