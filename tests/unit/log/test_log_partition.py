"""Appending, reading, rolling, sealing and removing, on one partition."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from millstream.errors import OffsetOutOfRange, StorageFailed
from millstream.log import recovery
from millstream.log.cache import FileCache, TailCache
from millstream.log.compaction import Compaction
from millstream.log.index import IndexFlags
from millstream.log.memory import MemoryFile, MemoryStorage
from millstream.log.partition import LogConfig, PartitionLog
from millstream.log.producers import Duplicate
from millstream.log.retention import Retention
from millstream.log.segment import Segment
from millstream.log.storage import DiskStorage, Storage
from millstream.log.swap import read_index_header
from millstream.records import Batch, BatchHeader
from tests.log_workload import (
    DIRECTORY,
    FIRST_INDEX,
    FIRST_LOG,
    Message,
    append,
    messages_of,
    mixed,
    open_log,
    plain,
    read_back,
)

MINUTE_US = 60 * 1_000_000


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


def filled(storage: Storage, count: int = 200, **options: int) -> tuple[PartitionLog, list[Message]]:
    """Many segments of mixed batches, appended in groups, everything synced."""
    random = Random(11)
    log = open_log(storage, **{"segment_bytes": 4000, "index_interval_bytes": 512, **options})
    messages: list[Message] = []
    for n in range(count):
        messages += append(log, *(mixed(random) for _ in range(random.randint(1, 3))), now_us=n * 1000)
    log.sync()
    return log, messages


# Appending


def test_a_new_log_is_empty_and_starts_at_zero(storage: MemoryStorage) -> None:
    log = open_log(storage)
    assert (log.start_offset, log.next_offset, log.size_bytes, log.messages) == (0, 0, 0, 0)
    assert log.read(0, 100, before=0) == ([], 0, None)
    assert log.recovery.clean


def test_append_stamps_offsets_time_and_epoch(storage: MemoryStorage) -> None:
    log = open_log(storage)
    log.leader_epoch = 4
    assert log.append([plain(b"a", b"b"), plain(b"c")], [2, 1], 777) == 0
    assert log.append([plain(b"d")], [1], 778) == 3
    (joined, last), _, _ = log.read(0, 1000, before=4)
    headers = [BatchHeader(joined), BatchHeader(joined, BatchHeader(joined).length), BatchHeader(last)]
    assert [header.base_offset for header in headers] == [0, 2, 3]
    assert [header.append_time_us for header in headers] == [777, 777, 778]
    assert {header.leader_epoch for header in headers} == {4}
    assert log.size_bytes == len(joined) + len(last) == storage.size(FIRST_LOG)
    assert log.messages == 4


def test_append_times_never_go_backwards_even_after_a_restart(storage: MemoryStorage) -> None:
    log = open_log(storage)
    append(log, plain(b"a"), now_us=500)
    append(log, plain(b"b"), now_us=100)
    assert log.last_append_us == 500
    log.close()
    log = open_log(storage)
    append(log, plain(b"c"), now_us=200)
    (data,), _, _ = log.read(2, 1000, before=3)
    assert Batch.parse(data).append_time_us == 500


def test_segments_roll_before_they_would_exceed_their_size(storage: MemoryStorage) -> None:
    log, messages = filled(storage)
    assert len(log.segments) > 10
    assert all(segment.size <= 4000 for segment in log.segments)
    assert log.size_bytes == sum(segment.size for segment in log.segments)
    assert log.messages == len(messages)
    big = append(log, plain(b"x" * 10_000))
    small = append(log, plain(b"y"))
    assert read_back(log) == (messages + big + small, [])
    assert log.segments[-2].messages == 1, "a batch larger than a segment has one for itself"


def test_segments_roll_before_they_have_more_messages_than_their_index_can_say(storage: MemoryStorage) -> None:
    """Batches of nothing are packed so well that billions of messages take a few megabytes."""
    log = open_log(storage)
    for n in range(6):
        log.append([plain(b"")], [2**30], n)
    assert [segment.messages for segment in log.segments] == [2**31] * 3
    log.append([plain(b""), plain(b"")], [2**30, 1], 6)
    log.append([plain(b"")], [2**30], 7)
    assert [segment.messages for segment in log.segments[3:]] == [2**30 + 1, 2**30]
    log.close()
    assert open_log(storage).next_offset == log.next_offset


def test_rolling_an_empty_segment_does_nothing(storage: MemoryStorage) -> None:
    log = open_log(storage)
    log.roll()
    assert len(log.segments) == 1


# Reading


@pytest.mark.parametrize("max_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("tail_bytes", [0, 3000, 1 << 20])
def test_everything_is_read_back_from_memory_and_from_files(
    storage: MemoryStorage, max_bytes: int, tail_bytes: int
) -> None:
    log, messages = filled(storage, tail_bytes=tail_bytes)
    assert read_back(log, max_bytes=max_bytes) == (messages, [])


@pytest.mark.parametrize("tail_bytes", [0, 1 << 20])
def test_a_read_may_start_at_any_offset_and_end_before_any(storage: MemoryStorage, tail_bytes: int) -> None:
    log, messages = filled(storage, 40, tail_bytes=tail_bytes)
    boundaries = {0}
    for chunk in (log.read(n, 1, before=log.next_offset) for n in range(log.next_offset)):
        boundaries.add(chunk.next_offset)
    for start in range(log.next_offset):
        assert read_back(log, start=start)[0] == messages[start:]
    for before in range(log.next_offset + 1):
        visible = max(boundary for boundary in boundaries if boundary <= before)
        assert read_back(log, before=before)[0] == messages[:visible], "no batch that reaches beyond `before`"


@pytest.mark.parametrize("tail_bytes", [0, 1 << 20])
def test_a_read_gets_at_least_one_batch_and_no_more_than_it_asked_for(storage: MemoryStorage, tail_bytes: int) -> None:
    log, _ = filled(storage, 40, tail_bytes=tail_bytes)
    offset = 0
    while offset < log.next_offset:
        one = log.read(offset, 1, before=log.next_offset)
        batch = Batch.parse(one.buffers[0])
        assert one.next_offset == batch.next_offset
        assert sum(map(len, one.buffers)) == batch.header.length
        for size in (500, 1300):
            chunk = log.read(offset, size, before=log.next_offset)
            assert sum(map(len, chunk.buffers)) <= max(size, batch.header.length)
        offset = one.next_offset


def test_readers_at_the_end_get_the_object_that_was_appended(storage: MemoryStorage) -> None:
    log = open_log(storage)
    append(log, plain(b"a"), plain(b"b"))
    append(log, plain(b"c"))
    first = log.read(0, 1 << 20, before=3)
    again = log.read(0, 1 << 20, before=3)
    assert len(first.buffers) == 2
    assert all(one is other for one, other in zip(first.buffers, again.buffers, strict=True))


def test_a_log_that_nobody_reads_is_written_without_a_copy_and_reads_back_the_same(storage: MemoryStorage) -> None:
    log = open_log(storage, segment_bytes=1 << 22)

    def append_borrowed(number: int) -> None:
        batch = plain(b"%05d" % number * 5000)
        append(log, batch)
        batch[:] = bytes(len(batch))  # the network's buffer is used again

    def is_kept(offset: int) -> bool:
        one, other = (log.read(offset, 1 << 20, before=log.next_offset).buffers[0] for _ in range(2))
        return one is other

    for number in range(100):
        append_borrowed(number)
    messages, _ = read_back(log)
    assert [message.value for message in messages] == [b"%05d" % number * 5000 for number in range(100)]
    assert not is_kept(99)
    append_borrowed(100)  # somebody has read up to the end
    assert is_kept(100)


def test_offsets_outside_the_log_are_refused(storage: MemoryStorage) -> None:
    log, _ = filled(storage, 60)
    log.delete_before(30)
    for offset in (log.start_offset - 1, log.next_offset + 1):
        with pytest.raises(OffsetOutOfRange, match=rf"{log.start_offset}\.\.{log.next_offset}"):
            log.read(offset, 100, before=log.next_offset)
    assert log.read(log.next_offset, 100, before=log.next_offset).buffers == []


def test_a_sequential_reader_pays_no_lookup(storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    log, messages = filled(storage, tail_bytes=0)
    offset = log.read(0, 600, before=log.next_offset).next_offset
    lookups = []
    locate = Segment.locate
    monkeypatch.setattr(Segment, "locate", lambda self, offset: lookups.append(offset) or locate(self, offset))
    found, _ = read_back(log, start=offset, max_bytes=600)
    assert found == messages[offset:]
    assert lookups == []


@pytest.mark.parametrize("max_bytes", [40_000, 70_000])
def test_batches_that_do_not_fit_are_read_from_the_file_once(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    log = open_log(storage, segment_bytes=1 << 22, index_interval_bytes=512, tail_bytes=0)
    messages = [append(log, plain(b"%05d" % number * 10_000)) for number in range(20)]
    read = MemoryFile.read
    sizes = []
    monkeypatch.setattr(MemoryFile, "read", lambda self, *at: sizes.append(len(got := read(self, *at))) or got)
    found, _ = read_back(log, max_bytes=max_bytes)
    assert found == [message for batch in messages for message in batch]
    assert sum(sizes) < 1.01 * log.size_bytes


def test_time_is_searched_to_the_batch(storage: MemoryStorage) -> None:
    log = open_log(storage, segment_bytes=1000, index_interval_bytes=200, tail_bytes=0)
    for n in range(100):
        append(log, plain(b"%d" % n), now_us=1000 + 10 * (n // 2))
    for n in range(50):
        assert log.offset_at_time(1000 + 10 * n) == 2 * n
        assert log.offset_at_time(1001 + 10 * n - 10) == 2 * n
    assert log.offset_at_time(0) == 0
    assert log.offset_at_time(1491) == 100
    log.close()
    log = open_log(storage, segment_bytes=1000, tail_bytes=0)
    assert [log.offset_at_time(1000 + 10 * n) for n in range(50)] == list(range(0, 100, 2))
    assert log.offset_at_time(1491) == 100


# Durability


def test_dirty_files_are_handed_out_once(storage: MemoryStorage) -> None:
    log = open_log(storage)
    assert log.dirty_files() == []
    append(log, plain(b"a"))
    assert len(log.dirty_files()) == 3, "the file, and the directories with its name and theirs"
    append(log, plain(b"a"))
    assert len(log.dirty_files()) == 1
    assert log.dirty_files() == []
    append(log, plain(b"b"))
    log.roll()
    append(log, plain(b"c"))
    assert len(log.dirty_files()) == 3, "the sealed segment, the new one, and the directory"


def test_files_stay_open_while_they_are_dirty(tmp_path: Path) -> None:
    files = FileCache(limit=1)
    logs = [
        PartitionLog.open(DiskStorage(tmp_path), f"p/{n}", config=LogConfig(), files=files, tail=TailCache(0))
        for n in range(5)
    ]
    for log in logs:
        append(log, plain(b"a"))
    rounds = [(log, log.dirty_files()) for log in logs]
    assert len(files) == 5
    for log in logs:
        append(log, plain(b"b"))
    for log, dirty in rounds:
        for file in dirty:
            file.sync()
        log.mark_durable(1)
    assert len(files) == 5, "each was written to again"
    for log in logs:
        log.sync()
    assert len(files) == 1
    for log in logs:
        assert len(read_back(log)[0]) == 2


def test_a_sealed_index_is_in_its_file_and_not_in_memory(storage: MemoryStorage) -> None:
    log, messages = filled(storage)
    assert all(segment.stored for segment in log.segments[:-1])
    header, size = read_index_header(storage, FIRST_INDEX)
    assert header is not None
    assert header.flags & IndexFlags.SEALED
    assert size == 64 + 24 * header.entries
    assert header.entries > 3
    assert header.log_bytes == header.durable_bytes == storage.size(FIRST_LOG)
    assert header.next_offset == log.segments[1].base_offset
    assert header.messages == log.segments[0].messages
    assert read_back(log) == (messages, [])


def test_a_full_segment_asks_to_be_sealed_even_if_nobody_needs_a_sync(storage: MemoryStorage) -> None:
    """The policy `never` takes no dirty files of its own accord; indexes must not pile up in memory all the same."""
    log = open_log(storage, segment_bytes=200)
    for n in range(20):
        append(log, plain(b"%d" % n * 20))
        assert log.seals_pending == (not all(segment.stored for segment in log.segments[:-1]))
        if log.seals_pending:
            log.sync()
    assert len(log.segments) > 5
    assert all(segment.stored for segment in log.segments[:-1])


def test_a_roll_does_not_disturb_a_sync_under_way_in_a_thread(tmp_path: Path) -> None:
    log = open_log(DiskStorage(tmp_path), segment_bytes=400)
    messages: list[Message] = []
    stop = threading.Event()
    handed: list[tuple[list[object], int]] = []
    done: list[int] = []

    def sync() -> None:
        while not stop.is_set() or handed:
            if handed:
                files, offset = handed.pop(0)
                for file in files:
                    file.sync()  # type: ignore[attr-defined]
                done.append(offset)

    thread = threading.Thread(target=sync)
    thread.start()
    for n in range(300):
        messages += append(log, plain(b"%d" % n))
        handed.append((list(log.dirty_files()), log.next_offset))
        while done:
            log.mark_durable(done.pop(0))
        if n % 50 == 0:
            log.sync()
    stop.set()
    thread.join()
    while done:
        log.mark_durable(done.pop(0))
    assert all(segment.stored for segment in log.segments[:-1])
    assert read_back(log) == (messages, [])
    log.close()
    assert read_back(open_log(DiskStorage(tmp_path))) == (messages, [])


def test_the_confirmed_size_is_noted_now_and_then(storage: MemoryStorage) -> None:
    log = open_log(storage)
    chunk = plain(b"x" * 1_000_000)
    for _ in range(4):
        append(log, chunk)
        log.sync()
    assert not storage.exists(FIRST_INDEX)
    append(log, chunk)
    log.sync()
    header, _ = read_index_header(storage, FIRST_INDEX)
    assert header is not None
    assert (header.durable_bytes, header.next_offset, header.flags) == (log.size_bytes, 5, 0)


# Closing and opening


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("clean", [True, False])
def test_an_opened_log_is_the_log_that_was_left(kind: str, clean: bool, tmp_path: Path) -> None:
    storage = MemoryStorage() if kind == "memory" else DiskStorage(tmp_path)
    log, messages = filled(storage)
    shape = [(it.base_offset, it.next_offset, it.size, it.messages, it.last_append_us) for it in log.segments]
    if clean:
        log.close()
    log = open_log(storage, segment_bytes=4000, index_interval_bytes=512)
    assert log.recovery.clean == clean
    assert [(it.base_offset, it.next_offset, it.size, it.messages, it.last_append_us) for it in log.segments] == shape
    assert read_back(log) == (messages, [])
    more = append(log, plain(b"goes on"))
    assert read_back(log) == (messages + more, [])


def test_opening_a_closed_log_reads_no_data(storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    log, messages = filled(storage)
    log.close()
    monkeypatch.setattr(recovery, "survey", lambda *_, **__: pytest.fail("a clean log was scanned"))
    log = open_log(storage)
    assert log.next_offset == len(messages)


def test_closing_what_did_not_change_writes_nothing(storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(storage)[0].close()
    log = open_log(storage)
    monkeypatch.setattr(storage, "replace", lambda *_: pytest.fail("nothing to write"))
    log.close()


def test_a_closed_log_takes_nothing_more(storage: MemoryStorage) -> None:
    log = open_log(storage)
    log.close()
    with pytest.raises(StorageFailed, match="closed"):
        append(log, plain(b"a"))


@pytest.mark.parametrize("ask", [lambda log: log.read(0, 1, before=1), lambda log: log.offset_at_time(0)])
def test_who_asks_a_log_that_was_let_go_of_opens_none_of_its_files(
    storage: MemoryStorage, ask: Callable[[PartitionLog], object]
) -> None:
    """The next log of its name would get them from the cache, and append to what is deleted."""
    files = FileCache()

    def opened() -> PartitionLog:
        tail = TailCache(bytes_max=0)
        return PartitionLog.open(storage, DIRECTORY, config=LogConfig(), files=files, tail=tail)

    log = opened()
    append(log, plain(b"old"))
    log.sync()
    log.abandon()
    with pytest.raises(StorageFailed, match="closed"):
        ask(log)
    storage.remove_tree(DIRECTORY)
    log = opened()
    append(log, plain(b"new"))
    log.sync()
    assert [message.value for message in read_back(open_log(storage))[0]] == [b"new"]


def test_delete_removes_every_file(storage: MemoryStorage) -> None:
    log, _ = filled(storage)
    log.delete()
    assert storage.names(DIRECTORY) == []
    assert open_log(storage).next_offset == 0


def test_cold_segments_are_verified_once_before_they_are_served(storage: MemoryStorage) -> None:
    log, messages = filled(storage)
    log.close()
    log = open_log(storage, segment_bytes=4000, tail_bytes=0)
    assert all(not segment.verified for segment in log.segments)
    cold = log.cold_segment(0)
    assert cold is log.segments[0]
    log.accept(cold.verify())
    assert log.cold_segment(0) is None
    assert log.cold_segment(cold.next_offset) is log.segments[1]
    more = append(log, plain(b"into the cold active segment"))
    assert not log.segments[-1].verified
    assert read_back(log) == (messages + more, [])
    assert log.cold_segment(log.next_offset - 1) is None
    assert all(segment.verified for segment in log.segments)


@pytest.mark.parametrize("gap", ["compacted", "damaged", "damaged, and read so far"])
def test_a_segment_that_a_read_would_step_into_is_cold_as_well(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch, gap: str
) -> None:
    """A read that begins where nothing is left of a segment goes on in the next one."""
    log = open_log(storage, segment_bytes=250, tail_bytes=0)
    keys = [b"a", b"b", b"b", b"c", b"d", b"e"]
    for key in keys:
        append(log, plain(b"x", keys=[key]))
        if log.next_offset % 2 == 0:
            log.roll()
    log.sync()
    if gap == "compacted":
        compaction = Compaction.plan(log, now_us=0, dirty_share_min=0)
        assert compaction is not None
        compaction.rewrite()
        assert any([*compaction.swaps()])
    log.close()
    first, second = log.segments[:2]
    if gap != "compacted":
        data = bytearray(storage.read_all(FIRST_LOG))
        data[-1] ^= 1
        storage.replace(FIRST_LOG, bytes(data))
    log = open_log(storage, tail_bytes=0)
    cold = log.cold_segment(0)
    assert cold is not None
    assert cold.base_offset == first.base_offset == 0
    log.accept(cold.verify())
    assert log.cold_segment(0) is None
    if "read" in gap:
        assert log.read(0, 1, before=6).next_offset == 1
    cold = log.cold_segment(1)
    assert cold is not None
    assert cold.base_offset == second.base_offset == 2
    log.accept(cold.verify())
    assert log.cold_segment(1) is None
    monkeypatch.setattr(Segment, "verify", None)  # nothing is left to be checked on the way
    chunk = log.read(1, 1 << 20, before=4)
    assert [message.offset for message in messages_of(chunk.buffers[0])] == [2, 3]
    assert chunk.damaged == (None if gap == "compacted" else (1, 2))


def test_a_cold_active_segment_can_be_rolled_and_verified_later(storage: MemoryStorage) -> None:
    log = open_log(storage, index_interval_bytes=64, tail_bytes=0)
    messages = [message for n in range(20) for message in append(log, plain(b"%d" % n))]
    log.close()
    log = open_log(storage, index_interval_bytes=64, tail_bytes=0)
    messages += [message for n in range(20) for message in append(log, plain(b"more %d" % n))]
    report = log.segments[0].verify()
    messages += append(log, plain(b"while it was being verified"))
    log.accept(report)
    log.roll()
    log.sync()
    assert len(log.segments[0].index) == 41
    assert read_back(log) == (messages, [])
    for message in messages:
        assert messages_of(log.read(message.offset, 1, before=41).buffers[0]) == [message]


# Producers


def record(log: PartitionLog, batch: memoryview, now_us: int = 0) -> None:
    header = BatchHeader(batch)
    assert log.producers.check(header) is None
    base = log.append([batch], [header.count], now_us)
    log.producers.record(header, base, log.last_append_us)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("segment_bytes", [300, 1 << 20])
def test_producers_survive_a_restart(storage: MemoryStorage, clean: bool, segment_bytes: int) -> None:
    log = open_log(storage, segment_bytes=segment_bytes)
    for n in range(30):
        record(log, plain(b"%d" % n, producer=(n % 3 + 1) << 16, sequence=n // 3))
    log.sync()
    expected = log.producers.encode(30)
    if clean:
        log.close()
    log = open_log(storage, segment_bytes=segment_bytes)
    assert log.producers.encode(30) == expected
    repeated = BatchHeader(plain(b"27", producer=1 << 16, sequence=9))
    assert log.producers.check(repeated) == Duplicate(27, 0)


@pytest.mark.parametrize("damage", ["missing", "damaged", "from the future"])
def test_producers_are_rebuilt_from_the_log_without_a_good_snapshot(storage: MemoryStorage, damage: str) -> None:
    log = open_log(storage, segment_bytes=300)
    for n in range(30):
        record(log, plain(b"%d" % n, producer=1 << 16, sequence=n))
    expected = log.producers.encode(30)
    log.close()
    names = [name for name in storage.names(DIRECTORY) if name.endswith(".producers")]
    assert names == [f"{30:020d}.producers"]
    if damage == "damaged":
        storage.replace(f"{DIRECTORY}/{names[0]}", b"nonsense")
    else:
        storage.remove(f"{DIRECTORY}/{names[0]}")
    if damage == "from the future":
        storage.replace(f"{DIRECTORY}/{99:020d}.producers", log.producers.encode(99))
    log = open_log(storage, segment_bytes=300)
    assert log.producers.encode(30) == expected
    assert not storage.exists(f"{DIRECTORY}/{99:020d}.producers")


def test_a_log_without_producers_is_not_scanned_for_them(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even after a crash, and not even when compaction has rewritten everything before."""
    log = open_log(storage, segment_bytes=300)
    for n in range(30):
        append(log, plain(b"%d" % n, keys=[b"k%d" % (n % 9)]))
    log.sync()
    compaction = Compaction.plan(log, now_us=0)
    assert compaction is not None
    compaction.rewrite()
    assert any([*compaction.swaps()])
    surveyed = []
    survey = recovery.survey
    monkeypatch.setattr(recovery, "survey", lambda *a, **k: surveyed.append(a[1]) or survey(*a, **k))
    again = open_log(storage, segment_bytes=300)
    assert surveyed == [log.segments[-1].base_offset], "only the active segment"
    assert len(again.producers) == 0


