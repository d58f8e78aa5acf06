"""The files of a broker say what the broker says, and reading them changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import (
    DataDamaged,
    InvalidArgument,
    OffsetOutOfRange,
    PartitionNotFound,
    TopicNotFound,
)
from millstream.log.cache import FileCache, TailCache
from millstream.log.compaction import Compaction
from millstream.log.partition import LogConfig, PartitionLog
from millstream.log.storage import DiskStorage
from millstream.records import Batch, encode_batch
from millstream.spark.columns import columns_of
from millstream.spark.decoding import BatchDecoder
from millstream.spark.segments import Offsets, SegmentDirectory
from tests.log_workload import Message, append, messages_of, mixed, plain, read_back

ORDERS = "topics/default/orders/0"
EVERYTHING = columns_of(headers=True, priority=True, ids=True)


def open_log(storage: DiskStorage, directory: str = ORDERS, *, segment_bytes: int = 1 << 20) -> PartitionLog:
    return PartitionLog.open(
        storage,
        directory,
        config=LogConfig(segment_bytes=segment_bytes, index_interval_bytes=256),
        files=FileCache(),
        tail=TailCache(0),
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return with_topics(tmp_path / "data", orders=[11, 12])


def with_topics(data: Path, **topics: list[int] | None) -> Path:
    """A data directory that knows of topics; None = it knew of it once."""
    log = open_log(DiskStorage(data), "state/topics")
    for name, uids in topics.items():
        document = None if uids is None else msgspec.json.encode({"partition_uids": uids, "deleting": False})
        append(log, memoryview(encode_batch([document], keys=[f"topic/default/{name}".encode()], base_timestamp_us=1)))
    log.close()
    return data


def read(
    data: Path, first: int = 0, until: int = 1 << 60, damaged: list[tuple[int, int]] | None = None
) -> list[Message]:
    buffers = SegmentDirectory(data).read("orders", 0, first, until, damaged=damaged)
    return [message for buffer in buffers for message in messages_of(bytes(buffer)) if first <= message.offset < until]


def compact(log: PartitionLog) -> None:
    plan = Compaction.plan(log, now_us=0, tombstone_retention_ms=1, dirty_share_min=0, keys_max=100_000)
    if plan is not None:
        plan.rewrite()
        list(plan.swaps())


@given(st.integers(0, 2**32), st.integers(1, 40), st.booleans(), st.booleans())
def test_any_log_is_read_as_the_broker_reads_it(
    tmp_path_factory: pytest.TempPathFactory, seed: int, appends: int, compacted: bool, closed: bool
) -> None:
    random = Random(seed)
    data = with_topics(tmp_path_factory.mktemp("log"), orders=[11])
    log = open_log(DiskStorage(data), segment_bytes=random.choice((500, 2_000, 1 << 20)))
    for _ in range(appends):
        append(log, *(mixed(random) for _ in range(random.randint(1, 3))), now_us=log.last_append_us + 5)
        if random.random() < 0.2:
            log.sync()
    log.sync()
    if compacted:
        compact(log)
    messages, damaged = read_back(log)
    first = random.randint(0, log.next_offset)
    until = random.randint(first, log.next_offset)
    times = [random.randint(0, log.last_append_us + 1) for _ in range(5)]
    expected = [log.offset_at_time(time_us) for time_us in times]
    if closed:
        log.close()
    directory = SegmentDirectory(data)
    assert directory.offsets("orders", 0) == Offsets(0, log.next_offset)
    assert read(data) == messages
    assert read(data, first, until) == [message for message in messages if first <= message.offset < until]
    found = [directory.offset_at("orders", 0, time_us) for time_us in times]
    assert [log.next_offset if offset is None else offset for offset in found] == [
        log.next_offset if offset is None else offset for offset in expected
    ]
    assert not damaged
    # Together with the decoder they are rows.
    decoder = BatchDecoder(EVERYTHING, topic="orders", partition=0, uid=11)
    rows = [
        row
        for buffer in directory.read("orders", 0, first, until)
        for batch in decoder.feed(buffer, first=first, until=until, verify=False)
        for row in batch.select(["offset", "key", "value"]).to_pylist()
    ]
    rows += [row for batch in decoder.finish() for row in batch.select(["offset", "key", "value"]).to_pylist()]
    assert [Message(**row) for row in rows] == [m for m in messages if first <= m.offset < until]


def test_topics_and_partitions_are_those_the_broker_knows(tmp_path: Path) -> None:
    data = with_topics(tmp_path, orders=[1, 2, 3], payments=[4], gone=[5])
    directory = SegmentDirectory(data)
    assert directory.topics() == {"gone": 1, "orders": 3, "payments": 1}
    with_topics(data, gone=None)
    assert directory.topics() == {"orders": 3, "payments": 1}
    assert directory.partitions("orders") == 3
    assert directory.uid("orders", 2) == 3
    assert directory.offsets("orders", 2) == Offsets(0, 0)
    assert list(directory.read("orders", 2, 0, 100)) == []
    with pytest.raises(TopicNotFound, match="topic 'gone' does not exist"):
        directory.partitions("gone")
    with pytest.raises(PartitionNotFound, match="topic 'orders' has no partition 3: it has 3"):
        directory.offsets("orders", 3)
    assert SegmentDirectory(f"file:{data}", namespace="team-a").topics() == {}


def test_what_is_asked_about_topics_is_answered_as_they_were_when_they_were_looked_at(tmp_path: Path) -> None:
    directory = SegmentDirectory(with_topics(tmp_path, orders=[1, 2]))
    assert directory.topics() == {"orders": 2}
    with_topics(tmp_path, orders=[7, 8, 9], payments=[4])  # made again
    assert directory.uid("orders", 1) == 2
    assert directory.uid("payments", 0) == 4, "what is not known is looked for"
    assert directory.uid("orders", 1) == 8
    with_topics(tmp_path, orders=[7, 8, 9, 10])
    assert directory.uid("orders", 3) == 10


def test_what_is_no_data_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is not a data directory: no broker has used it"):
        SegmentDirectory(tmp_path)
    with pytest.raises(InvalidArgument, match="there is no such directory"):
        SegmentDirectory(tmp_path / "nowhere")


def test_offsets_that_are_not_there_are_refused(data: Path) -> None:
    log = open_log(DiskStorage(data), segment_bytes=100)
    for _ in range(5):
        append(log, plain(b"x" * 50))
    log.sync()
    for name in sorted((data / ORDERS).glob("*"))[:2]:
        name.unlink()
    with pytest.raises(OffsetOutOfRange, match=r"orders/0: offset 0 is not in 1\.\.5"):
        read(data, 0)
    with pytest.raises(OffsetOutOfRange, match=r"offset 6 is not in 1\.\.5"):
        read(data, 6)
    assert read(data, 5) == []
    assert len(read(data, 1)) == 4


def test_a_write_that_is_under_way_is_not_seen(data: Path) -> None:
    log = open_log(DiskStorage(data))
    whole = append(log, plain(b"one", b"two"), plain(b"three"))
    path = data / log.segments[-1].path
    good = path.read_bytes()
    append(log, plain(b"four" * 10))
    more = path.read_bytes()
    for cut in range(len(good), len(more)):
        path.write_bytes(more[:cut])
        assert SegmentDirectory(data).offsets("orders", 0).end == 3
        assert read(data) == whole
    path.write_bytes(more + bytes(1000))
    assert len(read(data)) == 4
    assert SegmentDirectory(data).offsets("orders", 0).end == 4


def test_nothing_is_changed_by_reading(data: Path) -> None:
    log = open_log(DiskStorage(data), segment_bytes=200)
    for _ in range(10):
        append(log, plain(b"x" * 50))
    log.sync()
    for path in data.rglob("*"):
        path.chmod(0o500 if path.is_dir() else 0o400)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in data.rglob("*")}
    assert len(read(data)) == 10
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in data.rglob("*")} == before


@pytest.mark.parametrize("place", ["header", "body", "length"])
@pytest.mark.parametrize("closed", [True, False])
def test_damage_in_the_middle_is_reported_and_can_be_passed(data: Path, place: str, closed: bool) -> None:
    log = open_log(DiskStorage(data), segment_bytes=600)
    messages = [message for i in range(12) for message in append(log, plain(b"%03d" % i, b"x" * 60))]
    log.sync()
    if closed:
        log.close()
    first = data / f"{ORDERS}/{0:020d}.log"
    raw = bytearray(first.read_bytes())
    position = Batch.parse(raw).header.length  # where the second batch starts, with offsets 2 and 3
    raw[position + {"header": 18, "body": 70, "length": 6}[place]] ^= 0x40
    first.write_bytes(raw)
    with pytest.raises(DataDamaged, match=r"orders/0: offsets 2 to 3 are damaged in .*data"):
        read(data)
    damaged: list[tuple[int, int]] = []
    assert read(data, damaged=damaged) == [message for message in messages if message.offset not in (2, 3)]
    assert damaged == [(2, 4)]
    # Who does not ask for it does not meet it.
    assert read(data, 4) == messages[4:]
    assert read(data, 0, 2) == messages[:2]
    damaged.clear()
    assert read(data, 3, damaged=damaged) == messages[4:]
    assert damaged == [(3, 4)]


def test_a_file_that_is_gone_from_the_middle_is_damage(data: Path) -> None:
    log = open_log(DiskStorage(data), segment_bytes=200)
    messages = [message for _ in range(9) for message in append(log, plain(b"x" * 60))]
    log.sync()
    bases = [segment.base_offset for segment in log.segments]
    gone = data / f"{ORDERS}/{bases[1]:020d}.log"
    gone.unlink()
    lost = range(bases[1], bases[2])
    with pytest.raises(DataDamaged, match=f"offsets {lost.start} to {lost.stop - 1} are damaged"):
        read(data)
    damaged: list[tuple[int, int]] = []
    assert read(data, damaged=damaged) == [message for message in messages if message.offset not in lost]
    assert damaged == [(lost.start, lost.stop)]


def test_a_file_that_lost_its_end_is_damage(data: Path) -> None:
    log = open_log(DiskStorage(data), segment_bytes=300)
    messages = [message for _ in range(9) for message in append(log, plain(b"x" * 60))]
    log.sync()
    first = log.segments[0]
    path = data / first.path
    path.write_bytes(path.read_bytes()[:-40])
    damaged: list[tuple[int, int]] = []
    last = first.next_offset - 1
    assert read(data, damaged=damaged) == [message for message in messages if message.offset != last]
    assert damaged == [(last, last + 1)]


class CrashingStorage(DiskStorage):
    """Stops at the n-th change of a name."""

    steps_left = 1_000

    def _step(self) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise OSError(5, "the power went out")

    def rename(self, old: str, new: str) -> None:
        self._step()
        super().rename(old, new)

    def remove(self, path: str) -> None:
        self._step()
        super().remove(path)


@pytest.mark.parametrize("steps", range(9))
def test_a_compaction_that_was_interrupted_is_seen_as_before_or_as_after(data: Path, steps: int) -> None:
    storage = CrashingStorage(data)
    log = open_log(storage)
    for number in range(3):  # what is left of the three is more than the first of them was
        for key in (b"same", b"a%d" % number, b"b%d" % number, b"c%d" % number):
            append(log, plain(b"old", b"new" * 40, keys=[key, key]))
        log.roll()
    log.sync()
    before = read(data)
    plan = Compaction.plan(log, now_us=0, tombstone_retention_ms=1, dirty_share_min=0, keys_max=1_000)
    assert plan is not None
    plan.rewrite()
    storage.steps_left = steps
    finished = attempt(lambda: list(plan.swaps()))
    seen = read(data)
    after, _ = read_back(open_log(DiskStorage(data)))
    assert len(after) < len(before) or not finished
    assert seen in (before, after)
    if finished:
        assert seen == after


def attempt(action: Callable[[], Any]) -> bool:
    try:
        action()
    except Exception:
        return False
    return True


def test_a_batch_larger_than_a_window_is_read_whole(data: Path) -> None:
    log = open_log(DiskStorage(data), segment_bytes=64 << 20)
    messages = append(log, plain(b"small"), plain(bytes(5 << 20)), plain(b"small"))
    log.sync()
    assert read(data) == messages
