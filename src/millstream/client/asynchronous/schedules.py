"""`client.schedules`: messages that are delivered later, and messages that are published again and again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from typing import Any, Literal, TypeAlias

from millstream.client.asking import AsyncAsk
from millstream.client.messages import Receipt
from millstream.client.schedules import (
    PAGE,
    cancel_call,
    cancel_key_call,
    check_cancelled,
    id_of,
    list_call,
    move_call,
    repeat_call,
)
from millstream.client.values import Headers, Key, Value
from millstream.durations import Duration
from millstream.entries import Priority
from millstream.wire import schedule_calls as calls

__all__ = ["AsyncSchedules"]

# Inside the class `list` is a method.
_Summaries: TypeAlias = list[calls.ScheduleSummary]
_Stats: TypeAlias = list[calls.TopicSchedules]
_Repeating: TypeAlias = list[calls.Repeating]


class AsyncSchedules:
    """What is scheduled in a namespace.  Name a message by its receipt or its id."""

    def __init__(self, call: AsyncAsk) -> None:
        self._call = call

    # --- messages ------------------------------------------------------------------------------------------------

    async def list(
        self,
        topic: str,
        *,
        key: Key = None,
        after: float | datetime | None = None,
        before: float | datetime | None = None,
        limit: int = 100,
    ) -> _Summaries:
        """The messages that are pending for a topic, soonest first.

        `key` selects those with a key, `after` those due at a time or later, and `before` those due before a time.
        """
        found: _Summaries = []
        async for summary in self._pages(list_call(topic, key, after, before, limit)):
            found.append(summary)
            if len(found) == limit:
                break
        return found

    def iterate(
        self,
        topic: str,
        *,
        key: Key = None,
        after: float | datetime | None = None,
        before: float | datetime | None = None,
    ) -> AsyncIterator[calls.ScheduleSummary]:
        """Iterate over all that `list` would find, however much it is."""
        return self._pages(list_call(topic, key, after, before, PAGE))

    async def _pages(self, call: calls.ListSchedules) -> AsyncIterator[calls.ScheduleSummary]:
        while True:
            page = await self._call(call, _Summaries)
            for summary in page:
                yield summary
            if len(page) < call.limit:
                return
            call.behind = calls.place_of(page[-1])

    async def show(self, which: str | Receipt) -> calls.ScheduleInfo:
        """One scheduled message, whatever became of it.  Raises ScheduleNotFound."""
        return await self._call(calls.DescribeSchedule(id=id_of(which)), calls.ScheduleInfo)

    async def cancel(self, which: str | Receipt) -> None:
        """Cancel a message.  Raises ScheduleFired if it was delivered, ScheduleNotFound if there is none."""
        check_cancelled(await self._call(cancel_call([which]), calls.Cancelled))

    async def cancel_many(self, which: Iterable[str | Receipt]) -> calls.Cancelled:
        """Cancel messages; the answer says how many, and which ones could not be cancelled and why."""
        return await self._call(cancel_call(which), calls.Cancelled)

    async def cancel_key(self, topic: str, key: Key) -> int:
        """Cancel everything that is pending with a key; return how many messages that was."""
        answer = await self._call(cancel_key_call(topic, key), calls.Cancelled)
        return answer.cancelled

    async def move(
        self,
        which: str | Receipt,
        *,
        delay: Duration | None = None,
        deliver_at: float | datetime | None = None,
    ) -> calls.ScheduleSummary:
        """Move a pending message to another time.  Raises ScheduleFired or ScheduleNotFound.

        A `datetime` without a time zone is local time.
        """
        return await self._call(move_call(which, delay, deliver_at), calls.ScheduleSummary)

    async def stats(self, topic: str | None = None) -> _Stats:
        """Counts for one topic, or for each topic that has anything scheduled."""
        return await self._call(calls.ScheduleStats(topic=topic), _Stats)

    # --- recurring -----------------------------------------------------------------------------------------------

    async def repeat(
        self,
        name: str,
        topic: str,
        cron: str,
        value: Value = None,
        *,
        json: Any = None,
        key: Key = None,
        headers: Headers | None = None,
        priority: Priority | None = None,
        timezone: str = "UTC",
        paused: bool = False,
        catch_up: Literal["none", "latest", "all"] = "latest",
    ) -> calls.Repeating:
        """Publish a message again and again, by a cron expression; replaces the schedule of that name.

        `catch_up` says which of the occurrences missed while the broker was down are made up for.
        """
        call = repeat_call(name, topic, cron, value, json, key, headers, priority, timezone, paused, catch_up)
        return await self._call(call, calls.Repeating)

    async def repeating(self) -> _Repeating:
        """All recurring schedules, by name."""
        return await self._call(calls.ListRepeating(), _Repeating)

    async def show_repeating(self, name: str) -> calls.Repeating:
        return await self._call(calls.DescribeRepeating(name=name), calls.Repeating)

    async def pause(self, name: str) -> calls.Repeating:
        """Stop a recurring schedule for a while."""
        return await self._call(calls.PauseRepeating(name=name), calls.Repeating)

    async def resume(self, name: str) -> calls.Repeating:
        """Let a recurring schedule continue from now.  Occurrences during the pause are not made up for."""
        return await self._call(calls.PauseRepeating(name=name, paused=False), calls.Repeating)

    async def stop(self, name: str) -> None:
        """Delete a recurring schedule."""
        await self._call(calls.DeleteRepeating(name=name), object)
