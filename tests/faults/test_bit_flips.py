"""Any bit of a stored segment may flip.  It is noticed, only its own batch is lost, and nothing wrong is served."""

from __future__ import annotations

from random import Random

import pytest

from millstream.log.memory import MemoryStorage
from millstream.log.verify import verify
from tests.examples import seeds
from tests.log_workload import DIRECTORY, FIRST_INDEX, FIRST_LOG, Message, append, mixed, open_log, plain, read_back

SEED = 6
#: The fast suite looks at one bit of so many, and at all eight places of a byte.
STEP = 7


def sealed(batches: int) -> tuple[MemoryStorage, list[tuple[int, list[Message]]]]:
    """A sealed segment with mixed batches and an active one behind it; its batches as (end position, messages)."""
    random = Random(SEED)
    storage = MemoryStorage()
    log = open_log(storage, index_interval_bytes=256)
    ends = []
    for n in range(batches):
        messages = append(log, mixed(random, messages_max=3, value_bytes_max=30), now_us=1000 * n)
        ends.append((log.size_bytes, messages))
    log.roll()
    ends.append((-1, append(log, plain(b"behind"), now_us=10**6)))
    log.close()
    return storage, ends


@pytest.mark.parametrize("first", seeds(1, STEP))
def test_every_flipped_bit_is_detected_and_costs_no_more_than_its_batch(first: int) -> None:
    storage, ends = sealed(5)
    whole = storage.read_all(FIRST_LOG)
    index = storage.read_all(FIRST_INDEX)
    data = bytearray(whole)
    for bit in range(first, 8 * len(data), STEP):
        data[bit // 8] ^= 1 << bit % 8
        storage.replace(FIRST_LOG, bytes(data))
        storage.replace(FIRST_INDEX, index)
        data[bit // 8] ^= 1 << bit % 8
        hit = next(number for number, (end, _) in enumerate(ends) if bit // 8 < end)
        expected = [message for number, (_, messages) in enumerate(ends) if number != hit for message in messages]
        lost = ends[hit][1]
        where = f"bit {bit % 8} of byte {bit // 8}, seed {SEED}"

        log = open_log(storage)
        served, damaged = read_back(log)
        assert served == expected, where
        assert damaged == log.recovery.damaged == [(lost[0].offset, lost[-1].offset + 1)], where
        log.close()

        findings = list(verify(storage, DIRECTORY))
        assert [finding.is_good for finding in findings] == [False, True], where
        assert [(it.first_offset, it.next_offset) for it in findings[0].damaged] == damaged, where


@pytest.mark.parametrize("first", seeds(1, STEP))
def test_every_flipped_bit_of_an_index_is_harmless(first: int) -> None:
    storage, ends = sealed(7)
    whole = storage.read_all(FIRST_INDEX)
    everything = [message for _, messages in ends for message in messages]
    times = [(1000 * number, messages[0].offset) for number, (_, messages) in enumerate(ends[:-1])]
    data = bytearray(whole)
    for bit in range(first, 8 * len(data), STEP):
        data[bit // 8] ^= 1 << bit % 8
        storage.replace(FIRST_INDEX, bytes(data))
        assert not all(finding.is_good for finding in verify(storage, DIRECTORY)), f"bit {bit}, seed {SEED}"
        data[bit // 8] ^= 1 << bit % 8
        log = open_log(storage, index_interval_bytes=256)
        for time_us, offset in times:
            assert log.offset_at_time(time_us) == offset, f"bit {bit}, seed {SEED}"
        for message in everything[::5]:
            served, _ = read_back(log, start=message.offset, before=message.offset + 1, max_bytes=1)
            assert not served or served[0] == message, f"bit {bit}, seed {SEED}"
        assert read_back(log) == (everything, []), f"bit {bit}, seed {SEED}"
        log.close()


def test_a_flipped_byte_behind_what_was_confirmed_ends_the_log_and_keeps_the_rest_aside() -> None:
    """Without a note that these bytes were confirmed, damage is a torn write; whole batches behind it are not shown."""
    random = Random(SEED)
    storage = MemoryStorage()
    log = open_log(storage)
    ends = []
    for _ in range(9):
        messages = append(log, mixed(random))
        ends.append((log.size_bytes, messages))
    log.sync()
    whole = storage.read_all(FIRST_LOG)
    for position in range(0, len(whole), 3):
        data = bytearray(whole)
        data[position] ^= 0xFF
        storage.remove_tree(DIRECTORY)
        storage.make_directory(DIRECTORY)
        storage.replace(FIRST_LOG, bytes(data))
        log = open_log(storage)
        good = [(end, messages) for end, messages in ends if end <= position]
        cut = good[-1][0] if good else 0
        assert read_back(log) == ([message for _, messages in good for message in messages], [])
        assert log.recovery.truncated_bytes == len(whole) - cut
        aside = f"{DIRECTORY}/{0:020d}-{cut}.damaged"
        if position < ends[-2][0]:
            assert log.recovery.moved_aside == [aside]
            assert storage.read_all(aside) == data[cut:], "nothing was thrown away"
        else:
            assert log.recovery.moved_aside == [], "no whole batch was behind it"
        log.close()
        assert open_log(storage).recovery.clean


def test_damage_that_appears_while_running_is_stepped_over_too() -> None:
    """Read once and good; then the disk changes its mind."""
    storage, ends = sealed(9)
    log = open_log(storage)
    assert read_back(log)[1] == []
    file = storage.open(FIRST_LOG)
    start, (end, lost) = ends[3][0], ends[4]
    file.write(b"\xff" * 64, start)
    assert end > start + 64
    served, damaged = read_back(log, max_bytes=1)
    assert [message for message in served if message in lost] == []
    assert damaged == [(lost[0].offset, lost[-1].offset + 1)]
    assert len(served) + len(lost) == log.next_offset


def test_a_batch_inside_a_message_does_not_pass_for_one_of_ours() -> None:
    """Somebody publishes the bytes of segment files.  When their batch is damaged, its contents are not resurrected."""
    other = MemoryStorage()
    log = open_log(other)
    append(log, plain(*(b"%d" % n for n in range(50))))
    append(log, plain(b"embedded"))
    embedded = other.read_all(FIRST_LOG)

    storage = MemoryStorage()
    log = open_log(storage)
    first = append(log, plain(b"first"))
    start = log.size_bytes
    append(log, plain(embedded))
    last = append(log, plain(b"last"))
    log.roll()
    log.close()
    storage.open(FIRST_LOG).write(b"\xff", start + 64)  # in the contents: the header still tells where the batch ends
    log = open_log(storage)
    assert read_back(log) == (first + last, [(1, 2)])
