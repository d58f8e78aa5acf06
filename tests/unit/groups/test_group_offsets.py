"""Committed positions: lag, resets and documents."""

from __future__ import annotations

import json

import pytest

from millstream.errors import InvalidArgument, OffsetOutOfRange
from millstream.groups.offsets import (
    METADATA_BYTES_MAX,
    OFFSET_MAX,
    Bounds,
    Committed,
    Lag,
    OffsetTable,
    Reset,
    ResetTo,
    Shift,
    ToEarliest,
    ToLatest,
    ToOffset,
    ToTimestamp,
    committed_from_document,
    committed_to_document,
    decide_commit,
    decide_reset,
)
from millstream.groups.records import TopicPartition

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)
AUDIT = TopicPartition("audit", 0)


@pytest.fixture
def table() -> OffsetTable:
    table = OffsetTable("workers")
    table.replay(P0, decide_commit(40, metadata="checkpoint 7", now_ms=5))
    return table


def test_the_table_holds_the_last_position_and_may_go_back(table: OffsetTable) -> None:
    table.replay(P0, decide_commit(10, now_ms=6))
    assert table.get(P0) == Committed(10, "", 6)
    assert table.get(P1) is None


def test_positions_are_listed_in_order_and_forgotten_by_topic(table: OffsetTable) -> None:
    table.replay(AUDIT, Committed(1))
    table.replay(P1, Committed(2))
    assert [partition for partition, _ in table] == [AUDIT, P0, P1]
    assert table.of_topic("orders") == [P0, P1]
    for partition in table.of_topic("orders"):
        table.replay(partition, None)
    table.replay(P1, None)
    assert len(table) == 1


def test_lag_counts_what_is_still_there_to_read(table: OffsetTable) -> None:
    table.replay(AUDIT, Committed(5))
    lags = table.lag({P0: Bounds(0, 100), P1: Bounds(20, 30), AUDIT: Bounds(8, 10)})
    assert lags == {P0: Lag(40, 100, 60), P1: Lag(None, 30, 10), AUDIT: Lag(5, 10, 2)}


def test_a_position_beyond_the_end_has_no_lag(table: OffsetTable) -> None:
    assert table.lag({P0: Bounds(0, 30)})[P0].messages == 0


@pytest.mark.parametrize(
    ("to", "after"),
    [
        (ToEarliest(), 10),
        (ToLatest(), 90),
        (ToOffset(50), 50),
        (ToOffset(5), 10),
        (ToOffset(1_000), 90),
        (Shift(-15), 25),
        (Shift(-1_000), 10),
        (Shift(1_000), 90),
        (ToTimestamp({P0: 33}), 33),
        (ToTimestamp({P0: None}), 90),
        (ToTimestamp({}), 90),
    ],
)
def test_a_reset_lands_inside_the_partition(table: OffsetTable, to: ResetTo, after: int) -> None:
    assert decide_reset(table, to, partitions=[P0], bounds={P0: Bounds(10, 90)}) == [Reset(P0, 40, after)]
    assert table.get(P0) == Committed(40, "checkpoint 7", 5), "a plan changes nothing"


def test_a_reset_covers_partitions_without_a_commit_unless_it_is_a_shift(table: OffsetTable) -> None:
    bounds = {P0: Bounds(0, 90), P1: Bounds(3, 9)}
    plan = decide_reset(table, ToEarliest(), partitions=[P1, P0, P1], bounds=bounds)
    assert plan == [Reset(P0, 40, 0), Reset(P1, None, 3)]
    with pytest.raises(InvalidArgument, match="orders/1"):
        decide_reset(table, Shift(1), partitions=[P0, P1], bounds=bounds)


def test_a_commit_outside_the_limits_is_refused() -> None:
    assert decide_commit(OFFSET_MAX, metadata="x" * METADATA_BYTES_MAX, now_ms=0).offset == OFFSET_MAX
    for offset in (-1, OFFSET_MAX + 1):
        with pytest.raises(OffsetOutOfRange):
            decide_commit(offset, now_ms=0)
    with pytest.raises(InvalidArgument, match="4098 bytes"):
        decide_commit(0, metadata="é" * 2_049, now_ms=0)


def test_a_position_survives_being_written_down(table: OffsetTable) -> None:
    committed = table.get(P0)
    assert committed is not None
    document = json.loads(json.dumps(committed_to_document(committed)))
    assert committed_from_document({**document, "colour": "blue"}) == committed
    assert committed_from_document({"offset": 3}) == Committed(3)
