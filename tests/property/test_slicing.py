"""A part of a batch says about its messages exactly what the whole said."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import slicing
from millstream.headers import encode_headers
from millstream.queues.ranges import pack
from millstream.records import Batch, encode_batch, stamp
from millstream.slicing import parts_of, select_messages, slice_batch
from tests.property.test_records import batches


def rows(batch: Batch, places: list[int]) -> list[tuple[object, ...]]:
    """Everything that a reader can know about each message."""
    base_us = batch.header.base_timestamp_us
    columns = [
        batch.offsets(),
        batch.values(),
        batch.keys() or [None] * batch.count,
        batch.raw_headers() or [b""] * batch.count,
        batch.priorities() or [2] * batch.count,
        batch.deliver_at_us() or [0] * batch.count,
        batch.expiry_us() or [0] * batch.count,
        batch.timestamps_us() or [base_us] * batch.count,
    ]
    return [tuple(column[place] for column in columns) for place in places]


@st.composite
def stored(draw: st.DrawFn) -> bytes:
    made: dict[str, Any] = draw(batches())
    if draw(st.booleans()):  # plain values take another path
        made = {"values": made["values"], "base_timestamp_us": made["base_timestamp_us"], "producer": made["producer"]}
    elif draw(st.booleans()):  # and so do batches without nulls, of which some messages may be empty
        made["values"] = [value or b"" for value in made["values"]]
        made["keys"] = made["keys"] and [key or b"" for key in made["keys"]]
        made["deliver_at_us"] = None
    if draw(st.booleans()):
        made["deliver_at_us"] = None
    count = len(made["values"])
    if draw(st.booleans()):
        gaps = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
        made["offsets"] = [sum(gaps[1 : i + 1]) for i in range(count)]
    made["options"] = draw(st.booleans())
    data = encode_batch(**made)
    stamp(
        memoryview(data),
        0,
        base_offset=draw(st.integers(0, 2**48)),
        append_time_us=draw(st.integers(0, 2**62)),
        leader_epoch=draw(st.integers(0, 2**32 - 1)),
    )
    return bytes(data)


@given(stored(), st.data())
def test_a_slice_is_a_batch_of_the_same_messages(data: bytes, draw: st.DataObject) -> None:
    whole = Batch.parse(data)
    first = draw.draw(st.integers(0, whole.count - 1))
    last = draw.draw(st.integers(first + 1, whole.count))
    part = Batch.parse(slice_batch(data, first, last))
    assert rows(part, list(range(part.count))) == rows(whole, list(range(first, last)))
    assert_same_origin(part, whole)
    assert part.header.first_sequence == (whole.header.first_sequence + first) % 2**32
    assert slice_batch(memoryview(data), first, last) == slice_batch(data, first, last)


@given(st.lists(stored(), min_size=1, max_size=3), st.data())
def test_parts_are_small_and_together_have_every_message_once(stored_batches: list[bytes], draw: st.DataObject) -> None:
    whole = [Batch.parse(data) for data in stored_batches]
    first = draw.draw(st.sampled_from([0, whole[0].base_offset, whole[0].offsets()[-1]]))
    messages_max, bytes_max = draw.draw(st.integers(1, 5)), draw.draw(st.integers(200, 2000))
    with mock.patch.multiple(slicing, _PART_MESSAGES=messages_max, _PART_BYTES=bytes_max):
        parts = list(parts_of([b"".join(stored_batches)], first))
    wanted = [row for batch in whole for row in rows(batch, list(range(batch.count))) if row[0] >= first]
    assert [row for part in parts for row in rows(part, list(range(part.count))) if row[0] >= first] == wanted
    for part in parts:
        assert part.count <= messages_max
        assert part.count == 1 or len(part.block) <= bytes_max


@given(stored(), st.data())
def test_a_selection_is_a_batch_of_the_same_messages(data: bytes, draw: st.DataObject) -> None:
    whole = Batch.parse(data)
    places = sorted(draw.draw(st.sets(st.integers(0, whole.count - 1), min_size=1)))
    part = Batch.parse(select_messages(data, pack(0, places)))
    assert rows(part, list(range(part.count))) == rows(whole, places)
    assert_same_origin(part, whole)


@pytest.mark.parametrize("column", ["values", "keys", "headers"])
@pytest.mark.parametrize("places", [[1], [1, 2], [2], [2, 3], [1, 2, 3], [1, 3]])
def test_a_selection_behind_empty_messages_is_of_the_same_messages(column: str, places: list[int]) -> None:
    """Where those before them are empty the selected begin at byte 0, as the first ones do."""
    made: dict[str, Any] = {"values": [b"1", b"22", b"333", b"4444"], column: [b"", b"", b"abc", b"de"]}
    if column == "headers":
        made[column] = [encode_headers({}), encode_headers({}), encode_headers({"a": "b"}), encode_headers({"c": "d"})]
    data = encode_batch(**made, base_timestamp_us=1)
    stamp(memoryview(data), 0, base_offset=7, append_time_us=2, leader_epoch=3)
    whole = Batch.parse(bytes(data))
    part = Batch.parse(select_messages(bytes(data), pack(0, places)))
    assert rows(part, list(range(part.count))) == rows(whole, places)


def test_a_part_of_a_batch_with_nulls_costs_no_look_at_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten thousand messages a queue may hand out a few at a time."""
    keys = [b"k" if place % 3 else None for place in range(10_000)]
    values = [b"v" if place % 2 else None for place in range(10_000)]
    data = encode_batch(values, keys=keys, base_timestamp_us=1)
    stamp(memoryview(data), 0, base_offset=7, append_time_us=2, leader_epoch=3)
    whole = Batch.parse(bytes(data))
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "_cut", None)
        parts = [select_messages(bytes(data), pack(0, places)) for places in ([4000, 4001], [4000, 4007])]
    for part, places in zip(map(Batch.parse, parts), ([4000, 4001], [4000, 4007]), strict=True):
        assert rows(part, [0, 1]) == rows(whole, places)


def assert_same_origin(part: Batch, whole: Batch) -> None:
    for name in ("append_time_us", "leader_epoch", "base_timestamp_us", "producer"):
        assert getattr(part.header, name) == getattr(whole.header, name)
    assert part.header.flags & 2048 == whole.header.flags & 2048
    lanes = set(part.priorities() or [2])
    assert part.header.priorities == sum(1 << lane for lane in lanes)
