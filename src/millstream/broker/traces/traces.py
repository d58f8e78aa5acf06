"""What has happened to messages, found again: the passport of one, and the traces of many.

A passport is put together when somebody asks for it.  When a message was stored is in the log, when it was due in the
log of schedules, how often an unsettled one has failed in the ledgers of its groups, how a dead one died in its letter;
only the rest is in the records of the trace store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from millstream.broker.letters.letters import Letters
from millstream.broker.messages.messages import Messages
from millstream.broker.registry import Topic
from millstream.broker.schedules.schedules import Schedules
from millstream.broker.topics import Topics
from millstream.broker.traces.find import Finder
from millstream.broker.traces.recorder import Recorder
from millstream.clock import Clock, clock_text
from millstream.dead_letters import DEAD_LETTER_GROUP, DeadLetter
from millstream.errors import InvalidArgument, MessageNotFound, ScheduleNotFound
from millstream.ids import MessagePlace, parse_message_id, schedule_uid
from millstream.options import SCHEDULED_ID
from millstream.queues.letters import REPLAYED_FROM, dead_letter_topic
from millstream.queues.records import Whereabouts
from millstream.traceparent import context_of, own_trace_id
from millstream.traces.passport import Event, Passport, attempt_events, record_events
from millstream.traces.records import Search, marker
from millstream.wire import trace_calls as calls
from millstream.wire.message_calls import BrowseMessages, MessageInfo

if TYPE_CHECKING:
    from millstream.broker.broker import Session
    from millstream.broker.queues.queues import Queues

__all__ = ["Traces"]

#: How long records are looked through for one passport.
_WORK_MS: Final = 5_000
#: Clocks differ, and a time in an id is cut to milliseconds.
_EARLIER_MS: Final = 1_000
_UNRECORDED: Final = "when, and by whom, was not recorded: of what goes well only a sample is"


class _Host(Protocol):
    topics: Topics
    queues: Queues
    letters: Letters
    schedules: Schedules
    messages: Messages


class Traces:
    """The calls of the family `trace`."""

    def __init__(self, host: _Host, recorder: Recorder, *, clock: Clock) -> None:
        self._host = host
        self._recorder = recorder
        self._clock = clock
        self._finder = Finder(host, recorder, clock=clock)

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {
            calls.ShowPassport: lambda session, call: self.passport(session.namespace, call.id),
            calls.FindTraces: lambda session, call: self._finder.find(session.namespace, call),
        }

    async def passport(self, namespace: str, text: str) -> calls.PassportInfo:
        """Everything that is known to have happened to a message.  Raises MessageNotFound when nothing is."""
        place = parse_message_id(text)
        text = text.upper()
        registry = self._host.topics.registry
        found = registry.place_of(place.partition_uid)
        scheduled = found is None
        found = found or registry.place_of(schedule_uid(place.partition_uid))
        if found is None or found[0].namespace != namespace:
            raise MessageNotFound(f"no topic of namespace {namespace!r} has a message {text}")
        topic, number = found
        passport = Passport()
        info = calls.PassportInfo(
            id=text,
            topic=topic.name,
            partition=number,
            offset=place.offset,
            trace_id=own_trace_id(text),
            key=None,
            events=[],
            complete=await self._add_records(passport, place),
        )
        if scheduled:
            await self._add_schedule(passport, namespace, info)
        else:
            origin = await self._add_message(passport, namespace, info, place)
            self._add_groups(passport, topic, number, place.offset)
            await self._add_letters(passport, topic, info, origin)
        info.events = [
            calls.PassportEvent(
                kind=event.kind,
                time_ms=event.time_ms,
                group=event.group,
                consumer=event.consumer,
                error=event.error,
                note=event.note,
                link=event.link,
            )
            for event in passport.events()
        ]
        return info

    async def _add_records(self, passport: Passport, place: MessagePlace) -> bool:
        """What was recorded; False when that was too much to look through."""
        await self._recorder.flush()
        search = Search(
            places=frozenset((marker(place.partition_uid),)),
            offset=place.offset,
            from_ms=max(0, place.append_time_ms - _EARLIER_MS),
        )
        began_ms = self._clock.monotonic_ms()
        events: list[Event] = []
        complete = True
        async for records in self._recorder.store.forward(search):
            events += [event for record in records for event in record_events(record)]
            if self._clock.monotonic_ms() - began_ms > _WORK_MS:
                complete = False
                break
        passport.add(events)
        return complete

    # --- messages ------------------------------------------------------------------------------------------------

    async def _add_message(
        self, passport: Passport, namespace: str, info: calls.PassportInfo, place: MessagePlace
    ) -> str:
        """What the log says.  Of a dead letter, returns the id of the message that it was made of."""
        message: MessageInfo | None = None
        with suppress(MessageNotFound):
            message = await self._host.messages.find(namespace, info.id)
        if message is None:
            if not passport.events():
                raise MessageNotFound(f"no message has the id {info.id}; retention may have removed it")
            passport.add([Event("stored", place.append_time_ms, note="it is not stored any more")])
            return ""
        info.key = message.key
        context = context_of(message.headers)
        if context is not None:
            info.trace_id = context.trace_id
        passport.add(self._beginnings(message))
        with suppress(MessageNotFound):
            letter = await self._host.letters.show(namespace, info.id)
            if letter.original_id != letter.id:
                note = f"this is the dead letter of that message; reason {letter.reason}"
                died = Event(
                    "dead_lettered",
                    letter.dead_ms,
                    group=letter.group,
                    error=letter.error,
                    note=note,
                    link=letter.original_id,
                )
                passport.add([died])
                passport.add(_history(letter))
                return letter.original_id
        return ""

    def _beginnings(self, message: MessageInfo) -> Iterator[Event]:
        headers = {name: content.decode("utf-8", "replace") for name, content in message.headers}
        stored_ms = message.append_time_ms
        schedule = headers.get(SCHEDULED_ID, "")
        if schedule:
            yield Event("scheduled", _time_of(schedule, stored_ms), link=schedule)
            yield Event("fired", stored_ms, note="its time had come")
        if headers.get(REPLAYED_FROM):
            yield Event("replayed", stored_ms, note="out of this dead letter", link=headers[REPLAYED_FROM])
        note = ""
        if message.timestamp_ms > stored_ms:
            note = f"by its producer's clock at {clock_text(message.timestamp_ms)}"
        yield Event("published", min(message.timestamp_ms, stored_ms), note=note)
        yield Event("stored", stored_ms, note=f"{message.topic}/{message.partition} at offset {message.offset}")

    def _add_groups(self, passport: Passport, topic: Topic, number: int, offset: int) -> None:
        """What the queue groups of the topic know of it now."""
        events: list[Event] = []
        for group in self._host.queues.registry.on_topic(topic):
            if group.name == DEAD_LETTER_GROUP and not group.opened:
                continue  # that is how the broker keeps dead letters
            part = group.part(number)
            where = part.ledger.look(offset, part.end)
            for attempt in where.history.attempts:
                events += attempt_events(
                    attempt.kind,
                    group.name,
                    attempt.consumer,
                    attempt.delivered_us // 1000,
                    attempt.ended_us // 1000,
                    attempt.reason,
                )
            events += self._present(passport, group.name, where)
        passport.add(events)

    def _present(self, passport: Passport, group: str, where: Whereabouts) -> Iterator[Event]:
        """Where it is now, and how it ended if nobody has recorded that."""
        attempts = where.history.attempts
        if where.lease is not None:
            lease = where.lease
            note = f"until {clock_text(lease.deadline_us // 1000)}"
            yield Event("leased", lease.granted_us // 1000, group=group, consumer=lease.consumer, note=note)
        elif where.state == "waiting" and attempts:
            note = f"it is tried again at {clock_text(where.due_us // 1000)}"
            yield Event("waiting", attempts[-1].ended_us // 1000, group=group, note=note)
        # That it was purged is not to be had from here: a ledger says so of everything below, acked before or not.
        elif where.ending in ("acked", "expired", "evicted") and not passport.has(
            "acked", "expired", "evicted", "purged", group=group
        ):
            kind: Any = where.ending
            yield Event(kind, passport.last_ms, group=group, note=_UNRECORDED if kind == "acked" else "")
        elif where.ending == "dead" and not passport.has("dead_lettered", group=group):
            yield Event("dead_lettered", passport.last_ms, group=group, note=where.reason)

    async def _add_letters(self, passport: Passport, topic: Topic, info: calls.PassportInfo, origin: str) -> None:
        """What the dead letters of the message say, also of those that a crash has kept from being recorded."""
        died = [event for event in passport.events() if event.kind == "dead_lettered"]
        for event in died:
            if origin and event.link == origin:
                continue  # the letter is this one
            letter = await self._letter(topic, info, event)
            if letter is not None:
                event.link, event.time_ms = letter.id, letter.dead_ms
                event.error, event.note = letter.error, letter.reason
                passport.add(_history(letter))

    async def _letter(self, topic: Topic, info: calls.PassportInfo, event: Event) -> DeadLetter | None:
        letters, namespace = self._host.letters, topic.namespace
        with suppress(MessageNotFound):
            if event.link:
                return await letters.show(namespace, event.link)
            name = dead_letter_topic(topic.name, topic.config.dead_letter_topic)
            if self._host.topics.registry.find(namespace, name) is not None:
                call = BrowseMessages(
                    topic=name,
                    from_ms=parse_message_id(info.id).append_time_ms,
                    header=f"millstream-dead-id={info.id}",
                    limit=100,
                )
                page = await self._host.messages.browse(namespace, call)
                for message in page.messages:
                    letter = await letters.show(namespace, message.id)
                    if letter.group == event.group:
                        return letter
        return None

    # --- schedules -----------------------------------------------------------------------------------------------

    async def _add_schedule(self, passport: Passport, namespace: str, info: calls.PassportInfo) -> None:
        """What the log of schedules knows of a message that was published before its time."""
        try:
            schedule = await self._host.schedules.show(namespace, info.id)
        except ScheduleNotFound:
            if not passport.events():
                raise MessageNotFound(f"no message has the id {info.id}") from None
            return
        published_ms = schedule.published_ms or parse_message_id(info.id).append_time_ms
        info.key = schedule.key
        context = context_of(schedule.headers)
        if context is not None:
            info.trace_id = context.trace_id
        events = [Event("published", min(schedule.timestamp_ms or published_ms, published_ms))]
        due = f"for {clock_text(schedule.moved_from_ms or schedule.due_ms)}" if schedule.due_ms else ""
        events.append(Event("scheduled", published_ms, note=due))
        if schedule.moved_from_ms and not passport.has("moved"):
            events.append(Event("moved", published_ms, note=f"to {clock_text(schedule.due_ms)}"))
        if schedule.state in ("cancelled", "expired") and not passport.has(schedule.state):
            events.append(Event(schedule.state, max(passport.last_ms, published_ms)))
        if schedule.state == "fired":
            message = await self._host.messages.fired(namespace, schedule)
            fired = [] if message is None else [Event("fired", message.append_time_ms, link=message.id)]
            events += fired or [Event("fired", max(passport.last_ms, published_ms))]
        passport.add(events)


def _history(letter: DeadLetter) -> Iterator[Event]:
    for attempt in letter.attempts:
        yield from attempt_events(
            attempt.kind, letter.group, attempt.consumer, attempt.delivered_ms, attempt.ended_ms, attempt.reason
        )


def _time_of(text: str, otherwise_ms: int) -> int:
    try:
        return parse_message_id(text).append_time_ms
    except InvalidArgument:  # headers are anybody's to write
        return otherwise_ms
