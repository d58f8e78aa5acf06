"""Schedules: messages that are published now and delivered later, and messages that are published again and again.

Each partition has a schedule log beside it, from its first delayed message on; `ScheduleLog` runs one of them.  Here
they are found at start, asked by clients, kept tidy, and told when somebody has set the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any, Final, Protocol

import structlog

from millstream.broker.metrics import Metrics
from millstream.broker.partition import Partition
from millstream.broker.registry import Topic
from millstream.broker.schedules.log import ScheduleLog
from millstream.broker.schedules.messages import Scheduled
from millstream.broker.schedules.recurring import Recurring
from millstream.broker.schedules.repetitions import TargetIds
from millstream.broker.state import StateLog
from millstream.broker.topics import Topics
from millstream.broker.traces.recorder import Recorder
from millstream.broker.traffic.modes import ModeKeeper
from millstream.broker.transfer import Target
from millstream.clock import Clock, clock_text
from millstream.config import Settings
from millstream.durations import format_ms
from millstream.errors import InvalidArgument, MillstreamError, QuotaExceeded, ScheduleNotFound, StorageFailed
from millstream.headers import readable_headers
from millstream.ids import OFFSET_BITS, SCHEDULES, parse_message_id, schedule_uid
from millstream.wire import schedule_calls as calls
from millstream.wire.queue_calls import Explanation

__all__ = ["Schedules"]

_log = structlog.get_logger("millstream.schedules")

_LIST_LIMIT_MAX: Final = 10_000
_IDS_MAX: Final = 10_000
_FOREVER_MS: Final = 1 << 62
#: A wall clock that moved by more than this against the other clock was set by somebody.
_JUMP_MS: Final = 5


class _Host(Protocol):
    settings: Settings
    topics: Topics
    metrics: Metrics
    modes: ModeKeeper
    recorder: Recorder


class _Session(Protocol):
    @property
    def namespace(self) -> str: ...


class Schedules:
    """All schedules of the broker."""

    def __init__(
        self,
        host: _Host,
        state: StateLog,
        *,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        stopping: asyncio.Event,
    ) -> None:
        self._host = host
        self._stopping = stopping
        self._clock = clock
        self._loop = loop
        self.recurring = Recurring(host, state, clock=clock, loop=loop)
        self.recurring.replay(state.replay())
        #: By the topic's key, then by partition.
        self._logs: dict[str, dict[int, ScheduleLog]] = {}
        self._clock_offset_ms = self._measure_clock()
        self._finding: asyncio.Task[None] | None = None
        self._found = asyncio.Event()
        #: Schedule logs that could not be opened, by topic and partition, and why.
        self._missing: dict[tuple[str, int], str] = {}
        #: Whether the directories could be looked through at all.
        self._looked = False
        host.topics.on_schedule_log = self._opened

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open every schedule log there is, while others are served."""
        self.recurring.look()  # the clock may have been set while nobody was there
        self._finding = self._loop.create_task(self._find())

    async def _find(self) -> None:
        missing: dict[tuple[str, int], str] = {}
        try:
            for topic, number in self._host.topics.stored_beside("schedules"):
                await asyncio.sleep(0)
                if not topic.deleting and not self._stopping.is_set():
                    try:
                        self._open(topic, number)
                    except StorageFailed as error:
                        missing[topic.key, number] = str(error)
                        if self._missing.get((topic.key, number)) != str(error):
                            _log.error("schedules wait", topic=topic.name, partition=number, reason=str(error))
            self._looked = True
        except OSError as error:
            _log.error("schedules cannot be found", reason=str(error))
        self._missing = missing
        self._found.set()

    def _open(self, topic: Topic, number: int) -> None:
        """Have the schedule log of a partition open.  Raises StorageFailed."""
        try:
            self._host.topics.partition_of(topic, number | SCHEDULES)
        except (OSError, MillstreamError) as error:
            raise StorageFailed(f"the schedules of {topic.name}/{number} cannot be opened: {error}") from None

    async def stop(self) -> None:
        """Finish what is under way and start nothing new."""
        if self._finding is not None:
            await self._finding
        await self.recurring.close()
        await asyncio.gather(*(log.close() for log in self._all()))

    def _opened(self, topic: Topic, number: int, partition: Partition) -> None:
        topics = self._host.topics
        log = ScheduleLog(
            partition,
            Target(topic.namespace, topic.name, number),
            topics.journal(topic, number),
            topics.transfer(topic, number),
            clock=self._clock,
            loop=self._loop,
            may_fire=lambda: self._host.modes.publish_refusal is None,
            ids=lambda: TargetIds.of(topics.partition_of(topic, number), topic.config.dedup_window_ms),
        )
        self._logs.setdefault(topic.key, {})[number] = log
        partition.admit = lambda due_us: self._admit(topic, due_us)
        partition.lapsed = log.agenda.has_lapsed

    def _all(self) -> list[ScheduleLog]:
        return [log for logs in self._logs.values() for log in logs.values()]

    def _admit(self, topic: Topic, due_us: list[int]) -> None:
        """Raise if a batch with these due times is beyond the limits."""
        limits = self._host.settings.schedules
        if limits.max_delay_ms:
            self._check_delay(max(due_us) // 1000, limits.max_delay_ms)
        if limits.max_pending:
            # With what is on its way to the disk: a publisher with a window must not slip past.
            pending = sum(log.pending + log.partition.invisible for log in self._logs_of(topic).values())
            if pending + len(due_us) > limits.max_pending:
                raise QuotaExceeded(
                    f"topic {topic.name!r} has {pending} messages scheduled; schedules.max_pending is "
                    f"{limits.max_pending}"
                )

    def _check_delay(self, due_ms: int, max_delay_ms: int) -> None:
        delay_ms = due_ms - self._clock.now_us() // 1000
        if max_delay_ms and delay_ms > max_delay_ms:
            raise InvalidArgument(
                f"a message is due in {format_ms(delay_ms)}; schedules.max_delay_ms allows {format_ms(max_delay_ms)}"
            )

    def _measure_clock(self) -> int:
        return self._clock.now_us() // 1000 - self._clock.monotonic_ms()

    async def watch(self) -> None:
        """Once a second: alarms run on a clock that nobody can set, and due times are of the one that people set.

        What could not be opened is tried again: a disk may have recovered, or have room again.
        """
        if self._found.is_set() and (self._missing or not self._looked) and not self._stopping.is_set():
            await self._find()
        registry = self._host.topics.registry
        for key, logs in list(self._logs.items()):
            target = next(iter(logs.values())).target
            topic = registry.find(target.namespace, target.topic)
            self._logs[key] = {} if topic is None else self._logs_of(topic)
            if not self._logs[key]:
                del self._logs[key]
            for log in logs.values():
                log.take_in()
        offset_ms = self._measure_clock()
        if abs(offset_ms - self._clock_offset_ms) > _JUMP_MS:
            self._clock_offset_ms = offset_ms
            for log in self._all():
                log.arm()
            self.recurring.look()

    async def tidy(self) -> None:
        """Remove what is settled."""
        for log in self._all():
            await asyncio.sleep(0)
            if self._stopping.is_set():
                return
            try:
                self._host.metrics.segments_deleted += await log.tidy(self._stopping.is_set)
            except (OSError, MillstreamError) as error:
                _log.error("cleanup failed", directory=log.partition.log.directory, reason=str(error))

    # --- calls ---------------------------------------------------------------------------------------------------

    def handlers(self) -> dict[type, Callable[[Any, Any], Awaitable[object]]]:
        recurring = self.recurring
        return {
            calls.ListSchedules: self._list,
            calls.DescribeSchedule: lambda session, call: self.show(session.namespace, call.id),
            calls.CancelSchedules: self._cancel,
            calls.MoveSchedule: self._move,
            calls.ScheduleStats: self._stats,
            calls.Repeat: self._repeat,
            calls.ListRepeating: self._list_repeating,
            calls.DescribeRepeating: self._show_repeating,
            calls.PauseRepeating: lambda session, call: recurring.pause(
                session.namespace, call.name, paused=call.paused
            ),
            calls.DeleteRepeating: lambda session, call: recurring.delete(session.namespace, call.name),
        }

    async def _repeat(self, session: _Session, call: calls.Repeat) -> calls.Repeating:
        if call.value is None and call.key is None:  # as for every other publish
            raise InvalidArgument("a message needs a value; only a deletion marker with a key may go without one")
        return await self.recurring.repeat(session.namespace, call)

    async def _list_repeating(self, session: _Session, _: calls.ListRepeating) -> list[calls.Repeating]:
        return self.recurring.all(session.namespace)

    async def _show_repeating(self, session: _Session, call: calls.DescribeRepeating) -> calls.Repeating:
        return self.recurring.show(session.namespace, call.name)

    async def _of_topic(self, namespace: str, name: str) -> list[ScheduleLog]:
        """The schedule logs of a topic, ready to be asked."""
        topic = self._host.topics.registry.get(namespace, name)
        await self._found.wait()
        for key, number in list(self._missing):
            if key == topic.key and number < len(topic.partitions):
                self._open(topic, number)  # or say why not: what is there must not be denied
        logs = list(self._logs_of(topic).values())
        for log in logs:
            await log.loaded()
        return logs

    def pending(self, topic: Topic) -> int:
        """Messages that wait for their time, as far as their logs were found."""
        logs = self._logs.get(topic.key)
        return sum(log.pending for log in self._logs_of(topic).values()) if logs else 0

    def _logs_of(self, topic: Topic) -> dict[int, ScheduleLog]:
        """The schedule logs of this topic, and not of one of the same name that was deleted."""
        logs = self._logs.get(topic.key, {})
        return {number: log for number, log in logs.items() if topic.beside.get(f"{number}.schedules") is log.partition}

    async def _place(self, namespace: str, text: str) -> tuple[ScheduleLog, int]:
        """The log and the offset that an id speaks of."""
        place = parse_message_id(text)
        log = await self._with_uid(namespace, place.partition_uid)
        if log is None:
            raise ScheduleNotFound(f"nothing was scheduled under the id {text}")
        return log, place.offset

    async def _with_uid(self, namespace: str, uid: int) -> ScheduleLog | None:
        found = self._host.topics.registry.place_of(schedule_uid(uid))
        if found is None or found[0].namespace != namespace:
            return None
        topic, number = found
        await self._of_topic(namespace, topic.name)
        return self._logs_of(topic).get(number)

    async def _list(self, session: _Session, call: calls.ListSchedules) -> list[calls.ScheduleSummary]:
        if not 1 <= call.limit <= _LIST_LIMIT_MAX:
            raise InvalidArgument(f"limit must be between 1 and {_LIST_LIMIT_MAX}, not {call.limit}")
        if call.behind is not None and min(call.behind) < 0:
            raise InvalidArgument(f"behind is a time, a partition and an offset, not {list(call.behind)}")
        before_ms = call.before_ms or _FOREVER_MS
        found: list[calls.ScheduleSummary] = []
        for log in await self._of_topic(session.namespace, call.topic):
            summary = partial(_summary, log)  # without the value: there may be ten thousand of them
            if call.key is None:
                behind = _row_before(call.behind, log.target.partition)
                found += await log.upcoming(call.after_ms, before_ms, call.limit, summary, behind=behind)
            else:
                listed = await log.with_key(call.key, summary)
                found += [it for it in listed if call.after_ms <= it.due_ms < before_ms]
        found = [summary for summary in found if call.behind is None or calls.place_of(summary) > call.behind]
        found.sort(key=calls.place_of)
        return found[: call.limit]

    async def show(self, namespace: str, text: str) -> calls.ScheduleInfo:
        log, offset = await self._place(namespace, text)
        state = log.agenda.state(offset)
        if state == "unknown":
            raise ScheduleNotFound(f"nothing was scheduled under the id {text}")
        info = calls.ScheduleInfo(
            id=text.upper(), state=state, topic=log.target.topic, partition=log.target.partition, offset=offset
        )
        message = await log.message(offset)
        if message is None:
            return info
        info.due_ms = log.agenda.due_ms(offset, message.due_ms)
        info.moved_from_ms = message.due_ms if info.due_ms != message.due_ms else 0
        info.published_ms = message.append_time_us // 1000
        info.timestamp_ms = message.timestamp_us // 1000
        info.expiry_ms = message.expiry_us // 1000
        info.priority, info.key, info.value = message.priority, message.key, message.value
        info.headers = readable_headers(message.headers)
        return info

    async def _cancel(self, session: _Session, call: calls.CancelSchedules) -> calls.Cancelled:
        if bool(call.ids) == (call.key is not None):
            raise InvalidArgument("cancel by ids, or by topic and key")
        if call.key is not None:
            return calls.Cancelled(cancelled=await self._cancel_key(session.namespace, call.topic, call.key))
        if len(call.ids) > _IDS_MAX:
            raise InvalidArgument(f"{_IDS_MAX} ids can be cancelled at once, not {len(call.ids)}")
        logs: dict[int, ScheduleLog | None] = {}
        places: dict[ScheduleLog, set[int]] = {}
        refused: list[calls.RefusedCancel] = []
        known = 0
        for text in call.ids:
            try:
                _, uid, offset = parse_message_id(text)
                if uid not in logs:
                    logs[uid] = await self._with_uid(session.namespace, uid)
                log = logs[uid]
                if log is None:
                    raise ScheduleNotFound(f"nothing was scheduled under the id {text}")
                if log.agenda.state(offset) == "cancelled":
                    known += 1  # a repetition, perhaps because the answer was lost
                    continue
                log.check_pending(offset)
                places.setdefault(log, set()).add(offset)
            except MillstreamError as error:
                refused.append(calls.RefusedCancel(id=text, code=error.code, number=error.number, reason=str(error)))
        for log, offsets in places.items():
            known += await self._cancel_in(log, offsets)
        return calls.Cancelled(cancelled=known, refused=refused)

    async def _cancel_key(self, namespace: str, topic: str, key: bytes) -> int:
        cancelled = 0
        for log in await self._of_topic(namespace, topic):
            offsets = await log.with_key(key, lambda _, message: message.offset)
            cancelled += await self._cancel_in(log, offsets)
        return cancelled

    async def _cancel_in(self, log: ScheduleLog, offsets: Collection[int]) -> int:
        pending = sorted(offset for offset in offsets if log.agenda.state(offset) == "pending")
        cancelled = await log.cancel(pending)
        self._host.recorder.scheduled("cancelled", log.partition, pending, "")
        return cancelled

    async def _move(self, session: _Session, call: calls.MoveSchedule) -> calls.ScheduleSummary:
        if call.deliver_at_ms <= 0:
            raise InvalidArgument("deliver_at_ms is a time in milliseconds since 1970")
        self._check_delay(call.deliver_at_ms, self._host.settings.schedules.max_delay_ms)
        log, offset = await self._place(session.namespace, call.id)
        message = await log.message(offset)
        log.check_pending(offset)
        await log.move(offset, call.deliver_at_ms)
        self._host.recorder.scheduled("moved", log.partition, [offset], f"to {clock_text(call.deliver_at_ms)}")
        if message is None:
            raise ScheduleNotFound("the message is damaged")
        return _summary(log, call.deliver_at_ms, message)

    async def _stats(self, session: _Session, call: calls.ScheduleStats) -> list[calls.TopicSchedules]:
        registry = self._host.topics.registry
        names = [call.topic] if call.topic else [topic.name for topic in registry.matching(session.namespace, None)]
        answer: list[calls.TopicSchedules] = []
        for name in names:
            logs = await self._of_topic(session.namespace, name)
            if logs or call.topic:
                due = [it for log in logs for it in await log.upcoming(0, _FOREVER_MS, 1, lambda due_ms, _: due_ms)]
                answer.append(
                    calls.TopicSchedules(
                        topic=name,
                        pending=sum(log.agenda.pending for log in logs),
                        next_due_ms=min(due, default=0),
                        fired=sum(log.fired for log in logs),
                        expired=sum(log.expired for log in logs),
                        cancelled=sum(log.cancelled for log in logs),
                        moved=sum(log.moved for log in logs),
                        in_memory=sum(len(log.agenda.timers) for log in logs),
                        size_bytes=sum(log.partition.log.size_bytes for log in logs),
                    )
                )
        return answer

    # --- why -----------------------------------------------------------------------------------------------------

    async def explain(self, namespace: str, text: str) -> Explanation | None:
        """Why a scheduled message is not delivered; None when the id is not one of a scheduled message."""
        try:
            info = await self.show(namespace, text)
        except ScheduleNotFound:
            return None
        now_ms = self._clock.now_us() // 1000
        due = clock_text(info.due_ms)
        sentences = {
            "pending": f"The message is scheduled for {due}, in {format_ms(max(0, info.due_ms - now_ms))}.",
            "firing": f"The message was due at {due} and is being delivered this moment.",
            "fired": f"The message was scheduled for {due} and is in topic {info.topic} since.",
            "cancelled": f"The message was scheduled for {due} and cancelled before that.",
            "expired": f"The message was scheduled for {due} and had expired by then.",
            "lost": "The message was scheduled, but what is stored of it is damaged.",
            "gone": "The message was delivered, cancelled or expired some time ago, and its record has been removed.",
        }
        sentence = sentences[info.state]
        if info.state == "pending" and info.due_ms <= now_ms:
            refusal = self._host.modes.publish_refusal
            sentence = f"The message was due at {due}" + (f", but {refusal}." if refusal else " and is next in line.")
        facts = {"id": info.id, "topic": info.topic, "partition": info.partition, "due_ms": info.due_ms}
        return Explanation(sentence=sentence, state=f"schedule-{info.state}", facts=facts)


def _row_before(place: tuple[int, int, int] | None, partition: int) -> int:
    """The last row of a partition that is not behind a place in the list of all its topic's partitions."""
    if place is None:
        return -1
    due_ms, at, offset = place
    row = due_ms << OFFSET_BITS
    return row | offset if partition == at else row - 1 if partition > at else (due_ms + 1 << OFFSET_BITS) - 1


def _summary(log: ScheduleLog, due_ms: int, message: Scheduled) -> calls.ScheduleSummary:
    return calls.ScheduleSummary(
        id=message.id(log.partition.uid),
        topic=log.target.topic,
        partition=log.target.partition,
        offset=message.offset,
        due_ms=due_ms,
        published_ms=message.append_time_us // 1000,
        expiry_ms=message.expiry_us // 1000,
        priority=message.priority,
        key=message.key,
        size_bytes=message.size_bytes,
    )
