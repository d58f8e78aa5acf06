"""Cron expressions with a time zone: when something happens next, and when it happened last.

Five fields, or six with seconds in front.  Around changes of the clocks an expression with a fixed hour happens once: a
time that does not exist happens when the clocks have jumped over it, a time that exists twice happens the first time.
An expression that runs every hour or every few minutes runs on through both.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from millstream.errors import InvalidArgument

__all__ = ["Cron"]

_WORDS: Final = {
    "@yearly": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@hourly": "0 * * * *",
}


class Cron:
    """One expression in one time zone.  Times are milliseconds since 1970."""

    def __init__(self, expression: str, zone: str = "UTC") -> None:
        """Raises InvalidArgument, saying which part is wrong."""
        self._expression = _WORDS.get(expression.strip().lower(), expression)
        try:
            self._zone = ZoneInfo(zone)
        except (KeyError, ValueError, OSError):
            raise InvalidArgument(f"time zone {zone!r} is unknown: use a name such as Europe/Berlin or UTC") from None
        try:
            CronSim(self._expression, datetime(2000, 1, 1, tzinfo=UTC))
        except CronSimError as problem:
            raise InvalidArgument(
                f"cron expression {expression!r} is not understood ({str(problem).lower()}): use five fields such as "
                "'0 9 * * MON-FRI', or a word such as @daily"
            ) from None

    def next_ms(self, after_ms: int) -> int | None:
        """The first occurrence after a time; None when there is none within 50 years."""
        for occurrence in CronSim(self._expression, self._at(after_ms)):
            at_ms = _milliseconds(occurrence)
            # In the hour that comes twice the library may answer with a time that has passed.
            if at_ms > after_ms:
                return at_ms
        return None

    def last_ms(self, until_ms: int) -> int | None:
        """The last occurrence at or before a time."""
        for occurrence in CronSim(self._expression, self._at(until_ms + 1000), True):
            last_ms = _milliseconds(occurrence)
            if last_ms <= until_ms:
                # Backwards the library may step over one, in that same hour.
                while (next_ms := self.next_ms(last_ms)) is not None and next_ms <= until_ms:
                    last_ms = next_ms
                return last_ms
        return None

    def _at(self, time_ms: int) -> datetime:
        return datetime.fromtimestamp(time_ms // 1000, self._zone)


def _milliseconds(occurrence: datetime) -> int:
    return round(occurrence.timestamp()) * 1000
