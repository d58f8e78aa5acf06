"""Looking for what has happened to messages: arguments as users write them, as calls."""

from __future__ import annotations

from datetime import datetime
from typing import Final, TypedDict

from millstream.client.arguments import checked_number
from millstream.client.values import Key, check_conditions, key_bytes, microseconds
from millstream.wire.trace_calls import FindTraces, PassportInfo, TraceEvent

__all__ = ["PassportInfo", "TraceEvent", "TraceOptions", "next_traces", "traces_call"]

_PAGE: Final = 1_000


class TraceOptions(TypedDict, total=False):
    """Conditions for traces; all that are given must hold."""

    #: The trace id, as in `traceparent`.
    trace_id: str
    #: Messages of this topic.
    topic: str
    #: Messages with this key; needs `topic`.
    key: Key
    #: What happened at this time or later; local time if it has no time zone.
    since: float | datetime | None
    #: What happened before this time; local time if it has no time zone.
    until: float | datetime | None
    #: Only what went wrong: nacked, timed out, dead-lettered, expired...
    failures_only: bool


def traces_call(limit: int, options: TraceOptions) -> FindTraces:
    check_conditions(options, TraceOptions)
    since, until = options.get("since"), options.get("until")
    return FindTraces(
        trace_id=options.get("trace_id") or "",
        topic=options.get("topic") or "",
        key=key_bytes(options.get("key")),
        from_ms=0 if since is None else -(-microseconds(since) // 1000),
        until_ms=0 if until is None else -(-microseconds(until) // 1000),
        failures_only=options.get("failures_only", False),
        limit=min(checked_number("limit", limit), _PAGE),
    )


def next_traces(call: FindTraces, after: str, left: int) -> FindTraces | None:
    """How to go on; None when there is nothing more to look through, or enough was found."""
    if not after or left <= 0:
        return None
    call.after, call.limit = after, min(left, _PAGE)
    return call
