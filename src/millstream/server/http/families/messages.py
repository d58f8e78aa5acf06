"""Messages over HTTP: publishing them, looking at them, following them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from starlette.responses import Response

from millstream.entries import AnyEntry
from millstream.errors import InvalidArgument, MillstreamError, PartitionNotFound, UnsupportedMediaType
from millstream.server.http.endpoints import Exchange, Family, decode_with
from millstream.server.http.following import Follower
from millstream.server.http.incoming import ShownMessage, shown
from millstream.server.http.outgoing import (
    AddressedMessage,
    FsyncQuery,
    NewMessage,
    PublishQuery,
    cloud_event,
    entries_of,
    media_type,
    raw_message,
    trace_headers,
)
from millstream.server.http.problems import Problem, describe
from millstream.server.http.streaming import LineStream, own_session
from millstream.server.publishing import Receipt, publish
from millstream.values import Encoding
from millstream.wire import calls, message_calls
from millstream.wire.messages import FSYNC_POLICIES

__all__ = ["family"]

family = Family("messages", "Publish messages, look at them without consuming them, and follow them as they come.")

Whole = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
TimeMs = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999)]

_HEARTBEAT_MS: Final = 15_000
_one_or_many: Final = msgspec.json.Decoder(NewMessage | list[NewMessage])
_lines: Final = msgspec.json.Decoder(NewMessage)
_addressed: Final = msgspec.json.Decoder(list[AddressedMessage])
_addressed_lines: Final = msgspec.json.Decoder(AddressedMessage)
_NDJSON: Final = ("application/x-ndjson", "application/jsonl", "application/ndjson")
_FORM: Final = "application/x-www-form-urlencoded"
_MULTI_STATUS: Final = 207
_UNSUPPORTED: Final = 415


class Outcome(msgspec.Struct, omit_defaults=True):
    """What became of one message when not all of them were stored: one of the two."""

    receipt: Receipt | None = None
    error: Problem | None = None


# --- publishing --------------------------------------------------------------------------------------------------


@family.post(
    "/topics/{topic}/messages",
    permission="produce",
    query=PublishQuery,
    body=bytes,
    described_body=NewMessage | list[NewMessage],
    answer=list[Receipt],
    also={
        _MULTI_STATUS: ("Some messages were stored and some were not.", list[Outcome]),
        _UNSUPPORTED: ("The content type of the body is that of forms.", Problem),
    },
)
async def publish_messages(exchange: Exchange[PublishQuery, bytes]) -> Any:
    """Publish one message or many, and wait until they are stored.

    The body is a message, a list of messages, or (`application/x-ndjson`) one message per line. With any other content
    type, the body is the value as it is, and everything else is given in the query. Only the content type of forms is
    refused, because `curl -d` and others use it for anything. With `ce-id` and the other headers of a CloudEvent in
    binary mode, the body is the data of the event, and its attributes become headers of the message.

    The topic is created if it is missing and the broker may create it. `traceparent` and `tracestate` of the request
    become headers of messages that have none. The messages for one partition are stored as a whole or not at all.

    The answer has one receipt per message, in their order. It is an error if nothing was stored, and 207 if some
    partitions took their messages and others did not.
    """
    now_us = exchange.broker.now_us()
    query, headers = exchange.query, exchange.headers.raw
    extra, kind = trace_headers(headers), media_type(headers)
    event = cloud_event(headers, query)
    if event is not None:
        attributes, query = event
        entries, partitions = raw_message(exchange.body, query, now_us=now_us, extra=[*attributes, *extra])
    elif kind == "application/json":
        query.check_alone()
        one_or_many = decode_with(_one_or_many.decode, exchange.body, kind=_one_or_many.type)
        messages = one_or_many if isinstance(one_or_many, list) else [one_or_many]
        entries, partitions = entries_of(messages, now_us=now_us, extra=extra)
    elif kind in _NDJSON:
        query.check_alone()
        messages = decode_with(_lines.decode_lines, exchange.body, kind=list[NewMessage])
        entries, partitions = entries_of(messages, now_us=now_us, extra=extra)
    elif kind == _FORM:
        # Most often it is JSON, sent by somebody who would not notice that it was stored as a text.
        raise UnsupportedMediaType(
            f"the body is said to be {_FORM}, which is what `curl -d` says of anything: "
            "for JSON add -H 'Content-Type: application/json'"
        )
    else:
        entries, partitions = raw_message(exchange.body, query, now_us=now_us, extra=extra)
    return _answer(exchange, await _store(exchange, exchange.path["topic"], entries, partitions, now_us))


@family.post(
    "/messages",
    permission="produce",
    query=FsyncQuery,
    body=bytes,
    described_body=list[AddressedMessage],
    answer=list[Receipt],
    also={_MULTI_STATUS: ("Some messages were stored and some were not.", list[Outcome])},
)
async def publish_to_topics(exchange: Exchange[FsyncQuery, bytes]) -> Any:
    """Publish messages to several topics: each message names its `topic`.

    The body is a list, or (`application/x-ndjson`) one message per line. Everything else is as when publishing to one
    topic. A topic that cannot be published to does not affect the messages for other topics.
    """
    now_us = exchange.broker.now_us()
    headers = exchange.headers.raw
    decode = _addressed_lines.decode_lines if media_type(headers) in _NDJSON else _addressed.decode
    messages = decode_with(decode, exchange.body, kind=list[AddressedMessage])
    entries, partitions = entries_of(messages, now_us=now_us, extra=trace_headers(headers))
    places: dict[str, list[int]] = {}
    for place, message in enumerate(messages):
        places.setdefault(message.topic, []).append(place)
    results: list[Receipt | MillstreamError | None] = [None] * len(messages)
    for topic, its in places.items():
        wanted = None if partitions is None else [partitions[place] for place in its]
        try:
            stored = await _store(exchange, topic, [entries[place] for place in its], wanted, now_us)
        except MillstreamError as error:
            stored = [error] * len(its)
        for place, result in zip(its, stored, strict=True):
            results[place] = result
    return _answer(exchange, results)  # type: ignore[arg-type]


async def _store(
    exchange: Exchange[Any, Any],
    topic: str,
    entries: Sequence[AnyEntry],
    partitions: Sequence[int | None] | None,
    now_us: int,
) -> list[Receipt | MillstreamError]:
    broker, session = exchange.broker, exchange.session
    fsync = FSYNC_POLICIES.index(exchange.query.fsync)
    results = await publish(broker, session, topic, entries, partitions=partitions, fsync=fsync, now_us=now_us)
    broker.flow.session_closed(session)  # a request is no publisher that could be told to slow down
    return results


def _answer(exchange: Exchange[Any, Any], results: Sequence[Receipt | MillstreamError]) -> Any:
    failed = [result for result in results if isinstance(result, MillstreamError)]
    if not failed:
        return results
    if len(failed) == len(results):
        raise failed[0]
    outcomes = [
        Outcome(error=describe(result, exchange.request_id))
        if isinstance(result, MillstreamError)
        else Outcome(receipt=result)
        for result in results
    ]
    return Response(msgspec.json.encode(outcomes), status_code=_MULTI_STATUS, media_type="application/json")


# --- looking -----------------------------------------------------------------------------------------------------


class BrowseQuery(msgspec.Struct, forbid_unknown_fields=True):
    #: Without it, all partitions, merged by the time when messages were stored.
    partition: int | None = None
    #: From this offset on, in every partition.
    offset: Whole | None = None
    #: When they were stored: from this time on, and before that one.
    from_ms: TimeMs = 0
    until_ms: TimeMs = 0
    key: str | None = None
    #: `name`, or `name=value`.
    header: str = ""
    #: Contained in the value.
    text: str = ""
    newest_first: bool = False
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 50
    #: The `after` of an earlier answer.
    after: str = ""
    #: How much of each value to show.
    value_bytes: Annotated[int, msgspec.Meta(ge=0, le=message_calls.WHOLE_VALUES)] = message_calls.WHOLE_VALUES
    encoding: Encoding = "auto"
    #: When there is nothing to show, wait this long for something to come.
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 0


class ShownPage(msgspec.Struct):
    messages: list[ShownMessage]
    #: Where to go on: the parameter `after` of the next request; empty = everything was looked at.
    after: str
    #: The same for a later request that is to show what has come meanwhile; empty with `newest_first`.
    tail: str


class EncodingQuery(msgspec.Struct, forbid_unknown_fields=True):
    encoding: Encoding = "auto"


@family.get("/topics/{topic}/messages", query=BrowseQuery, answer=ShownPage)
async def browse_messages(exchange: Exchange[BrowseQuery, None]) -> ShownPage:
    """Look at messages without consuming them.

    All conditions that are given must hold. A request looks through the topic for about a second. If `after` in the
    answer is not empty, there is more to look through.

    Values are shown as JSON if they are JSON objects or lists, as text if they are UTF-8, and otherwise as base64; or
    as the parameter `encoding` says. The `encoding` of each message says which it is.
    """
    query = exchange.query
    call = message_calls.BrowseMessages(
        topic=exchange.path["topic"],
        partition=query.partition,
        offset=query.offset,
        from_ms=query.from_ms,
        until_ms=query.until_ms,
        key=None if query.key is None else query.key.encode(),
        header=query.header,
        text=query.text,
        newest_first=query.newest_first,
        limit=query.limit,
        after=query.after,
        value_bytes=query.value_bytes,
        wait_ms=query.wait_ms,
    )
    asked = exchange.call(call)
    page: message_calls.MessagePage = await (exchange.wait_for(asked) if query.wait_ms else asked)
    return ShownPage([shown(message, query.encoding) for message in page.messages], page.after, page.tail)


@family.get("/messages/{id}", query=EncodingQuery, answer=ShownMessage)
async def find_message(exchange: Exchange[EncodingQuery, None]) -> ShownMessage:
    """Show the message with an id, even one that is scheduled and not due yet."""
    message = await exchange.call(message_calls.FindMessage(id=exchange.path["id"]))
    return shown(message, exchange.query.encoding)


# --- following ---------------------------------------------------------------------------------------------------


class StreamQuery(msgspec.Struct, forbid_unknown_fields=True):
    #: Without it, all partitions.
    partition: int | None = None
    #: One of these says where to begin. Without any, it begins at the end: only new messages are sent.
    offset: Whole | None = None
    from_ms: TimeMs | None = None
    earliest: bool = False
    after: str = ""
    encoding: Encoding = "auto"
    #: End after this many messages; 0 = never.
    limit: Whole = 0
    #: How long there is silence before a line says that all is well.
    heartbeat_ms: Annotated[int, msgspec.Meta(ge=100, le=3_600_000)] = _HEARTBEAT_MS


@family.get(
    "/topics/{topic}/stream",
    query=StreamQuery,
    answer=ShownMessage,
    media_type="application/x-ndjson",
)
async def stream_messages(exchange: Exchange[StreamQuery, None]) -> LineStream:
    """Follow a topic: one line of JSON per message, for as long as the connection lasts.

    Messages of one partition come in order. While there are none, lines such as `{"heartbeat_ms":…,"after":"0:17"}`
    come; a new connection with this `after` misses nothing. If the broker has to end the stream, the last line says
    why, as `{"error":{…}}`.
    """
    query, topic = exchange.query, exchange.path["topic"]
    if sum((query.offset is not None, query.from_ms is not None, query.earliest, bool(query.after))) > 1:
        raise InvalidArgument("begin at one place: offset, from_ms, earliest or after")
    [metadata] = await exchange.call(calls.Metadata(topics=[topic]))
    count = len(metadata.partition_uids)
    if query.partition is not None and not 0 <= query.partition < count:  # what is scheduled has numbers beyond it
        raise PartitionNotFound(f"topic {topic!r} has partitions 0 to {count - 1}, not {query.partition}")
    lines = _followed(exchange, metadata.partition_uids, await _start(exchange, topic))
    await anext(lines)  # who may have no connection more is told so before anything is sent
    return LineStream(exchange, lines)


async def _followed(
    exchange: Exchange[StreamQuery, None], uids: Sequence[int], starts: Mapping[int, int]
) -> AsyncGenerator[bytes, None]:
    query, topic = exchange.query, exchange.path["topic"]
    with own_session(exchange, lambda why: follower.end(why)) as session:
        follower = Follower(exchange.broker, session, topic, uids, starts, encoding=query.encoding)
        yield b""
        async with aclosing(follower.lines(limit=query.limit, heartbeat_ms=query.heartbeat_ms)) as pieces:
            async for piece in pieces:
                yield piece


async def _start(exchange: Exchange[StreamQuery, None], topic: str) -> dict[int, int]:
    """Where to begin in each partition."""
    query = exchange.query
    call = calls.ListOffsets(topic=topic, partitions=None if query.partition is None else [query.partition])
    if query.from_ms is not None:
        call.at, call.timestamp_ms = "timestamp", query.from_ms
    elif query.earliest or query.after or query.offset is not None:
        call.at = "earliest"
    entries: list[calls.OffsetEntry] = await exchange.call(call)
    starts = {entry.partition: max(entry.offset, query.offset or 0) for entry in entries}
    for number, offset in message_calls.parse_cursor(query.after).items():
        if number in starts:
            starts[number] = max(starts[number], offset)
    return starts
