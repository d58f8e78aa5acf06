"""Schedules over HTTP: messages that are delivered later, and messages that are published again and again."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from millstream.errors import InvalidArgument, error_from_wire
from millstream.server.http.endpoints import Exchange, Family, NoQuery, page
from millstream.server.http.message_view import Content, content, view_of
from millstream.server.http.outgoing import said_lane
from millstream.server.http.parameters import DurationMs, Limit, Page, TimeMs
from millstream.values import Encoding, from_headers, from_json, to_json
from millstream.wire import schedule_calls as calls

__all__ = ["family"]

family = Family("schedules", "Messages that wait for their time, and messages that are published by the clock.")


#: Digits of a time, a partition and an offset.
_DIGITS_MAX: Final = 19


class SchedulesQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: Due at or after, and before, these times; 0 = no bound.
    after_ms: TimeMs = 0
    before_ms: TimeMs = 0
    #: Only messages with this key; then every pending message of the topic is looked at.
    key: str | None = None
    #: Where to continue: the `after` of the last answer.
    after: str = ""
    limit: Limit = 50


class StatisticsQuery(Page, kw_only=True, forbid_unknown_fields=True):
    topic: str | None = None


class RecurringQuery(Page, kw_only=True, forbid_unknown_fields=True):
    #: Only those that publish to this topic.
    topic: str = ""
    encoding: Encoding = "auto"


class ScheduleShowQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    encoding: Encoding = "auto"


class Move(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """When it is due instead: a time, or how long from now."""

    deliver_at_ms: TimeMs | None = None
    delay_ms: DurationMs | None = None


class Cancel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Messages by their ids, or everything that is pending for a topic and key."""

    ids: Annotated[list[Annotated[str, Meta(max_length=26)]], Meta(max_length=10_000)] = []
    topic: str = ""
    key: Any = None
    key_encoding: Encoding = "auto"


class RecurringBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    topic: str
    #: Five fields, six with seconds in front, or a word such as `@daily`.
    cron: Annotated[str, Meta(max_length=255)]
    timezone: Annotated[str, Meta(max_length=255)] = "UTC"
    key: Any = None
    value: Any = None
    encoding: Encoding = "auto"
    headers: dict[str, str | list[str]] = {}
    #: critical, high, normal, low, background, or a number from 0 to 4.
    priority: str | int | None = None
    paused: bool = False
    #: What happens to occurrences that were missed.
    catch_up: calls.CatchUp = "latest"


class ScheduleRow(msgspec.Struct, kw_only=True):
    """A message that waits for its time."""

    id: str
    topic: str
    partition: int
    offset: int
    due_ms: int
    published_ms: int
    #: 0 = none.
    expiry_ms: int
    priority: int
    key: Any
    key_encoding: str
    size_bytes: int


class SchedulePageView(msgspec.Struct, kw_only=True):
    schedules: list[ScheduleRow]
    #: Where the next page begins; empty = this was the last one.
    after: str


class ScheduleView(Content, kw_only=True):
    """A message that is, or was, scheduled."""

    id: str
    state: str
    topic: str
    partition: int
    offset: int
    due_ms: int
    #: When it was due before it was moved; 0 = it was not moved.
    moved_from_ms: int
    published_ms: int
    timestamp_ms: int
    expiry_ms: int


class RecurringView(Content, kw_only=True):
    """A message that is published repeatedly."""

    name: str
    topic: str
    cron: str
    timezone: str
    paused: bool
    catch_up: str
    created_ms: int
    #: 0 = never again, or paused.
    next_ms: int
    last_ms: int
    published: int


# --- messages ----------------------------------------------------------------------------------------------------


@family.get("/topics/{topic}/schedules", query=SchedulesQuery, answer=SchedulePageView)
async def list_schedules(exchange: Exchange[SchedulesQuery, None]) -> SchedulePageView:
    """List the messages that are pending for a topic, soonest first.

    Pass `after` of an answer to continue where it ended; it is empty at the end.
    """
    query = exchange.query
    found: list[calls.ScheduleSummary] = await exchange.wait_for(
        exchange.call(
            calls.ListSchedules(
                topic=exchange.path["topic"],
                after_ms=query.after_ms,
                before_ms=query.before_ms,
                key=None if query.key is None else query.key.encode(),
                behind=_place(query.after),
                limit=query.limit,
            )
        )
    )
    after = "/".join(map(str, calls.place_of(found[-1]))) if len(found) == query.limit else ""
    return SchedulePageView(schedules=[_row(summary) for summary in found], after=after)


@family.get("/schedules/statistics", query=StatisticsQuery, answer=list[calls.TopicSchedules])
async def count_schedules(exchange: Exchange[StatisticsQuery, None]) -> Any:
    """Show how much is scheduled for each topic that has any, when the next is due, and what became of the others."""
    query = exchange.query
    topics: list[calls.TopicSchedules] = await exchange.call(calls.ScheduleStats(topic=query.topic))
    return page(exchange, topics, limit=query.limit, offset=query.offset)


@family.get("/schedules/{id}", query=ScheduleShowQuery, answer=ScheduleView)
async def show_schedule(exchange: Exchange[ScheduleShowQuery, None]) -> ScheduleView:
    """Show a scheduled message, whatever became of it."""
    info: calls.ScheduleInfo = await exchange.call(calls.DescribeSchedule(id=exchange.path["id"]))
    return view_of(ScheduleView, info, **content(info.key, info.value, info.headers, exchange.query.encoding))


