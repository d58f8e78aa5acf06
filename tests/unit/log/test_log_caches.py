"""Open files and recent bytes are bounded, whatever the number of partitions."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from millstream.log.cache import PIECE_BYTES, FileCache, TailCache
from millstream.log.index import IndexHeader, LiveIndex, StoredIndex
from millstream.log.memory import MemoryStorage
from millstream.log.storage import DiskStorage


def test_the_least_recently_used_file_is_closed_first(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    for name in "abc":
        storage.open(name, create=True).close()
    files = FileCache(limit=2)
    a, b = files.get(storage, "a"), files.get(storage, "b")
    assert files.get(storage, "a") is a
    files.get(storage, "c")
    assert len(files) == 2
    assert files.get(storage, "a") is a
    with pytest.raises(OSError, match="Bad file descriptor"):
        b.size()


def test_a_pinned_file_stays_open_and_becomes_ordinary_again(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    for name in "abc":
        storage.open(name, create=True).close()
    files = FileCache(limit=1)
    a = files.pin(storage, "a")
    assert files.pin(storage, "a") is a
    assert files.get(storage, "a") is a
    files.get(storage, "b")
    files.get(storage, "c")
    assert a.size() == 0
    assert len(files) == 2
    files.unpin(storage, "a")
    files.unpin(storage, "a")
    assert len(files) == 1
    files.drop(storage, "a")
    files.drop(storage, "a")
    assert len(files) == 0


def test_files_of_different_storages_are_different_files() -> None:
    one, two = MemoryStorage(), MemoryStorage()
    one.replace("f", b"1")
    two.replace("f", b"2")
    files = FileCache()
    assert files.get(one, "f").read(0, 1) == b"1"
    assert files.get(two, "f").read(0, 1) == b"2"


def test_the_oldest_bytes_of_any_partition_go_first() -> None:
    cache = TailCache(bytes_max=10 + 3 * PIECE_BYTES)
    one, two = cache.attach(), cache.attach()
    one.add(0, b"aaaa")
    two.add(0, b"bbbb")
    assert (one.first_offset, two.first_offset) == (0, 0)
    two.add(5, b"cc")
    one.add(7, b"dddd")
    assert (one.first_offset, two.first_offset) == (7, 0)
    assert one.pieces[one.find(9)] == b"dddd"
    assert two.pieces[two.find(5)] == b"cc"
    assert two.pieces[two.find(4)] == b"bbbb"
    assert cache.size_bytes == 10 + 3 * PIECE_BYTES
    two.add(6, b"x" * 11 + bytes(3 * PIECE_BYTES))
    assert (one.first_offset, two.first_offset, cache.size_bytes) == (-1, -1, 0)


@pytest.mark.parametrize("size", [1, 100, 1000])
def test_many_small_pieces_take_no_more_memory_than_is_allowed(size: int) -> None:
    allowed = 1_000_000
    tracemalloc.start()
    try:
        cache = TailCache(bytes_max=allowed)
        tail = cache.attach()
        for n in range(3 * allowed // (size + PIECE_BYTES)):
            tail.add(10**9 + n, bytes(size))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Lists have room to grow, and places of what was evicted are given back from time to time.
    assert taken < 1.3 * allowed


def test_a_long_tail_does_not_keep_what_was_evicted() -> None:
    cache = TailCache(bytes_max=1000 * (1 + PIECE_BYTES))
    tail = cache.attach()
    for n in range(50_000):
        tail.add(n, b"x")
        assert tail.first_offset == max(0, n - 999)
    assert len(tail.pieces) < 4000
    assert tail.find(49_500) == tail.first + 500


def test_a_cleared_tail_does_not_confuse_the_cache() -> None:
    cache = TailCache(bytes_max=3 * (2 + PIECE_BYTES))
    one, two = cache.attach(), cache.attach()
    one.add(0, b"aa")
    one.add(1, b"bb")
    one.clear()
    one.add(2, b"cc")
    assert one.first_offset == 2
    two.add(0, b"dd")
    two.add(1, b"ee")
    assert (one.first_offset, two.first_offset) == (2, 0)
    two.add(2, b"ff")
    assert (one.first_offset, two.first_offset) == (-1, 0)


def test_pieces_before_an_offset_can_be_forgotten() -> None:
    cache = TailCache(bytes_max=100 * PIECE_BYTES)
    tail = cache.attach()
    for n in range(4):
        tail.add(10 * n, b"%d" % n)
    tail.forget_before(25, 40)
    assert tail.first_offset == 20
    tail.forget_before(40, 40)
    assert tail.first_offset == -1
    tail.add(40, b"x")
    assert tail.first_offset == 40


def entries(count: int) -> LiveIndex:
    index = LiveIndex(100)
    for n in range(count):
        index.add(10 * n, 100 * n, 1000 * (n // 2))
    return index


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_an_index_answers_the_same_from_memory_and_from_its_file(count: int) -> None:
    live = entries(count)
    storage = MemoryStorage()
    storage.replace("index", bytes(64) + live.encode())
    stored = StoredIndex(FileCache(), storage, "index", count)
    again = LiveIndex.decode(live.encode(), 100)
    assert again.due == live.due
    for value in range(-1, 1002, 3):
        answers = live.last_at_offset(value), live.last_at_position(10 * value), live.last_before_time(100 * value)
        for other in (stored, again):
            got = other.last_at_offset(value), other.last_at_position(10 * value), other.last_before_time(100 * value)
            assert got == answers
        number = min(value // 10, count - 1)
        assert answers[0] == (live.entry(number) if value >= 0 and count else None)


def test_an_index_header_survives_and_every_flipped_bit_is_noticed() -> None:
    header = IndexHeader(1, 2, 3, 4, 5, -6, 7, 8, 9)
    data = bytearray(header.encode())
    assert len(data) == 64
    assert IndexHeader.decode(bytes(data)) == header
    assert IndexHeader.decode(bytes(data[:63])) is None
    for bit in range(8 * 64):
        data[bit // 8] ^= 1 << bit % 8
        assert IndexHeader.decode(bytes(data)) is None
        data[bit // 8] ^= 1 << bit % 8
