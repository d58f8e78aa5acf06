"""Disks that fail and power that goes: nothing that was confirmed is lost, and the log goes on or refuses.

Confirmed means: `sync` returned.  What was appended but not confirmed may survive or not, but only as a prefix.
"""

from __future__ import annotations

import copy
import functools
from contextlib import suppress
from random import Random

import pytest

from millstream.errors import BatchDamaged, StorageFailed
from millstream.log.partition import PartitionLog
from millstream.log.retention import Retention
from millstream.log.storage import NotOpened
from millstream.records import BatchHeader
from millstream.testing.storage import Fault, Operation, PowerCut, SimulatedStorage
from tests.examples import seeds
from tests.log_workload import DIRECTORY, FIRST_LOG, Message, append, messages_of, mixed, open_log, plain, read_back

SEGMENT_BYTES = 1_500


@functools.cache
def made_up() -> list[bytes]:
    """Batches of all kinds: to make them up takes longer than to store them."""
    random = Random(0)
    return [bytes(mixed(random)) for _ in range(300)]


class Workload:
    """Appends, syncs, reads and retention on a storage that may fail, and a list of what was promised."""

    def __init__(self, storage: SimulatedStorage, seed: int) -> None:
        self.storage = storage
        self.random = Random(seed)
        self.accepted: list[Message] = []  # by offset
        self.refused: list[Message] = []  # the last append, if it failed: a prefix of it may be found after a crash
        self.confirmed = 0
        self.log: PartitionLog | None = None

    def open(self) -> PartitionLog:
        self.log = open_log(self.storage, segment_bytes=SEGMENT_BYTES, index_interval_bytes=256, tail_bytes=2_000)
        return self.log

    def run(self, steps: int, *, close: bool = False) -> None:
        """Do some steps; ends early when the log refuses."""
        log = self.log or self.open()
        for step in range(steps):
            action = self.random.random()
            if action < 0.65:
                batches = [
                    memoryview(bytearray(self.random.choice(made_up()))) for _ in range(self.random.randint(1, 3))
                ]
                self.append(log, batches, now_us=step)
            elif action < 0.9:
                self.sync(log)
            elif action < 0.95:
                assert read_back(log, before=self.confirmed)[1] == []
            elif len(log.segments) > 4:
                log.retain(Retention(max_bytes=2 * SEGMENT_BYTES), now_us=step)
            if log.failure is not None:
                return
        if close:
            log.close()

    def append(self, log: PartitionLog, batches: list[memoryview], now_us: int) -> None:
        next_offset, size = log.next_offset, log.size_bytes
        try:
            self.accepted += append(log, *batches, now_us=now_us)
            self.refused = []
        except PowerCut:
            self.refused = batches_as_refused(batches, next_offset)
            raise
        except StorageFailed as error:
            assert (log.next_offset, log.size_bytes) == (next_offset, size), "a failed append changes nothing"
            assert str(error)
            self.refused = batches_as_refused(batches, next_offset)

    def sync(self, log: PartitionLog) -> None:
        next_offset = log.next_offset
        try:
            log.sync()
        except StorageFailed:
            assert log.failure is not None
            return
        self.confirmed = next_offset

    def check(self) -> None:
        """Open the log again and compare."""
        log = self.open()
        found, damaged = read_back(log)
        start, end = log.start_offset, log.next_offset
        assert end >= self.confirmed, f"{self.confirmed - end} confirmed messages are gone"
        assert damaged == log.recovery.damaged == []
        assert found == (self.accepted + self.refused)[start:end]
        self.accepted = (self.accepted + self.refused)[:end]
        self.refused = []
        # What was found is shown to readers from now on, so it is as good as confirmed.
        self.confirmed = end


def batches_as_refused(batches: list[memoryview], offset: int) -> list[Message]:
    """What a refused append would have stored; nothing if it did not even get as far as stamping the batches."""
    try:
        found = [message for batch in batches for message in messages_of(bytes(batch))]
    except BatchDamaged:
        return []
    assert found[0].offset == offset
    return found


