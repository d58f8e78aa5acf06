"""The log against the dumbest thing that could work: a list of messages.

Random appends, reads, rolls, syncs, crashes, retention and compaction; after each step both must tell the same story.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millstream.log.compaction import Compaction
from millstream.log.partition import PartitionLog
from millstream.log.retention import Retention
from millstream.log.verify import verify
from millstream.records import encode_batch
from millstream.testing.storage import SimulatedStorage
from tests.examples import examples
from tests.log_workload import DIRECTORY, Message, append, open_log, read_back

SECOND = 1_000_000
KEYS = [None, b"a", b"b", b"c", b"d"]
ROWS = st.lists(st.tuples(st.sampled_from(KEYS), st.none() | st.binary(max_size=40)), min_size=1, max_size=5)


class LogMachine(RuleBasedStateMachine):
    """`model` is every message that must be readable, by offset."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = SimulatedStorage(0)
        self.now_us = SECOND
        self.model: dict[int, Message] = {}
        self.times: dict[int, int] = {}  # append time by the first offset of each append
        self.durable = 0
        self.compacted = False
        self.log = self.open()

    def open(self) -> PartitionLog:
        return open_log(self.storage, segment_bytes=700, index_interval_bytes=128, tail_bytes=500)

    @rule(batches=st.lists(ROWS, min_size=1, max_size=3), codec=st.integers(0, 2), wait=st.integers(0, 2 * SECOND))
    def append(self, batches: list[list[tuple[bytes | None, bytes | None]]], codec: int, wait: int) -> None:
        self.now_us += wait
        encoded = []
        for rows in batches:
            keys = [key for key, _ in rows]
            values = [value for _, value in rows]
            with_keys = keys if any(key is not None for key in keys) else None
            encoded.append(memoryview(encode_batch(values, keys=with_keys, base_timestamp_us=0, codec=codec)))
        self.times[self.log.next_offset] = self.now_us
        for message in append(self.log, *encoded, now_us=self.now_us):
            self.model[message.offset] = message

    @rule()
    def sync(self) -> None:
        self.log.sync()
        self.durable = self.log.next_offset

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule(data=st.data(), max_bytes=st.sampled_from([1, 200, 1 << 20]))
    def read(self, data: st.DataObject, max_bytes: int) -> None:
        start = data.draw(st.integers(self.log.start_offset, self.log.next_offset))
        found, damaged = read_back(self.log, start=start, max_bytes=max_bytes)
        assert damaged == []
        assert found == [message for offset, message in sorted(self.model.items()) if offset >= start]

    @rule(data=st.data())
    def search_time(self, data: st.DataObject) -> None:
        time_us = data.draw(st.integers(0, self.now_us + 1))
        found = self.log.offset_at_time(time_us)
        exact = min((offset for offset, at in self.times.items() if at >= time_us), default=self.log.next_offset)
        if not self.compacted:
            assert found == max(exact, self.log.start_offset)
        elif found != self.log.next_offset:
            # Merged batches stand for up to a second, and messages that are gone cannot be found.
            early = min((offset for offset, at in self.times.items() if at > time_us - SECOND), default=0)
            left = min((offset for offset in self.model if offset >= exact), default=self.log.next_offset)
            assert early <= found <= max(left, self.log.start_offset)

    @rule()
    def close_and_open(self) -> None:
        self.log.close()
        self.log = self.open()
        assert self.log.recovery.clean
        self.durable = self.log.next_offset

    @rule()
    def kill(self) -> None:
        self.storage.kill()
        self.log = self.open()
        self.durable = self.log.next_offset

    @rule()
    def power_cut(self) -> None:
        self.storage.power_cut()
        self.log = self.open()
        assert self.log.next_offset >= self.durable
        self.model = {offset: message for offset, message in self.model.items() if offset < self.log.next_offset}
        self.times = {offset: at for offset, at in self.times.items() if offset < self.log.next_offset}
        self.durable = self.log.next_offset

    @rule(max_bytes=st.integers(0, 3000))
    def retain(self, max_bytes: int) -> None:
        self.sync()
        self.log.retain(Retention(max_bytes=max_bytes), now_us=self.now_us)
        self.drop_before(self.log.start_offset)

    @rule(age_ms=st.integers(0, 5000))
    def retain_by_age(self, age_ms: int) -> None:
        self.log.retain(Retention(max_age_ms=age_ms), now_us=self.now_us)
        self.drop_before(self.log.start_offset)
        self.durable = max(self.durable, self.log.start_offset)

    @precondition(lambda self: self.log.next_offset > 0)
    @rule(data=st.data())
    def delete_before(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(0, self.log.next_offset))
        start = self.log.start_offset
        assert start <= self.log.delete_before(offset) <= max(offset, start)
        self.drop_before(self.log.start_offset)
        self.durable = max(self.durable, self.log.start_offset)

    def drop_before(self, start: int) -> None:
        self.model = {offset: message for offset, message in self.model.items() if offset >= start}

    @rule(keep_tombstones=st.booleans(), keys_max=st.sampled_from([1, 1000]))
    def compact(self, keep_tombstones: bool, keys_max: int) -> None:
        self.sync()
        retention_ms = 10**9 if keep_tombstones else 0
        plan = Compaction.plan(
            self.log, now_us=self.now_us, tombstone_retention_ms=retention_ms, dirty_share_min=0, keys_max=keys_max
        )
        if plan is None:
            return
        plan.rewrite()
        list(plan.swaps())
        self.compacted = True
        found, damaged = read_back(self.log)
        assert damaged == []
        left = {message.offset: message for message in found}
        assert left.items() <= self.model.items()
        newest = {message.key: message.offset for message in self.model.values()}
        sealed_until = self.log.segments[-1].base_offset
        for offset, message in self.model.items():
            must_stay = message.key is None or offset >= sealed_until or offset == newest[message.key]
            if must_stay and not (message.value is None and message.key is not None and not keep_tombstones):
                assert offset in left, f"{message} is gone"
        for key in KEYS[1:]:
            latest = [message.value for message in self.model.values() if message.key == key][-1:]
            latest_left = [message.value for message in found if message.key == key][-1:]
            assert (latest or [None]) == (latest_left or [None]), f"the newest value of {key!r} changed"
        self.model = left

    @invariant()
    def numbers_agree(self) -> None:
        log = self.log
        assert log.failure is None
        assert log.recovery.damaged == []
        assert log.messages == len(self.model)
        assert log.size_bytes == sum(segment.size for segment in log.segments)
        assert log.start_offset == log.segments[0].base_offset

    def teardown(self) -> None:
        self.log.close()
        assert all(finding.is_good for finding in verify(self.storage, DIRECTORY))
        self.log = self.open()
        assert read_back(self.log) == ([message for _, message in sorted(self.model.items())], [])


TestLogAgainstAList = LogMachine.TestCase
TestLogAgainstAList.settings = examples(50, stateful_step_count=40)
