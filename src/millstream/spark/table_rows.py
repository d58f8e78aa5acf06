"""The rows of tables, a page at a time, made of what calls answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from millstream.dead_letters import DeadLetter, LetterFilter
from millstream.errors import GroupNotFound, MillstreamError, TopicNotFound
from millstream.spark.connection import BrokerConnection
from millstream.spark.offsets import Place
from millstream.wire import calls, letter_calls, queue_calls, schedule_calls, trace_calls

__all__ = ["ROWS", "Row", "Scope"]

Row: TypeAlias = dict[str, Any]
_Pages: TypeAlias = Iterator[list[Row]]

_PAGE: Final = 1_000
_SCHEDULES_PAGE: Final = 10_000
#: Calls that are on their way at a time.
_ABREAST: Final = 100


@dataclass(frozen=True)
class Scope:
    """Which rows are wanted; None and 0 = whatever they have."""

    topics: frozenset[str] | None = None
    pattern: str | None = None
    places: frozenset[Place] | None = None
    groups: frozenset[str] | None = None
    reasons: frozenset[str] | None = None
    since_ms: int = 0
    until_ms: int = 0

    def holds(self, topic: str | None, partition: int | None) -> bool:
        """Whether the topic and the partition of a row are wanted; one without a partition is about all of them."""
        if topic is None:
            return self.topics is None and self.pattern is None
        if self.topics is not None and topic not in self.topics:
            return False
        if self.pattern is not None and not re.fullmatch(self.pattern, topic):
            return False
        return self.places is None or partition is None or Place(topic, partition) in self.places

    def each_topic(self) -> list[str]:
        """For calls that take one topic, or none for all of them."""
        return [""] if self.topics is None else sorted(self.topics)


def _dead_letters(connection: BrokerConnection, scope: Scope) -> _Pages:
    for topic in scope.each_topic():
        for group in [""] if scope.groups is None else sorted(scope.groups):
            for reason in [""] if scope.reasons is None else sorted(scope.reasons):
                wanted = LetterFilter(
                    topic=topic, group=group, reason=reason, since_ms=scope.since_ms, until_ms=scope.until_ms
                )
                yield from _letters(connection, wanted)


def _letters(connection: BrokerConnection, wanted: LetterFilter) -> _Pages:
    after = ""
    while True:
        page: letter_calls.LetterPage = connection.call(
            letter_calls.ListLetters(filter=wanted, after=after, limit=_PAGE, value_bytes=letter_calls.WHOLE_VALUES),
            letter_calls.LetterPage,
        )
        yield [_letter(letter) for letter in page.letters]
        after = page.after
        if not after:
            return


def _letter(letter: DeadLetter) -> Row:
    return {
        "id": letter.id,
        "topic": letter.original_topic,
        "partition": letter.original_partition,
        "offset": letter.original_offset,
        "originalId": letter.original_id,
        "group": letter.group,
        "reason": letter.reason,
        "error": letter.error,
        "deliveries": letter.deliveries,
        "failures": letter.failures,
        "firstDelivery": _time(letter.first_delivery_ms),
        "died": _time(letter.dead_ms),
        "keptUntil": _time(letter.kept_until_ms),
        "attempts": [
            {
                "consumer": attempt.consumer,
                "delivered": _time(attempt.delivered_ms),
                "ended": _time(attempt.ended_ms),
                "kind": attempt.kind,
                "reason": attempt.reason,
            }
            for attempt in letter.attempts
        ],
        "key": letter.key,
        "value": letter.value,
        "headers": [{"key": name, "value": value} for name, value in letter.headers],
        "timestamp": letter.timestamp_us,
        "priority": letter.priority,
        "letterTopic": letter.topic,
        "letterPartition": letter.partition,
        "letterOffset": letter.offset,
    }


def _schedules(connection: BrokerConnection, scope: Scope) -> _Pages:
    known = connection.call(schedule_calls.ScheduleStats(), list[schedule_calls.TopicSchedules])
    for topic in sorted(each.topic for each in known if each.pending and scope.holds(each.topic, None)):
        behind: tuple[int, int, int] | None = None
        while True:
            call = schedule_calls.ListSchedules(
                topic=topic,
                after_ms=scope.since_ms,
                before_ms=scope.until_ms,
                behind=behind,
                limit=_SCHEDULES_PAGE,
            )
            try:
                page = connection.call(call, list[schedule_calls.ScheduleSummary])
            except TopicNotFound:
                break  # it was deleted meanwhile
            if not page:
                break
            yield [_schedule(each) for each in page]
            behind = schedule_calls.place_of(page[-1])


def _schedule(summary: schedule_calls.ScheduleSummary) -> Row:
    return {
        "id": summary.id,
        "topic": summary.topic,
        "partition": summary.partition,
        "offset": summary.offset,
        "key": summary.key,
        "due": _time(summary.due_ms),
        "published": _time(summary.published_ms),
        "expires": _time(summary.expiry_ms),
        "priority": summary.priority,
        "sizeBytes": summary.size_bytes,
    }


def _groups(connection: BrokerConnection, scope: Scope) -> _Pages:
    names = [each.name for each in connection.call(calls.ListGroups(), list[calls.GroupSummary])]
    wanted = [calls.DescribeGroup(name=name) for name in names if scope.groups is None or name in scope.groups]
    for info in _answers(connection, wanted, calls.GroupInfo):
        group = {
            "group": info.name,
            "state": info.state,
            "generation": info.generation,
            "members": len(info.members),
            "paused": info.paused,
        }
        places = [
            {
                "topic": lag.topic,
                "partition": lag.partition,
                "committed": lag.committed,
                "end": None if lag.failed else lag.end,
                "lag": None if lag.failed else lag.lag,
                "lagMs": None if lag.failed else lag.lag_ms,
                "member": lag.member_id,
            }
            for lag in info.lag
        ]
        nowhere = dict.fromkeys(("topic", "partition", "committed", "end", "lag", "lagMs", "member"))
        yield [group | place for place in places or [nowhere]]


def _queues(connection: BrokerConnection, scope: Scope) -> _Pages:
    listed = connection.call(queue_calls.ListQueues(), list[queue_calls.QueueSummary])
    wanted = [
        queue_calls.DescribeQueue(topic=each.topic, group=each.group)
        for each in listed
        if scope.holds(each.topic, None) and (scope.groups is None or each.group in scope.groups)
    ]
    paused = {(each.topic, each.group): each.paused for each in listed}
    ways = ("acked", "dead", "expired", "evicted", "purged", "gone")
    for info in _answers(connection, wanted, queue_calls.QueueInfo):
        row = {
            "topic": info.topic,
            "group": info.group,
            "depth": info.depth,
            "ready": info.ready,
            "leased": info.leased,
            "waiting": info.waiting,
            "consumers": len(info.consumers),
            "paused": paused[info.topic, info.group],
            "oldestMs": info.oldest_ms,
        }
        yield [row | {way: info.settled.get(way, 0) for way in ways}]


def _passports(connection: BrokerConnection, scope: Scope) -> _Pages:
    for topic in scope.each_topic():
        after = ""
        while True:
            call = trace_calls.FindTraces(
                topic=topic, from_ms=scope.since_ms, until_ms=scope.until_ms, after=after, limit=_PAGE
            )
            try:
                page: trace_calls.TracePage = connection.call(call, trace_calls.TracePage)
            except TopicNotFound:
                break  # nothing is known of it
            yield [_event(event) for event in page.events]
            after = page.after
            if not after:
                break


def _event(event: trace_calls.TraceEvent) -> Row:
    return {
        "id": event.id or None,
        "topic": event.topic,
        "partition": event.partition,
        "offset": event.offset,
        "event": event.kind,
        "time": _time(event.time_ms),
        "traceId": event.trace_id or None,
        "key": event.key,
        "group": event.group or None,
        "consumer": event.consumer or None,
        "error": event.error or None,
        "note": event.note or None,
        "link": event.link or None,
        "messages": event.messages,
    }


def _topics(connection: BrokerConnection, scope: Scope) -> _Pages:
    after = ""
    while page := connection.call(calls.ListTopics(after=after), list[calls.TopicInfo]):
        after = page[-1].name
        wanted = [calls.DescribeTopic(name=each.name) for each in page if scope.holds(each.name, None)]
        for info in _answers(connection, wanted, calls.TopicInfo):
            yield [_partition(info, part) for part in info.partitions]


def _partition(topic: calls.TopicInfo, part: calls.PartitionInfo) -> Row:
    return {
        "topic": topic.name,
        "partition": part.partition,
        "startOffset": part.start_offset,
        "endOffset": part.high_watermark,
        "messages": part.high_watermark - part.start_offset,
        "sizeBytes": part.size_bytes,
        "segments": part.segments,
        "damaged": sum(until - first for first, until in part.damaged_ranges),
        "failed": part.failed,
        "created": _time(topic.created_ms),
    }


def _answers(connection: BrokerConnection, wanted: list[Any], kind: Any) -> Iterator[Any]:
    """The answers to many calls, without those about what is gone meanwhile."""
    for first in range(0, len(wanted), _ABREAST):
        for answer in connection.calls(wanted[first : first + _ABREAST], kind):
            if isinstance(answer, TopicNotFound | GroupNotFound):
                continue
            if isinstance(answer, MillstreamError):
                raise answer
            yield answer


def _time(time_ms: int) -> int | None:
    """In microseconds, as Arrow wants it; 0 = never."""
    return time_ms * 1000 if time_ms else None


ROWS: Final[dict[str, Callable[[BrokerConnection, Scope], _Pages]]] = {
    "dead_letters": _dead_letters,
    "schedules": _schedules,
    "groups": _groups,
    "queues": _queues,
    "passports": _passports,
    "topics": _topics,
}
