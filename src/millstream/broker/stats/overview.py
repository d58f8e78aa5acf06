"""The overview: a survey summed up for a person."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nlargest
from typing import Final

from millstream.broker.stats.rates import NO_PACE, Pace
from millstream.broker.stats.survey import QueueRow, StreamRow, Survey, TopicRow
from millstream.errors import InvalidArgument
from millstream.wire import stats_calls as calls

__all__ = ["busiest_topics", "check_limit", "furthest_behind", "sums"]

_LIMIT_MAX: Final = 1_000

Paces = Mapping[tuple[str, str], Pace]


def check_limit(limit: int) -> None:
    if not 0 <= limit <= _LIMIT_MAX:
        raise InvalidArgument(f"limit must be between 0 and {_LIMIT_MAX}, not {limit}")


def within(survey: Survey, namespace: str) -> Survey:
    """The part of a survey that is about one namespace."""
    return Survey(
        survey.time_ms,
        survey.monotonic_ms,
        survey.namespaces,
        [row for row in survey.topics if row.namespace == namespace],
        [row for row in survey.queues if row.namespace == namespace],
        [row for row in survey.streams if row.namespace == namespace],
    )


def sums(survey: Survey, paces: Paces) -> dict[str, object]:
    """What the overview says about all topics and groups together."""
    topics, queues = survey.topics, survey.queues
    pace = Pace.sum_of(paces[key] for key in ((row.namespace, row.topic) for row in topics) if key in paces)
    return {
        "rates": calls.Rates(
            published=_rounded(pace.published),
            published_bytes=_rounded(pace.published_bytes),
            consumed=_rounded(pace.consumed),
            acked=_rounded(pace.acked),
            failed=_rounded(pace.failed),
            dead_lettered=_rounded(pace.dead),
        ),
        "totals": calls.Totals(
            published=sum(row.published for row in topics),
            published_bytes=sum(row.published_bytes for row in topics),
            consumed=sum(row.consumed for row in topics),
            acked=sum(row.acked for row in topics),
            failed=sum(row.failed for row in topics),
            dead_lettered=sum(row.dead for row in topics),
        ),
        "topics": len(topics),
        "partitions": sum(row.partitions for row in topics),
        "cold_partitions": sum(row.cold for row in topics),
        "queue_groups": len(queues),
        "stream_groups": len({(row.namespace, row.group) for row in survey.streams}),
        "messages": sum(row.messages for row in topics),
        "depth": sum(row.depth for row in topics),
        "ready": sum(row.ready for row in queues),
        "leased": sum(row.leased for row in queues),
        "waiting": sum(row.waiting for row in queues),
        "oldest_ms": max((row.oldest_ms for row in queues), default=0),
        "scheduled": sum(row.scheduled for row in topics),
        "dead_letters": sum(row.dead_letters for row in topics),
        "consumers": sum(row.consumers for row in queues),
        "throttled_topics": sum(row.throttle_ms > 0 for row in topics),
        "log_bytes": sum(row.log_bytes for row in topics),
    }


def busiest_topics(survey: Survey, paces: Paces, limit: int) -> list[calls.TopicActivity]:
    def business(row: TopicRow) -> tuple[float, int, int]:
        pace = paces.get((row.namespace, row.topic), NO_PACE)
        return pace.published + pace.consumed, row.depth, row.messages

    found = []
    for row in nlargest(limit, sorted(survey.topics, key=lambda row: (row.namespace, row.topic)), key=business):
        pace = paces.get((row.namespace, row.topic), NO_PACE)
        found.append(
            calls.TopicActivity(
                namespace=row.namespace,
                topic=row.topic,
                published_rate=_rounded(pace.published),
                consumed_rate=_rounded(pace.consumed),
                messages=row.messages,
                size_bytes=row.log_bytes,
                depth=row.depth,
                leased=row.leased,
                waiting=row.waiting,
                scheduled=row.scheduled,
                throttle_ms=row.throttle_ms,
            )
        )
    return found


def furthest_behind(survey: Survey, limit: int) -> list[calls.GroupStanding]:
    standings = [_of_queue(row) for row in survey.queues] + [_of_stream(row) for row in survey.streams]
    standings.sort(key=lambda it: (-it.oldest_ms, -it.lag, it.namespace, it.topic, it.group))
    return standings[:limit]


def _of_queue(row: QueueRow) -> calls.GroupStanding:
    busy = "active" if row.consumers else "idle"
    return calls.GroupStanding(
        namespace=row.namespace,
        topic=row.topic,
        group=row.group,
        kind="queue",
        lag=row.depth,
        oldest_ms=row.oldest_ms,
        leased=row.leased,
        consumers=row.consumers,
        state="paused" if row.paused else busy if row.depth else "caught up",
    )


def _of_stream(row: StreamRow) -> calls.GroupStanding:
    busy = "active" if row.members else "idle"
    return calls.GroupStanding(
        namespace=row.namespace,
        topic=row.topic,
        group=row.group,
        kind="stream",
        lag=row.lag,
        oldest_ms=row.oldest_ms,
        leased=0,
        consumers=row.members,
        state="paused" if row.paused else "rebalancing" if row.rebalancing else busy if row.lag else "caught up",
    )


def _rounded(rate: float) -> float:
    return round(rate, 2)
