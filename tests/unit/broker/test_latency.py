"""Histograms that double, and ages from memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.ages import Ages
from millstream.broker.latency import BUCKETS, Histogram, quantile_us


@given(st.lists(st.tuples(st.integers(-5, 10**12), st.integers(1, 1000)), max_size=30))
def test_every_duration_is_counted_in_the_first_bucket_that_holds_it(observed: list[tuple[int, int]]) -> None:
    histogram = Histogram()
    for took_us, messages in observed:
        histogram.observe(took_us, messages)
    for bucket in range(BUCKETS - 1):
        within = sum(messages for took_us, messages in observed if took_us <= 1 << bucket)
        assert sum(histogram.counts[: bucket + 1]) == within
    assert histogram.count == sum(messages for _, messages in observed)
    assert histogram.sum_us == sum(max(took_us, 0) * messages for took_us, messages in observed)


def test_a_percentile_is_exact_to_its_bucket() -> None:
    histogram = Histogram()
    histogram.observe(100, 98)
    histogram.observe(5_000, 2)
    assert 64 <= quantile_us(0.5, histogram.counts) <= 128
    assert 4_096 <= quantile_us(0.99, histogram.counts) <= 8_192
    assert quantile_us(0.99, [0] * BUCKETS) == 0


def test_a_percentile_of_the_last_seconds_leaves_out_what_was_before() -> None:
    histogram = Histogram()
    histogram.observe(1_000_000, 1_000)
    before = list(histogram.counts)
    assert quantile_us(0.99, histogram.counts, before) == 0
    histogram.observe(100)
    assert quantile_us(0.99, histogram.counts, before) <= 128


@dataclass
class Segment:
    base_offset: int
    next_offset: int
    first_append_us: int
    last_append_us: int
    size: int = 1


@dataclass
class Log:
    segments: list[Segment] = field(default_factory=list)


SECOND = 1_000_000


def ages_of(*segments: Segment) -> Any:
    return Ages(Log(list(segments)))  # type: ignore[arg-type]


def test_the_age_of_a_rare_message_is_exact() -> None:
    ages = ages_of()
    for offset in range(40):
        ages.note(offset, offset * 60 * SECOND)
    for offset in range(40):
        assert ages.time_us(offset, end=40, end_us=39 * 60 * SECOND) == offset * 60 * SECOND


def test_ages_take_a_bounded_memory_however_long_it_goes_on() -> None:
    ages = ages_of()
    for offset in range(10_000):
        time_us = offset * 2 * SECOND
        assert time_us >= ages.due_us
        ages.note(offset, time_us)
    assert len(ages._offsets) <= 64
    # And what is in between is found between its neighbours.
    assert ages.time_us(5_000, end=10_000, end_us=20_000 * SECOND) == pytest.approx(10_000 * SECOND, rel=0.05)


def test_what_was_there_before_is_as_old_as_its_segment_says() -> None:
    ages = ages_of(Segment(0, 101, 0, 100 * SECOND), Segment(101, 201, 100 * SECOND, 200 * SECOND))
    assert ages.time_us(50, end=201, end_us=200 * SECOND) == 50 * SECOND
    assert ages.time_us(200, end=201, end_us=200 * SECOND) == 200 * SECOND
    ages.learn(50, 99 * SECOND)  # somebody has looked
    assert ages.time_us(50, end=201, end_us=200 * SECOND) == 99 * SECOND


def test_a_log_without_messages_has_no_age() -> None:
    assert ages_of().time_us(0, end=0, end_us=0) == 0
