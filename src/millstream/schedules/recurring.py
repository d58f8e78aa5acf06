"""Recurring schedules: what is known about one, and which occurrences are to be published now.

An occurrence is a time on the wall clock, and happens once.  A clock that is set back a little comes to the last one
again, which is not repeated.  One that is set far back comes to many of them again: the schedule goes on by it and
repeats them as their times come, but makes up for none of them when the clock is set ahead again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal

import msgspec

from millstream.schedules.cron import Cron

__all__ = ["RecurringSchedule", "following_clock", "occurrences", "upcoming_ms"]

#: An occurrence that is handled this late counts as missed.
_ON_TIME_MS: Final = 10_000
#: A clock that is set back by no more is waited for, however often a schedule occurs.
_SET_BACK_MS: Final = 60_000
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
    #: Occurrences up to this time were dealt with before the clock was set far back.
    reached_ms: int = 0


@lru_cache(maxsize=1024)
def _cron(expression: str, zone: str) -> Cron:
    return Cron(expression, zone)


def upcoming_ms(schedule: RecurringSchedule) -> int | None:
    """The next occurrence that is not dealt with; it may have passed."""
    return None if schedule.paused else _cron(schedule.cron, schedule.timezone).next_ms(schedule.done_ms)


def following_clock(schedule: RecurringSchedule, now_ms: int) -> RecurringSchedule:
    """The schedule itself, unless the clock was set back over more than one of its occurrences: then one that goes on
    from now.
    """
    if schedule.done_ms - now_ms <= _SET_BACK_MS:
        return schedule
    cron = _cron(schedule.cron, schedule.timezone)
    again_ms = cron.next_ms(now_ms)
    second_ms = None if again_ms is None else cron.next_ms(again_ms)
    if second_ms is None or second_ms > schedule.done_ms:
        return schedule
    return msgspec.structs.replace(schedule, done_ms=now_ms, reached_ms=max(schedule.reached_ms, schedule.done_ms))


def occurrences(schedule: RecurringSchedule, now_ms: int) -> tuple[list[int], int]:
    """Which occurrences to publish now, and the time up to which all are dealt with then."""
    cron = _cron(schedule.cron, schedule.timezone)
    # What was dealt with before the clock was set back is not missed, whatever it is set to next.
    done_ms = max(schedule.done_ms, min(schedule.reached_ms, now_ms - _ON_TIME_MS))
    next_ms = None if schedule.paused else cron.next_ms(done_ms)
    if next_ms is None or next_ms > now_ms:
        return [], done_ms
    if schedule.catch_up == "all":
        due = [next_ms]
        while len(due) < _AT_ONCE and (next_ms := cron.next_ms(due[-1])) is not None and next_ms <= now_ms:
            due.append(next_ms)
        return due, due[-1]
    last_ms = cron.last_ms(now_ms) or next_ms
    missed = now_ms - last_ms > _ON_TIME_MS
    return [] if missed and schedule.catch_up == "none" else [last_ms], last_ms
