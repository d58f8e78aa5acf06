"""Where what was stored up to an epoch ends, which tells readers what a power cut took."""

from __future__ import annotations

import pytest

from millstream.log.memory import MemoryStorage
from tests.log_workload import append, open_log, plain


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


def test_the_end_of_an_epoch_is_where_a_later_one_begins(storage: MemoryStorage) -> None:
    log = open_log(storage, segment_bytes=1000, index_interval_bytes=200, tail_bytes=0)
    assert log.end_of_epoch(3) == 0
    begins: dict[int, int] = {}
    for epoch in (2, 3, 7, 8):
        log.leader_epoch, begins[epoch] = epoch, log.next_offset
        for n in range(epoch * 5):
            append(log, plain(b"%d" % n))
    assert len(log.segments) > 5
    for reopened in (False, True):
        if reopened:
            log.close()
            log = open_log(storage, segment_bytes=1000, tail_bytes=0)
            log.leader_epoch = 8
        ends = [log.end_of_epoch(epoch) for epoch in range(10)]
        assert ends == [0, 0, begins[3], *[begins[7]] * 4, begins[8], log.next_offset, log.next_offset]


def test_the_end_of_an_epoch_is_found_beside_damage(storage: MemoryStorage) -> None:
    log = open_log(storage, segment_bytes=1000, index_interval_bytes=200, tail_bytes=0)
    for epoch in (1, 2):
        log.leader_epoch, begins = epoch, log.next_offset
        for n in range(20):
            append(log, plain(b"%d" % n))
    log.sync()
    for segment in log.segments[:-1]:
        file = storage.open(segment.path)
        file.write(b"XXXX", 20)  # the first header of each
    assert log.end_of_epoch(1) in range(begins, begins + 2), "the first that can be read"