@pytest.mark.parametrize("clean", [False, True])
def test_producers_are_known_however_long_nobody_was_there(storage: MemoryStorage, clean: bool) -> None:
    """What is repeated after a restart is what was under way when the broker stopped, a moment or a month ago."""
    log = open_log(storage)
    first, second = plain(b"a", producer=7 << 16), plain(b"b", producer=8 << 16)
    hour_us = 60 * MINUTE_US
    log.producers.record(BatchHeader(first), append(log, first, now_us=hour_us)[0].offset, hour_us)
    if clean:
        log.close()
    log = open_log(storage)
    log.producers.record(BatchHeader(second), append(log, second, now_us=900 * hour_us)[0].offset, 900 * hour_us)
    for again in (log, open_log(storage)):
        assert again.producers.check(BatchHeader(first)) == Duplicate(0, hour_us)


def test_producers_outlive_the_segments_they_wrote(storage: MemoryStorage) -> None:
    log = open_log(storage, segment_bytes=300)
    record(log, plain(b"old", producer=9 << 16))
    log.delete_before(log.next_offset)
    assert log.start_offset == log.next_offset == 1
    log.close()
    log = open_log(storage, segment_bytes=300)
    assert log.producers.check(BatchHeader(plain(b"old", producer=9 << 16))) == Duplicate(0, 0)


