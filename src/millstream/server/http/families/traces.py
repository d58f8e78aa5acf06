"""What has happened to messages, over HTTP."""

from __future__ import annotations

from typing import Annotated

import msgspec

from millstream.server.http.endpoints import Exchange, Family
from millstream.server.http.message_view import view_of
from millstream.values import to_json
from millstream.wire import trace_calls as calls

__all__ = ["family"]

family = Family("traces", "What has happened to messages: the passport of one, and the traces of many.")

TimeMs = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999)]


class ShownPassport(msgspec.Struct, kw_only=True):
    """Everything that is known to have happened to one message, in the order in which it happened."""

    id: str
    topic: str
    partition: int
    offset: int
    #: From the header `traceparent`; without one, the message has a trace of its own.
    trace_id: str
    key: str | None
    #: `text` or `base64`.
    key_encoding: str
    events: list[calls.PassportEvent]
    #: False when there are more records than could be looked through.
    complete: bool


class ShownTrace(msgspec.Struct, kw_only=True):
    """Something that happened to a message, or to `messages` of them that were too many to be named."""

    #: Empty if it is about many messages.
    id: str
    topic: str
    partition: int
    offset: int
    kind: str
    time_ms: int
    trace_id: str
    key: str | None
    #: `text` or `base64`.
    key_encoding: str
    group: str
    consumer: str
    error: str
    note: str
    #: The id of another message: the dead letter, what was replayed, what was scheduled.
    link: str
    messages: int


class TracesQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    #: 32 hexadecimal digits.
    trace_id: str = ""
    topic: str = ""
    #: Used with a topic.
    key: str | None = None
    #: When it happened: from this time on, and before that one.
    from_ms: TimeMs = 0
    until_ms: TimeMs = 0
    failures_only: bool = False
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 50
    #: The `after` of an earlier answer.
    after: str = ""


class ShownTraces(msgspec.Struct):
    events: list[ShownTrace]
    #: Where to go on: the parameter `after` of the next request; empty = everything was looked at.
    after: str


@family.get("/messages/{id}/passport", answer=ShownPassport)
async def show_passport(exchange: Exchange[None, None]) -> ShownPassport:
    """Show everything that is known to have happened to a message.

    It says when the message was published and stored, scheduled, moved or cancelled; by whom it was leased; each
    failure with its error; its dead letter and what that was replayed as. Failures are always recorded. Of what goes
    well, only a sample is, so an `acked` may have a note instead of a consumer.
    """
    passport: calls.PassportInfo = await exchange.call(calls.ShowPassport(id=exchange.path["id"]))
    key, how = to_json(passport.key, "text")
    return view_of(ShownPassport, passport, key=key, key_encoding=how)


@family.get("/traces", query=TracesQuery, answer=ShownTraces)
async def find_traces(exchange: Exchange[TracesQuery, None]) -> ShownTraces:
    """Find what was recorded about messages, newest first.

    All conditions that are given must hold. Without any, these are the newest events of the namespace. With a topic and
    a key, or a topic and a trace id, the topic itself is looked through as well, after the records: messages that were
    never recorded, because all went well, are shown as `stored`. A request looks for about a second. If `after` in the
    answer is not empty, there is more to look through.
    """
    query = exchange.query
    call = calls.FindTraces(
        trace_id=query.trace_id,
        topic=query.topic,
        key=None if query.key is None else query.key.encode(),
        from_ms=query.from_ms,
        until_ms=query.until_ms,
        failures_only=query.failures_only,
        limit=query.limit,
        after=query.after,
    )
    page: calls.TracePage = await exchange.call(call)
    return ShownTraces([_shown(event) for event in page.events], page.after)


def _shown(event: calls.TraceEvent) -> ShownTrace:
    key, how = to_json(event.key, "text")
    return view_of(ShownTrace, event, key=key, key_encoding=how)
