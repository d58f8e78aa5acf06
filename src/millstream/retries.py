"""When a message that failed is tried again, and when no more.

A policy is written as text wherever it can be set: a profile's name, or a profile with changes, such as
`durable,max_retries=5,initial=2s`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import msgspec

from millstream.durations import DURATION_MS_MAX, format_ms, parse_ms
from millstream.errors import ConfigInvalid, InvalidArgument
from millstream.names import did_you_mean
from millstream.settings import Bounds, within_bounds

__all__ = ["PROFILES", "RetryPolicy", "parse_retry", "within_limits"]

#: Beyond this a counter has more digits than a person can wait for.
RETRIES_MAX: Final = 10_000
_DAY_MS: Final = 86_400_000
#: Every wait that can be asked for must fit into what journals can hold.
_BOUNDS: Final[Bounds] = {
    "max_retries": (0, RETRIES_MAX),
    "initial_ms": (0, DURATION_MS_MAX),
    "multiplier": (1, 1000),
    "max_ms": (0, DURATION_MS_MAX),
    "total_ms": (0, DURATION_MS_MAX),
    "jitter": (0, 1),
}


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A message is tried `max_retries` + 1 times, unless `total_ms` (0 = no limit) since its publish end it before."""

    max_retries: int = 3
    initial_ms: int = 1_000
    multiplier: float = 2.0
    max_ms: int = 60_000
    total_ms: int = 0
    #: The first retry does not wait; the second waits `initial_ms`.
    first_immediate: bool = False
    #: Up to this share of each wait is randomly taken off, so that what failed together does not come back together.
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for option, (field, kind) in _OPTIONS.items():
            value = getattr(self, field)
            if field in _BOUNDS and not _BOUNDS[field][0] <= value <= _BOUNDS[field][1]:  # NaN is not, either
                least, most = _BOUNDS[field]
                limit, given = (f"{most // _DAY_MS} days", f"{value} ms") if kind == "time" else (most, value)
                raise ConfigInvalid(f"retry option {option} must be between {least} and {limit}, not {given}")

    def delay_ms(self, failures: int, draw: Callable[[], float]) -> int:
        """How long to wait after the given number of failures (1 or more); `draw` gives numbers from 0 to 1."""
        steps = failures - 1
        if self.first_immediate:
            if steps == 0:
                return 0
            steps -= 1
        if not self.initial_ms:
            return 0
        wait = float(self.initial_ms)
        for _ in range(steps):
            wait *= self.multiplier
            if wait >= self.max_ms:
                break
        wait = min(wait, self.max_ms)
        return round(wait * (1 - self.jitter * draw())) if self.jitter else round(wait)

    def __str__(self) -> str:
        """The text that `parse_retry` reads back."""
        for name, profile in PROFILES.items():
            if profile == self:
                return name
        base = PROFILES["standard"]
        changes = [
            f"{option}={format_ms(getattr(self, field)) if kind == 'time' else _text(getattr(self, field))}"
            for option, (field, kind) in _OPTIONS.items()
            if getattr(self, field) != getattr(base, field)
        ]
        return ",".join(["standard", *changes])


#: What can be changed in the text of a policy: the field, and how its value is read.
_OPTIONS: Final = {
    "max_retries": ("max_retries", "int"),
    "initial": ("initial_ms", "time"),
    "multiplier": ("multiplier", "float"),
    "max": ("max_ms", "time"),
    "total": ("total_ms", "time"),
    "first_immediate": ("first_immediate", "bool"),
    "jitter": ("jitter", "float"),
}

PROFILES: Final[dict[str, RetryPolicy]] = {
    "standard": RetryPolicy(),
    "durable": RetryPolicy(max_retries=10, initial_ms=5_000, max_ms=300_000, total_ms=3 * 3_600_000),
    "eager": RetryPolicy(max_retries=5, first_immediate=True, multiplier=4.0, max_ms=300_000),
    "simple": RetryPolicy(max_retries=3, initial_ms=0, multiplier=1.0, max_ms=0),
}


def _text(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


@lru_cache(maxsize=1024)
def parse_retry(text: str) -> RetryPolicy:
    """The policy that a text describes; raises ConfigInvalid with the part that is wrong."""
    profile, fields = _parts(text)
    return msgspec.structs.replace(profile, **fields)


def within_limits(text: str) -> str:
    """A text that was stored when other limits held, as near as those of today allow."""
    profile, fields = _parts(text)
    allowed = within_bounds(fields, _BOUNDS)
    return text if allowed == fields else str(msgspec.structs.replace(profile, **allowed))


def _parts(text: str) -> tuple[RetryPolicy, dict[str, Any]]:
    """The profile, and the fields that are not as it has them."""
    name, *changes = (part.strip() for part in text.split(","))
    if "=" in name:
        name, changes = "standard", [name, *changes]
    profile = PROFILES.get(name)
    if profile is None:
        hint = did_you_mean(name, PROFILES) or f"; profiles: {', '.join(PROFILES)}"
        raise ConfigInvalid(f"retry profile {name[:80]!r} is unknown{hint}")
    fields: dict[str, Any] = {}
    for change in changes:
        option, _, value = change.partition("=")
        if option not in _OPTIONS:
            raise ConfigInvalid(f"retry option {option!r} is unknown; known: {', '.join(_OPTIONS)}")
        field, kind = _OPTIONS[option]
        try:
            fields[field] = _read(kind, value.strip())
        except (ValueError, InvalidArgument):
            raise ConfigInvalid(f"retry option {change!r} does not fit: a {kind} is expected") from None
    return profile, fields


def _read(kind: str, value: str) -> object:
    if kind == "time":
        return parse_ms(value)
    if kind == "bool":
        if value not in ("true", "false"):
            raise ValueError(value)
        return value == "true"
    return int(value) if kind == "int" else float(value)