@pytest.mark.parametrize("goes", ["compacted", "removed"])
def test_producers_outlive_a_segment_that_a_crash_left_unsealed(storage: MemoryStorage, goes: str) -> None:
    """Recovery sealed it without a snapshot.  After the next crash a batch that was sent again was stored again."""
    log = open_log(storage)
    repeated = plain(b"old", keys=[b"k"], producer=9 << 16)
    record(log, repeated)
    log.roll()
    append(log, plain(b"new"))
    for _ in range(2):  # a crash before the seal; and one just after the recovery
        log = open_log(storage)
    if goes == "removed":
        log.delete_before(1)
    elif (compaction := Compaction.plan(log, now_us=0)) is not None:
        compaction.rewrite()
        assert any([*compaction.swaps()])
    log = open_log(storage)
    assert log.producers.check(BatchHeader(repeated)) == Duplicate(0, 0)


# Removing


def test_retention_removes_whole_segments_and_moves_the_start(storage: MemoryStorage) -> None:
    log, messages = filled(storage)
    removed = log.retain(Retention(max_bytes=10_000), now_us=0)
    assert removed > 0
    assert log.start_offset == log.segments[0].base_offset > 0
    assert 10_000 <= log.size_bytes <= 14_000
    assert read_back(log) == (messages[log.start_offset :], [])
    start = log.start_offset
    log.close()
    log = open_log(storage)
    assert log.start_offset == start
    assert read_back(log) == (messages[start:], [])