@pytest.mark.parametrize("seed", seeds(20, 60))
def test_power_cuts_between_operations_lose_nothing_confirmed(seed: int) -> None:
    workload = Workload(SimulatedStorage(seed), seed)
    for _ in range(6):
        workload.run(25)
        workload.storage.power_cut(lose_everything=workload.random.random() < 0.3)
        workload.check()


@pytest.mark.parametrize("seed", seeds(1, 4))
def test_a_power_cut_in_any_operation_loses_nothing_confirmed(seed: int) -> None:
    probe = Workload(SimulatedStorage(seed), seed)
    probe.run(40, close=True)
    for number in range(1, probe.storage.operations + 1):
        workload = Workload(SimulatedStorage(seed), seed)
        workload.storage.inject(Fault.POWER_CUT, at=number)
        with pytest.raises(PowerCut):
            workload.run(40, close=True)
        workload.storage.restart()
        workload.check()
        workload.run(5)
        workload.storage.power_cut()
        workload.check()


def test_a_power_cut_during_recovery_loses_nothing_either() -> None:
    for seed in range(12):
        workload = Workload(SimulatedStorage(seed), seed)
        workload.run(30)
        workload.storage.power_cut()
        for number in range(1, 40):
            workload.storage.inject(Fault.POWER_CUT, at=workload.storage.operations + number)
            try:
                workload.open()
                workload.storage.heal()
                workload.storage.power_cut()
            except PowerCut:
                workload.storage.restart()
        workload.check()


@pytest.mark.parametrize("fault", [Fault.SHORT_WRITE, Fault.NO_SPACE, Fault.WRITE_ERROR, Fault.SYNC_ERROR])
@pytest.mark.parametrize("seed", seeds(1, 2))
def test_a_failure_of_any_operation_is_survived(fault: Fault, seed: int) -> None:
    """The log refuses what it cannot store, and after a restart everything confirmed is there, power cut or not."""
    probe = Workload(SimulatedStorage(seed), seed)
    numbers: list[int] = []  # of the operations that this fault can happen to

    def watch(operation: Operation) -> bool:
        numbers.append(operation.number)
        return False

    probe.storage.inject(fault, when=watch)
    probe.run(25)
    assert numbers
    for number in numbers:
        for ending in ("kill", "power cut"):
            workload = Workload(SimulatedStorage(seed), seed)
            workload.storage.inject(fault, at=number)
            with suppress(StorageFailed):  # opening or removing may fail, as long as it says so
                workload.run(25)
            workload.storage.heal()
            if ending == "kill":
                workload.storage.kill()
                workload.check()
            # Also after a kill: what was shown since then must not depend on the page cache.
            workload.storage.power_cut(lose_everything=True)
            workload.check()


def test_a_full_disk_refuses_and_recovers_when_there_is_room() -> None:
    storage = SimulatedStorage(1)
    log = open_log(storage)
    first = append(log, plain(b"fits"))
    storage.inject(Fault.NO_SPACE, times=3)
    for _ in range(3):
        with pytest.raises(StorageFailed, match="No space left"):
            append(log, plain(b"does not fit" * 50))
        assert read_back(log) == (first, [])
    assert log.failure is None
    second = append(log, plain(b"there is room again"))
    log.sync()
    storage.power_cut()
    assert read_back(open_log(storage)) == (first + second, [])


def test_a_write_that_can_neither_be_done_nor_undone_ends_the_log() -> None:
    storage = SimulatedStorage(2)
    log = open_log(storage)
    first = append(log, plain(b"good"))
    log.sync()
    storage.inject(Fault.WRITE_ERROR)
    log._files.get(storage, FIRST_LOG)
    file = log._files.pin(storage, FIRST_LOG)
    file.truncate = _refuse  # type: ignore[method-assign]
    with pytest.raises(StorageFailed):
        append(log, plain(b"bad"))
    with pytest.raises(StorageFailed, match="cannot cut it back"):
        append(log, plain(b"refused"))
    assert log.dirty_files() == []
    assert read_back(log) == (first, [])


