"""Compaction keeps the newest message per key, at its old offset, and never anything but."""

from __future__ import annotations

from pathlib import Path

import pytest
from crc32c import crc32c

from millstream.compression import Codec
from millstream.errors import StorageFailed
from millstream.log.compaction import Compaction
from millstream.log.holding import files_below
from millstream.log.memory import MemoryStorage
from millstream.log.partition import PartitionLog
from millstream.log.retention import Retention
from millstream.log.storage import DiskStorage, Storage
from millstream.log.verify import dump, verify
from millstream.records import Batch, Columns, encode_batch
from millstream.testing.storage import Fault, PowerCut, SimulatedStorage
from tests.log_workload import DIRECTORY, FIRST_INDEX, FIRST_LOG, Message, append, open_log, plain, read_back

SECOND = 1_000_000
DAY_MS = 24 * 3600 * 1000


def keyed(**pairs: bytes | None) -> memoryview:
    return plain(*pairs.values(), keys=[key.encode() for key in pairs])


def compact(log: PartitionLog, *, now_us: int = 0, tombstone_retention_ms: int = DAY_MS, keys_max: int = 1000) -> bool:
    compaction = Compaction.plan(
        log, now_us=now_us, tombstone_retention_ms=tombstone_retention_ms, dirty_share_min=0, keys_max=keys_max
    )
    if compaction is None:
        return False
    compaction.rewrite()
    return any([*compaction.swaps()])


def sealed_log(storage: Storage, *segments: list[memoryview], segment_bytes: int = 1 << 20) -> PartitionLog:
    """One sealed segment per list of batches, appended a second apart."""
    log = open_log(storage, segment_bytes=segment_bytes, tail_bytes=0)
    for batches in segments:
        for batch in batches:
            append(log, batch, now_us=log.last_append_us + SECOND)
        log.roll()
    log.sync()
    return log


def contents(log: PartitionLog) -> dict[int, tuple[bytes | None, bytes | None]]:
    messages, damaged = read_back(log)
    assert damaged == []
    return {message.offset: (message.key, message.value) for message in messages}


def test_only_the_newest_message_of_a_key_stays_where_it_was() -> None:
    log = sealed_log(MemoryStorage(), [keyed(a=b"1", b=b"1"), keyed(a=b"2")], [keyed(c=b"1"), keyed(b=b"2", d=b"1")])
    assert compact(log)
    assert contents(log) == {2: (b"a", b"2"), 3: (b"c", b"1"), 4: (b"b", b"2"), 5: (b"d", b"1")}
    assert (log.start_offset, log.next_offset, len(log.segments)) == (0, 6, 2)
    assert log.messages == 4


def test_messages_without_a_key_stay() -> None:
    log = sealed_log(MemoryStorage(), [plain(b"x"), plain(b"y", b"z", keys=[None, b"k"])], [keyed(k=b"new")])
    assert compact(log)
    assert contents(log) == {0: (None, b"x"), 1: (None, b"y"), 3: (b"k", b"new")}


def test_options_in_headers_are_still_found_after_compaction() -> None:
    options = memoryview(
        encode_batch([b"1", b"2"], keys=[b"a", b"b"], headers=[b"", b""], options=True, base_timestamp_us=1)
    )
    log = sealed_log(MemoryStorage(), [options, keyed(a=b"new")])
    assert compact(log)
    (chunk,) = log.read(0, 1 << 20, before=log.next_offset).buffers
    assert Batch.parse(chunk).header.flags & Columns.OPTIONS


def test_the_active_segment_is_left_alone() -> None:
    log = sealed_log(MemoryStorage(), [keyed(a=b"1")])
    append(log, keyed(a=b"2"))
    assert compact(log)
    assert contents(log) == {0: (b"a", b"1"), 1: (b"a", b"2")}


def test_a_tombstone_stays_for_its_time_and_then_goes() -> None:
    log = sealed_log(MemoryStorage(), [keyed(a=b"1")], [keyed(a=None), keyed(b=b"1")])
    hour_ms = 3600 * 1000
    assert compact(log, now_us=log.last_append_us, tombstone_retention_ms=hour_ms)
    assert contents(log) == {1: (b"a", None), 2: (b"b", b"1")}
    append(log, keyed(c=b"1"))
    log.roll()
    log.sync()
    assert compact(log, now_us=log.last_append_us + hour_ms * 1000, tombstone_retention_ms=hour_ms)
    assert contents(log) == {2: (b"b", b"1"), 3: (b"c", b"1")}


