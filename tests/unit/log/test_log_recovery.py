"""What opening a partition makes of directories that are not as a clean close leaves them."""

from __future__ import annotations

import errno
from typing import NoReturn

import pytest
from crc32c import crc32c

from millstream.errors import StorageFailed
from millstream.log.cache import FileCache
from millstream.log.index import IndexFlags
from millstream.log.memory import MemoryStorage
from millstream.log.partition import PartitionLog
from millstream.log.storage import File, Storage
from millstream.log.swap import read_index_header
from millstream.log.verify import verify
from millstream.records import encode_batch, stamp
from millstream.testing.storage import Fault, SimulatedFile, SimulatedStorage
from tests.log_workload import DIRECTORY, FIRST_INDEX, FIRST_LOG, Message, append, open_log, plain, read_back


def three_segments() -> tuple[MemoryStorage, list[Message], list[int]]:
    """Two sealed segments and an active one, three batches of two messages each; base offsets 0, 6, 12."""
    storage = MemoryStorage()
    log = open_log(storage, index_interval_bytes=64)
    messages = []
    for number in range(3):
        for n in range(3):
            messages += append(log, plain(b"%d" % number, b"x" * n), now_us=100 * number + n)
        if number < 2:
            log.roll()
    log.close()
    return storage, messages, [segment.base_offset for segment in log.segments]


def reopened(storage: MemoryStorage) -> PartitionLog:
    return open_log(storage, index_interval_bytes=64, tail_bytes=0)


@pytest.mark.parametrize("damaged", [False, True], ids=["good", "damaged"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_segment_that_was_cold_and_is_full_now_keeps_the_index_of_all_of_it(when: str, damaged: bool) -> None:
    """Only what an earlier process wrote is checked; where the rest lies is known to this one."""
    storage = MemoryStorage()
    log = reopened(storage)
    messages = [message for n in range(20) for message in append(log, plain(b"%d" % n))]
    log.close()
    log = reopened(storage)
    messages += [message for n in range(20) for message in append(log, plain(b"more %d" % n))]
    cold = log.cold_segment(0)
    assert cold is not None
    report = cold.verify()
    log.roll()
    log.sync()
    good = storage.read_all(FIRST_INDEX)
    if damaged:
        storage.replace(FIRST_INDEX, good[:64] + bytes(5 * 24) + good[64 + 5 * 24 :])
    log.accept(report if when == "meanwhile" else cold.verify())
    assert storage.read_all(FIRST_INDEX) == good
    assert log.recovery.rebuilt_indexes == damaged
    assert len(log.segments[0].index) == 40, "one for every batch here: nobody has to step from one to the next"
    assert read_back(log) == (messages, [])


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "long", "garbage", "of another segment"])
def test_a_bad_index_of_a_sealed_segment_is_rebuilt(damage: str) -> None:
    storage, messages, _ = three_segments()
    good = storage.read_all(FIRST_INDEX)
    bad = {
        "empty": b"",
        "short": good[:-1],
        "long": good + bytes(24),
        "garbage": bytes(len(good)),
        "of another segment": storage.read_all(f"{DIRECTORY}/{6:020d}.index"),
    }
    if damage == "missing":
        storage.remove(FIRST_INDEX)
    else:
        storage.replace(FIRST_INDEX, bad[damage])
    assert not all(finding.is_good for finding in verify(storage, DIRECTORY))
    log = reopened(storage)
    assert log.recovery.rebuilt_indexes == 1
    assert read_back(log) == (messages, [])
    header, _ = read_index_header(storage, FIRST_INDEX)
    assert header is not None
    assert header.flags & IndexFlags.SEALED
    assert storage.read_all(FIRST_INDEX)[64:] == good[64:]
    log.close()
    assert reopened(storage).recovery.rebuilt_indexes == 0


