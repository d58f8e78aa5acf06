"""Texts of the command line that stand for something else: `key=value`, points in time, places in a log."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer

from millstream.cli.failure import UsageProblem
from millstream.durations import DURATION_MS_MAX, parse_ms
from millstream.entries import lane_of
from millstream.errors import InvalidArgument

__all__ = [
    "PriorityOption",
    "header_value",
    "parse_ahead",
    "parse_duration",
    "parse_headers",
    "parse_length",
    "parse_moment",
    "parse_pairs",
    "parse_past",
    "parse_priority",
    "parse_reset",
    "parse_size",
    "parse_span",
    "parse_start",
    "parse_timeout_s",
    "parse_topic_config",
    "refuse_empty",
]

_OFFSET: Final = re.compile(r"\d+")
_SPAN: Final = re.compile(r"(\d+(\.\d+)?\s*[a-zA-Z]+\s*)+")

TIME_FORMS: Final = "a time such as 2026-01-31T09:30 (UTC) or 2026-01-31T09:30+01:00"
START_FORMS: Final = f"earliest, latest, an offset, {TIME_FORMS}, or an age such as 15m"
PAST_FORMS: Final = f"{TIME_FORMS}, or an age such as 15m"
AHEAD_FORMS: Final = f"{TIME_FORMS.replace('2026', '2027')}, or how far ahead such as 15m"
RESET_FORMS: Final = f"earliest, latest, {TIME_FORMS}, an age such as 1h, offset:N or shift:-N"

PriorityOption = Annotated[
    str | None,
    typer.Option("--priority", metavar="NAME", help="Priority: critical, high, normal, low or background, or 0 to 4."),
]


def parse_size(text: str) -> int | None:
    """A size such as 100 or 64MiB in bytes; None when it is none."""
    from millstream.config import parse_bytes  # here: the settings model takes long to load and few commands need it

    size = parse_bytes(text)
    return size if isinstance(size, int) else None


def parse_duration(text: str) -> int | None:
    """A duration such as 500ms or 7d in milliseconds; None when it is none."""
    from millstream.config import parse_duration_ms

    duration_ms = parse_duration_ms(text)
    return duration_ms if isinstance(duration_ms, int) else None


def parse_length(text: str, option: str) -> int:
    """A length of time, in milliseconds.  A bare number counts seconds, as everywhere on the command line."""
    try:
        length_ms = parse_ms(text)
    except InvalidArgument:
        raise UsageProblem(f"{option} {text!r} is not a length of time: use 500ms, 30s, 5m or 1h30m") from None
    if length_ms > DURATION_MS_MAX:
        raise UsageProblem(f"{option} {text!r} is more than a hundred years: use 500ms, 30s, 5m or 1h30m")
    return length_ms


def parse_span(text: str, option: str) -> datetime.timedelta:
    """A length of time, as the client takes it."""
    return datetime.timedelta(milliseconds=parse_length(text, option))


def refuse_empty(text: str | None, option: str) -> None:
    """`--topic "$TOPIC"` where the variable is not set: never as if the option had been left out."""
    if text == "":
        raise UsageProblem(f"{option} is empty: name one, or leave it out")


def parse_timeout_s(text: str | None) -> float | None:
    """What `--timeout` says, in seconds."""
    return None if text is None else parse_length(text, "--timeout") / 1000


def parse_pairs(pairs: Iterable[str], option: str) -> dict[str, str]:
    """`key=value` texts as a dictionary; the value may hold further `=`."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageProblem(f"{option} {pair!r} is not of the form key=value")
        found[key] = value
    return found


def parse_headers(pairs: Iterable[str], option: str = "--header") -> dict[str, str | bytes]:
    """The headers of a message."""
    try:
        return {name: header_value(name, text) for name, text in parse_pairs(pairs, option).items()}
    except InvalidArgument as problem:
        raise UsageProblem(f"{option}: {problem}") from None


def header_value(name: str, said: str | bytes) -> str | bytes:
    """A header as it is printed: text, or base64 behind `base64:`.  Raises InvalidArgument."""
    if isinstance(said, bytes) or not said.startswith("base64:"):
        return said
    from millstream.values import from_header  # here: only commands that talk to a broker pay for it

    return from_header(name, said)


def parse_priority(text: str) -> int:
    """A priority by its name or its number."""
    try:
        return lane_of(int(text) if text.isdecimal() else text)
    except InvalidArgument as problem:
        raise UsageProblem(f"--priority: {problem}") from None


def parse_topic_config(pairs: Iterable[str]) -> dict[str, Any]:
    """Topic settings, with `retention_ms=7d` and `segment_bytes=16MiB` turned into numbers.

    The broker knows which keys there are and says so; only the units are a matter of the command line.
    """
    config: dict[str, Any] = {}
    for key, value in parse_pairs(pairs, "--config").items():
        if key == "partitions":
            raise UsageProblem("the number of partitions is no setting: use --partitions")
        number = parse_duration(value) if key.endswith("_ms") else parse_size(value) if "bytes" in key else None
        config[key] = value if number is None else number
    return config


def parse_moment(text: str, now: datetime.datetime) -> datetime.datetime | None:
    """A point in time: ISO 8601 (UTC unless it says otherwise), or how long ago.  None when it is neither."""
    if _SPAN.fullmatch(text):
        return _shifted(now, text, -1)
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)


def _shifted(now: datetime.datetime, span: str, sign: int) -> datetime.datetime | None:
    """None when that is no length of time, or no calendar has that day."""
    try:
        return now + sign * datetime.timedelta(milliseconds=parse_ms(span))
    except (InvalidArgument, OverflowError):
        return None


def parse_past(text: str, now: datetime.datetime, option: str) -> datetime.datetime:
    """As parse_moment, for an option that takes nothing else."""
    moment = parse_moment(text, now)
    if moment is None:
        raise UsageProblem(f"{option} {text!r} is not a time: use {PAST_FORMS}")
    return moment


def parse_ahead(text: str, now: datetime.datetime, option: str) -> datetime.datetime:
    """A point in time: ISO 8601 (UTC unless it says otherwise), or how far ahead."""
    moment = _shifted(now, text, +1) if _SPAN.fullmatch(text) else parse_moment(text, now)
    if moment is None:
        raise UsageProblem(f"{option} {text!r} is not a time: use {AHEAD_FORMS}")
    return moment


def parse_start(text: str, now: datetime.datetime) -> str | int | datetime.datetime:
    """Where to start reading."""
    if text in ("earliest", "latest"):
        return text
    # A number is an offset even where it would pass for a date: 20260131 is a message, 2026-01-31 a day.
    if _OFFSET.fullmatch(text):
        return int(text)
    moment = parse_moment(text, now)
    if moment is None:
        raise UsageProblem(f"--from {text!r} is not a place to start: use {START_FORMS}")
    return moment


def parse_reset(text: str, now: datetime.datetime) -> tuple[str, int | None]:
    """Where to move a group: what to do, and the number it takes (offset, shift or milliseconds since 1970)."""
    kind, colon, number = text.partition(":")
    if text in ("earliest", "latest"):
        return text, None
    if colon and kind in ("offset", "shift") and re.fullmatch(r"[+-]?\d+", number):
        if kind == "offset" and int(number) < 0:
            raise UsageProblem(f"--to {text!r}: an offset is never negative")
        return kind, int(number)
    moment = None if _OFFSET.fullmatch(text) else parse_moment(text, now)
    if moment is None:
        raise UsageProblem(f"--to {text!r} is not a place to move to: use {RESET_FORMS}")
    return "timestamp", round(moment.timestamp() * 1000)