@family.patch("/schedules/{id}", permission="produce", body=Move, answer=ScheduleRow)
async def move_schedule(exchange: Exchange[NoQuery, Move]) -> ScheduleRow:
    """Move a pending message to another time."""
    body = exchange.body
    if (body.deliver_at_ms is None) == (body.delay_ms is None):
        raise InvalidArgument("say when: deliver_at_ms or delay_ms")
    due_ms = body.deliver_at_ms
    if due_ms is None:
        due_ms = exchange.broker.now_us() // 1000 + (body.delay_ms or 0)
    moved: calls.ScheduleSummary = await exchange.call(calls.MoveSchedule(id=exchange.path["id"], deliver_at_ms=due_ms))
    return _row(moved)


@family.delete("/schedules/{id}", permission="produce")
async def cancel_schedule(exchange: Exchange[NoQuery, None]) -> None:
    """Cancel a pending message; 409 if it was already delivered."""
    answer: calls.Cancelled = await exchange.call(calls.CancelSchedules(ids=[exchange.path["id"]]))
    for refused in answer.refused:
        raise error_from_wire(refused.number, refused.reason)


@family.post("/schedules/cancel", permission="produce", body=Cancel, answer=calls.Cancelled)
async def cancel_schedules(exchange: Exchange[NoQuery, Cancel]) -> Any:
    """Cancel many messages, by their ids or all that are pending for a topic and key."""
    body = exchange.body
    key = from_json(body.key, body.key_encoding, what="key")
    return await exchange.call(calls.CancelSchedules(ids=body.ids, topic=body.topic, key=key))


# --- recurring ---------------------------------------------------------------------------------------------------


@family.get("/recurring", query=RecurringQuery, answer=list[RecurringView])
async def list_recurring(exchange: Exchange[RecurringQuery, None]) -> list[RecurringView]:
    """List recurring schedules, by name."""
    query = exchange.query
    found: list[calls.Repeating] = await exchange.call(calls.ListRepeating())
    if query.topic:
        found = [schedule for schedule in found if schedule.topic == query.topic]
    rows = page(exchange, found, limit=query.limit, offset=query.offset)
    return [_recurring(schedule, query.encoding) for schedule in rows]


@family.get("/recurring/{name}", query=ScheduleShowQuery, answer=RecurringView)
async def show_recurring(exchange: Exchange[ScheduleShowQuery, None]) -> RecurringView:
    """Show a recurring schedule, and when it is due next."""
    found: calls.Repeating = await exchange.call(calls.DescribeRepeating(name=exchange.path["name"]))
    return _recurring(found, exchange.query.encoding)


@family.put("/recurring/{name}", permission="produce", body=RecurringBody, answer=RecurringView)
async def put_recurring(exchange: Exchange[NoQuery, RecurringBody]) -> RecurringView:
    """Publish a message repeatedly, by a cron expression. This replaces the schedule of that name."""
    body = exchange.body
    made: calls.Repeating = await exchange.call(
        calls.Repeat(
            name=exchange.path["name"],
            topic=body.topic,
            cron=body.cron,
            timezone=body.timezone,
            key=from_json(body.key, what="key"),
            value=from_json(body.value, body.encoding),
            headers=from_headers(body.headers),
            priority=said_lane(body.priority),
            paused=body.paused,
            catch_up=body.catch_up,
        )
    )
    return _recurring(made, "auto")


@family.delete("/recurring/{name}", permission="produce")
async def delete_recurring(exchange: Exchange[NoQuery, None]) -> None:
    """Delete a recurring schedule."""
    await exchange.call(calls.DeleteRepeating(name=exchange.path["name"]))


@family.post("/recurring/{name}/pause", permission="produce", answer=RecurringView)
async def pause_recurring(exchange: Exchange[NoQuery, None]) -> RecurringView:
    """Pause a recurring schedule."""
    return await _set_paused(exchange, paused=True)


@family.post("/recurring/{name}/resume", permission="produce", answer=RecurringView)
async def resume_recurring(exchange: Exchange[NoQuery, None]) -> RecurringView:
    """Resume a recurring schedule from now on. Occurrences during the pause are not made up for."""
    return await _set_paused(exchange, paused=False)


async def _set_paused(exchange: Exchange[NoQuery, None], *, paused: bool) -> RecurringView:
    found: calls.Repeating = await exchange.call(calls.PauseRepeating(name=exchange.path["name"], paused=paused))
    return _recurring(found, "auto")


def _place(after: str) -> tuple[int, int, int] | None:
    """Where a page has ended; None = there was none before."""
    if not after:
        return None
    numbers = after.split("/")
    if len(numbers) != 3 or not all(it.isascii() and it.isdecimal() and len(it) <= _DIGITS_MAX for it in numbers):
        raise InvalidArgument(f"after={after[:80]!r} is not what a call of this family has answered")
    due_ms, partition, offset = map(int, numbers)
    return due_ms, partition, offset


def _row(summary: calls.ScheduleSummary) -> ScheduleRow:
    key, key_encoding = to_json(summary.key, "text")
    return view_of(ScheduleRow, summary, key=key, key_encoding=key_encoding)


def _recurring(schedule: calls.Repeating, encoding: Encoding) -> RecurringView:
    return view_of(RecurringView, schedule, **content(schedule.key, schedule.value, schedule.headers, encoding))
