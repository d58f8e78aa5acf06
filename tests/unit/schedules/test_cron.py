"""Cron with time zones: right around changes of the clocks, and never twice."""

from __future__ import annotations

from bisect import bisect_right
from datetime import UTC, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidArgument
from millstream.schedules.cron import Cron

BERLIN = ZoneInfo("Europe/Berlin")


def ms(*moment: int, zone: ZoneInfo | None = None) -> int:
    return round(datetime(*moment, tzinfo=zone or UTC).timestamp() * 1000)  # type: ignore[misc]


def test_next_is_after_and_last_is_at_or_before() -> None:
    cron = Cron("30 9 * * MON-FRI")
    friday, monday = ms(2026, 1, 30, 9, 30), ms(2026, 2, 2, 9, 30)
    assert cron.next_ms(friday - 1) == friday
    assert cron.next_ms(friday) == monday
    assert cron.last_ms(friday) == friday
    assert cron.last_ms(monday - 1) == friday


def test_a_time_that_the_clocks_jump_over_happens_when_they_have_jumped() -> None:
    cron = Cron("30 2 * * *", "Europe/Berlin")
    assert cron.next_ms(ms(2026, 3, 28, 12, zone=BERLIN)) == ms(2026, 3, 29, 3, 0, zone=BERLIN)


def test_a_time_that_comes_twice_happens_once() -> None:
    cron = Cron("30 2 * * *", "Europe/Berlin")
    first = cron.next_ms(ms(2026, 10, 24, 12, zone=BERLIN))
    assert first == ms(2026, 10, 25, 0, 30)  # 02:30 in summer time
    assert cron.next_ms(first) == ms(2026, 10, 26, 2, 30, zone=BERLIN)


def test_every_half_hour_runs_on_when_the_clocks_go_back() -> None:
    cron = Cron("*/30 * * * *", "Europe/Berlin")
    at_ms, occurrences = ms(2026, 10, 24, 22, 45), []
    while len(occurrences) < 8:
        at_ms = cron.next_ms(at_ms) or 0
        occurrences.append(at_ms)
    assert {b - a for a, b in pairwise(occurrences)} == {1_800_000}


@given(
    st.sampled_from(["30 2 * * *", "*/20 * * * *", "0 2,3 * * *", "15 * * * *", "59 23 * * 6"]),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC"]),
    st.sampled_from([(2026, 3, 28), (2026, 10, 24), (2026, 11, 1), (2026, 4, 4), (2026, 10, 3)]),
    st.integers(0, 48 * 3600),
)
def test_wherever_one_starts_the_occurrences_are_the_same(
    expression: str, zone: str, day: tuple[int, int, int], second: int
) -> None:
    """A restart at any moment must neither repeat an occurrence nor leave one out."""
    cron = Cron(expression, zone)
    start_ms = ms(*day) - 86_400_000
    occurrences: list[int] = []
    at_ms: int | None = start_ms
    while at_ms is not None and at_ms < start_ms + 5 * 86_400_000:
        at_ms = cron.next_ms(at_ms)
        occurrences.append(at_ms or 0)
    asked_ms = start_ms + 86_400_000 + second * 1000
    place = bisect_right(occurrences, asked_ms)
    assert cron.next_ms(asked_ms) == occurrences[place]
    if place:
        assert cron.last_ms(asked_ms) == occurrences[place - 1]


@pytest.mark.parametrize("expression", ["", "* * * *", "61 * * * *", "0 0 30 2 *", "every day"])
def test_an_expression_that_makes_no_sense_is_refused(expression: str) -> None:
    with pytest.raises(InvalidArgument, match="cron expression"):
        Cron(expression)


def test_an_unknown_time_zone_is_refused() -> None:
    for zone in ("Mars/Olympus", "../etc/passwd", ""):
        with pytest.raises(InvalidArgument, match="time zone"):
            Cron("@daily", zone)
