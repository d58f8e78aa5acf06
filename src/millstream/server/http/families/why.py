"""`why` over HTTP."""

from __future__ import annotations

from typing import Any

import msgspec

from millstream.errors import InvalidArgument
from millstream.server.http.endpoints import Exchange, Family
from millstream.wire.queue_calls import Explain, Explanation

__all__ = ["family"]

family = Family("why", "One sentence on what holds a message, or a queue, up.")


class WhyQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: Of a message; or else name a topic and a group.
    id: str = ""
    topic: str = ""
    group: str = ""


@family.get("/why", query=WhyQuery, answer=Explanation)
async def explain(exchange: Exchange[WhyQuery, None]) -> Any:
    """Why is this message, or the next message of this queue, not being delivered right now?"""
    query = exchange.query
    if query.id and query.topic:
        raise InvalidArgument("name a message id, or a topic and a group, not both")
    return await exchange.call(Explain(id=query.id, topic=query.topic, group=query.group))
