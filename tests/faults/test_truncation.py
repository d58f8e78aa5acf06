"""A file may end anywhere after a crash.  What comes back is every whole batch before that, and nothing else."""

from __future__ import annotations

from random import Random

import pytest

from millstream.log.memory import MemoryStorage
from millstream.log.verify import dump, verify
from tests.examples import seeds
from tests.log_workload import DIRECTORY, FIRST_INDEX, FIRST_LOG, Message, append, mixed, open_log, plain, read_back

SEED = 20
#: The fast suite looks at one byte of so many.
STEP = 7


def written(batches: int) -> tuple[bytes, list[tuple[int, list[Message]]]]:
    """The log file of a partition that was never closed, and its batches as (end position, messages)."""
    random = Random(SEED)
    storage = MemoryStorage()
    log = open_log(storage)
    ends = []
    for _ in range(batches):
        messages = append(log, mixed(random, messages_max=4, value_bytes_max=60))
        ends.append((log.size_bytes, messages))
    log.sync()
    return storage.read_all(FIRST_LOG), ends


@pytest.mark.parametrize("first", seeds(1, STEP))
def test_truncation_at_every_byte_leaves_the_whole_batches_before_it(first: int) -> None:
    data, ends = written(20)
    kinds = {flags for _, messages in ends for flags in (len(messages), messages[0].key is None)}
    assert len(kinds) >= 4, f"seed {SEED} makes too plain a log"
    for size in range(first, len(data) + 1, STEP):
        storage = MemoryStorage()
        storage.make_directory(DIRECTORY)
        storage.replace(FIRST_LOG, data[:size])
        log = open_log(storage)
        expected = [message for end, messages in ends if end <= size for message in messages]
        whole = max((end for end, _ in ends if end <= size), default=0)
        assert read_back(log) == (expected, []), f"cut at {size}, seed {SEED}"
        assert (log.next_offset, log.size_bytes) == (len(expected), whole)
        assert log.recovery.truncated_bytes == size - whole
        assert storage.size(FIRST_LOG) == whole, "the torn end is gone from the file as well"
        assert log.recovery.moved_aside == []


@pytest.mark.parametrize("lost", [1, 63, 64, 200])
def test_the_log_goes_on_after_a_torn_end(lost: int) -> None:
    data, _ = written(20)
    storage = MemoryStorage()
    storage.make_directory(DIRECTORY)
    storage.replace(FIRST_LOG, data[:-lost])
    log = open_log(storage)
    before, _ = read_back(log)
    more = append(log, plain(b"after", b"the crash"))
    assert more[0].offset == len(before)
    log.close()
    log = open_log(storage)
    assert log.recovery.clean
    assert read_back(log) == (before + more, [])
    assert all(finding.is_good for finding in verify(storage, DIRECTORY))


def test_confirmed_messages_that_are_gone_are_reported_and_their_offsets_not_used_again() -> None:
    """The note left by a clean close says how long the file was: this is loss, not a torn write."""
    storage = MemoryStorage()
    log = open_log(storage)
    messages = [message for n in range(9) for message in append(log, plain(b"%d" % n, b"x" * n))]
    log.close()
    whole = storage.read_all(FIRST_LOG)
    notes = storage.read_all(FIRST_INDEX)
    for size in range(0, len(whole), 5):
        storage.replace(FIRST_LOG, whole[:size])
        storage.replace(FIRST_INDEX, notes)
        log = open_log(storage)
        survivors, damaged = read_back(log)
        assert survivors == messages[: len(survivors)]
        assert log.next_offset == 18
        assert log.recovery.damaged == [(len(survivors), 18)], f"cut at {size}"
        assert damaged == [(len(survivors), 18)]
        more = append(log, plain(b"new"))
        assert more[0].offset == 18
        assert read_back(log) == (survivors + more, [(len(survivors), 18)])
        *_, last = dump(storage, DIRECTORY)
        assert last.next_offset == 19, "what is appended behind damage can be found without an index"
        log.delete()
        storage.make_directory(DIRECTORY)
