"""Room behind the last batch: where syncs are small and frequent the active file grows in steps, by zeros."""

from __future__ import annotations

import errno

import pytest

from millstream.errors import StorageFailed
from millstream.log.memory import MemoryStorage
from millstream.log.partition import PartitionLog
from millstream.log.storage import Storage
from millstream.log.verify import dump, verify
from millstream.records import Buffer
from millstream.testing.storage import Fault, SimulatedFile, SimulatedStorage
from tests.log_workload import DIRECTORY, FIRST_INDEX, FIRST_LOG, Message, append, open_log, plain, read_back

KIB = 1024


def with_room(storage: Storage, **options: int) -> tuple[PartitionLog, list[Message]]:
    """A log whose file is longer than its batches."""
    log = open_log(storage, **options)
    messages: list[Message] = []
    while storage.size(FIRST_LOG) == log.size_bytes:
        messages += append(log, plain(b"x" * 100))
        log.sync()
    return log, messages


def test_small_syncs_prepare_room_and_most_appends_leave_the_size_of_the_file_alone() -> None:
    storage = MemoryStorage()
    log, _ = with_room(storage)
    sizes = []
    for _ in range(5000):
        append(log, plain(b"x" * 100))
        log.sync()
        sizes.append(storage.size(FIRST_LOG))
    assert len(set(sizes)) < 20
    assert log.size_bytes < sizes[-1] <= log.size_bytes + 256 * KIB


def test_a_small_partition_takes_at_most_twice_its_space() -> None:
    storage = MemoryStorage()
    log, _ = with_room(storage)
    for _ in range(20):
        assert storage.size(FIRST_LOG) <= 2 * log.size_bytes
        append(log, plain(b"x" * 100))
        log.sync()


@pytest.mark.parametrize(("count", "size"), [(100, 1000), (1, 40 * KIB)])
def test_large_rounds_and_large_writes_prepare_nothing(count: int, size: int) -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    for _ in range(5):
        for _ in range(count):
            append(log, plain(b"x" * size))
        log.sync()
        assert storage.size(FIRST_LOG) == log.size_bytes


def test_after_a_crash_room_is_no_torn_write() -> None:
    storage = SimulatedStorage(seed=1)
    _, messages = with_room(storage)
    storage.kill()
    log = open_log(storage)
    assert read_back(log) == (messages, [])
    assert log.recovery.truncated_bytes == 0
    assert not log.recovery.damaged
    assert storage.size(FIRST_LOG) == log.size_bytes


def test_a_torn_write_into_room_is_cut_off_and_nothing_is_moved_aside() -> None:
    storage = SimulatedStorage(seed=1)
    log, messages = with_room(storage)
    end = log.size_bytes
    append(log, plain(b"torn" * 10))
    torn = storage.read_all(FIRST_LOG)
    storage.kill()
    file = storage.open(FIRST_LOG)
    file.write(bytes(8), log.size_bytes - 8)  # the last bytes of the batch never came to the disk
    file.close()
    assert len(torn) > log.size_bytes
    again = open_log(storage)
    assert read_back(again) == (messages, [])
    assert again.recovery.truncated_bytes == log.size_bytes - end
    assert not again.recovery.moved_aside


def test_a_crash_between_a_roll_and_its_seal_loses_nothing_behind_the_room() -> None:
    storage = SimulatedStorage(seed=1)
    log, messages = with_room(storage)
    log.roll()
    messages += append(log, plain(b"behind"))
    assert storage.size(FIRST_LOG) > log.segments[0].size, "the room is still there"
    storage.kill()
    assert read_back(open_log(storage)) == (messages, [])


def test_a_sealed_segment_and_a_closed_log_have_no_room() -> None:
    storage = MemoryStorage()
    log, messages = with_room(storage)
    log.roll()
    log.sync()
    assert storage.size(FIRST_LOG) == log.segments[0].size
    for _ in range(10):
        messages += append(log, plain(b"x" * 100))
        log.sync()
    assert sum(storage.size(segment.path) for segment in log.segments) > log.size_bytes
    log.close()
    assert sum(storage.size(segment.path) for segment in log.segments) == log.size_bytes
    log = open_log(storage)
    assert log.recovery.clean
    assert read_back(log) == (messages, [])