def _refuse(size: int) -> None:
    raise OSError(5, "Input/output error")


def test_after_a_failed_sync_nothing_is_appended_and_the_durable_part_is_served() -> None:
    """Syncing again would succeed and prove nothing: the kernel has forgotten the pages it could not write."""
    storage = SimulatedStorage(3)
    log = open_log(storage, tail_bytes=0)
    first = append(log, plain(b"durable"))
    log.sync()
    append(log, plain(b"in doubt"))
    storage.inject(Fault.SYNC_ERROR, when=lambda it: it.kind == "sync")
    files = log.dirty_files()
    with pytest.raises(OSError, match="Input/output"):
        files[0].sync()
    log.fail("the disk failed")
    with pytest.raises(StorageFailed, match="the disk failed"):
        append(log, plain(b"refused"))
    with pytest.raises(StorageFailed):
        log.roll()
    assert log.dirty_files() == []
    assert read_back(log, before=1) == (first, [])
    log.close()
    storage.power_cut(lose_everything=True)
    assert read_back(open_log(storage))[0][:1] == first


def test_what_a_restart_shows_survives_a_power_cut_even_after_a_failed_sync() -> None:
    """The pages that a failed sync has left behind look clean; recovery must write them again."""
    storage = SimulatedStorage(3)
    log = open_log(storage)
    storage.inject(Fault.SYNC_ERROR, when=lambda it: it.kind == "sync")
    in_doubt = append(log, plain(b"in doubt"))
    with pytest.raises(StorageFailed):
        log.sync()
    storage.kill()
    assert read_back(open_log(storage)) == (in_doubt, [])
    storage.power_cut(lose_everything=True)
    assert read_back(open_log(storage)) == (in_doubt, [])


def test_a_new_segment_is_not_confirmed_before_its_name_is_durable() -> None:
    storage = SimulatedStorage(4)
    log = open_log(storage)
    messages = append(log, plain(b"one"))
    log.roll()
    messages += append(log, plain(b"two"))
    for file in log.dirty_files():
        file.sync()
    storage.power_cut(lose_everything=True)
    assert read_back(open_log(storage)) == (messages, [])


@pytest.mark.parametrize("last_first", [False, True])
def test_a_power_cut_between_two_seals_leaves_no_producer_with_a_batch_that_is_lost(last_first: bool) -> None:
    """Files are synced in any order, by several threads; a seal vouches for everything before it."""
    for done in range(4):
        storage = SimulatedStorage(4)
        log = open_log(storage)
        log.sync()
        batches = [plain(b"%d" % n, producer=7 << 16, sequence=n) for n in range(3)]
        for batch in batches:
            base = append(log, batch)[0].offset
            log.producers.record(BatchHeader(batch), base, log.last_append_us)
            if base < 2:
                log.roll()
        work = log.dirty_files()
        for file in (work[::-1] if last_first else work)[:done]:
            file.sync()
        storage.power_cut(lose_everything=True)
        log = open_log(storage)
        messages, damaged = read_back(log)
        assert (damaged, log.recovery.damaged) == ([], []), "nothing that was confirmed is lost"
        for batch in batches[len(messages) :]:
            assert log.producers.check(BatchHeader(batch)) is None, "it is not there, so it is no repetition"
            log.producers.record(BatchHeader(batch), append(log, batch)[0].offset, log.last_append_us)


