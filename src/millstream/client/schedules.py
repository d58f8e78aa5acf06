"""Schedules as users ask for them: arguments turned into calls, for both clients."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from millstream.client.arguments import as_dict, as_list, checked_number
from millstream.client.messages import Receipt
from millstream.client.values import Headers, Key, Value, key_bytes, microseconds, value_bytes
from millstream.durations import Duration, parse_ms
from millstream.entries import Priority, lane_of
from millstream.errors import InvalidArgument, error_from_wire
from millstream.records import PRIORITY_DEFAULT
from millstream.wire import schedule_calls as calls
from millstream.wire.schedule_calls import Cancelled, Repeating, ScheduleInfo, ScheduleSummary, TopicSchedules

__all__ = [
    "PAGE",
    "Cancelled",
    "Repeating",
    "ScheduleInfo",
    "ScheduleSummary",
    "TopicSchedules",
    "cancel_call",
    "cancel_key_call",
    "check_cancelled",
    "id_of",
    "list_call",
    "move_call",
    "repeat_call",
]

#: Messages asked for at a time.
PAGE: Final = 1_000


def id_of(which: str | Receipt) -> str:
    return which.id if isinstance(which, Receipt) else which


def list_call(
    topic: str, key: Key, after: float | datetime | None, before: float | datetime | None, limit: int
) -> calls.ListSchedules:
    return calls.ListSchedules(
        topic=topic,
        key=key_bytes(key),
        after_ms=0 if after is None else -(-microseconds(after) // 1000),
        before_ms=0 if before is None else -(-microseconds(before) // 1000),
        limit=min(checked_number("limit", limit), PAGE),
    )


def cancel_call(which: Iterable[str | Receipt]) -> calls.CancelSchedules:
    return calls.CancelSchedules(ids=list(map(id_of, as_list("which", which))))


def cancel_key_call(topic: str, key: Key) -> calls.CancelSchedules:
    if key is None:
        raise InvalidArgument("cancel by key needs a key")
    return calls.CancelSchedules(topic=topic, key=key_bytes(key))


def check_cancelled(answer: calls.Cancelled) -> None:
    """Raise what the broker says about the one message it could not cancel."""
    for refused in answer.refused:
        raise error_from_wire(refused.number, refused.reason)


def move_call(which: str | Receipt, delay: Duration | None, deliver_at: float | datetime | None) -> calls.MoveSchedule:
    if (delay is None) == (deliver_at is None):
        raise InvalidArgument("use delay= or deliver_at= to say when")
    if deliver_at is not None:
        due_ms = -(-microseconds(deliver_at) // 1000)
    else:
        assert delay is not None
        due_ms = time.time_ns() // 1_000_000 + parse_ms(delay, "delay")
    return calls.MoveSchedule(id=id_of(which), deliver_at_ms=due_ms)


def repeat_call(
    name: str,
    topic: str,
    cron: str,
    value: Value,
    json: Any,
    key: Key,
    headers: Headers | None,
    priority: Priority | None,
    timezone: str,
    paused: bool,
    catch_up: str,
) -> calls.Repeat:
    if catch_up not in ("none", "latest", "all"):
        raise InvalidArgument(f"catch_up is none, latest or all, not {catch_up!r}")
    return calls.Repeat(
        name=name,
        topic=topic,
        cron=cron,
        timezone=timezone,
        key=key_bytes(key),
        value=value_bytes(value, json),
        headers=[(at, _raw(text)) for at, text in as_dict("headers", headers).items()],
        priority=PRIORITY_DEFAULT if priority is None else lane_of(priority),
        paused=paused,
        catch_up=catch_up,  # type: ignore[arg-type]
    )


def _raw(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
