"""Dead letters as users ask for them: arguments turned into calls, for both clients."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final, TypedDict

from millstream.client.arguments import as_dict, as_list
from millstream.client.values import Headers, Value, check_conditions, checked_rate, microseconds, value_bytes
from millstream.dead_letters import LetterEdit, LetterFilter
from millstream.errors import InvalidArgument
from millstream.wire.letter_calls import PurgeLetters, ReplayLetters

__all__ = [
    "PAGE",
    "POLL_S",
    "LetterOptions",
    "ReplayOptions",
    "checked_limit",
    "letter_filter",
    "purge_call",
    "replay_call",
]

#: How often a replay that is waited for is looked at.
POLL_S: Final = 0.2
#: Letters asked for at a time.
PAGE: Final = 500


class LetterOptions(TypedDict, total=False):
    """Conditions for dead letters; all that are given must hold."""

    #: The topic they came from, or a pattern such as `orders.#`.
    topic: str
    #: The queue group that gave up on them.
    group: str
    #: Why they died: `REJECTED`, `MAX_RETRIES_EXCEEDED`...
    reason: str
    #: A part of the error's text.
    error: str
    #: Headers of the original message with their values; None = any value.
    headers: Mapping[str, str | None]
    #: The key of the original message.
    key: str
    #: Died at this time or later; local time if it has no time zone.
    since: float | datetime | None
    #: Died before this time; local time if it has no time zone.
    until: float | datetime | None


def letter_filter(options: LetterOptions, kind: type = LetterOptions) -> LetterFilter:
    check_conditions(options, kind)
    since, until = options.get("since"), options.get("until")
    return LetterFilter(
        topic=options.get("topic", ""),
        group=options.get("group", ""),
        reason=options.get("reason", ""),
        error=options.get("error", ""),
        headers=as_dict("headers", options.get("headers")),
        key=options.get("key"),
        since_ms=0 if since is None else microseconds(since) // 1000,
        until_ms=0 if until is None else microseconds(until) // 1000,
    )


class ReplayOptions(LetterOptions, total=False):
    """Which dead letters to send again, and how."""

    #: The topic to send them to; None = back to the one that each came from.
    target: str | None
    #: A value that replaces the value of all of them.
    value: Value
    #: Headers to add or to replace.
    set_headers: Headers
    #: Names of headers to leave out.
    remove_headers: Iterable[str]
    #: Messages per second; None = as fast as they can be stored.
    rate: float | None


def checked_limit(limit: int) -> int:
    if type(limit) is not int or not 1 <= limit <= sys.maxsize:  # to the broker 0 means all of them
        raise InvalidArgument(f"limit is a number from 1 on, not {limit!r}")
    return limit


def purge_call(
    ids: Iterable[str], everything: bool, dry_run: bool, limit: int | None, options: LetterOptions
) -> PurgeLetters:
    return PurgeLetters(
        ids=as_list("ids", ids),
        filter=letter_filter(options),
        everything=everything,
        dry_run=dry_run,
        limit=0 if limit is None else checked_limit(limit),
    )


def replay_call(ids: Iterable[str], everything: bool, dry_run: bool, options: ReplayOptions) -> ReplayLetters:
    try:
        texts = {
            name: text.decode() if isinstance(text, bytes) else text
            for name, text in as_dict("set_headers", options.get("set_headers")).items()
        }
    except UnicodeDecodeError:
        raise InvalidArgument("a replay sets headers to text only, and one of these is not") from None
    edit = LetterEdit(
        value=value_bytes(options.get("value")),
        set_headers=texts,
        remove_headers=as_list("remove_headers", options.get("remove_headers", ())),
    )
    return ReplayLetters(
        ids=as_list("ids", ids),
        filter=letter_filter(options, ReplayOptions),
        everything=everything,
        target=options.get("target") or "",
        edit=edit,
        rate=checked_rate(options.get("rate")) or 0,
        dry_run=dry_run,
    )
