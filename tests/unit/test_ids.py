"""Message ids: every place has one, every id is a place, and nothing else is an id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidArgument
from millstream.ids import OFFSET_BITS, message_id, parse_message_id, schedule_uid

TIMES_MS = st.integers(0, (1 << 48) - 1)
UIDS = st.integers(0, (1 << 32) - 1)
OFFSETS = st.integers(0, 2_000) | st.integers(0, (1 << OFFSET_BITS) - 1)


@given(TIMES_MS, UIDS, OFFSETS)
def test_an_id_leads_back_to_its_place(time_ms: int, uid: int, offset: int) -> None:
    text = message_id(time_ms * 1000 + 999, uid, offset)
    assert len(text) == 26
    assert parse_message_id(text) == parse_message_id(text.lower()) == (time_ms, uid, offset)
    assert schedule_uid(schedule_uid(uid)) == uid != schedule_uid(uid)


@given(TIMES_MS, UIDS, OFFSETS, TIMES_MS, UIDS, OFFSETS)
def test_ids_sort_by_time_then_partition_then_offset(a: int, b: int, c: int, d: int, e: int, f: int) -> None:
    assert (message_id(a * 1000, b, c) < message_id(d * 1000, e, f)) == ((a, b, c) < (d, e, f))


def test_ids_look_the_same_for_ever() -> None:
    assert message_id(1_767_225_600_000_000, 0x89ABCDEF, 12_345) == "01KDVDNA00H6NWVVR000000C1S"


@pytest.mark.parametrize(
    "text",
    [
        *("", "0" * 25, "0" * 27, "U" + "0" * 25, "0" * 25 + "L", "Z" * 26, "8" + "0" * 25, "0_0" + "0" * 23),
        *(" " + "0" * 25, "+" + "0" * 25, "٣" * 26, "0" * 25 + "é", "0b" + "-" * 24),
    ],
)
def test_nothing_else_is_an_id(text: str) -> None:
    with pytest.raises(InvalidArgument, match="not a message id"):
        parse_message_id(text)
