"""However batches lie in the log, a queue is told of the same messages and gets exactly the bytes it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.queues.source import LogWindows, PartitionSource, StoredRun
from millstream.log.partition import Chunk
from millstream.records import Batch, encode_batch, stamp


@st.composite
def logs(draw: st.DrawFn) -> list[Batch]:
    """Stored batches in the order of their offsets, with gaps between and inside some of them."""
    batches = []
    offset, time_us = draw(st.integers(0, 50)), 1_000_000
    for number in range(draw(st.integers(1, 8))):
        count = draw(st.integers(1, 5))
        columns: dict[str, Any] = {"base_timestamp_us": number}
        if draw(st.booleans()):
            columns["keys"] = [b"k%d" % (n % 2) for n in range(count)]
        if draw(st.booleans()):
            columns["expiry_us"] = [number] * count
        if draw(st.booleans()):
            columns["priorities"] = [draw(st.integers(0, 4))] * count
        size = count
        if draw(st.sampled_from((False, False, True))):
            columns["offsets"] = [2 * n for n in range(count)]
            size = 2 * count - 1
        data = encode_batch([b"%d/%d" % (number, n) for n in range(count)], **columns)
        stamp(memoryview(data), 0, base_offset=offset, append_time_us=time_us, leader_epoch=0)
        batches.append(Batch.parse(bytes(data)))
        offset += size + draw(st.sampled_from((0, 0, 0, 3)))
        time_us += draw(st.sampled_from((0, 1_000, 20_000)))
    return batches


def raw(batch: Batch) -> bytes:
    return bytes(batch.block)


class FakePartition:
    """A log that answers with as many batches as fit, in buffers that were cut anywhere between batches."""

    def __init__(self, batches: list[Batch], cuts: Sequence[int]) -> None:
        self.log = self
        self.batches = batches
        self.cuts = set(cuts)
        self.start_offset = batches[0].base_offset
        self.high_watermark = batches[-1].next_offset

    def cold_segment(self, offset: int) -> None:
        return None

    def read(self, offset: int, max_bytes: int, *, before: int) -> Chunk:
        first = next(n for n, batch in enumerate(self.batches) if batch.next_offset > offset)
        buffers: list[bytes] = []
        for number in range(first, len(self.batches)):
            if not buffers or number in self.cuts:
                buffers.append(b"")
            buffers[-1] += raw(self.batches[number])
        return Chunk(buffers, before, None)


def runs_of(batches: list[Batch], cuts: Sequence[int]) -> list[StoredRun]:
    source = PartitionSource(FakePartition(batches, cuts), LogWindows())  # type: ignore[arg-type]
    runs, offset = [], source.start
    while (run := source.batch_at(offset)) is not None:
        runs.append(run)
        offset = run.next_offset
    return runs


def messages(pieces: Sequence[bytes | memoryview]) -> dict[int, bytes | None]:
    data, found, at = b"".join(pieces), {}, 0
    while at < len(data):
        batch = Batch.parse(data, at)
        at += batch.header.length
        found.update(zip(batch.offsets(), batch.values(), strict=True))
    return found


CUTS = st.sets(st.integers(1, 7))


@given(logs(), CUTS)
def test_runs_tell_of_every_message_once_and_in_order(batches: list[Batch], cuts: set[int]) -> None:
    runs = runs_of(batches, sorted(cuts))
    expected = {o: v for batch in batches for o, v in zip(batch.offsets(), batch.values(), strict=True)}
    seen = [pair for run in runs for pair in zip(run.offsets(), run.values(), strict=True)]
    assert seen == sorted(expected.items())
    keys = [key for batch in batches for key in batch.keys() or [None] * batch.count]
    assert [key for run in runs for key in run.keys() or [None] * run.count] == keys
    expiry = [at for batch in batches for at in batch.expiry_us() or [0] * batch.count]
    assert [at for run in runs for at in run.expiry_us() or [0] * run.count] == expiry
    for run in runs:
        mine = [batch for batch in batches if run.base_offset <= batch.base_offset < run.next_offset]
        assert run.append_time_us == mine[-1].append_time_us
        assert run.append_time_us - mine[0].append_time_us <= 10_000, "nothing is said about ages that is not true"
        assert (run.count, run.length) == (sum(b.count for b in mine), sum(b.header.length for b in mine))
        lanes = 0
        for batch in mine:
            lanes |= batch.header.priorities
        assert run.priorities == lanes


@given(logs(), CUTS, st.data())
def test_exactly_the_messages_between_two_offsets_are_cut_out(
    batches: list[Batch], cuts: set[int], draw: st.DataObject
) -> None:
    for run in runs_of(batches, sorted(cuts)):
        start = draw.draw(st.integers(max(run.base_offset - 2, 0), run.next_offset - 1))
        end = draw.draw(st.integers(max(start, run.base_offset) + 1, run.next_offset + 2))
        expected = {o: v for o, v in zip(run.offsets(), run.values(), strict=True) if start <= o < end}
        assert messages(run.pieces(start, (1 << end - start) - 1)) == expected


@given(logs(), CUTS, st.data())
def test_what_is_granted_is_among_what_is_sent_and_not_much_else(
    batches: list[Batch], cuts: set[int], draw: st.DataObject
) -> None:
    for run in runs_of(batches, sorted(cuts)):
        start = draw.draw(st.integers(max(run.base_offset - 3, 0), run.next_offset - 1))
        bits = draw.draw(st.integers(0, 2 ** (run.next_offset - start + 2) - 1))
        expected = {
            o: v for o, v in zip(run.offsets(), run.values(), strict=True) if o >= start and bits >> o - start & 1
        }
        found = messages(run.pieces(start, bits))
        assert {offset: found[offset] for offset in expected} == expected
        assert len(found) <= 2 * len(expected)


def test_small_batches_become_one_run() -> None:
    batches = []
    for number in range(100):
        data = encode_batch([b"%d" % number], base_timestamp_us=1)
        stamp(memoryview(data), 0, base_offset=number, append_time_us=5, leader_epoch=0)
        batches.append(Batch.parse(bytes(data)))
    (run,) = runs_of(batches, [])
    (piece,) = run.pieces(0, 2**100 - 1)
    assert isinstance(piece, bytes), "whole runs are not even copied"
    assert len(run.pieces(3, 2**94 - 1)) == 1


class CountedPartition(FakePartition):
    """A log that answers with about as much as was asked for, and knows how much that was in all."""

    def __init__(self, count: int, size: int) -> None:
        batches = []
        for number in range(count):
            data = encode_batch([bytes(size)], base_timestamp_us=1)
            # Far from each other in time: each is a run.
            stamp(memoryview(data), 0, base_offset=number, append_time_us=number * 1_000_000, leader_epoch=0)
            batches.append(Batch.parse(bytes(data)))
        super().__init__(batches, [])
        self.reads = 0
        self.bytes_read = 0

    def read(self, offset: int, max_bytes: int, *, before: int) -> Chunk:
        data = b""
        while offset < before and (not data or len(data) + len(raw(self.batches[offset])) <= max_bytes):
            data += raw(self.batches[offset])
            offset += 1
        self.reads += 1
        self.bytes_read += len(data)
        return Chunk([data], offset, None)


def test_a_window_that_is_in_use_does_not_give_way_to_one_that_is_not() -> None:
    windows = LogWindows(bytes_max=3 * 256 * 1024)
    partitions = [CountedPartition(50, 20_000) for _ in range(8)]
    busy, *others = [PartitionSource(partition, windows) for partition in partitions]  # type: ignore[arg-type]
    for source in others:
        assert busy.batch_at(0) is not None
        assert source.batch_at(0) is not None
    assert partitions[0].reads == 1


def test_partitions_that_are_drained_together_read_little_of_it_twice() -> None:
    windows = LogWindows(bytes_max=1024 * 1024)
    partitions = [CountedPartition(500, 2_000) for _ in range(20)]
    sources = [PartitionSource(partition, windows) for partition in partitions]  # type: ignore[arg-type]
    for offset in range(500):
        for source in sources:
            run = source.batch_at(offset)
            assert run is not None
            assert run.base_offset == offset
    stored = sum(len(raw(batch)) for partition in partitions for batch in partition.batches)
    assert sum(partition.bytes_read for partition in partitions) < 3 * stored
