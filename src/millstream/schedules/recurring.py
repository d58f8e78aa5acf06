"""Recurring schedules: what is known about one, and which occurrences are to be published now."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal

import msgspec

from millstream.schedules.cron import Cron

__all__ = ["RecurringSchedule", "occurrences", "upcoming_ms"]

#: An occurrence that is handled this late counts as missed.
_ON_TIME_MS: Final = 10_000
#: With catch_up="all": what is published at once before others get their turn.
_AT_ONCE: Final = 1000


class RecurringSchedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The document of one schedule.  It is replaced as a whole whenever an occurrence was dealt with."""

    namespace: str
    name: str
    topic: str
    cron: str
    timezone: str
    created_ms: int
    #: Under this identity its messages are published, numbered by `published`: a repetition is recognised.
    producer_id: int
    #: Occurrences up to this time have been dealt with.
    done_ms: int
    key: bytes | None = None
    value: bytes | None = b""
    headers: list[tuple[str, bytes]] = []
    priority: int = 2
    paused: bool = False
    catch_up: Literal["none", "latest", "all"] = "latest"
    #: The occurrence that was published last.
    last_ms: int = 0
    published: int = 0


@lru_cache(maxsize=1024)
def _cron(expression: str, zone: str) -> Cron:
    return Cron(expression, zone)


def upcoming_ms(schedule: RecurringSchedule) -> int | None:
    """The next occurrence that is not dealt with; it may have passed."""
    return None if schedule.paused else _cron(schedule.cron, schedule.timezone).next_ms(schedule.done_ms)


def occurrences(schedule: RecurringSchedule, now_ms: int) -> tuple[list[int], int]:
    """Which occurrences to publish now, and the time up to which all are dealt with then."""
    cron = _cron(schedule.cron, schedule.timezone)
    next_ms = upcoming_ms(schedule)
    if next_ms is None or next_ms > now_ms:
        return [], schedule.done_ms
    if schedule.catch_up == "all":
        due = [next_ms]
        while len(due) < _AT_ONCE and (next_ms := cron.next_ms(due[-1])) is not None and next_ms <= now_ms:
            due.append(next_ms)
        return due, due[-1]
    last_ms = cron.last_ms(now_ms) or next_ms
    missed = now_ms - last_ms > _ON_TIME_MS
    return [] if missed and schedule.catch_up == "none" else [last_ms], last_ms
