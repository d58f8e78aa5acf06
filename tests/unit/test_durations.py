from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.durations import format_ms, parse_ms
from millstream.errors import InvalidArgument


@pytest.mark.parametrize(
    ("written", "ms"),
    [
        ("30s", 30_000),
        ("250ms", 250),
        ("2m", 120_000),
        ("1h30m", 5_400_000),
        ("1.5s", 1_500),
        (" 10 S ", 10_000),
        ("7", 7_000),
        (0.25, 250),
        (3, 3_000),
        (timedelta(minutes=1), 60_000),
        ("1w", 604_800_000),
        (0, 0),
    ],
)
def test_people_write_lengths_of_time_in_many_ways(written: float | str | timedelta, ms: int) -> None:
    assert parse_ms(written) == ms


@pytest.mark.parametrize("written", ["", "soon", "5 parsecs", "-1s", -1, float("nan"), float("inf"), True, "1s2", None])
def test_what_is_no_length_of_time_is_refused_by_name(written: object) -> None:
    with pytest.raises(InvalidArgument, match="lease="):
        parse_ms(written, "lease")  # type: ignore[arg-type]


@given(st.integers(0, 10**12))
def test_the_text_of_a_length_of_time_reads_back(ms: int) -> None:
    assert parse_ms(format_ms(ms)) == ms
