"""Opening must not depend on how much is stored."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from millstream.log.index import IndexFlags, IndexHeader
from millstream.log.segment import segment_name
from millstream.log.storage import DiskStorage
from millstream.records import stamp
from tests.log_workload import DIRECTORY, append, open_log, plain, read_back

MIB = 1024 * 1024


@pytest.mark.slow
def test_ten_gigabytes_open_in_a_blink(tmp_path: Path) -> None:
    """160 sealed segments of 64 MiB, as sparse files: the first batch is real, the rest are holes nobody reads."""
    storage = DiskStorage(tmp_path)
    storage.make_directory(DIRECTORY)
    count = 160
    for number in range(count):
        base = 1000 * number
        batch = plain(b"first of segment %d" % number)
        stamp(batch, 0, base_offset=base, append_time_us=number, leader_epoch=0)
        log = tmp_path / segment_name(DIRECTORY, base, "log")
        log.write_bytes(batch)
        os.truncate(log, 64 * MIB)
        flags, size = int(IndexFlags.SEALED | IndexFlags.NO_PRODUCERS), 64 * MIB
        header = IndexHeader(flags, 16384, size, base, base + 1000, number, number, size, 1000)
        (tmp_path / segment_name(DIRECTORY, base, "index")).write_bytes(header.encode() + bytes(24 * 16384))
    (tmp_path / segment_name(DIRECTORY, 1000 * count, "log")).write_bytes(b"")
    started = time.perf_counter()
    log = open_log(storage)
    seconds = time.perf_counter() - started
    print(f"opened {log.size_bytes / 2**30:.1f} GiB in {seconds * 1000:.1f} ms")
    assert log.size_bytes == count * 64 * MIB
    assert (log.start_offset, log.next_offset, log.messages) == (0, 160_000, 160_000)
    assert seconds < 0.5
    more = append(log, plain(b"at the end"))
    assert read_back(log, start=160_000) == (more, [])


@pytest.mark.slow
def test_a_crashed_segment_of_64_mib_recovers_within_seconds(tmp_path: Path) -> None:
    """The worst that recovery has to scan per partition: a full active segment of small batches."""
    storage = DiskStorage(tmp_path)
    log = open_log(storage)
    batches = [plain(b"x" * 100) for _ in range(100)]
    for _ in range(64 * MIB // len(batches[0]) // 100):
        log.append(batches, [1] * 100, 0)
    log.sync()
    started = time.perf_counter()
    again = open_log(storage)
    print(f"recovered {again.messages} batches in {time.perf_counter() - started:.2f} s")
    assert not again.recovery.clean
    assert again.next_offset == log.next_offset
    assert again.recovery.seconds < 10
