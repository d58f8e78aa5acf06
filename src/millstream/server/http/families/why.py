"""`why` over HTTP."""

from __future__ import annotations

from typing import Any

import msgspec

from millstream.errors import InvalidArgument
from millstream.server.http.endpoints import Exchange, Family
from millstream.wire.queue_calls import Explain, Explanation

__all__ = ["family"]

family = Family("why", "One sentence on what holds up a message or a queue.")


class WhyQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: The id of a message. Or give a topic and a group instead.
    id: str = ""
    topic: str = ""
    group: str = ""


@family.get("/why", query=WhyQuery, answer=Explanation)
async def explain(exchange: Exchange[WhyQuery, None]) -> Any:
    """Say why a message, or the next message of a queue, is not being delivered right now."""
    query = exchange.query
    if query.id and query.topic:
        raise InvalidArgument("name a message id, or a topic and a group, not both")
    return await exchange.call(Explain(id=query.id, topic=query.topic, group=query.group))
