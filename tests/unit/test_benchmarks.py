"""What the benchmarks conclude from figures; the figures themselves are nobody's test."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.limits import Limits, limits_of, median_limits
from benchmarks.report import Results, publish_results
from benchmarks.scale.growth import growth_of

LIMITS = Limits(
    loopback_bytes=2e9,
    round_trips=50_000,
    round_trips_apart=10_000,
    round_trips_shared=80_000,
    round_trips_of_16=70_000,
    paced_p50_us=30,
    paced_p99_us=90,
    write_bytes=1e9,
    syncs=4_000,
    sync_p99_us=900,
    syncs_appending=3_000,
    paced_sync_p50_us=150,
    paced_sync_p99_us=400,
    copy_bytes=8e9,
)


def test_publishing_is_held_against_whichever_is_slower_the_disk_or_the_network() -> None:
    (limit,) = limits_of("W1", 100, LIMITS)
    assert (limit.value, limit.column) == (10_000_000, "of the disk")
    (limit,) = limits_of("W6p", 100, LIMITS)
    assert limit.column == "of the disk", "who does not wait for each sync is not held back by their number"
    (limit,) = limits_of("W3q", 1000, replace(LIMITS, loopback_bytes=5e8))
    assert (limit.value, limit.column) == (500_000, "of loopback")


def test_a_single_request_is_held_against_a_bare_round_trip_of_the_same_placement() -> None:
    assert [limits_of(name, 100, LIMITS)[0].value for name in ("W5", "W5a", "W5s")] == [50_000, 10_000, 80_000]


def test_sixteen_producers_are_held_against_round_trips_and_against_syncs() -> None:
    assert [limit.value for limit in limits_of("W6", 100, LIMITS)] == [70_000, 4_000]
    assert [limit.value for limit in limits_of("W6c", 100, LIMITS)] == [4_000], "one program needs fewer round trips"


def test_the_limits_of_a_run_are_the_medians_of_its_rounds() -> None:
    rounds = [replace(LIMITS, syncs=value) for value in (1.0, 5.0, 2.0)]
    assert median_limits(rounds) == replace(LIMITS, syncs=2.0)


def test_figures_of_all_rounds_stand_beside_the_median_that_is_made_of_them() -> None:
    """Two of them have the same words in their names, and had the same figures."""
    rounds = [replace(LIMITS, paced_p99_us=trip, paced_sync_p99_us=sync) for trip, sync in ((1, 7), (2, 8), (3, 9))]
    rows = Results({}, [], [], 3, {}, {}, rounds).limit_rows()
    trips, syncs = ([row[1], *row[2].split("; ")] for row in rows if row[0] == "… at 1,000 a second")
    assert [text.split()[-2] for text in trips] == ["2", "1", "2", "3"]
    assert [text.split()[-2] for text in syncs] == ["8", "7", "8", "9"]


def test_processor_time_that_doubles_along_an_axis_is_marked_and_memory_is_not() -> None:
    points = [1, 100, 10_000]
    assert growth_of("batch, broker us", points, [20.0, 21.0, 45.0]).marked
    assert not growth_of("batch, broker us", points, [20.0, 21.0, 35.0]).marked
    assert growth_of("memory, MB", points, [50.0, 51.0, 150.0]).text == "10.00 KB each"


def test_points_at_which_nothing_could_be_said_do_not_count() -> None:
    assert growth_of("batch, broker us", [1, 10, 100], [math.nan, 20.0, 20.0]).text == "1.0x"
    assert growth_of("batch, broker us", [1, 10], [math.nan, 20.0]).text == ""


def test_publishing_a_run_replaces_its_two_sections_and_nothing_else(tmp_path: Path) -> None:
    files = {"results.md": "tables\n", "summary.md": "short\n", "results.svg": "<svg/>", "results.json": "{}"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- summary begin -->\nold\n<!-- summary end -->\nbetween\n"
        "<!-- results begin -->\nold\n<!-- results end -->\nafter\n"
    )
    publish_results(tmp_path, page)
    published = page.read_text()
    assert "old" not in published
    lines = [line for line in published.splitlines() if line and not line.startswith(("<!--", "!["))]
    assert lines == ["before", "short", "between", "tables", "after"]
    assert (tmp_path / "page.svg").read_text() == "<svg/>"
    assert (tmp_path / "page.json").read_text() == "{}"


def test_a_page_without_a_place_for_the_results_is_left_alone(tmp_path: Path) -> None:
    for name in ("results.md", "summary.md", "results.svg"):
        (tmp_path / name).write_text("new")
    page = tmp_path / "page.md"
    page.write_text("mine\n")
    with pytest.raises(SystemExit, match="no place"):
        publish_results(tmp_path, page)
    assert page.read_text() == "mine\n"