def test_everything_may_go_and_offsets_are_still_not_used_again() -> None:
    log = sealed_log(MemoryStorage(), [keyed(a=b"1")], [keyed(a=None)])
    assert compact(log, now_us=10 * SECOND, tombstone_retention_ms=0)
    assert contents(log) == {}
    assert log.read(0, 1000, before=2) == ([], 2, None), "a reader gets past what is gone"
    assert append(log, keyed(a=b"2"))[0].offset == 2
    assert contents(log) == {2: (b"a", b"2")}


def test_small_batches_of_one_second_are_merged_and_time_stays_searchable() -> None:
    storage = MemoryStorage()
    log = open_log(storage, tail_bytes=0)
    for n in range(40):
        append(log, keyed(**{f"key{n}": b"v"}), now_us=n * SECOND // 10)
    log.roll()
    log.sync()
    assert compact(log)
    batches = list(dump(storage, DIRECTORY))
    assert [batch.header.count for batch in batches] == [10, 10, 10, 10]
    assert [batch.header.append_time_us for batch in batches] == [900_000, 1_900_000, 2_900_000, 3_900_000]
    assert log.offset_at_time(2 * SECOND) == 20
    assert log.offset_at_time(5 * SECOND) == 40
    assert all(finding.is_good for finding in verify(storage, DIRECTORY))


@pytest.mark.parametrize(
    ("first", "others"), [(Codec.NONE, Codec.ZSTD), (Codec.LZ4, Codec.LZ4), (Codec.NONE, Codec.NONE)]
)
def test_what_survives_of_many_batches_is_never_merged_beyond_a_frame(first: Codec, others: Codec) -> None:
    storage = MemoryStorage()
    log = open_log(storage, tail_bytes=0)
    append(log, memoryview(encode_batch([b"small"], keys=[b"small"], base_timestamp_us=1, codec=first)), now_us=1)
    for n in range(70):
        # One large message among many small ones that the next batch replaces: its share of the batch is small.
        values = [bytes(1_000_000), *[b"v"] * 50]
        keys = [f"large{n}".encode(), *(f"k{i}".encode() for i in range(50))]
        append(log, memoryview(encode_batch(values, keys=keys, base_timestamp_us=1, codec=others)), now_us=1)
    log.roll()
    log.sync()
    assert compact(log)
    assert max(batch.header.length for batch in dump(storage, DIRECTORY)) < 2 * 1024 * 1024
    assert all(finding.is_good for finding in verify(storage, DIRECTORY))
    assert len(contents(log)) == 1 + 70 + 50


def test_every_column_survives_a_merge() -> None:
    storage = MemoryStorage()
    log = open_log(storage, tail_bytes=0)
    rich = encode_batch(
        [b"v0", None, b"v2"],
        keys=[b"k0", b"k1", None],
        headers=[b"", b"\x01\x00h\x01\x00\x00\x00x", b""],
        priorities=[0, 4, 2],
        deliver_at_us=[0, 77, 0],
        expiry_us=[5, 0, 0],
        timestamps_us=[1, 2, 3],
        base_timestamp_us=1,
        codec=2,
    )
    poor = encode_batch([b"v3"], keys=[b"k3"], base_timestamp_us=9, producer=5 << 16, first_sequence=1)
    append(log, memoryview(rich))
    append(log, memoryview(poor))
    log.roll()
    log.sync()
    assert compact(log)
    (stored,) = dump(storage, DIRECTORY)
    batch = stored.open()
    assert batch.header.flags & Columns.OFFSETS
    assert batch.header.producer == 0
    assert list(batch.offsets()) == [0, 1, 2, 3]
    assert batch.values() == [b"v0", None, b"v2", b"v3"]
    assert batch.keys() == [b"k0", b"k1", None, b"k3"]
    assert [bytes(raw or b"") for raw in batch.raw_headers() or []] == [b"", b"\x01\x00h\x01\x00\x00\x00x", b"", b""]
    assert batch.priorities() == [0, 4, 2, 2]
    assert batch.deliver_at_us() == [0, 77, 0, 0]
    assert batch.expiry_us() == [5, 0, 0, 0]
    assert batch.timestamps_us() == [1, 2, 3, 9]


def test_a_second_round_does_nothing_until_something_new_is_sealed() -> None:
    log = sealed_log(MemoryStorage(), [keyed(a=b"1"), keyed(a=b"2")])
    assert compact(log)
    assert not compact(log)
    append(log, keyed(a=b"3"))
    log.roll()
    log.sync()
    assert compact(log)
    assert contents(log) == {2: (b"a", b"3")}


def test_little_new_is_not_worth_reading_everything() -> None:
    log = sealed_log(MemoryStorage(), [keyed(**{f"k{n}": b"x" * 100}) for n in range(20)])
    assert compact(log)
    append(log, keyed(k1=b"2"))
    log.roll()
    log.sync()
    assert Compaction.plan(log, now_us=0) is None


def test_a_full_map_of_keys_leaves_the_rest_for_the_next_round() -> None:
    log = sealed_log(
        MemoryStorage(),
        [keyed(a=b"1"), keyed(b=b"1"), keyed(a=b"2")],
        [keyed(a=b"3"), keyed(b=b"2")],
        [keyed(b=b"3"), keyed(a=b"4")],
    )
    rounds = 0
    while compact(log, keys_max=1):
        rounds += 1
    assert rounds == 3
    assert contents(log) == {5: (b"b", b"3"), 6: (b"a", b"4")}


def test_segments_are_merged_only_up_to_the_size_of_one() -> None:
    batches = [[keyed(**{f"k{n}": b"x" * 300})] for n in range(6)]
    log = sealed_log(MemoryStorage(), *batches, segment_bytes=1000)
    assert compact(log)
    assert len(contents(log)) == 6
    assert 3 <= len(log.segments) - 1 < 6
    assert all(segment.size <= 1000 for segment in log.segments)


def test_a_reader_in_the_middle_of_a_replaced_segment_goes_on() -> None:
    log = sealed_log(MemoryStorage(), [keyed(**{f"k{n % 7}": b"%d" % n}) for n in range(30)])
    offset = log.read(0, 1000, before=30).next_offset
    assert 0 < offset < 20
    assert compact(log)
    found, _ = read_back(log, start=offset)
    assert [message.offset for message in found] == list(range(23, 30))


def test_a_damaged_segment_stays_as_it_is_and_tombstones_behind_it_stay_too() -> None:
    storage = MemoryStorage()
    log = sealed_log(storage, [keyed(a=b"1"), keyed(b=b"1")], [keyed(a=None), keyed(b=b"2"), keyed(b=b"3")])
    data = bytearray(storage.read_all(FIRST_LOG))
    data[80] ^= 1
    storage.open(FIRST_LOG).write(data, 0)
    assert compact(log, now_us=100 * SECOND, tombstone_retention_ms=0)
    messages, damaged = read_back(log)
    assert [(it.offset, it.key, it.value) for it in messages] == [(1, b"b", b"1"), (2, b"a", None), (4, b"b", b"3")]
    assert damaged == log.recovery.damaged == [(0, 1)]
    assert storage.read_all(FIRST_LOG) == data
    assert not compact(log)


def test_retention_between_rewrite_and_swap_wins() -> None:
    storage = MemoryStorage()
    log = sealed_log(storage, [keyed(a=b"1")], [keyed(a=b"2")])
    compaction = Compaction.plan(log, now_us=0)
    assert compaction is not None
    compaction.rewrite()
    log.delete_before(1)
    assert not any([*compaction.swaps()])
    assert contents(log) == {1: (b"a", b"2")}
    assert not [name for name in storage.names(DIRECTORY) if name.endswith(".new")]


def test_a_failed_rewrite_leaves_nothing_behind() -> None:
    storage = SimulatedStorage(0)
    log = sealed_log(storage, [keyed(a=b"1"), keyed(a=b"2")])
    before = storage.names(DIRECTORY)
    compaction = Compaction.plan(log, now_us=0)
    assert compaction is not None
    storage.inject(Fault.NO_SPACE, when=lambda it: it.kind == "write")
    with pytest.raises(OSError, match="No space"):
        compaction.rewrite()
    assert storage.names(DIRECTORY) == before
    assert not any([*compaction.swaps()])
    assert contents(log) == {0: (b"a", b"1"), 1: (b"a", b"2")}


@pytest.mark.parametrize("batches", range(6))
def test_a_rewrite_that_is_given_up_anywhere_leaves_nothing_behind(batches: int) -> None:
    storage = MemoryStorage()
    log = sealed_log(storage, [keyed(a=b"1"), keyed(b=b"1")], [keyed(a=b"2")], segment_bytes=1)
    before = storage.names(DIRECTORY)
    compaction = Compaction.plan(log, now_us=0)
    assert compaction is not None
    asked = iter(range(6))
    compaction.rewrite(lambda: next(asked) == batches)
    assert storage.names(DIRECTORY) == before
    assert not any([*compaction.swaps()])
    assert contents(log) == {0: (b"a", b"1"), 1: (b"b", b"1"), 2: (b"a", b"2")}
    assert compact(log), "and another one is free to do it"


def test_a_compacted_log_opens_again_as_it_was() -> None:
    storage = MemoryStorage()
    log = sealed_log(storage, [keyed(a=b"1", b=b"1")], [keyed(a=b"2")], [keyed(c=b"1")])
    assert compact(log)
    expected = contents(log)
    for clean in (True, False):
        if clean:
            log.close()
        log = open_log(storage, tail_bytes=0)
        assert contents(log) == expected
        assert (log.start_offset, log.next_offset) == (0, 4)
        assert log.recovery.rebuilt_indexes == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_power_cut_in_any_operation_of_a_compaction_is_harmless(seed: int) -> None:
    def prepare() -> tuple[SimulatedStorage, PartitionLog]:
        storage = SimulatedStorage(seed)
        segments = [[keyed(**{f"k{n % 5}": b"%d" % n}) for n in range(first, first + 6)] for first in (0, 6, 12, 18)]
        segments.append([keyed(k3=None), keyed(k4=b"last")])
        log = sealed_log(storage, *segments, segment_bytes=1200)
        return storage, log

    storage, log = prepare()
    everything = contents(log)
    start = storage.operations
    assert compact(log, now_us=100 * SECOND, tombstone_retention_ms=0)
    survivors = contents(log)
    newest = {key: offset for offset, (key, _) in everything.items()}
    assert set(survivors) == {offset for key, offset in newest.items() if key != b"k3"}
    for number in range(start + 1, storage.operations + 1):
        storage, log = prepare()
        storage.inject(Fault.POWER_CUT, at=number)
        with pytest.raises(PowerCut):
            compact(log, now_us=100 * SECOND, tombstone_retention_ms=0)
        storage.restart()
        log = open_log(storage, segment_bytes=1200, tail_bytes=0)
        found = contents(log)
        assert found.items() <= everything.items(), f"operation {number}, seed {seed}"
        assert found.items() >= survivors.items(), f"operation {number}, seed {seed}"
        latest = {key: value for _, (key, value) in sorted(found.items())}
        assert latest.get(b"k3") is None, "a deleted key came back"
        assert (log.start_offset, log.next_offset) == (0, 26)
        assert not [name for name in storage.names(DIRECTORY) if name.endswith((".new", ".tmp"))]
        compact(log, now_us=100 * SECOND, tombstone_retention_ms=0)
        assert contents(log) == survivors


def _interrupted(storage: Storage) -> dict[int, tuple[bytes | None, bytes | None]]:
    """A swap of which only the first step was done; returns what is in the log."""
    log = sealed_log(storage, [keyed(a=b"1" * 300, b=b"1")], [keyed(c=b"1")], [keyed(d=b"1")])
    compaction = Compaction.plan(log, now_us=0, dirty_share_min=0)
    assert compaction is not None
    compaction.rewrite()
    index = f"{DIRECTORY}/{0:020d}.index"
    storage.rename(f"{index}.new", index)
    before = contents(log)
    log.abandon()
    return before


def test_a_compacted_index_whose_log_file_is_lost_takes_no_segment_with_it() -> None:
    storage = MemoryStorage()
    before = _interrupted(storage)
    storage.remove(f"{FIRST_LOG}.new")
    for _ in range(3):
        log = open_log(storage, tail_bytes=0)
        assert contents(log) == before
        assert [segment.next_offset for segment in log.segments] == [2, 3, 4, 4]
        log.close()


def test_a_backup_after_an_interrupted_swap_has_all_that_the_next_start_needs(tmp_path: Path) -> None:
    before = _interrupted(DiskStorage(tmp_path))
    assert f"{FIRST_LOG}.new" in files_below(str(tmp_path))
    (tmp_path / f"{DIRECTORY}/{9:020d}.index.new").touch()
    (tmp_path / f"{DIRECTORY}/{9:020d}.log.new").touch()
    files = {path: (tmp_path / path).read_bytes() for path in files_below(str(tmp_path))}
    assert not [path for path in files if f"{9:020d}" in path], "what is being written does not count"
    for path, data in files.items():
        (tmp_path / "copy" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / path).write_bytes(data)
    log = open_log(DiskStorage(tmp_path / "copy"), tail_bytes=0)
    assert contents(log) == before
    assert len(log.segments) == 2
    log.close()


def test_a_batch_that_cannot_be_unpacked_is_kept() -> None:
    """Its checksum is right: the producer packed garbage.  That is for its consumers to find out."""
    storage = MemoryStorage()
    log = open_log(storage, tail_bytes=0)
    batch = encode_batch([b"v" * 100], keys=[b"a"], base_timestamp_us=0, codec=1)
    batch[72:] = b"\xff" * len(batch[72:])
    batch[8:12] = crc32c(bytes(batch[36:])).to_bytes(4, "little")
    log.append([memoryview(batch)], [1], 0)
    append(log, keyed(a=b"2"))
    log.roll()
    log.sync()
    assert compact(log)
    assert [stored.header.base_offset for stored in dump(storage, DIRECTORY)] == [0, 1]
    assert Message(1, b"a", b"2") in read_back(log, start=1)[0]


@pytest.mark.parametrize("wrong", ["one size", "priority", "ends"])
def test_a_batch_whose_columns_cannot_be_read_is_kept_and_keeps_nothing_else(wrong: str) -> None:
    """No broker stores such a batch, but its log may come from somewhere else."""
    storage = MemoryStorage()
    log = open_log(storage, tail_bytes=0)
    values = [b"v", b"v"] if wrong == "one size" else [b"v", b"vv"]
    batch = encode_batch(values, keys=[b"a", b"b"], priorities=[0, 1], base_timestamp_us=0)
    at = Batch.parse(batch, verify=False).sections
    if wrong == "priority":
        batch[at.priority] = 200
    else:
        place = at.value_ends + (8 if wrong == "one size" else 4)
        batch[place : place + 4] = (1 if wrong == "one size" else 9).to_bytes(4, "little")
    batch[8:12] = crc32c(bytes(batch[36:])).to_bytes(4, "little")
    log.append([memoryview(batch)], [2], 0)
    append(log, keyed(a=b"2", c=b"2"), keyed(c=b"3"))
    log.roll()
    log.sync()
    assert compact(log)
    assert [(stored.header.base_offset, stored.header.count) for stored in dump(storage, DIRECTORY)] == [(0, 2), (2, 2)]
    assert read_back(log, start=2)[0] == [Message(2, b"a", b"2"), Message(4, b"c", b"3")]


HOUR = 3600 * SECOND


def test_a_slow_log_is_rolled_for_compaction_when_its_active_segment_is_an_hour_old() -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    assert not Compaction.wants_roll(log, now_us=100 * HOUR)
    append(log, keyed(a=b"1"), now_us=HOUR)
    append(log, keyed(a=b"2"), now_us=2 * HOUR - 1)
    assert not Compaction.wants_roll(log, now_us=2 * HOUR)
    log = open_log(storage)
    assert Compaction.wants_roll(log, now_us=2 * HOUR + 1), "also after a restart"
    log.roll()
    log.sync()
    assert compact(log)
    assert [value for _, value in contents(log).values()] == [b"2"]
    assert not Compaction.wants_roll(log, now_us=100 * HOUR)


def test_a_slow_log_is_not_cut_into_segments_that_are_not_worth_a_compaction() -> None:
    log = sealed_log(MemoryStorage(), [keyed(**{f"k{number}": bytes(100) for number in range(100)})])
    assert compact(log)
    append(log, keyed(a=b"1"), now_us=HOUR)
    assert not Compaction.wants_roll(log, now_us=100 * HOUR)
    append(log, keyed(b=bytes(4000)), now_us=HOUR)
    assert Compaction.wants_roll(log, now_us=100 * HOUR)


def test_compaction_leaves_segments_that_retention_can_remove_in_time() -> None:
    """Merged with what came last, old messages would never be too old."""
    limits = {
        "age": (Retention(max_age_ms=32_000), 3),
        "messages": (Retention(max_messages=40), 3),
        "none": (Retention(), 1),
    }
    for name, (retention, sealed) in limits.items():
        log = sealed_log(MemoryStorage(), *([keyed(**{f"k{number}": b"1"})] * 2 for number in range(6)))
        compaction = Compaction.plan(log, now_us=12 * SECOND, retention=retention)
        assert compaction is not None
        compaction.rewrite()
        assert any([*compaction.swaps()])
        assert len(log.segments) - 1 == sealed, name
        assert log.messages == 6


@pytest.mark.parametrize("seed", range(8))
def test_a_power_cut_while_a_compaction_is_undone_does_not_finish_it(seed: int) -> None:
    """Where values have one size, the new file had the size that the index in place speaks of, and took its place."""
    storage = SimulatedStorage(seed)
    log = sealed_log(storage, [keyed(a=b"1", b=b"1")])
    assert compact(log)
    append(log, keyed(b=b"2"), now_us=log.last_append_us)
    log.roll()
    log.sync()
    expected = contents(log)
    compaction = Compaction.plan(log, now_us=0, dirty_share_min=0)
    assert compaction is not None
    compaction.rewrite()
    storage.kill()
    storage.inject(Fault.POWER_CUT, when=lambda operation: operation.kind == "sync_directory")
    with pytest.raises(PowerCut):
        open_log(storage)
    storage.restart()
    assert contents(open_log(storage, tail_bytes=0)) == expected


@pytest.mark.parametrize(("left", "damage"), [("a", "rot"), ("a", "loss"), ("a large batch", "rot"), ("none", "rot")])
def test_a_lost_index_of_a_compacted_end_does_not_free_its_offsets(left: str, damage: str) -> None:
    """The empty segment behind it was taken for one that does not belong there: batches end before offsets do."""
    storage = SimulatedStorage()
    kept = {"a": [keyed(a=b"1")], "a large batch": [keyed(a=b"1" * 65_536)], "none": []}[left]
    log = sealed_log(storage, [*kept, keyed(b=None), keyed(c=None)])
    assert compact(log, now_us=10 * SECOND, tombstone_retention_ms=0)
    expected, next_offset = contents(log), log.next_offset
    assert len(expected) == len(kept)
    log.close()
    if damage == "rot":
        storage.flip(FIRST_INDEX, 20)
    else:
        storage.remove(FIRST_INDEX)
    log = open_log(storage, tail_bytes=0)
    assert (log.next_offset, contents(log)) == (next_offset, expected)
    log.close()
    log = open_log(storage, tail_bytes=0)
    assert log.recovery.clean
    assert (log.next_offset, contents(log)) == (next_offset, expected)


@pytest.mark.parametrize("sync", [1, 2, 3])
def test_a_log_whose_swap_failed_is_read_as_its_files_are(sync: int) -> None:
    """Messages that were good were reported as damaged and stepped over, or nothing could be read until a restart."""
    storage = SimulatedStorage()
    log = open_log(storage, tail_bytes=0)
    for batches in ([keyed(a=b"old" * 100), keyed(b=b"1")], [keyed(a=b"new"), keyed(c=b"1"), keyed(d=b"1")]):
        append(log, *batches)  # all in one second: what is left becomes one batch
        log.roll()
    append(log, keyed(e=b"1"))
    log.sync()
    compaction = Compaction.plan(log, now_us=0, dirty_share_min=0)
    assert compaction is not None
    compaction.rewrite()
    syncs = iter(range(1, 10))
    storage.inject(Fault.SYNC_ERROR, when=lambda operation: operation.kind == "sync_directory" and next(syncs) == sync)
    with pytest.raises(StorageFailed, match="cannot put a compacted segment in place"):
        list(compaction.swaps())
    expected = {1: (b"b", b"1"), 2: (b"a", b"new"), 3: (b"c", b"1"), 4: (b"d", b"1"), 5: (b"e", b"1")}
    for start in (5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5):
        messages, damaged = read_back(log, start=start)
        found = {message.offset: (message.key, message.value) for message in messages if message.offset}
        assert (found, damaged) == ({offset: it for offset, it in expected.items() if offset >= start}, [])
    storage.power_cut()
    again = contents(open_log(storage, tail_bytes=0))
    assert again.keys() - {0} == expected.keys()


def test_segments_with_very_many_messages_are_not_made_into_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.log.compaction.MESSAGES_MAX", 5)
    log = sealed_log(MemoryStorage(), *([plain(b"x", b"y")] for _ in range(5)))
    assert compact(log)
    assert [segment.messages for segment in log.segments] == [4, 4, 2, 0]


def test_a_directory_that_cannot_be_opened_puts_compaction_off() -> None:
    storage = SimulatedStorage(0)
    log = sealed_log(storage, [keyed(a=b"1")], [keyed(a=b"2")])
    before = contents(log)
    storage.inject(Fault.NO_FILES, when=lambda it: it.kind == "open_directory")
    assert not compact(log)
    assert log.failure is None
    assert contents(log) == before
    assert not [name for name in storage.names(DIRECTORY) if name.endswith(".new")]
    assert compact(log), "and the next round does it"
    assert contents(log) == {1: (b"a", b"2")}
