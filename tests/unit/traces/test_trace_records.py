"""Records of what happened: what they say, how they are found, and what a passport makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidArgument
from millstream.ids import message_id
from millstream.traceparent import TraceContext, check_trace_id, context_of, own_trace_id, parse_traceparent
from millstream.traces.passport import Event, Passport, attempt_events, record_events
from millstream.traces.records import Record, Search, Subject, decode_record, encode_record, marker

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
UID = 0xDEAD_BEEF


def nacked(time_ms: int = 2_000, *, subjects: tuple[Subject, ...] = ()) -> Record:
    """A nack of the messages 100, 101 and 103."""
    return Record("nacked", time_ms, marker(UID), 100, b"\x0b", "billing", "c-1", 1_500, "db down", subjects=subjects)


# --- records ---------------------------------------------------------------------------------------------------------


def test_a_record_says_which_messages_it_is_about() -> None:
    record = decode_record(encode_record(nacked()))

    assert list(record.offsets()) == [100, 101, 103]
    assert [offset for offset in range(90, 130) if record.has(offset)] == [100, 101, 103]
    assert record.messages == 3


@given(base=st.integers(0, 1 << 48), bits=st.integers(1, 1 << 200), offset=st.integers(-10, 300))
def test_a_record_has_exactly_the_offsets_of_its_bitmap(base: int, bits: int, offset: int) -> None:
    record = Record("acked", 1, b"", base, bits.to_bytes((bits.bit_length() + 7) // 8, "little"))

    assert record.has(base + offset) == (offset >= 0 and bool(bits >> offset & 1))


def test_a_search_by_place_finds_the_record_and_its_bytes() -> None:
    data = encode_record(nacked())
    here = Search(places=frozenset((marker(UID),)), offset=101)
    beside = Search(places=frozenset((marker(UID),)), offset=102)
    elsewhere = Search(places=frozenset((marker(7),)))

    assert here.may_match(data)
    assert here.matches(nacked())
    assert not beside.matches(nacked())
    assert not elsewhere.may_match(data)
    assert not elsewhere.matches(nacked())


def test_a_search_by_key_or_trace_finds_single_messages() -> None:
    trace = bytes.fromhex(TRACE)
    record = nacked(subjects=(Subject(100, 1_000, b"k1"), Subject(101, 1_000, b"k2", trace), Subject(103, 1_000)))
    data = encode_record(record)

    assert [s.offset for s in Search(key=b"k1").subjects(record)] == [100]
    assert [s.offset for s in Search(trace=trace).subjects(record)] == [101]
    assert [s.offset for s in Search().subjects(record)] == [100, 101, 103]
    assert Search(key=b"k2", trace=trace).may_match(data)
    assert not Search(key=b"k3").may_match(data)
    assert not Search(trace=bytes(16)).may_match(data)


def test_messages_that_are_not_named_are_found_together_unless_the_one_that_is_looked_for_is() -> None:
    record = nacked(subjects=(Subject(100, 1_000, b"k1"),))

    assert Search().others(record) == record.messages - 1 > 0
    assert Search(offset=101).others(record) == record.messages - 1
    assert Search(offset=100).others(record) == 0
    assert [s.offset for s in Search(offset=100).subjects(record)] == [100]
    assert not list(Search(offset=101).subjects(record))
    assert Search(key=b"k1").others(record) == Search(trace=bytes(16)).others(record) == 0


def test_a_search_has_a_beginning_and_an_end_in_time() -> None:
    assert Search(from_ms=2_000, until_ms=2_001).matches(nacked(2_000))
    assert not Search(from_ms=2_001).matches(nacked(2_000))
    assert not Search(until_ms=2_000).matches(nacked(2_000))


def test_an_ack_is_no_failure() -> None:
    failures = Search(failures_only=True)

    assert failures.matches(nacked())
    assert not failures.matches(Record("acked", 1, b"", 0, b"\1"))


# --- passports -------------------------------------------------------------------------------------------------------


def kinds(passport: Passport) -> list[str]:
    return [event.kind for event in passport.events()]


def test_what_ended_a_lease_tells_when_it_began() -> None:
    leased, failed = record_events(nacked())

    assert (leased.kind, leased.time_ms, leased.consumer) == ("leased", 1_500, "c-1")
    assert (failed.kind, failed.time_ms, failed.error) == ("nacked", 2_000, "db down")


def test_what_two_places_know_is_told_once() -> None:
    passport = Passport()
    passport.add(record_events(nacked()))
    passport.add(attempt_events("nack", "billing", "c-1", 1_500, 2_000, "db down"))
    passport.add([Event("stored", 1_000)])

    assert kinds(passport) == ["stored", "leased", "nacked"]


def test_two_failures_within_one_millisecond_are_two() -> None:
    passport = Passport()
    passport.add([*record_events(nacked()), *record_events(nacked())])
    passport.add(attempt_events("nack", "billing", "c-1", 1_500, 2_000, "db down"))

    assert sorted(kinds(passport)) == ["leased", "leased", "nacked", "nacked"]


def test_groups_do_not_hide_each_others_events() -> None:
    passport = Passport()
    passport.add([Event("acked", 5, group="a"), Event("acked", 5, group="b")])

    assert kinds(passport) == ["acked", "acked"]
    assert passport.has("acked", group="b")
    assert not passport.has("acked", group="c")


# --- traceparent -----------------------------------------------------------------------------------------------------


def test_a_traceparent_is_read() -> None:
    text = f"00-{TRACE}-00f067aa0ba902b7-01".encode()

    assert parse_traceparent(text) == TraceContext(TRACE, "00f067aa0ba902b7", True)
    assert context_of([("x", b"1"), ("traceparent", text)]) == TraceContext(TRACE, "00f067aa0ba902b7", True)
    assert parse_traceparent(text[:-2] + b"00") == TraceContext(TRACE, "00f067aa0ba902b7", False)


def test_a_later_version_may_say_more() -> None:
    assert parse_traceparent(f"01-{TRACE}-00f067aa0ba902b7-01-more".encode()) is not None
    assert parse_traceparent(f"00-{TRACE}-00f067aa0ba902b7-01-more".encode()) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"00",
        b"\xff\x00",
        f"ff-{TRACE}-00f067aa0ba902b7-01".encode(),
        f"00-{TRACE.upper()}-00f067aa0ba902b7-01".encode(),
        f"00-{'0' * 32}-00f067aa0ba902b7-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
        f"00-{TRACE}-00f067aa0ba902b7".encode(),
    ],
)
def test_what_is_no_traceparent_is_no_trace(text: bytes) -> None:
    assert parse_traceparent(text) is None


@given(st.binary(max_size=80))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    parse_traceparent(data)


def test_a_message_without_a_trace_has_one_of_its_own() -> None:
    name = message_id(1_700_000_000_000_000, UID, 17)

    trace_id = own_trace_id(name)

    assert check_trace_id(trace_id)[6:10] == marker(UID)
    assert int(trace_id[-12:], 16) == 17


@pytest.mark.parametrize("text", ["", "xyz", TRACE[:-1], TRACE + "0"])
def test_what_is_no_trace_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="32 hexadecimal"):
        check_trace_id(text)