def test_a_segment_that_is_gone_is_reported_and_stepped_over() -> None:
    storage, messages, _ = three_segments()
    storage.remove(f"{DIRECTORY}/{6:020d}.log")
    log = reopened(storage)
    assert log.recovery.damaged == [(6, 12)]
    assert read_back(log) == (messages[:6] + messages[12:], [(6, 12)])
    assert read_back(log, start=8) == (messages[12:], [(8, 12)])
    assert not storage.exists(f"{DIRECTORY}/{6:020d}.index"), "an index without a log is a leftover"
    assert [finding.is_good for finding in verify(storage, DIRECTORY)] == [True, False]


def test_a_sealed_segment_that_was_cut_short_is_reported_and_stepped_over() -> None:
    storage, messages, _ = three_segments()
    file = storage.open(f"{DIRECTORY}/{6:020d}.log")
    whole = file.size()
    for size in (0, 8, 64, whole // 3, whole // 2, whole - 1):
        storage.open(f"{DIRECTORY}/{6:020d}.log").truncate(size)
        log = reopened(storage)
        left = size // (whole // 3) * 2
        assert read_back(log) == (messages[: 6 + left] + messages[12:], [(6 + left, 12)])
        assert log.recovery.damaged == [(6 + left, 12)]
        log.close()
        storage, messages, _ = three_segments()


def test_bytes_behind_a_sealed_segment_are_never_served() -> None:
    storage, messages, _ = three_segments()
    file = storage.open(FIRST_LOG)
    stray = storage.read_all(f"{DIRECTORY}/{12:020d}.log")
    file.write(stray, file.size())
    log = reopened(storage)
    assert read_back(log)[0] == messages


def test_damage_below_the_confirmed_size_is_rot_and_what_follows_is_kept() -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    big = b"x" * 1_500_000
    messages = [message for n in range(5) for message in append(log, plain(b"%d" % n + big))]
    log.sync()
    assert storage.exists(FIRST_INDEX), "the confirmed size is noted"
    position = log.size_bytes
    messages += append(log, plain(b"not noted, but whole"))
    storage.open(FIRST_LOG).write(b"\xff", position // 5 + 100)
    log = open_log(storage)
    expected = [message for message in messages if message.offset != 1]
    assert read_back(log) == (expected, [(1, 2)])
    assert log.recovery.damaged == [(1, 2)]
    assert log.recovery.truncated_bytes == 0
    more = append(log, plain(b"goes on"))
    assert more[0].offset == 6
    log.close()
    log = open_log(storage)
    assert read_back(log) == (expected + more, [(1, 2)])


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_rot_in_a_small_log_costs_no_more_than_its_batch(end: str) -> None:
    storage = MemoryStorage()
    log = open_log(storage, notes_bytes_min=1_000_000)
    messages = [message for n in range(20) for message in append(log, plain(b"%02d" % n))]
    log.sync()
    if end == "closed":
        log.close()
    else:
        log.note_durable()
    storage.open(FIRST_LOG).write(b"\xff", storage.size(FIRST_LOG) // 20 * 7 + 40)
    log = open_log(storage)
    assert read_back(log) == ([message for message in messages if message.offset != 7], [(7, 8)])
    assert append(log, plain(b"goes on"))[0].offset == 20


def test_a_note_is_about_what_is_on_disk_of_the_active_segment() -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    append(log, plain(b"on disk"))
    log.note_durable()
    assert not storage.exists(FIRST_INDEX)
    log.sync()
    append(log, plain(b"not on disk"))
    log.note_durable()
    header, _ = read_index_header(storage, FIRST_INDEX)
    assert header is not None
    assert header.next_offset == 1
    log.roll()
    log.sync()
    log.note_durable()
    header, _ = read_index_header(storage, FIRST_INDEX)
    assert header is not None
    assert header.flags & IndexFlags.SEALED
    log.close()
    storage.remove(FIRST_INDEX)
    log.note_durable()
    assert not storage.exists(FIRST_INDEX), "somebody else may have the files by now"


def test_nothing_is_noted_while_a_segment_before_is_being_sealed() -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    append(log, plain(b"sealed in a thread, in a moment"))
    log.roll()
    append(log, plain(b"of the same round"))
    under_way = log.dirty_files()
    until = log.next_offset
    append(log, plain(b"synced here and now"))
    log.sync()
    log.note_durable()
    noted = f"{DIRECTORY}/{1:020d}.index"
    assert not storage.exists(noted)
    for file in under_way:
        file.sync()
    log.mark_durable(until)
    log.note_durable()
    assert storage.exists(noted)


def test_rot_at_the_very_end_of_what_was_confirmed_does_not_free_its_offsets() -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    first = append(log, plain(b"a" * 2_500_000))
    append(log, plain(b"b" * 2_500_000))
    log.sync()
    size = log.size_bytes
    append(log, plain(b"unconfirmed"))
    storage.open(FIRST_LOG).write(b"\xff" * 64, size // 2)
    storage.open(FIRST_LOG).write(b"\xff" * 64, size)
    log = open_log(storage)
    assert log.recovery.damaged == [(1, 2)]
    assert log.recovery.truncated_bytes > 0
    more = append(log, plain(b"new"))
    assert more[0].offset == 2
    assert read_back(log) == (first + more, [(1, 2)])


def test_leftovers_of_a_crash_are_cleaned_up() -> None:
    storage, messages, _ = three_segments()
    for name in ("00000000000000000000.log.new", "00000000000000000000.index.new", "x.index.tmp"):
        storage.replace(f"{DIRECTORY}/{name}", b"half")
    storage.replace(f"{DIRECTORY}/{99:020d}.index", b"an index without a log")
    storage.replace(f"{DIRECTORY}/notes.log", b"somebody's notes")
    log = reopened(storage)
    assert read_back(log) == (messages, [])
    assert {name.rpartition(".")[2] for name in storage.names(DIRECTORY)} == {"log", "index"}


def test_an_empty_new_segment_left_by_a_roll_is_used() -> None:
    storage, messages, _ = three_segments()
    storage.replace(f"{DIRECTORY}/{18:020d}.log", b"")
    log = reopened(storage)
    assert [segment.base_offset for segment in log.segments] == [0, 6, 12, 18]
    assert read_back(log) == (messages, [])
    assert append(log, plain(b"next"))[0].offset == 18


def test_damage_found_by_a_later_read_is_added_to_the_report() -> None:
    storage, messages, _ = three_segments()
    storage.open(FIRST_LOG).write(b"\xff", 70)
    log = reopened(storage)
    assert log.recovery.damaged == []
    assert read_back(log) == (messages[2:], [(0, 2)])
    assert log.recovery.damaged == [(0, 2)]


def test_damage_that_is_found_on_a_full_disk_is_known_all_the_same() -> None:
    """It was not reported, and who read on from a place inside of it got bytes that are no good."""
    storage = SimulatedStorage()
    log = open_log(storage, index_interval_bytes=64, tail_bytes=0)
    messages = [message for n in range(5) for message in append(log, plain(b"%d" % n))]
    log.roll()
    log.sync()
    length = log.segments[0].size // 5
    assert log.read(0, 2 * length, before=5).next_offset == 2  # a reader that will go on at 2
    storage.flip(FIRST_LOG, length + 8)  # the header of 1
    storage.flip(FIRST_LOG, 3 * length - 8)  # the value of 2
    storage.inject(Fault.NO_SPACE, when=lambda operation: ".index" in operation.path)
    with pytest.raises(StorageFailed, match="cannot replace"):
        log.read(1, length, before=5)
    assert log.recovery.damaged == [(1, 3)]
    assert read_back(log, start=2) == (messages[3:], [(2, 3)])


def test_a_file_that_vanishes_under_us_is_an_error_and_not_a_crash() -> None:
    storage, _, _ = three_segments()
    log = reopened(storage)
    storage.remove(FIRST_LOG)
    with pytest.raises(StorageFailed, match="cannot read"):
        log.read(0, 100, before=18)


@pytest.mark.parametrize("fails", ["the old file", "the new file"])
def test_a_roll_that_was_given_up_hides_nothing_that_was_appended_since(fails: str) -> None:
    """Its file was taken for a segment: who read on from there was sent past everything that came after."""
    storage = SimulatedStorage()
    log = open_log(storage)
    messages = append(log, plain(b"before"))
    log.sync()
    with pytest.MonkeyPatch.context() as patch:
        if fails == "the old file":
            patch.setattr(log, "_files", _NoMoreFiles())
        else:
            patch.setattr(SimulatedFile, "truncate", _refuse)
        with pytest.raises(StorageFailed):
            log.roll()
    messages += append(log, plain(b"one")) + append(log, plain(b"two"))
    log.roll()
    messages += append(log, plain(b"three"))
    log.sync()
    log.note_durable()
    storage.kill()
    log = open_log(storage, tail_bytes=0)
    for start in range(4):
        assert read_back(log, start=start) == (messages[start:], [])
    assert [segment.base_offset for segment in log.segments] == [0, 3]


class _NoMoreFiles(FileCache):
    def pin(self, storage: Storage, path: str) -> File:
        _refuse()


def _refuse(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("sealed", [0, 1, 2])
@pytest.mark.parametrize("clean", [True, False])
def test_the_file_of_the_last_segment_that_is_gone_does_not_free_its_offsets(sealed: int, clean: bool) -> None:
    storage = SimulatedStorage()
    log = open_log(storage)
    messages: list[Message] = []
    for number in range(sealed):
        messages += append(log, plain(b"%d" % number, b"x"))
        log.roll()
    append(log, plain(b"lost", b"too"))
    log.sync()
    log.note_durable()
    if clean:
        log.close()
    storage.kill()
    storage.remove(log.segments[-1].path)
    lost = 2 * sealed, 2 * sealed + 2
    log = open_log(storage, tail_bytes=0)
    assert log.next_offset == 2 * sealed + 2
    assert log.recovery.damaged == [lost]
    messages += append(log, plain(b"after"))
    log.sync()
    storage.power_cut(lose_everything=True)
    log = open_log(storage, tail_bytes=0)
    assert read_back(log) == (messages, [lost] if sealed else [])


def test_what_was_moved_aside_before_stays_when_the_same_place_is_torn_again() -> None:
    storage = SimulatedStorage()
    asides = []
    for value in (b"first", b"second", b"third"):
        log = open_log(storage)
        append(log, plain(b"torn"), plain(value))
        storage.kill()
        storage.flip(FIRST_LOG, 70)
        log = open_log(storage)
        assert log.next_offset == 0
        asides += log.recovery.moved_aside
    for path, value in zip(asides, (b"first", b"second", b"third"), strict=True):
        assert value in storage.read_all(path)
    assert len(set(asides)) == 3


def test_a_segment_with_more_messages_than_its_index_can_say_is_opened_all_the_same() -> None:
    """As an earlier version could write it: the count is a figure, and not what anything depends on."""
    storage = SimulatedStorage()
    storage.make_directory(DIRECTORY)
    most, data = 2**32 - 1, b""
    for number in range(2):
        batch = bytearray(encode_batch([b""], base_timestamp_us=1))
        batch[36:40] = most.to_bytes(4, "little")
        batch[8:12] = crc32c(batch[36:]).to_bytes(4, "little")
        stamp(memoryview(batch), 0, base_offset=number * most, append_time_us=1, leader_epoch=0)
        data += batch
    storage.open(FIRST_LOG, create=True).write(data, 0)
    log = open_log(storage)
    assert (log.next_offset, log.messages) == (2 * most, 2 * most)
    log.append([plain(b"x")], [1], 2)
    log.sync()
    assert [segment.base_offset for segment in log.segments] == [0, 2 * most], "nothing more is added to it"
    log.close()
    log = open_log(storage)
    assert (log.next_offset, log.segments[0].messages) == (2 * most + 1, most)
