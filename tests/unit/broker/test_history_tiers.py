"""Rings of slots: what is measured, joined, forgotten and asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.history.choice import Choice
from millstream.broker.history.history import decode_slot, encode_slot
from millstream.broker.history.tiers import TIERS, Point, Series, Tiers

DEPTH = Series("depth")
HOUR, DAY = 3_600_000, 86_400_000
NOON = 1_700_000_100_000 // 900_000 * 900_000


def measure(tiers: Tiers, start_ms: int, count: int, *, step_ms: int = 5_000, value: float | None = None) -> int:
    """So many measurements, numbered unless a value is given; returns when the next one would be."""
    for number in range(count):
        tiers.add(start_ms + number * step_ms, {DEPTH: number if value is None else value})
    return start_ms + count * step_ms


def ask(tiers: Tiers, from_ms: int, until_ms: int, points: int = 2_000) -> list[tuple[int, Point]]:
    return tiers.query(DEPTH, from_ms, until_ms, points, now_ms=until_ms)[1]


def test_the_last_hour_is_there_as_it_was_measured() -> None:
    tiers = Tiers()
    end = measure(tiers, NOON, 720)
    found = ask(tiers, NOON, end)
    assert [time_ms for time_ms, _ in found] == list(range(NOON, end, 5_000))
    assert [point.avg for _, point in found] == list(range(720))


def test_a_day_is_there_by_the_minute_with_average_least_and_most() -> None:
    tiers = Tiers()
    end = measure(tiers, NOON, 3 * 720)
    found = ask(tiers, end - DAY, end)
    assert len(found) == 180
    assert found[0] == (NOON, Point(5.5, 0, 11, 12))
    assert found[-1][1] == Point(2_153.5, 2_148, 2_159, 12)


def test_a_month_is_there_by_the_quarter() -> None:
    tiers = Tiers()
    end = measure(tiers, NOON, 10 * 24 * 60, step_ms=60_000, value=7)
    found = ask(tiers, end - 20 * DAY, end)
    assert len(found) == 10 * 24 * 4
    assert {point[:3] for _, point in found} == {(7, 7, 7)}


def test_what_is_older_than_a_ring_is_forgotten() -> None:
    tiers = Tiers()
    end = measure(tiers, NOON, 40 * 24 * 4, step_ms=900_000, value=1)
    assert len(ask(tiers, end - 60 * DAY, end, points=10_000)) == TIERS[-1].slots


MEASURED = Tiers()
measure(MEASURED, NOON, 1_500)


@given(points=st.integers(1, 400), width=st.integers(1, 3 * HOUR), start=st.integers(0, 2 * HOUR))
def test_there_are_never_more_points_than_asked_for(points: int, width: int, start: int) -> None:
    step_ms, found = MEASURED.query(DEPTH, NOON + start, NOON + start + width, points, now_ms=NOON + 1_500 * 5_000)
    assert len(found) <= points
    assert all(time_ms % step_ms == 0 for time_ms, _ in found), "the same moments however often one asks"


def test_joined_points_keep_the_extremes() -> None:
    tiers = Tiers()
    end = measure(tiers, NOON, 360)
    step_ms, found = tiers.query(DEPTH, NOON, end, 1, now_ms=end)
    joined = [point for _, point in found]
    assert min(point.min for point in joined) == 0
    assert max(point.max for point in joined) == 359
    assert step_ms >= 1_800_000


def test_there_is_no_point_where_nothing_was_measured() -> None:
    tiers = Tiers()
    measure(tiers, NOON, 10)
    end = measure(tiers, NOON + 600_000, 10)
    assert len(ask(tiers, NOON, end)) == 20


@pytest.mark.parametrize("far", [30_000, HOUR, 400 * DAY])
def test_a_clock_that_is_set_back_overwrites_what_it_reaches_again(far: int) -> None:
    tiers = Tiers()
    end = measure(tiers, NOON, 20, value=1)
    again = measure(tiers, end - far, 3, value=2)
    newest = ask(tiers, end - far, again)
    assert [point for _, point in newest] == [Point(2, 2, 2, 1)] * 3


def test_a_clock_that_is_set_ahead_leaves_a_gap() -> None:
    tiers = Tiers()
    end = measure(tiers, NOON, 20, value=1)
    later = measure(tiers, end + 400 * DAY, 3, value=2)
    assert [point.avg for _, point in ask(tiers, later - HOUR, later)] == [2, 2, 2]


def test_memory_is_bounded_and_grows_only_with_what_is_measured() -> None:
    tiers = Tiers()
    empty = tiers.memory_bytes
    tiers.add(NOON, {DEPTH: 1.0})
    assert tiers.memory_bytes - empty < 4_000
    for tier in tiers.tiers:
        for number in range(2 * tier.size.slots):
            tier.put(number, {DEPTH: Point(1, 1, 1, 1)})
    assert 220 * (tiers.memory_bytes - empty) + empty < 20_000_000


def test_a_slot_reads_back_as_it_was_written() -> None:
    points = {DEPTH: Point(1.5, 1.0, 2.0, 3), Series("lag", "default", "o/r", "g"): Point(0.0, 0.0, 0.0, 1)}
    assert decode_slot(encode_slot(17, points)) == (17, points)


def test_coarse_slots_that_are_missing_are_made_of_the_fine_ones() -> None:
    whole, restarted = Tiers(), Tiers()
    end = measure(whole, NOON, 300)
    fine = whole.tiers[0]
    for number in fine.numbers():
        restarted.tiers[0].put(number, fine.slot(number))
    mended = restarted.mend()
    assert {tier.size.name for tier in mended} == {"minutes", "quarters"}
    for before, after in zip(whole.tiers, restarted.tiers, strict=True):
        assert [before.slot(number) for number in before.numbers()] == [
            after.slot(number) for number in after.numbers()
        ]
    # And the slot that was not complete goes on.
    restarted.add(end, {DEPTH: 300})
    whole.add(end, {DEPTH: 300})
    assert ask(restarted, end - DAY, end + 60_000) == ask(whole, end - DAY, end + 60_000)


# --- who has a history -------------------------------------------------------------------------------------------


def test_the_busiest_have_a_history_and_a_busier_one_takes_the_place_of_the_least() -> None:
    choice: Choice[str] = Choice(2)
    assert choice.choose({"a": 10, "b": 20, "c": 5, "idle": 0}) == []
    assert ("a" in choice, "b" in choice, "c" in choice, "idle" in choice) == (True, True, False, False)
    assert choice.choose({"a": 10, "b": 20, "c": 30}) == []  # not so much busier that a plot should go for it
    assert choice.choose({"a": 10, "b": 20, "c": 300}) == ["a"]
    assert "c" in choice


def test_whoever_falls_silent_gives_way_after_a_while() -> None:
    choice: Choice[str] = Choice(1)
    choice.choose({"a": 1000, "b": 0})
    rounds = 0
    while "b" not in choice:
        choice.choose({"a": 0, "b": 10})
        rounds += 1
    assert 12 < rounds < 720  # a minute to an hour


def test_what_was_chosen_while_the_past_was_read_keeps_its_past() -> None:
    choice: Choice[str] = Choice(2)
    choice.choose({"a": 10, "b": 20})
    assert choice.resume(["a", "b", "c"]) == ["c"]
    assert choice.choose({"a": 10, "b": 20, "c": 30}) == []  # what was busy still is


def test_what_is_deleted_has_no_history_any_more() -> None:
    choice: Choice[str] = Choice(2)
    assert choice.resume(["a", "b", "c"]) == ["c"]
    assert choice.choose({"b": 0.0}) == ["a"]
