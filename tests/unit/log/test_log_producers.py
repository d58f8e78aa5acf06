"""Retries are recognised, gaps and stale producers refused, and all of it survives a restart."""

from __future__ import annotations

import pytest

from millstream.errors import OutOfSequence, ProducerFenced
from millstream.log.producers import Duplicate, ProducerTable
from millstream.records import BatchHeader, encode_batch

HOUR_US = 3600 * 1_000_000
LAST = 2**32


def header(producer_id: int, sequence: int, count: int = 1, epoch: int = 0) -> BatchHeader:
    identity = producer_id << 16 | epoch
    return BatchHeader(
        encode_batch([b""] * count, base_timestamp_us=0, producer=identity, first_sequence=sequence % LAST)
    )


def table_with(*batches: tuple[BatchHeader, int, int]) -> ProducerTable:
    table = ProducerTable()
    for batch, offset, time_us in batches:
        assert table.check(batch) is None
        table.record(batch, offset, time_us)
    return table


def test_batches_in_order_are_accepted_and_repetitions_recognised() -> None:
    table = table_with((header(7, 0, 3), 10, 100), (header(7, 3, 2), 20, 200))
    assert table.check(header(7, 5)) is None
    assert table.check(header(7, 3, 2)) == Duplicate(20, 200)
    assert table.check(header(7, 0, 3)) == Duplicate(10, 100)


def test_a_gap_is_refused() -> None:
    with pytest.raises(OutOfSequence, match="expected 1"):
        table_with((header(7, 0), 0, 0)).check(header(7, 2))


def test_the_same_start_with_another_size_is_no_repetition() -> None:
    with pytest.raises(OutOfSequence):
        table_with((header(7, 0, 3), 0, 0), (header(7, 3), 3, 0)).check(header(7, 0, 2))


def test_what_lies_before_all_that_is_remembered_was_stored() -> None:
    table = table_with(*((header(7, LAST - 5 + n), n, n) for n in range(20)))
    assert table.is_past(header(7, LAST - 5))
    assert table.is_past(header(7, LAST - 2)), "sequences begin again at 0"
    for other in (header(7, LAST - 1), header(7, 15), header(7, 99), header(8, 0), header(7, LAST - 5, epoch=1)):
        assert not table.is_past(other)


def test_only_the_last_sixteen_batches_are_recognised() -> None:
    table = table_with(*((header(7, n), n, n) for n in range(20)))
    assert table.check(header(7, 4)) == Duplicate(4, 4)
    with pytest.raises(OutOfSequence):
        table.check(header(7, 3))


def test_sequences_wrap_around() -> None:
    table = table_with((header(7, LAST - 2, 4), 0, 0))
    assert table.check(header(7, 2)) is None
    assert table.check(header(7, LAST - 2, 4)) == Duplicate(0, 0)


def test_a_new_epoch_fences_the_old_one_and_starts_at_zero() -> None:
    table = table_with((header(7, 0, epoch=1), 0, 0))
    with pytest.raises(OutOfSequence):
        table.check(header(7, 1, epoch=2))
    table.record(header(7, 0, epoch=2), 1, 0)
    assert table.check(header(7, 1, epoch=2)) is None
    with pytest.raises(ProducerFenced, match="epoch 2"):
        table.check(header(7, 1, epoch=1))


def test_an_unknown_producer_may_start_anywhere_and_no_producer_is_not_tracked() -> None:
    table = table_with((header(7, 12345), 0, 0))
    table.record(header(0, 5), 1, 0)
    assert table.check(header(0, 99)) is None
    assert len(table) == 1


def test_a_batch_may_follow_one_that_waits_for_the_same_append() -> None:
    table = table_with((header(7, 0), 0, 0))
    waiting = header(7, 1, 2)
    assert table.check(header(7, 3), after=waiting) is None
    with pytest.raises(OutOfSequence):
        table.check(header(7, 1, 2), after=waiting)


def test_silent_producers_are_forgotten_after_a_day() -> None:
    table = table_with((header(1, 0), 0, 0), (header(2, 0), 1, 20 * HOUR_US), (header(3, 0), 2, 25 * HOUR_US))
    assert len(table) == 2
    table.forget_idle(45 * HOUR_US)
    assert len(table) == 1


