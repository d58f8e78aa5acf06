"""Lengths of time as people write them: `30s`, `1h30m`, `250ms`, a number of seconds, a timedelta."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Final, TypeAlias, TypeGuard

from millstream.errors import InvalidArgument

__all__ = ["DURATION_MS_MAX", "Duration", "format_ms", "is_span", "parse_ms"]

Duration: TypeAlias = float | str | timedelta

#: A hundred years: longer than anybody waits, and as a moment it fits into what journals can hold.
DURATION_MS_MAX: Final = 36_500 * 86_400_000

_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)")
_TEXT: Final = re.compile(rf"(?:{_PART.pattern}\s*)+")
_NUMBERS: Final = (int, float)  # made once: `int | float` would be made for every message with a time to live
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")


def is_span(value: object) -> TypeGuard[float]:
    """A number that can be a length of time."""
    return isinstance(value, _NUMBERS) and not isinstance(value, bool) and 0 <= value < math.inf


def parse_ms(span: Duration, name: str = "duration") -> int:
    """Whole milliseconds.  A bare number, also as text, counts seconds.  Raises InvalidArgument, naming `name`."""
    if isinstance(span, str):
        text = span.strip().lower()
        ms = math.inf
        if _NUMBER.fullmatch(text):
            ms = float(text) * 1000
        elif _TEXT.fullmatch(text):
            ms = sum(float(amount) * _UNIT_MS[unit] for amount, unit in _PART.findall(text))
        if ms < math.inf:
            return round(ms)
    else:
        seconds = span.total_seconds() if isinstance(span, timedelta) else span
        if is_span(seconds):
            return round(seconds * 1000)
    raise InvalidArgument(
        f"{name}={span!r} is not a length of time: use seconds, a timedelta or text such as '30s', '5m', '1h30m'"
    )


def format_ms(ms: int) -> str:
    """The shortest exact text: 90000 is `1m30s`."""
    parts: list[str] = []
    for unit in ("w", "d", "h", "m", "s", "ms"):
        amount, ms = divmod(ms, _UNIT_MS[unit])
        if amount:
            parts.append(f"{amount}{unit}")
    return "".join(parts) or "0s"