def test_zeros_where_confirmed_batches_were_are_damage() -> None:
    storage = MemoryStorage()
    log, messages = with_room(storage)
    messages += append(log, plain(b"confirmed"))
    log.sync()
    header = log.segments[0].header(0)
    index = storage.open(FIRST_INDEX, create=True)
    index.write(header.encode(), 0)
    file = storage.open(FIRST_LOG)
    last = log.size_bytes // len(messages) * (len(messages) - 1)
    file.write(bytes(storage.size(FIRST_LOG) - last), last)
    log.abandon()
    again = open_log(storage)
    assert again.next_offset == len(messages), "an offset that was confirmed is not used again"
    assert again.recovery.damaged
    assert len(read_back(again)[0]) < len(messages)


def test_a_disk_with_space_for_the_messages_only_takes_them() -> None:
    storage = SimulatedStorage(seed=1)
    log, messages = with_room(storage)
    batch_bytes = log.size_bytes // len(messages)
    while log.size_bytes + batch_bytes <= storage.size(FIRST_LOG):
        messages += append(log, plain(b"x" * 100))
        log.sync()
    storage.inject(Fault.NO_SPACE, times=1)  # for room; the second try is without
    messages += append(log, plain(b"x" * 100))
    assert storage.size(FIRST_LOG) == log.size_bytes
    storage.inject(Fault.NO_SPACE, times=2)
    with pytest.raises(StorageFailed):
        append(log, plain(b"refused"))
    messages += append(log, plain(b"goes on"))
    log.sync()
    storage.power_cut()
    assert read_back(open_log(storage)) == (messages, [])


def test_a_quota_with_room_for_the_messages_only_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = SimulatedStorage(seed=1)
    log, messages = with_room(storage)
    honest = SimulatedFile.write

    def write(file: SimulatedFile, data: Buffer, position: int) -> None:
        if position + len(data) > storage.size(FIRST_LOG) + 1_000:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        honest(file, data, position)

    monkeypatch.setattr(SimulatedFile, "write", write)
    for _ in range(40):
        messages += append(log, plain(b"x" * 100))
        log.sync()
    monkeypatch.undo()
    storage.power_cut(lose_everything=True)
    assert read_back(open_log(storage)) == (messages, [])


def test_offline_tools_step_over_room() -> None:
    storage = SimulatedStorage(seed=1)
    log, messages = with_room(storage)
    log.roll()
    messages += append(log, plain(b"behind"))
    storage.kill()
    findings = list(verify(storage, DIRECTORY))
    assert [finding.damaged for finding in findings] == [(), ()]
    assert findings[0].bytes == log.segments[0].size
    assert sum(batch.header.count for batch in dump(storage, DIRECTORY)) == len(messages)


@pytest.mark.parametrize("back", [8, 160])
def test_rot_in_the_last_confirmed_batch_before_room_does_not_free_its_offsets(back: int) -> None:
    """They were given to the next messages, which whoever had read that far never saw."""
    storage = SimulatedStorage()
    log, messages = with_room(storage)
    log.note_durable()
    end = log.size_bytes
    assert storage.size(FIRST_LOG) > end
    storage.kill()
    storage.flip(FIRST_LOG, end - back)  # in its value, and in its header
    log = open_log(storage, tail_bytes=0)
    lost = messages.pop().offset
    assert log.next_offset == lost + 1
    assert log.recovery.damaged == [(lost, lost + 1)]
    messages += append(log, plain(b"after"))
    log.sync()
    assert read_back(log) == (messages, [(lost, lost + 1)])


@pytest.mark.parametrize("seed", range(4))
def test_room_that_did_not_fit_on_the_disk_is_cut_off_in_the_end(seed: int) -> None:
    """Zeros stayed behind a sealed segment, and every start after that read all of it to make its index anew."""
    storage = SimulatedStorage(seed)
    log, messages = with_room(storage)
    messages += append(log, plain(b"x" * 100))
    log.sync()
    storage.inject(Fault.NO_SPACE, when=lambda operation: operation.kind == "write")
    messages += append(log, plain(b"x" * 100))
    log.roll()
    log.close()
    assert storage.size(FIRST_LOG) == log.size_bytes
    log = open_log(storage, tail_bytes=0)
    assert log.recovery.clean
    assert read_back(log) == (messages, [])
