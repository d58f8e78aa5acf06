"""Which occurrences of a recurring schedule are published, in good times and after bad ones."""

from __future__ import annotations

import msgspec
import pytest

from millstream.schedules.recurring import RecurringSchedule, following_clock, occurrences, upcoming_ms

MINUTE = 60_000
HOUR = 60 * MINUTE


def schedule(**fields: object) -> RecurringSchedule:
    known: dict[str, object] = {
        "namespace": "default",
        "name": "tick",
        "topic": "t",
        "cron": "*/10 * * * *",
        "timezone": "UTC",
        "created_ms": 0,
        "producer_id": 1,
        "done_ms": 0,
    }
    return RecurringSchedule(**{**known, **fields})  # type: ignore[arg-type]


def test_nothing_happens_before_the_time() -> None:
    assert upcoming_ms(schedule()) == 10 * MINUTE
    assert occurrences(schedule(), 10 * MINUTE - 1) == ([], 0)
    assert occurrences(schedule(), 10 * MINUTE) == ([10 * MINUTE], 10 * MINUTE)


@pytest.mark.parametrize(
    ("catch_up", "published"),
    [("none", []), ("latest", [HOUR]), ("all", [n * 10 * MINUTE for n in range(1, 7)])],
)
def test_what_was_missed_is_made_up_for_as_asked(catch_up: str, published: list[int]) -> None:
    now_ms = HOUR + 5 * MINUTE
    assert occurrences(schedule(catch_up=catch_up), now_ms) == (published, HOUR)


def test_without_catching_up_an_occurrence_that_is_on_time_counts() -> None:
    assert occurrences(schedule(catch_up="none"), HOUR + 50) == ([HOUR], HOUR)


def test_all_that_was_missed_comes_in_pieces() -> None:
    due, done_ms = occurrences(schedule(catch_up="all", cron="* * * * *"), 2000 * MINUTE)
    assert len(due) == 1000
    assert done_ms == due[-1] == 1000 * MINUTE


def test_an_occurrence_that_is_done_never_comes_again() -> None:
    """Also when the clock is set back."""
    assert occurrences(schedule(done_ms=HOUR), HOUR) == ([], HOUR)
    assert occurrences(schedule(done_ms=HOUR), 10 * MINUTE) == ([], HOUR)


@pytest.mark.parametrize(
    ("cron", "done_ms", "now_ms"),
    [
        ("*/10 * * * *", HOUR, HOUR),
        ("*/10 * * * *", HOUR, HOUR - 10 * MINUTE),
        ("@hourly", 2 * HOUR, HOUR),
        ("* * * * * *", HOUR, HOUR - MINUTE),
        ("@yearly", 24 * HOUR, 0),
    ],
)
def test_a_clock_that_is_set_back_a_little_is_waited_for(cron: str, done_ms: int, now_ms: int) -> None:
    """The occurrence that comes again is the last one, and would be one too many."""
    known = schedule(cron=cron, done_ms=done_ms)
    assert following_clock(known, now_ms) is known


@pytest.mark.parametrize(
    ("cron", "now_ms", "next_ms"),
    [
        ("*/10 * * * *", HOUR - 10 * MINUTE - 1, HOUR - 10 * MINUTE),
        ("* * * * * *", HOUR - MINUTE - 1, HOUR - MINUTE),
        ("*/10 * * * *", 5 * MINUTE, 10 * MINUTE),
    ],
)
def test_after_the_clock_was_set_far_back_a_schedule_goes_on_by_it(cron: str, now_ms: int, next_ms: int) -> None:
    known = following_clock(schedule(cron=cron, done_ms=HOUR), now_ms)
    assert (upcoming_ms(known), known.reached_ms) == (next_ms, HOUR)
    assert occurrences(known, now_ms)[0] == []
    assert occurrences(known, next_ms + 50)[0] == [next_ms]


@pytest.mark.parametrize(
    ("catch_up", "missed"),
    [("none", []), ("latest", [HOUR + 20 * MINUTE]), ("all", [HOUR + 10 * MINUTE, HOUR + 20 * MINUTE])],
)
def test_what_was_published_before_the_clock_was_set_back_is_not_missed(catch_up: str, missed: list[int]) -> None:
    known = following_clock(schedule(catch_up=catch_up, done_ms=HOUR), 5 * MINUTE)
    assert occurrences(known, HOUR + MINUTE) == ([], HOUR)
    assert occurrences(known, HOUR + 25 * MINUTE)[0] == missed


def test_a_paused_schedule_has_nothing_coming() -> None:
    assert upcoming_ms(schedule(paused=True)) is None
    assert occurrences(schedule(paused=True), HOUR) == ([], 0)


def test_a_document_survives_its_way_through_the_state_log() -> None:
    original = schedule(key=b"\xff\x00", value=None, headers=[("h", b"\xfe")])
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(original)), RecurringSchedule) == original
