"""Dead letters over HTTP: finding them, sending them again, removing them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from millstream.dead_letters import (
    DeadAttempt,
    DeadLetter,
    LetterEdit,
    LetterFilter,
    LetterStatistics,
    ReplayInfo,
)
from millstream.errors import InvalidArgument
from millstream.server.http.endpoints import Exchange, Family, NoQuery, page
from millstream.server.http.message_view import Content, content, view_of
from millstream.server.http.parameters import Count, Limit, Page, TimeMs
from millstream.values import Encoding, from_header, from_json
from millstream.wire import letter_calls as calls

__all__ = ["family"]

family = Family("dead letters", "Messages that queues have given up on, with their whole history.")

Ids = Annotated[list[Annotated[str, Meta(max_length=26)]], Meta(max_length=10_000)]
Headers = dict[str, str | None]


class LetterQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which letters; all conditions that are given must hold."""

    #: The topic they came from, or a pattern such as `orders.#`.
    topic: str = ""
    group: str = ""
    reason: str = ""
    #: A part of the error; upper and lower case make no difference.
    error: str = ""
    #: `name` or `name=value` (or `name:value`); may be repeated.
    header: list[str] = []
    key: str | None = None
    #: When they died: from `since_ms` on and before `until_ms`; 0 = no limit.
    since_ms: TimeMs = 0
    until_ms: TimeMs = 0

    def filter(self) -> LetterFilter:
        headers: Headers = {}
        for text in self.header:
            separator = min("=:", key=lambda sign: (text + "=:").index(sign))  # whichever comes first
            name, found, value = text.partition(separator)
            headers[name] = value if found else None
        return _filter(self, headers)


class LettersQuery(LetterQuery, kw_only=True, forbid_unknown_fields=True):
    #: Where to continue: the `after` of the last answer.
    after: str = ""
    limit: Limit = 50
    #: How much of each value to show.
    value_bytes: Annotated[int, Meta(ge=0, le=1024 * 1024)] = calls.SHOWN_BYTES
    encoding: Encoding = "auto"


