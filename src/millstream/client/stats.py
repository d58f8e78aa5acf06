"""The call behind `client.history`, for both drivers, and the answers about how a broker is doing."""

from __future__ import annotations

from datetime import datetime

from millstream.client.values import microseconds
from millstream.wire.stats_calls import GroupStanding, Overview, ReadHistory, TopicActivity

__all__ = ["GroupStanding", "Overview", "TopicActivity", "history_call"]


def history_call(
    metric: str, topic: str, group: str, start: datetime | None, end: datetime | None, points: int
) -> ReadHistory:
    return ReadHistory(
        metric=metric,
        topic=topic,
        group=group,
        from_ms=_milliseconds(start),
        until_ms=_milliseconds(end),
        points=points,
    )


def _milliseconds(moment: datetime | None) -> int:
    return 0 if moment is None else microseconds(moment) // 1000
