"""Piles of messages: sealed exactly at their limits, whatever path the messages took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.client.accumulator import Accumulator
from millstream.client.delivery import Delivery
from millstream.client.values import make_entry
from millstream.entries import Entry, encode_entries
from millstream.errors import PartitionNotFound, PayloadTooLarge
from millstream.ids import SCHEDULES
from millstream.partitioning import key_partition
from millstream.records import Batch, decode_headers, stamp


def make(
    partitions: int = 1, *, batch_bytes: int = 65_536, batch_messages: int = 10_000, **options: int
) -> tuple[Accumulator, Delivery]:
    delivery = Delivery(window=8, delivery_timeout_ms=1000, request_timeout_ms=1000, jitter=lambda: 1.0)
    accumulator = Accumulator(
        "t",
        delivery,
        partitions=partitions,
        producer=0,
        batch_bytes=batch_bytes,
        batch_messages=batch_messages,
        buffer_bytes=options.pop("buffer_bytes", 32 << 20),
        message_bytes_max=options.pop("message_bytes_max", 1 << 20),
        **options,
    )
    accumulator.open_gate()
    return accumulator, delivery


def send(accumulator: Accumulator, value: bytes, key: bytes | None = None) -> bool:
    """As a producer does it; True when the fast path took the message."""
    if key is None:
        pile, entry, size = accumulator.sticky, value, len(value)
    else:
        pile = accumulator.piles[key_partition(key, len(accumulator.piles))]
        entry, size = (value, key), len(value) + len(key)  # type: ignore[assignment]
        accumulator.special = True
    left = pile.left - size - pile.surcharge
    if left > 0:
        pile.left = left
        pile.entries.append(entry)
        return True
    accumulator.add(entry, now_us=1, now_ms=1)
    return False


def sealed(delivery: Delivery) -> list[int]:
    return [batch.count for line in delivery._lines for batch in line.ready]


@given(st.lists(st.integers(0, 500), min_size=1, max_size=300), st.integers(1, 50), st.integers(200, 3000))
def test_no_batch_exceeds_its_limits_and_none_is_sealed_without_reason(
    sizes: list[int], batch_messages: int, batch_bytes: int
) -> None:
    accumulator, delivery = make(batch_messages=batch_messages, batch_bytes=batch_bytes)
    for size in sizes:
        send(accumulator, bytes(size))
    counts = sealed(delivery)
    at = 0
    for count in counts:
        assert count <= batch_messages
        batch = sizes[at : at + count]
        assert count == 1 or sum(batch) <= batch_bytes
        # Sealed because it was full by count, or because the next message, or this one, did not fit any more.
        following = sizes[at + count] if at + count < len(sizes) else 0
        # Near enough: what a message costs besides its bytes is known only roughly.
        assert count == batch_messages or sum(batch) + following + 12 * (count + 1) >= batch_bytes
        at += count
    accumulator.seal_all(now_us=1, now_ms=1)
    assert sum(sealed(delivery)) == len(sizes)


def test_most_messages_take_the_fast_path() -> None:
    accumulator, _ = make()
    assert sum(send(accumulator, bytes(100)) for _ in range(10_000)) > 9_950


def test_a_closed_gate_sends_every_message_the_slow_way_and_forgets_nothing() -> None:
    accumulator, delivery = make(partitions=3)
    for _ in range(10):
        assert send(accumulator, b"x")
        assert send(accumulator, b"x", b"k")
    accumulator.close_gate()
    assert not accumulator.gate_open
    assert not send(accumulator, b"x")
    assert not send(accumulator, b"x", b"k")
    accumulator.open_gate()
    assert send(accumulator, b"x")
    accumulator.seal_all(now_us=1, now_ms=1)
    assert sum(sealed(delivery)) == 23


def test_values_alone_stay_in_one_partition_until_its_batch_is_sealed() -> None:
    accumulator, delivery = make(partitions=3, batch_messages=4)
    for _ in range(12):
        send(accumulator, b"x")
    assert sealed(delivery) == [4, 4, 4]
    assert [len(line.ready) for line in delivery._lines] == [1, 1, 1]


def test_all_piles_together_fit_the_buffer() -> None:
    accumulator, _ = make(partitions=1000, buffer_bytes=1 << 20)
    assert accumulator.batch_bytes * 1000 <= 1 << 19


def test_partitions_can_be_added() -> None:
    accumulator, delivery = make(partitions=1)
    with pytest.raises(PartitionNotFound):
        accumulator.add(b"x", 1, now_us=1, now_ms=1)
    accumulator.grow(2)
    accumulator.add(b"x", 1, now_us=1, now_ms=1)
    accumulator.seal_all(now_us=1, now_ms=1)
    assert [len(line.ready) for line in delivery._lines] == [0, 1]


def test_delayed_messages_travel_apart_to_the_log_of_schedules() -> None:
    accumulator, delivery = make(partitions=2, batch_messages=4)
    for number in range(10):
        accumulator.add(make_entry(b"now", b"k"), now_us=1, now_ms=1)
        accumulator.add(make_entry(b"later", b"k", delay=60 + number), now_us=1, now_ms=1)
    assert not accumulator.empty
    accumulator.seal_all(now_us=1, now_ms=1)
    assert accumulator.empty
    home = key_partition(b"k", 2)
    counts = {line.partition: [batch.count for batch in line.ready] for line in delivery._lines if line.ready}
    assert counts == {home: [4, 4, 2], home | SCHEDULES: [4, 4, 2]}
    for line in delivery._lines:
        for sealed_batch in line.ready:
            data = bytearray(sealed_batch.head + sealed_batch.tail)
            stamp(memoryview(data), 0, base_offset=0, append_time_us=0, leader_epoch=0)
            due = Batch.parse(bytes(data)).deliver_at_us()
            assert (due is not None and all(due)) == bool(line.partition & SCHEDULES)


@pytest.mark.parametrize("key", [None, b"k"])
def test_batches_larger_than_a_message_may_be_are_filled_quickly_and_hide_none_that_is_too_large(
    key: bytes | None,
) -> None:
    accumulator, delivery = make(batch_bytes=40_000, batch_messages=4000, message_bytes_max=1000)
    quick = 0
    for _ in range(4000):
        assert accumulator.piles[0].left <= 1000, "what exceeds it must be looked at"
        quick += send(accumulator, bytes(30), key)
    assert quick > 3800
    assert min(sealed(delivery)) > 1200


#: One of every kind that a producer may be given.
KINDS: dict[str, dict[str, object]] = {
    "text": {"value": "text"},
    "JSON": {"value": None, "json": {"a": 1}},
    "a key": {"value": b"v", "key": "k"},
    "a deletion marker": {"value": None, "key": b"k"},
    "headers": {"value": b"v", "headers": {"a": "b"}},
    "a priority": {"value": b"v", "priority": "high"},
    "an end": {"value": b"v", "ttl": "1h"},
    "a time": {"value": b"v", "timestamp": 5},
    "a delay": {"value": b"v", "delay": 60},
    "a dedup id": {"value": b"v", "dedup_id": "d"},
    "a partition": {"value": b"v", "partition": 1},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_whatever_a_message_has_it_is_taken_quickly_and_once(kind: dict[str, object]) -> None:
    accumulator, delivery = make(partitions=2, batch_messages=100)
    entry, partition = make_entry(**kind), kind.get("partition")  # type: ignore[arg-type]
    accumulator.add(entry, partition, now_us=1, now_ms=1)  # type: ignore[arg-type]  # a schedule's pile is made here
    taken = 1
    while accumulator.take(entry, partition):  # type: ignore[arg-type]
        taken += 1
    assert 80 <= taken <= 100
    accumulator.seal_all(now_us=1, now_ms=1)
    assert sum(sealed(delivery)) == taken
    accumulator.close_gate()
    assert not accumulator.take(entry, partition), "somebody wants to have a word with the producer"  # type: ignore[arg-type]


def test_what_may_not_be_where_it_wants_to_is_looked_at_closely() -> None:
    accumulator, _ = make(partitions=2, message_bytes_max=100)
    assert not accumulator.take(b"x", 2), "there may be more partitions by now"
    with pytest.raises(PartitionNotFound):
        accumulator.take(b"x", -1)
    for value in (bytes(101), (bytes(50), bytes(51)), make_entry(bytes(90), b"k", {"name": "value"})):
        assert not accumulator.take(value, None)
    assert not accumulator.take(make_entry(b"x", delay=60), None), "no pile for schedules is made without the lock"
    assert accumulator.empty


def test_sizes_count_key_and_headers() -> None:
    accumulator, _ = make(message_bytes_max=100)
    accumulator.check_size(bytes(100))
    for entry in (bytes(101), (bytes(95), bytes(6)), make_entry(bytes(90), b"k", {"name": "value"})):
        with pytest.raises(PayloadTooLarge):
            accumulator.check_size(entry)


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=5),
            st.tuples(st.none() | st.binary(max_size=5), st.none() | st.binary(max_size=5)),
            st.builds(
                lambda value, key, priority, time: make_entry(
                    value, key, {"h": "v"}, priority=priority, timestamp=time, deliver_at=time, ttl=1
                ),
                st.binary(max_size=5),
                st.none() | st.binary(max_size=5),
                st.none() | st.integers(0, 4),
                st.none() | st.integers(1, 2**31),
            ),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_any_mixture_of_entries_is_read_back_as_it_was(entries: list[bytes | tuple[bytes | None, ...] | Entry]) -> None:
    head, tail = encode_entries(entries, base_timestamp_us=7)  # type: ignore[arg-type]
    data = bytearray(head + tail)
    stamp(memoryview(data), 0, base_offset=0, append_time_us=0, leader_epoch=0)
    batch = Batch.parse(bytes(data))
    full = [(entry, None) if isinstance(entry, bytes) else entry for entry in entries]
    assert batch.values() == [entry[0] for entry in full]
    assert (batch.keys() or [None] * batch.count) == [entry[1] for entry in full]
    headers = batch.raw_headers() or [b""] * batch.count
    times = batch.timestamps_us() or [7] * batch.count
    priorities = batch.priorities() or [2] * batch.count
    for entry, raw, time, priority in zip(full, headers, times, priorities, strict=True):
        if isinstance(entry, Entry):
            assert decode_headers(raw) == [("h", b"v")]
            assert time == (entry.timestamp_us or 7)
            assert priority == entry.priority
        else:
            assert (raw, time, priority) == (b"", 7, 2)
