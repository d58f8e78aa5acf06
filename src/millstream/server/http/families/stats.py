"""How the broker is doing, over HTTP."""

from __future__ import annotations

from typing import Any

import msgspec

from millstream.server.http.endpoints import Exchange, Family
from millstream.wire import stats_calls as calls

__all__ = ["family"]

family = Family("stats", "How the broker is doing: now, since the start, and over the last month.")


class Extent(msgspec.Struct, forbid_unknown_fields=True):
    #: How many topics, and how many groups, are listed.
    limit: int = 10
    #: All namespaces instead of this one.
    everywhere: bool = False


class Window(msgspec.Struct, forbid_unknown_fields=True):
    metric: str
    topic: str = ""
    group: str = ""
    #: 0 = an hour before the end.
    from_ms: int = 0
    #: 0 = now.
    until_ms: int = 0
    #: At most this many.
    points: int = 300


@family.get("/stats/overview", query=Extent, answer=calls.Overview)
async def show_overview(exchange: Exchange[Extent, None]) -> Any:
    """Show everything that matters in one answer: rates, depth, the oldest message, memory, disk, mode.

    The answer is made in one pass over memory, so it may be asked for every second. Sums are over the topics of the
    namespace, or of all namespaces with `everywhere`.
    """
    query = exchange.query
    return await exchange.call(calls.DescribeOverview(limit=query.limit, everywhere=query.everywhere))


@family.get("/stats/history", query=Window, answer=calls.History)
async def show_history(exchange: Exchange[Window, None]) -> Any:
    """Show how one metric developed: of the broker, of a topic, or of a group on a topic.

    The last hour is kept every 5 seconds, the last day every minute, and the last month every quarter of an hour. Where
    nothing was measured, there is no point.
    """
    query = exchange.query
    return await exchange.call(
        calls.ReadHistory(
            metric=query.metric,
            topic=query.topic,
            group=query.group,
            from_ms=query.from_ms,
            until_ms=query.until_ms,
            points=query.points,
        )
    )
