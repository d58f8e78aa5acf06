"""Recurring schedules at run time: an alarm, a message for each occurrence, and a fact once it is stored.

Each schedule publishes under a producer identity of its own, numbered by its occurrences.  After a crash between the
message and the fact the same number is published again and recognised, so an occurrence is one message.  When a number
is recognised, the stored message is read to see whether it is this occurrence: if the broker was down for longer, the
one to publish now may be a later one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import structlog

from millstream.broker.partition import Partition
from millstream.broker.registry import Topic
from millstream.broker.schedules.messages import collect
from millstream.broker.state import StateLog
from millstream.broker.topics import Topics
from millstream.broker.traffic.modes import ModeKeeper
from millstream.clock import Clock
from millstream.errors import (
    InvalidArgument,
    MillstreamError,
    OutOfSequence,
    PayloadTooLarge,
    ProducerFenced,
    QuotaExceeded,
    RequestError,
    ScheduleNotFound,
)
from millstream.headers import encode_headers
from millstream.names import check_group
from millstream.partitioning import key_partition
from millstream.records import encode_batch
from millstream.schedules.cron import Cron
from millstream.schedules.recurring import RecurringSchedule, following_clock, occurrences, upcoming_ms
from millstream.wire import calls
from millstream.wire.schedule_calls import Repeat, Repeating

__all__ = ["Recurring"]

_log = structlog.get_logger("millstream.schedules")

_SEQUENCE: Final = 0xFFFF_FFFF
_RETRY_S: Final = 1.0
_ALARM_S_MAX: Final = 3600.0
#: Schedules that publish at the same time.
_AT_A_TIME: Final = 200
_PRIORITY_MAX: Final = 4
#: All of them are in memory, with their messages.
_SCHEDULES_MAX: Final = 10_000
#: What tells a reader where a message comes from.
NAME_HEADER: Final = "millstream-schedule"
TIME_HEADER: Final = "millstream-schedule-time-ms"


class _Host(Protocol):
    topics: Topics
    modes: ModeKeeper


class Recurring:
    """All recurring schedules of the broker, by namespace and name."""

    def __init__(self, host: _Host, log: StateLog, *, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self._host = host
        self._log = log
        self._clock = clock
        self._loop = loop
        self._schedules: dict[tuple[str, str], RecurringSchedule] = {}
        #: When each of them occurs next, for those that do: to find out takes a while.
        self._upcoming: dict[tuple[str, str], int] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._closed = False

    # --- life ----------------------------------------------------------------------------------------------------

    def replay(self, documents: Mapping[str, Any]) -> None:
        for document in documents.values():
            self._keep(msgspec.convert(document, RecurringSchedule))

    def _keep(self, schedule: RecurringSchedule) -> None:
        key = (schedule.namespace, schedule.name)
        self._schedules[key] = schedule
        self._upcoming.pop(key, None)
        if (at_ms := upcoming_ms(schedule)) is not None:
            self._upcoming[key] = at_ms

    def _drop(self, key: tuple[str, str]) -> None:
        del self._schedules[key]
        self._upcoming.pop(key, None)

    async def close(self) -> None:
        self._closed = True
        self._disarm()
        if self._task is not None:
            await asyncio.wait([self._task])

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def arm(self, at_least_s: float = 0.0) -> None:
        """Set the alarm for the next occurrence of all."""
        self._disarm()
        if self._closed or self._task is not None:
            return
        if self._upcoming:
            wait_s = (min(self._upcoming.values()) * 1000 - self._clock.now_us()) / 1_000_000
            self._alarm = self._loop.call_later(min(max(at_least_s, wait_s), _ALARM_S_MAX), self._ring)

    def look(self) -> None:
        """See what is due now, as after somebody has set the clock."""
        if self._task is not None:  # which may have looked at the clock before
            self._task.add_done_callback(lambda _: self.look())
        elif not self._closed:
            self._ring()

    def _ring(self) -> None:
        self._disarm()
        self._task = self._loop.create_task(self._publish_due())

    # --- occurrences ---------------------------------------------------------------------------------------------

    async def _publish_due(self) -> None:
        pause_s = 0.001  # the alarm may ring a little early, and must not ring in circles
        try:
            await self._follow_clock()
            now_ms = self._clock.now_us() // 1000
            due = [key for key, at_ms in self._upcoming.items() if at_ms <= now_ms]
            for some in (due[at : at + _AT_A_TIME] for at in range(0, len(due), _AT_A_TIME)):
                if self._closed or self._host.modes.publish_refusal is not None:
                    pause_s = _RETRY_S
                    break
                if not await self._catch_up_with(some):
                    pause_s = _RETRY_S
        except MillstreamError as error:
            _log.warning("recurring schedules wait", reason=str(error))
            pause_s = _RETRY_S
        except Exception:
            _log.exception("recurring schedules failed")
            pause_s = _RETRY_S
        finally:
            self._task = None
            self.arm(pause_s)

    async def _follow_clock(self) -> None:
        async with self._changing:
            now_ms = self._clock.now_us() // 1000
            ahead = [schedule for schedule in self._schedules.values() if schedule.done_ms > now_ms]
            after = [following_clock(schedule, now_ms) for schedule in ahead]
            changed = [new for old, new in zip(ahead, after, strict=True) if new is not old]
            if changed:
                _log.warning("the clock was set back; recurring schedules go on by it", schedules=len(changed))
                await self._record_all(changed)

    async def _catch_up_with(self, keys: Sequence[tuple[str, str]]) -> bool:
        """Publish what is due, of different schedules at the same time, to share the disk's; whether all went well."""
        tasks: list[asyncio.Task[bool]] = []
        async with self._changing, asyncio.TaskGroup() as group:
            for key in keys:
                if self._must_open(key):
                    await asyncio.sleep(0)  # opening takes a moment; others go first
                tasks.append(group.create_task(self._try_to_catch_up(key)))
        return all(task.result() for task in tasks)

    def _must_open(self, key: tuple[str, str]) -> bool:
        """Whether a schedule's partition is to be opened before anything can be published there."""
        schedule = self._schedules.get(key)
        topic = self._host.topics.registry.find(schedule.namespace, schedule.topic) if schedule else None
        return bool(schedule and topic and topic.partitions[_partition_number(schedule, topic)] is None)

    async def _try_to_catch_up(self, key: tuple[str, str]) -> bool:
        try:
            await self._catch_up(key)
        except MillstreamError as error:
            _log.warning("a recurring schedule waits", name=key[1], reason=str(error))
            return False
        except Exception:
            _log.exception("a recurring schedule failed", name=key[1])
            return False
        return True

    async def _catch_up(self, key: tuple[str, str]) -> None:
        schedule = self._schedules.get(key)
        if schedule is None:
            return
        due, done_ms = occurrences(schedule, self._clock.now_us() // 1000)
        for at_ms in due:
            schedule = await self._occur(schedule, at_ms)
        if schedule.done_ms < done_ms:
            await self._record(msgspec.structs.replace(schedule, done_ms=done_ms))

    async def _occur(self, schedule: RecurringSchedule, at_ms: int) -> RecurringSchedule:
        try:
            while not await self._publish(schedule, at_ms):
                schedule = msgspec.structs.replace(schedule, published=schedule.published + 1)
        except (OutOfSequence, ProducerFenced):
            # The topic got more partitions and back, or lost what it knew: count anew, under another identity.
            producer_id = await self._host.topics.new_producer_id()
            schedule = await self._record(msgspec.structs.replace(schedule, producer_id=producer_id))
            await self._publish(schedule, at_ms)
        except RequestError as error:
            # The topic was deleted.  Nobody is there to read it, and this would fail for ever.
            _log.warning("an occurrence was dropped", name=schedule.name, topic=schedule.topic, reason=str(error))
            return await self._record(msgspec.structs.replace(schedule, done_ms=at_ms))
        return await self._record(
            msgspec.structs.replace(schedule, done_ms=at_ms, last_ms=at_ms, published=schedule.published + 1)
        )

    async def _publish(self, schedule: RecurringSchedule, at_ms: int) -> bool:
        """Have an occurrence stored; False when its number is that of another, which a crash kept from being noted."""
        topics = self._host.topics
        topic = topics.registry.get(schedule.namespace, schedule.topic)
        headers = [*schedule.headers, (NAME_HEADER, schedule.name.encode()), (TIME_HEADER, str(at_ms).encode())]
        batch = encode_batch(
            [schedule.value],
            keys=None if schedule.key is None else [schedule.key],
            headers=[encode_headers(headers)],
            priorities=[schedule.priority],
            base_timestamp_us=at_ms * 1000,
            producer=schedule.producer_id << 16,
            first_sequence=schedule.published & _SEQUENCE,
        )
        partition = topics.partition_of(topic, _partition_number(schedule, topic))
        end = partition.log.next_offset
        offset = await partition.append_durably(batch)
        return offset >= end or await _holds(partition, offset, at_ms)

    async def _record(self, schedule: RecurringSchedule) -> RecurringSchedule:
        await self._record_all([schedule])
        return schedule

    async def _record_all(self, schedules: Sequence[RecurringSchedule]) -> None:
        facts = {f"{schedule.namespace}/{schedule.name}": schedule for schedule in schedules}
        await self._log.record(facts, now_us=self._clock.now_us())
        for schedule in schedules:
            self._keep(schedule)

    # --- calls ---------------------------------------------------------------------------------------------------

    async def repeat(self, namespace: str, call: Repeat) -> Repeating:
        """Make a schedule, or replace the one of that name; it then goes on from now."""
        check_group(call.name, "schedule")
        now_ms = self._clock.now_us() // 1000
        if Cron(call.cron, call.timezone).next_ms(now_ms) is None:
            raise InvalidArgument(f"cron expression {call.cron!r} never happens")
        if not 0 <= call.priority <= _PRIORITY_MAX:
            raise InvalidArgument(f"priority is a number from 0 to {_PRIORITY_MAX}, not {call.priority}")
        headers = encode_headers(call.headers)  # or say what is wrong with them
        (topic,) = await self._host.topics.metadata(namespace, calls.Metadata(topics=[call.topic], create=True))
        size = len(headers) + len(call.key or b"") + len(call.value or b"")
        if size > topic.max_message_bytes:
            raise PayloadTooLarge(f"the message has {size} bytes, the topic allows {topic.max_message_bytes}")
        async with self._changing:
            existing = self._schedules.get((namespace, call.name))
            if existing is None and len(self._schedules) >= _SCHEDULES_MAX:
                raise QuotaExceeded(f"the broker has {_SCHEDULES_MAX} recurring schedules already; delete some")
            producer_id = existing.producer_id if existing else await self._host.topics.new_producer_id()
            schedule = RecurringSchedule(
                namespace=namespace,
                name=call.name,
                topic=call.topic,
                cron=call.cron,
                timezone=call.timezone,
                created_ms=existing.created_ms if existing else now_ms,
                producer_id=producer_id,
                # Never back before what was dealt with, or the same occurrence could come twice.
                done_ms=max(now_ms, existing.last_ms if existing else 0),
                key=call.key,
                value=call.value,
                headers=call.headers,
                priority=call.priority,
                paused=call.paused,
                catch_up=call.catch_up,
                last_ms=existing.last_ms if existing else 0,
                published=existing.published if existing else 0,
                reached_ms=existing.reached_ms if existing else 0,
            )
            schedule = await self._record(following_clock(schedule, now_ms))
        self.arm()
        return self._answer(schedule)

    async def pause(self, namespace: str, name: str, *, paused: bool) -> Repeating:
        """Stop a schedule, or let it go on from now: what fell into the pause is not made up for."""
        async with self._changing:
            schedule = self._get(namespace, name)
            if schedule.paused != paused:
                done_ms = max(schedule.done_ms, self._clock.now_us() // 1000)
                schedule = await self._record(msgspec.structs.replace(schedule, paused=paused, done_ms=done_ms))
        self.arm()
        return self._answer(schedule)

    async def delete(self, namespace: str, name: str) -> None:
        async with self._changing:
            self._get(namespace, name)
            await self._log.record({f"{namespace}/{name}": None}, now_us=self._clock.now_us())
            self._drop((namespace, name))
        self.arm()

    async def forget_namespace(self, namespace: str) -> None:
        async with self._changing:
            gone = [key for key in self._schedules if key[0] == namespace]
            if gone:
                await self._log.record({f"{namespace}/{name}": None for _, name in gone}, now_us=self._clock.now_us())
            for key in gone:
                self._drop(key)
        self.arm()

    def show(self, namespace: str, name: str) -> Repeating:
        return self._answer(self._get(namespace, name))

    def all(self, namespace: str) -> list[Repeating]:
        return [self._answer(self._schedules[key]) for key in sorted(self._schedules) if key[0] == namespace]

    def _get(self, namespace: str, name: str) -> RecurringSchedule:
        schedule = self._schedules.get((namespace, name))
        if schedule is None:
            raise ScheduleNotFound(f"no recurring schedule is called {name!r}")
        return schedule

    def _answer(self, schedule: RecurringSchedule) -> Repeating:
        return Repeating(
            name=schedule.name,
            topic=schedule.topic,
            cron=schedule.cron,
            timezone=schedule.timezone,
            paused=schedule.paused,
            catch_up=schedule.catch_up,
            key=schedule.key,
            value=schedule.value,
            headers=schedule.headers,
            priority=schedule.priority,
            created_ms=schedule.created_ms,
            next_ms=self._upcoming.get((schedule.namespace, schedule.name), 0),
            last_ms=schedule.last_ms,
            published=schedule.published,
        )


def _partition_number(schedule: RecurringSchedule, topic: Topic) -> int:
    """Without a key by its name: always the same partition, so that its messages stay in order."""
    return key_partition(schedule.key or schedule.name.encode(), len(topic.partition_uids))


async def _holds(partition: Partition, offset: int, at_ms: int) -> bool:
    """Whether the message that is stored there is that of an occurrence; not if it is gone: rather twice than never."""
    await partition.warm(offset)
    if offset < partition.log.start_offset:
        return False
    collected = await collect(partition.log, [offset], partition.high_watermark, lambda message: message.timestamp_us)
    return collected.found.get(offset) == at_ms * 1000