@pytest.mark.parametrize("kind", ["create", "write"])
@pytest.mark.parametrize("note", [".producers.tmp", ".index.tmp"])
@pytest.mark.parametrize("then", ["room", "cut", "kill", "close"])
def test_a_disk_without_room_for_the_notes_of_full_segments_stops_nothing(kind: str, note: str, then: str) -> None:
    """Their messages are on disk; the notes only spare the next start a scan, and are left when there is room."""
    storage = SimulatedStorage(4)
    log = open_log(storage)
    log.sync()
    messages: list[Message] = []
    storage.inject(Fault.NO_SPACE, times=2, when=lambda it: it.kind == kind and it.path.endswith(note))
    batches = [plain(b"%d" % n, producer=7 << 16, sequence=n) for n in range(4)]
    for number, batch in enumerate(batches):
        messages += append(log, batch)
        log.producers.record(BatchHeader(batch), messages[-1].offset, log.last_append_us)
        log.roll()
        if number in (1, 2):
            log.sync()
            assert log.seals_pending
            assert not any(segment.stored for segment in log.segments), "a seal vouches for everything before it"
    log.sync()
    assert not log.seals_pending
    assert [segment.stored for segment in log.segments] == [True] * 4 + [False]
    if then == "cut":
        storage.power_cut(lose_everything=True)
    elif then == "kill":
        storage.kill()
    elif then == "close":
        log.close()
    if then != "room":
        log = open_log(storage)
    assert read_back(log) == (messages, [])
    assert not log.recovery.rebuilt_indexes
    assert log.producers.check(BatchHeader(batches[-1])) is not None
    assert append(log, plain(b"on"))[0].offset == 4


@pytest.mark.parametrize(("kind", "name"), [("create", ".tmp"), ("sync_directory", "")])
@pytest.mark.parametrize("then", ["files", "cut", "kill", "close"])
def test_too_many_open_files_put_off_the_notes_of_full_segments(kind: str, name: str, then: str) -> None:
    storage = SimulatedStorage(4)
    log = open_log(storage)
    log.sync()
    messages: list[Message] = []
    batches = [plain(b"%d" % n, producer=7 << 16, sequence=n) for n in range(4)]
    for number, batch in enumerate(batches):
        messages += append(log, batch)
        log.producers.record(BatchHeader(batch), messages[-1].offset, log.last_append_us)
        log.roll()
        if number in (1, 2):
            storage.inject(Fault.NO_FILES, when=lambda it: it.kind == kind and it.path.endswith(name))
            log.sync()
            assert log.seals_pending
            assert not any(segment.stored for segment in log.segments), "a seal vouches for everything before it"
    log.sync()
    assert [segment.stored for segment in log.segments] == [True] * 4 + [False]
    if then == "cut":
        storage.power_cut(lose_everything=True)
    elif then == "kill":
        storage.kill()
    elif then == "close":
        log.close()
    if then != "files":
        log = open_log(storage)
    assert read_back(log) == (messages, [])
    assert log.recovery.damaged == []
    assert not log.recovery.rebuilt_indexes
    assert log.producers.check(BatchHeader(batches[-1])) is not None


@pytest.mark.parametrize("refused", range(1, 6))
@pytest.mark.parametrize("in_a_thread", [False, True])
def test_names_that_could_not_be_synced_are_synced_before_anything_is_confirmed(
    refused: int, in_a_thread: bool
) -> None:
    """No more files can be opened for a while: nobody knows of anything that is wrong, and nothing is on disk yet."""
    storage = SimulatedStorage(4)
    log = open_log(storage)
    messages: list[Message] = []
    confirmed = 0
    storage.inject(Fault.NO_FILES, times=refused, when=lambda it: it.kind == "sync_directory")
    for number in range(12):
        messages += append(log, plain(b"%d" % number))
        if number % 3 == 1:
            log.roll()
        if in_a_thread:
            problems = synced_in_any_order(log)
            log.put_off() if problems else log.mark_durable(log.next_offset)
        else:
            problems = []
            try:
                log.sync()
            except StorageFailed as error:
                assert "Too many open files" in str(error)
                problems = [error]
        assert log.failure is None
        if not problems:
            confirmed = len(messages)
            trial = copy.deepcopy(storage)
            trial.heal()
            trial.power_cut(lose_everything=True)
            assert read_back(open_log(trial)) == (messages, [])
    assert confirmed == 12
    assert not log.seals_pending
    assert [segment.stored for segment in log.segments] == [True] * 4 + [False]


