"""Texts of the command line that stand for something else."""

from __future__ import annotations

import datetime

import pytest

from millstream.cli.arguments import (
    parse_headers,
    parse_moment,
    parse_reset,
    parse_span,
    parse_start,
    parse_timeout_s,
    parse_topic_config,
)
from millstream.cli.connection import credentials_first
from millstream.cli.failure import UsageProblem

NOW = datetime.datetime(2026, 3, 1, 12, 0, tzinfo=datetime.UTC)


def moment(*parts: int) -> datetime.datetime:
    return datetime.datetime(*parts, tzinfo=datetime.UTC)  # type: ignore[arg-type, misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("earliest", "earliest"),
        ("latest", "latest"),
        ("0", 0),
        ("20260131", 20260131),
        ("2026-01-31", moment(2026, 1, 31)),
        ("2026-01-31T09:30", moment(2026, 1, 31, 9, 30)),
        ("2026-01-31T09:30:00+02:00", moment(2026, 1, 31, 7, 30)),
        ("2026-01-31T09:30Z", moment(2026, 1, 31, 9, 30)),
        ("15m", moment(2026, 3, 1, 11, 45)),
        ("1.5h", moment(2026, 3, 1, 10, 30)),
        ("1h30m", moment(2026, 3, 1, 10, 30)),
    ],
)
def test_places_to_start(text: str, expected: object) -> None:
    assert parse_start(text, NOW) == expected


@pytest.mark.parametrize(("text", "seconds"), [("5", 5), ("0.5", 0.5), ("200ms", 0.2), ("1h30m", 5400), (None, None)])
def test_a_bare_number_counts_seconds_whatever_the_option(text: str | None, seconds: float | None) -> None:
    assert parse_timeout_s(text) == seconds
    assert text is None or parse_span(text, "--wait").total_seconds() == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5", "15 parsecs", "2026-13-45", "offset:3"])
def test_what_is_no_place_to_start_says_what_is(text: str) -> None:
    with pytest.raises(UsageProblem, match="use earliest, latest, an offset, a time such as"):
        parse_start(text, NOW)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("earliest", ("earliest", None)),
        ("latest", ("latest", None)),
        ("offset:12", ("offset", 12)),
        ("shift:-10", ("shift", -10)),
        ("shift:+3", ("shift", 3)),
        ("2026-01-01T00:00", ("timestamp", 1_767_225_600_000)),
        ("1h", ("timestamp", 1_772_362_800_000)),
    ],
)
def test_places_to_reset_to(text: str, expected: tuple[str, int | None]) -> None:
    assert parse_reset(text, NOW) == expected


@pytest.mark.parametrize("text", ["12", "offset:", "offset:x", "offset:-1", "shift:ten", "yesterday"])
def test_what_is_no_place_to_reset_to_is_refused(text: str) -> None:
    """A bare number could be an offset, a shift or a time: moving a group on a guess would lose messages."""
    with pytest.raises(UsageProblem):
        parse_reset(text, NOW)


def test_naive_times_are_utc() -> None:
    found = parse_moment("2026-01-31T09:30", NOW)
    assert found is not None
    assert found.utcoffset() == datetime.timedelta(0)


def test_topic_settings_take_units() -> None:
    config = parse_topic_config(["retention_ms=7d", "segment_bytes=16MiB", "cleanup=compact", "max_message_bytes=x=y"])
    assert config == {
        "retention_ms": 604_800_000,
        "segment_bytes": 16_777_216,
        "cleanup": "compact",
        "max_message_bytes": "x=y",  # the broker says what is wrong with it
    }


def test_partitions_among_the_settings_of_a_topic_are_told_from_a_misspelt_one() -> None:
    """`did you mean 'retention_ms'?` sent people the wrong way."""
    with pytest.raises(UsageProblem, match="use --partitions"):
        parse_topic_config(["partitions=3"])


@pytest.mark.parametrize("text", ["novalue", "=value", ""])
def test_pairs_without_key_or_equals_are_refused(text: str) -> None:
    with pytest.raises(UsageProblem, match="key=value"):
        parse_headers([text])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("topic list --ca f --json", "--ca f topic list --json"),
        ("--api-key k topic list --ca=f", "--api-key k --ca=f topic list"),
        ("publish orders -- --ca f", "publish orders -- --ca f"),
        ("key create --name c", "key create --name c"),
    ],
)
def test_credentials_may_stand_behind_the_command(words: str, expected: str) -> None:
    assert credentials_first(words.split()) == expected.split()
