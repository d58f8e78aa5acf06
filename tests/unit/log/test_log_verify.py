"""Looking at files offline."""

from __future__ import annotations

from millstream.log.memory import MemoryStorage
from millstream.log.verify import dump, verify
from tests.log_workload import DIRECTORY, FIRST_LOG, append, open_log, plain, read_back


def written() -> MemoryStorage:
    storage = MemoryStorage()
    log = open_log(storage)
    for n in range(6):
        append(log, plain(b"%d" % n, b"second"), now_us=n)
        if n == 3:
            log.roll()
    log.close()
    return storage


def test_a_good_partition_is_counted_and_found_good() -> None:
    storage = written()
    sealed, active = verify(storage, DIRECTORY)
    assert (sealed.base_offset, sealed.next_offset, sealed.batches, sealed.messages) == (0, 8, 4, 8)
    assert (active.base_offset, active.next_offset, active.batches, active.messages) == (8, 12, 2, 4)
    assert sealed.bytes == storage.size(FIRST_LOG)
    assert (sealed.sealed, active.sealed) == (True, False)
    assert sealed.is_good
    assert active.is_good


def test_a_missing_partition_has_no_findings() -> None:
    assert list(verify(MemoryStorage(), "nowhere")) == []
    assert list(dump(MemoryStorage(), "nowhere")) == []


def test_damage_is_described() -> None:
    storage = written()
    storage.open(FIRST_LOG).write(b"\xff", 80)
    finding, _ = verify(storage, DIRECTORY)
    assert finding.batches == 3
    assert finding.problems == ("bytes 0 to 88 are damaged (offsets 0 to 1)",)


def test_verify_and_dump_change_nothing() -> None:
    storage = written()
    storage.open(FIRST_LOG).write(b"\xff", 80)
    before = {name: storage.read_all(f"{DIRECTORY}/{name}") for name in storage.names(DIRECTORY)}
    list(verify(storage, DIRECTORY))
    list(dump(storage, DIRECTORY))
    assert before == {name: storage.read_all(f"{DIRECTORY}/{name}") for name in storage.names(DIRECTORY)}


def test_dump_starts_at_the_batch_with_the_offset_and_stops_at_the_limit() -> None:
    storage = written()
    batches = list(dump(storage, DIRECTORY, 5, 3))
    assert [batch.header.base_offset for batch in batches] == [4, 6, 8]
    assert batches[0].open().values() == [b"2", b"second"]
    assert [batch.position for batch in batches] == [176, 264, 0]
    assert [batch.header.base_offset for batch in dump(storage, DIRECTORY)] == [0, 2, 4, 6, 8, 10]
    assert list(dump(storage, DIRECTORY, limit=0)) == []


def test_a_torn_end_is_found_before_recovery_cuts_it_off() -> None:
    storage = written()
    active = f"{DIRECTORY}/{8:020d}.log"
    storage.open(active).write(b"half a batch", storage.size(active))
    _, finding = verify(storage, DIRECTORY)
    assert len(finding.problems) == 1
    assert "after offset 11" in finding.problems[0]
    log = open_log(storage)
    assert len(read_back(log)[0]) == 12
    log.close()
    assert all(finding.is_good for finding in verify(storage, DIRECTORY))


def test_confirmed_bytes_that_are_gone_are_found() -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    append(log, plain(b"x" * 5_000_000))
    log.sync()
    storage.open(FIRST_LOG).truncate(0)
    (finding,) = verify(storage, DIRECTORY)
    assert "were confirmed" in finding.problems[0]