def synced_in_any_order(log: PartitionLog) -> list[Exception]:
    """What a round does: all of it is tried, whatever becomes of the rest."""
    problems: list[Exception] = []
    for file in reversed(log.dirty_files()):
        try:
            file.sync()
        except NotOpened as problem:
            problems.append(problem)
    return problems


@pytest.mark.parametrize("clean", [False, True])
def test_what_lies_in_segments_whose_notes_were_put_off_survives(clean: bool) -> None:
    storage = SimulatedStorage(4)
    log = open_log(storage)
    log.sync()
    storage.inject(Fault.NO_SPACE, times=9, when=lambda it: it.path.endswith(".tmp"))
    batches = [plain(b"%d" % n, producer=7 << 16, sequence=n) for n in range(3)]
    messages: list[Message] = []
    for batch in batches:
        messages += append(log, batch)
        log.producers.record(BatchHeader(batch), messages[-1].offset, log.last_append_us)
        if len(messages) < 3:
            log.roll()
    log.sync()
    assert log.seals_pending
    if clean:
        with suppress(StorageFailed):
            log.close()
    storage.heal()
    storage.power_cut(lose_everything=True)
    log = open_log(storage)
    assert read_back(log) == (messages, [])
    assert log.recovery.damaged == []
    assert log.producers.check(BatchHeader(batches[-1])) is not None


@pytest.mark.parametrize("name", ["log", "producers.tmp", "index.tmp", ""])
def test_a_sync_that_fails_while_a_segment_is_sealed_is_final(name: str) -> None:
    storage = SimulatedStorage(4)
    log = open_log(storage)
    log.sync()
    batch = plain(b"x", producer=7 << 16)
    log.producers.record(BatchHeader(batch), append(log, batch)[0].offset, log.last_append_us)
    log.roll()
    storage.inject(Fault.SYNC_ERROR, when=lambda it: it.path.endswith(name) if name else it.kind == "sync_directory")
    with pytest.raises(StorageFailed):
        log.sync()
    assert log.failure is not None


def test_two_segments_may_be_torn_at_once() -> None:
    """Without a sync between them, the older segment can be torn while the newer one is whole."""
    storage = SimulatedStorage(5)
    log = open_log(storage)
    first = append(log, plain(b"one"))
    log.sync()
    append(log, plain(b"torn"))
    log.roll()
    append(log, plain(b"behind the gap"))
    storage.open(f"{DIRECTORY}/{2:020d}.log").sync()
    storage.sync_directory(DIRECTORY)
    storage.power_cut(lose_everything=True)
    log = open_log(storage)
    assert read_back(log) == (first, [])
    assert log.recovery.moved_aside == [f"{DIRECTORY}/{2:020d}-0.damaged"]
    second = append(log, plain(b"goes on at offset 1"))
    assert second[0].offset == 1
    log.close()
    assert read_back(open_log(storage)) == (first + second, [])


def test_faults_happen_where_they_were_asked_for() -> None:
    """The simulator itself: a fault that never fires would make every test above pass."""
    storage = SimulatedStorage(0)
    seen: list[Operation] = []

    def watch(operation: Operation) -> bool:
        seen.append(operation)
        return False

    storage.inject(Fault.POWER_CUT, when=watch)
    log = open_log(storage)
    append(log, plain(b"x"))
    log.sync()
    log.close()
    kinds = {operation.kind for operation in seen}
    assert kinds >= {"create", "write", "truncate", "sync", "rename", "sync_directory"}
    assert [operation.number for operation in seen] == list(range(1, storage.operations + 1))
    storage.heal()
    storage.inject(Fault.NO_SPACE)
    with pytest.raises(OSError, match="No space"):
        storage.open(f"{DIRECTORY}/f", create=True)
    storage.inject(Fault.WRITE_ERROR, at=storage.operations + 3)
    file = storage.open(f"{DIRECTORY}/f", create=True)
    file.write(b"1", 0)
    with pytest.raises(OSError, match="Input/output"):
        file.write(b"2", 1)
