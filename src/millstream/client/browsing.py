"""Looking at messages without consuming them: arguments as users write them, as calls."""

from __future__ import annotations

from datetime import datetime
from typing import Final, TypedDict

from millstream.client.arguments import checked_number
from millstream.client.values import Key, check_conditions, key_bytes, microseconds
from millstream.wire.message_calls import WHOLE_VALUES, BrowseMessages, MessageInfo

__all__ = ["BrowseOptions", "MessageInfo", "browse_call", "next_call"]

_PAGE: Final = 1_000


class BrowseOptions(TypedDict, total=False):
    """Conditions for messages; all that are given must hold."""

    #: The partition; if left out, all of them, merged by the time the messages were stored.
    partition: int | None
    #: From this offset on, in every partition.
    offset: int | None
    #: Stored at this time or later; local time if it has no time zone.
    since: float | datetime | None
    #: Stored before this time; local time if it has no time zone.
    until: float | datetime | None
    #: Exactly this key.
    key: Key
    #: A header's name, or `name=value`.
    header: str | None
    #: A text that the value contains.
    text: str | None
    #: Go backwards from the end.
    newest_first: bool
    #: How many bytes of each value to fetch; if left out, all of them.
    value_bytes: int


def browse_call(topic: str, limit: int, options: BrowseOptions) -> BrowseMessages:
    check_conditions(options, BrowseOptions)
    since, until = options.get("since"), options.get("until")
    return BrowseMessages(
        topic=topic,
        partition=options.get("partition"),
        offset=options.get("offset"),
        # Rounded up: a message before the moment asked for would be a surprise.
        from_ms=0 if since is None else -(-microseconds(since) // 1000),
        until_ms=0 if until is None else -(-microseconds(until) // 1000),
        key=key_bytes(options.get("key")),
        header=options.get("header") or "",
        text=options.get("text") or "",
        newest_first=options.get("newest_first", False),
        limit=min(checked_number("limit", limit), _PAGE),
        value_bytes=options.get("value_bytes", WHOLE_VALUES),
    )


def next_call(call: BrowseMessages, after: str, left: int) -> BrowseMessages | None:
    """How to go on; None when there is nothing more to look through, or enough was found."""
    if not after or left <= 0:
        return None
    call.after, call.limit = after, min(left, _PAGE)
    return call