def test_beyond_the_limit_the_longest_silent_go_first() -> None:
    table = ProducerTable(producers_max=2)
    for producer_id, time_us in ((1, 0), (2, 1), (1, 2), (3, 3)):
        table.record(header(producer_id, time_us), time_us, time_us)
    assert len(table) == 2
    assert table.check(header(2, 77)) is None, "2 was forgotten, so it may start anywhere"
    assert table.check(header(1, 2)) == Duplicate(2, 2)


def test_a_snapshot_brings_everything_back() -> None:
    table = table_with(*((header(n % 5 + 1, n // 5, epoch=3), n, n) for n in range(40)))
    copy = ProducerTable.decode(table.encode(40), 40)
    assert copy is not None
    assert copy.encode(40) == table.encode(40)
    assert copy.check(header(1, 7, epoch=3)) == Duplicate(35, 35)


def test_a_damaged_snapshot_is_not_believed() -> None:
    data = bytearray(table_with((header(7, 0, 3), 10, 100)).encode(13))
    assert ProducerTable.decode(bytes(data), 13) is not None
    assert ProducerTable.decode(bytes(data), 14) is None, "it belongs to another offset"
    for size in range(len(data)):
        assert ProducerTable.decode(bytes(data[:size]), 13) is None
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert ProducerTable.decode(bytes(data), 13) is None
        data[bit // 8] ^= 1 << bit % 8


def test_merging_adds_only_what_is_new() -> None:
    older = table_with(*((header(7, n), n, n) for n in range(3)))
    newer = table_with(*((header(7, n), n, n) for n in range(2, 5)), (header(8, 0), 5, 5))
    older.merge(newer, from_offset=3)
    assert older.encode(6) == table_with(*((header(7, n), n, n) for n in range(5)), (header(8, 0), 5, 5)).encode(6)


def test_a_producer_that_repeats_an_old_message_has_not_been_silent() -> None:
    """A dedup id may be known for longer than a day; its batch is recorded with the time of the first one."""
    table = table_with((header(7, 0), 50, 30 * HOUR_US))
    table.record(header(7, 1), 3, 1 * HOUR_US)
    table.record(header(8, 0), 51, 31 * HOUR_US)
    assert table.check(header(7, 0)) == Duplicate(50, 30 * HOUR_US)
    table.record(header(7, 2), 4, 1 * HOUR_US)
    table.record(header(7, 3), 5, 1 * HOUR_US)
    table.record(header(8, 1), 52, 32 * HOUR_US)
    table.record(header(9, 0), 53, 33 * HOUR_US)
    assert table.check(header(7, 0)) == Duplicate(50, 30 * HOUR_US)


@pytest.mark.parametrize("goes_on", [2, 3])
def test_nobody_is_forgotten_because_nothing_came_for_long(goes_on: int) -> None:
    """The broker was down for a month, or its clock was set ahead; whoever comes first after that."""
    table = table_with((header(1, 0), 0, 0), (header(2, 0), 1, HOUR_US))
    table.record(header(goes_on, 1), 2, 721 * HOUR_US)
    table.record(header(4, 0), 3, 721 * HOUR_US)
    assert table.check(header(1, 0)) == Duplicate(0, 0)
    assert table.check(header(2, 0)) == Duplicate(1, HOUR_US)
    table.record(header(5, 0), 4, 726 * HOUR_US)
    assert table.check(header(1, 77)) is None, "silence counts again"


def test_nobody_is_forgotten_over_a_pause_that_a_crash_has_ended() -> None:
    """A snapshot knows of the time before, the log itself of the time after."""
    older = table_with((header(1, 0), 0, 0), (header(2, 0), 1, HOUR_US))
    newer = table_with((header(3, 0), 2, 721 * HOUR_US), (header(4, 0), 3, 722 * HOUR_US))
    for table in (older, ProducerTable.decode(older.encode(2), 2)):
        assert table is not None
        table.merge(newer, from_offset=2)
        table.merge(ProducerTable(), from_offset=2)
        assert table.check(header(1, 0)) == Duplicate(0, 0)
        assert len(table) == 4
        table.merge(table_with((header(3, 1), 4, 741 * HOUR_US)), from_offset=4)
        assert len(table) == 2, "silence counts again"


def test_what_repeats_an_old_message_is_no_pause() -> None:
    table = table_with((header(1, 0), 50, 100 * HOUR_US))
    for number in range(2, 10):
        table.record(header(number, 0), 3, 1 * HOUR_US)
        table.record(header(number + 10, 0), 50 + number, (100 + 3 * number) * HOUR_US)
    assert table.check(header(1, 77)) is None, "it has been silent for a day"
