"""Finding traces: records by topic, key, trace and time, and messages that were never recorded as all went well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from millstream.broker.messages.messages import Messages
from millstream.broker.registry import Topic
from millstream.broker.topics import Topics
from millstream.broker.traces.recorder import Recorder
from millstream.clock import Clock
from millstream.errors import InvalidArgument, MessageNotFound
from millstream.ids import MessagePlace, message_id, schedule_uid
from millstream.traceparent import TRACEPARENT, check_trace_id, context_of, own_trace_id
from millstream.traces.records import Record, Search, marker
from millstream.wire import trace_calls as calls
from millstream.wire.message_calls import BrowseMessages, MessageInfo

__all__ = ["Finder"]

#: How long one call looks through records before it answers with what it has.
_WORK_MS: Final = 1_000
_PAGE_MAX: Final = 1_000
_DIGITS_MAX: Final = 15
#: In front of a position that is one in the topic itself.
_TOPIC: Final = "m"

_Places = dict[bytes, tuple[Topic, int]]


class _Host(Protocol):
    topics: Topics
    messages: Messages


class Finder:
    def __init__(self, host: _Host, recorder: Recorder, *, clock: Clock) -> None:
        self._host = host
        self._recorder = recorder
        self._clock = clock

    async def find(self, namespace: str, call: calls.FindTraces) -> calls.TracePage:
        _check(call)
        trace = check_trace_id(call.trace_id) if call.trace_id else None
        places = self._places(namespace, call.topic)
        own = _own_place(trace, places)
        if call.after.startswith(_TOPIC) and _goes_on_in_topic(call):
            return await self._in_topic(namespace, call, own, call.after[1:], call.limit)
        await self._recorder.flush()
        page = await self._in_records(call, _search(call, trace, own, places), places)
        if not page.after and _goes_on_in_topic(call):
            left = call.limit - len(page.events)
            if left <= 0:
                page.after = _TOPIC
            else:
                more = await self._in_topic(namespace, call, own, "", left)
                page.events += more.events
                page.after = more.after
        return page

    def _places(self, namespace: str, name: str) -> _Places:
        """Where the messages of a topic, or of all, are or wait."""
        registry = self._host.topics.registry
        topics = [registry.get(namespace, name)] if name else registry.matching(namespace, None)
        places: _Places = {}
        for topic in topics:
            for number, uid in enumerate(topic.partition_uids):
                places[marker(uid)] = places[marker(schedule_uid(uid))] = (topic, number)
        return places

    # --- records -------------------------------------------------------------------------------------------------

    async def _in_records(self, call: calls.FindTraces, search: Search, places: _Places) -> calls.TracePage:
        end, skipped = _parse(call.after, self._recorder.store.end)
        events: list[calls.TraceEvent] = []
        began_ms = self._clock.monotonic_ms()
        async for position, found in self._recorder.store.backward(search, end):
            for offset, record in found:
                skip = skipped if offset == end - 1 else 0
                rows = list(_rows(record, search, places))
                room = call.limit - len(events)
                events += rows[skip : skip + room]
                if len(events) == call.limit:
                    # The cursor names the record to go on with, and how much of it was shown.
                    return calls.TracePage(events=events, after=f"{offset + 1}.{skip + room}")
            if self._clock.monotonic_ms() - began_ms > _WORK_MS:
                return calls.TracePage(events=events, after=f"{position}.0")
        return calls.TracePage(events=events)

    # --- the topic -----------------------------------------------------------------------------------------------

    async def _in_topic(
        self, namespace: str, call: calls.FindTraces, own: MessagePlace | None, after: str, limit: int
    ) -> calls.TracePage:
        """Messages of a topic with a key or trace, whatever has become of them."""
        if own is not None:
            return calls.TracePage(events=await self._untraced(namespace, call, own))
        browse = BrowseMessages(
            topic=call.topic,
            from_ms=call.from_ms,
            until_ms=call.until_ms,
            key=call.key,
            header=TRACEPARENT if call.trace_id else "",
            newest_first=True,
            limit=limit,
            after=after,
            value_bytes=0,
        )
        page = await self._host.messages.browse(namespace, browse)
        events = [_stored(message) for message in page.messages]
        wanted = call.trace_id.lower()
        found = [event for event in events if wanted in ("", event.trace_id)]
        return calls.TracePage(events=found, after=_TOPIC + page.after if page.after else "")

    async def _untraced(self, namespace: str, call: calls.FindTraces, own: MessagePlace) -> list[calls.TraceEvent]:
        """The message that a trace of its own belongs to, unless other conditions say no."""
        name = message_id(own.append_time_ms * 1000, own.partition_uid, own.offset)
        try:
            event = _stored(await self._host.messages.find(namespace, name))
        except MessageNotFound:
            return []
        holds = (
            # Otherwise it came with another trace, or is what a schedule has become.
            event.trace_id == call.trace_id.lower()
            and call.key in (None, event.key)
            and event.time_ms >= call.from_ms
            and not 0 < call.until_ms <= event.time_ms
        )
        return [event] if holds else []


def _check(call: calls.FindTraces) -> None:
    if not 1 <= call.limit <= _PAGE_MAX:
        raise InvalidArgument(f"limit must be between 1 and {_PAGE_MAX}, not {call.limit}")
    for name in ("from_ms", "until_ms"):
        if not 0 <= getattr(call, name) < 1 << 50:
            raise InvalidArgument(f"{name} is a time in milliseconds since 1970, not {getattr(call, name)}")
    if call.key is not None and not call.topic:
        raise InvalidArgument("a key means something within a topic: name the topic, too")


def _goes_on_in_topic(call: calls.FindTraces) -> bool:
    return bool(call.topic and (call.key is not None or call.trace_id) and not call.failures_only)


def _own_place(trace: bytes | None, places: _Places) -> MessagePlace | None:
    """Where the message of a trace is, if it came without one: then it has one of its own, which says so."""
    if trace is None or trace[6:10] not in places:
        return None
    return MessagePlace(int.from_bytes(trace[:6]), int.from_bytes(trace[6:10]), int.from_bytes(trace[10:]))


def _search(call: calls.FindTraces, trace: bytes | None, own: MessagePlace | None, places: _Places) -> Search:
    return Search(
        places=frozenset(places) if own is None else frozenset((marker(own.partition_uid),)),
        offset=None if own is None else own.offset,
        key=call.key,
        trace=trace if own is None else None,
        from_ms=call.from_ms,
        until_ms=call.until_ms,
        failures_only=call.failures_only,
    )


def _rows(record: Record, search: Search, places: _Places) -> Iterator[calls.TraceEvent]:
    """A record, as one line for each of its messages that is known by name and one for all others."""
    topic, number = places[record.place]
    uid = int.from_bytes(record.place)
    for subject in search.subjects(record):
        name = message_id(subject.append_ms * 1000, uid, subject.offset)
        trace_id = subject.trace.hex() if subject.trace is not None else own_trace_id(name)
        yield _row(record, topic, number, name, subject.offset, trace_id, subject.key)
    others = search.others(record)
    if others > 0:
        yield _row(record, topic, number, "", record.base, "", None, messages=others)


def _row(
    record: Record,
    topic: Topic,
    number: int,
    name: str,
    offset: int,
    trace_id: str,
    key: bytes | None,
    messages: int = 1,
) -> calls.TraceEvent:
    return calls.TraceEvent(
        id=name,
        topic=topic.name,
        partition=number,
        offset=offset,
        kind=record.kind,
        time_ms=record.time_ms,
        trace_id=trace_id,
        key=key,
        group=record.group,
        consumer=record.consumer,
        error=record.error,
        note=record.note,
        link=record.link,
        messages=messages,
    )


def _stored(message: MessageInfo) -> calls.TraceEvent:
    context = context_of(message.headers)
    return calls.TraceEvent(
        id=message.id,
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        kind="scheduled" if message.deliver_at_ms else "stored",
        time_ms=message.append_time_ms,
        trace_id=context.trace_id if context is not None else own_trace_id(message.id),
        key=message.key,
    )


def _parse(after: str, end: int) -> tuple[int, int]:
    """Where to go on: before which record, and how much of the last of those was shown."""
    if not after:
        return end, 0
    numbers = after.split(".")
    if len(numbers) != 2 or not all(n.isascii() and n.isdecimal() and len(n) <= _DIGITS_MAX for n in numbers):
        raise InvalidArgument(f"after={after[:80]!r} is not what a call of this family has answered")
    return min(int(numbers[0]), end), int(numbers[1])