def test_old_messages_go_even_from_the_active_segment(storage: MemoryStorage) -> None:
    log = open_log(storage)
    append(log, plain(b"old"), now_us=0)
    assert log.retain(Retention(max_age_ms=60_000), now_us=MINUTE_US) == 0
    assert log.retain(Retention(max_age_ms=60_000), now_us=MINUTE_US + 1) == 1
    assert (log.start_offset, log.next_offset, log.size_bytes, log.messages) == (1, 1, 0, 0)
    assert append(log, plain(b"new"), now_us=2 * MINUTE_US)[0].offset == 1
    log = open_log(storage)
    assert (log.start_offset, log.next_offset) == (1, 2)


def test_delete_before_keeps_the_segment_with_the_offset(storage: MemoryStorage) -> None:
    log, messages = filled(storage)
    third = log.segments[3]
    assert log.delete_before(third.base_offset + 1) == third.base_offset
    assert log.delete_before(0) == third.base_offset
    assert read_back(log) == (messages[third.base_offset :], [])
    assert log.delete_before(log.next_offset) == log.next_offset
    assert read_back(log) == ([], [])


def test_a_segment_being_synced_in_a_thread_is_not_removed_yet(tmp_path: Path) -> None:
    """It was handed out as the active segment, and rolled while the sync was under way."""
    log = open_log(DiskStorage(tmp_path))
    append(log, plain(b"a"))
    files = log.dirty_files()
    log.roll()
    assert log.delete_before(1) == 0
    for file in files:
        file.sync()
    log.mark_durable(1)
    assert log.delete_before(1) == 1


def test_a_segment_being_sealed_in_a_thread_is_not_removed_yet(storage: MemoryStorage) -> None:
    log = open_log(storage)
    append(log, plain(b"a"))
    log.roll()
    append(log, plain(b"b"))
    files = log.dirty_files()
    assert log.delete_before(1) == 0
    for file in files:
        file.sync()
    log.mark_durable(2)
    assert log.delete_before(1) == 1
    assert storage.names(DIRECTORY) == [f"{1:020d}.log"]