class Filter(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Which letters; all conditions that are given must hold."""

    topic: str = ""
    group: str = ""
    reason: str = ""
    error: str = ""
    #: Headers of the original message and their values; null = any value.
    headers: Headers = {}
    key: str | None = None
    since_ms: TimeMs = 0
    until_ms: TimeMs = 0

    def filter(self) -> LetterFilter:
        return _filter(self, self.headers)


class Chosen(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Letters by id, by a filter, or all of them: exactly one of these."""

    ids: Ids = []
    filter: Filter = Filter()
    everything: bool = False
    #: Only show what would happen.
    dry_run: bool = False


class PurgeBody(Chosen, kw_only=True, forbid_unknown_fields=True):
    #: At most this many; 0 = all.
    limit: Count = 0


class Edit(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What is changed about the messages when they are sent again."""

    #: Replaces the values of all of them; null leaves them as they were.
    value: Any = None
    encoding: Encoding = "auto"
    set_headers: dict[str, str] = {}
    remove_headers: list[str] = []


class ReplayBody(Chosen, kw_only=True, forbid_unknown_fields=True):
    #: The topic to send to; empty = each to the topic that it came from.
    target: str = ""
    edit: Edit = Edit()
    #: Messages per second; 0 = as fast as they can be stored.
    rate: Annotated[float, Meta(ge=0, le=1e9)] = 0


class LetterShowQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    encoding: Encoding = "auto"


class LetterView(Content, kw_only=True):
    """A dead letter: where it is, where it came from, and why."""

    id: str
    topic: str
    partition: int
    offset: int
    original_id: str
    original_topic: str
    original_partition: int
    original_offset: int
    timestamp_ms: int
    group: str
    reason: str
    error: str
    deliveries: int
    failures: int
    first_delivery_ms: int
    attempts: list[DeadAttempt]
    dead_ms: int
    #: Retention may remove it after this; 0 = never.
    kept_until_ms: int


class LetterPageView(msgspec.Struct, kw_only=True):
    letters: list[LetterView]
    #: Where the next page begins; empty = this was the last one.  A page may be short, or empty, before the last.
    after: str


# --- looking -----------------------------------------------------------------------------------------------------


@family.get("/dead-letters", query=LettersQuery, answer=LetterPageView)
async def list_letters(exchange: Exchange[LettersQuery, None]) -> LetterPageView:
    """List dead letters by topic, partition and offset, with the beginning of their values."""
    query = exchange.query
    found: calls.LetterPage = await exchange.call(
        calls.ListLetters(filter=query.filter(), after=query.after, limit=query.limit, value_bytes=query.value_bytes)
    )
    letters = [_view(letter, query.encoding) for letter in found.letters]
    return LetterPageView(letters=letters, after=found.after)


@family.get("/dead-letters/statistics", query=LetterQuery, answer=LetterStatistics)
async def count_letters(exchange: Exchange[LetterQuery, None]) -> LetterStatistics:
    """Count letters by reason, topic, group, error and age."""
    return await exchange.wait_for(_count(exchange, calls.CountLetters(filter=exchange.query.filter())))


@family.get("/dead-letters/{id}", query=LetterShowQuery, answer=LetterView)
async def show_letter(exchange: Exchange[LetterShowQuery, None]) -> LetterView:
    """Show a letter with its whole value, even one that was replayed or purged, while it is stored."""
    letter: DeadLetter = await exchange.call(calls.ShowLetter(id=exchange.path["id"]))
    return _view(letter, exchange.query.encoding)


@family.post("/dead-letters/purge", body=PurgeBody, answer=LetterStatistics)
async def purge_letters(exchange: Exchange[NoQuery, PurgeBody]) -> LetterStatistics:
    """Remove letters: those with these ids, those that a filter matches, or everything.

    If the client goes away, letters that were removed by then stay removed.
    """
    body = exchange.body
    call = calls.PurgeLetters(
        ids=body.ids,
        filter=body.filter.filter(),
        everything=body.everything,
        dry_run=body.dry_run,
        limit=body.limit,
    )
    return await exchange.wait_for(_count(exchange, call))


async def _count(exchange: Exchange[Any, Any], call: calls.CountLetters | calls.PurgeLetters) -> LetterStatistics:
    """Ask until all letters have been looked at."""
    total = LetterStatistics()
    limit = getattr(call, "limit", 0)
    while True:
        found: calls.LetterCount = await exchange.call(call)
        total.add(found.statistics)
        if not found.after:
            return total
        call.after = found.after
        if isinstance(call, calls.PurgeLetters) and limit:
            call.limit = limit - total.total


# --- replays -----------------------------------------------------------------------------------------------------


@family.get("/dead-letters/replays", query=Page, answer=list[ReplayInfo])
async def list_replays(exchange: Exchange[Page, None]) -> Any:
    """List replays that run, and the reports of those that are over, newest first."""
    replays: list[ReplayInfo] = await exchange.call(calls.ListReplays())
    return page(exchange, replays, limit=exchange.query.limit, offset=exchange.query.offset)


@family.post("/dead-letters/replays", body=ReplayBody, answer=calls.ReplayStarted)
async def replay_letters(exchange: Exchange[NoQuery, ReplayBody]) -> Any:
    """Send letters again, to where they came from or to another topic, and edited if need be.

    The answer has the plan and, unless it was a dry run, the replay that has begun.
    """
    body = exchange.body
    edit = LetterEdit(
        value=from_json(body.edit.value, body.edit.encoding) if body.edit.value is not None else None,
        set_headers={name: _as_text(name, text) for name, text in body.edit.set_headers.items()},
        remove_headers=body.edit.remove_headers,
    )
    return await exchange.call(
        calls.ReplayLetters(
            ids=body.ids,
            filter=body.filter.filter(),
            everything=body.everything,
            target=body.target,
            edit=edit,
            rate=body.rate,
            dry_run=body.dry_run,
        )
    )


@family.get("/dead-letters/replays/{replay}", answer=ReplayInfo)
async def show_replay(exchange: Exchange[NoQuery, None]) -> Any:
    """Show how far a replay is or, when it is over, its report."""
    return await exchange.call(calls.ShowReplay(id=exchange.path["replay"]))


@family.delete("/dead-letters/replays/{replay}", answer=ReplayInfo)
async def abort_replay(exchange: Exchange[NoQuery, None]) -> Any:
    """Abort a replay; what it has sent stays sent."""
    return await exchange.call(calls.AbortReplay(id=exchange.path["replay"]))


def _filter(query: LetterQuery | Filter, headers: Headers) -> LetterFilter:
    return LetterFilter(
        topic=query.topic,
        group=query.group,
        reason=query.reason,
        error=query.error,
        headers=headers,
        key=query.key,
        since_ms=query.since_ms,
        until_ms=query.until_ms,
    )


def _view(letter: DeadLetter, encoding: Encoding) -> LetterView:
    shown = content(letter.key, letter.value, letter.headers, encoding, letter.value_bytes)
    return view_of(LetterView, letter, timestamp_ms=letter.timestamp_us // 1000, **shown)


def _as_text(name: str, text: str) -> str:
    try:
        return from_header(name, text).decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"header {name[:100]!r} is not text: a replay sets headers to text only") from None
