"""Topics over HTTP."""

from __future__ import annotations

from typing import Any

from millstream.server.http.endpoints import Exchange, Family, NoQuery
from millstream.wire import calls

__all__ = ["family"]

family = Family("topics", "Named logs, split into partitions.")


@family.get("/topics/{topic}", answer=calls.TopicInfo)
async def show_topic(exchange: Exchange[NoQuery, None]) -> Any:
    """One topic, with its partitions and its configuration."""
    return await exchange.call(calls.DescribeTopic(name=exchange.path["topic"]))
