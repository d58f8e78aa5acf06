"""Messages at rest: browsing a topic, and finding the message that an id speaks of.

Nothing here changes anything.  Topics are looked through in the log itself, all partitions merged by the time their
batches were stored; there is no index that could disagree with the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Final, Protocol

from millstream.broker.messages.filters import MessageFilter, Row, row_at
from millstream.broker.messages.reading import Backward, Forward, Reader
from millstream.broker.registry import Topic
from millstream.broker.schedules.schedules import Schedules
from millstream.broker.topics import Topics
from millstream.clock import Clock
from millstream.errors import InvalidArgument, MessageNotFound, PartitionNotFound, ScheduleNotFound
from millstream.headers import readable_headers
from millstream.ids import message_id, parse_message_id
from millstream.options import SCHEDULED_ID
from millstream.slicing import batches_of
from millstream.wire import message_calls as calls
from millstream.wire.schedule_calls import ScheduleInfo

if TYPE_CHECKING:
    from millstream.broker.broker import Session

__all__ = ["Messages"]

#: How long one call looks through messages before it answers with what it has.
_WORK_MS: Final = 1_000
#: An answer must fit a frame, with room for base 64 and headers.
_PAGE_BYTES_MAX: Final = 4 * 1024 * 1024
_PAGE_MESSAGES_MAX: Final = 1_000
_WAIT_MS_MAX: Final = 60_000
#: Read at a time, shared by the partitions that are read side by side.
_READ_BYTES: Final = 256 * 1024
_READ_BYTES_MIN: Final = 8 * 1024
_ALL_READS_BYTES: Final = 4 * 1024 * 1024


class _Host(Protocol):
    topics: Topics
    schedules: Schedules


class Messages:
    """All messages of the broker, to be looked at."""

    def __init__(self, host: _Host, *, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self._host = host
        self._clock = clock
        self._loop = loop

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {
            calls.BrowseMessages: lambda session, call: self.browse(session.namespace, call),
            calls.FindMessage: lambda session, call: self.find(session.namespace, call.id),
        }

    # --- browsing ------------------------------------------------------------------------------------------------

    async def browse(self, namespace: str, call: calls.BrowseMessages) -> calls.MessagePage:
        _check(call)
        topic = self._host.topics.registry.get(namespace, call.topic)
        search = _Search(self._host.topics, topic, call, self._clock)
        deadline_ms = self._clock.monotonic_ms() + min(call.wait_ms, _WAIT_MS_MAX)
        while True:
            page = await search.page()
            left_ms = deadline_ms - self._clock.monotonic_ms()
            if page.messages or page.after or not page.tail or call.until_ms or left_ms <= 0:
                return page
            await self._news(topic, search, left_ms)

    async def _news(self, topic: Topic, search: _Search, wait_ms: int) -> None:
        """Wait until something is stored behind where a search ended."""
        answered: asyncio.Future[Any] = self._loop.create_future()

        def reply(answer: object) -> None:
            if not answered.done():
                answered.set_result(answer)

        handles = []
        try:
            for number, offset in search.positions().items():
                handles.append(self._host.topics.partition_of(topic, number).fetch(offset, 1, wait_ms, reply))
                if answered.done():
                    break
            answer = await answered
        finally:
            for handle in filter(None, handles):
                handle.cancel()
        if isinstance(answer, Exception):
            raise answer

    # --- finding -------------------------------------------------------------------------------------------------

    async def find(self, namespace: str, text: str) -> calls.MessageInfo:
        """The message that an id speaks of.  Raises MessageNotFound."""
        place = parse_message_id(text)
        found = self._host.topics.registry.place_of(place.partition_uid)
        if found is None:
            return await self._find_scheduled(namespace, text)
        topic, number = found
        if topic.namespace == namespace and not self._host.topics.is_untouched(topic, number):
            partition = self._host.topics.partition_of(topic, number)
            await partition.warm(max(place.offset, partition.log.start_offset))
            if partition.log.start_offset <= place.offset < partition.high_watermark:
                chunk = partition.log.read(place.offset, 1, before=partition.high_watermark)
                for batch in batches_of(chunk.buffers):
                    row = row_at(batch, place.offset)
                    if row is not None:
                        message = _info(row, topic, number, batch.append_time_us, calls.WHOLE_VALUES)
                        if message.id == text.upper():
                            return message
        raise MessageNotFound(f"no message has the id {text}; retention may have removed it")

    async def _find_scheduled(self, namespace: str, text: str) -> calls.MessageInfo:
        try:
            scheduled = await self._host.schedules.show(namespace, text)
        except ScheduleNotFound:
            raise MessageNotFound(f"no message has the id {text}") from None
        if scheduled.state == "fired" and (message := await self.fired(namespace, scheduled)) is not None:
            return message
        if scheduled.state not in ("pending", "firing"):
            raise MessageNotFound(f"the message {text} was scheduled, and is {scheduled.state} now")
        return calls.MessageInfo(
            id=scheduled.id,
            topic=scheduled.topic,
            partition=scheduled.partition,
            offset=scheduled.offset,
            key=scheduled.key,
            value=scheduled.value,
            size=len(scheduled.value or b""),
            headers=scheduled.headers,
            timestamp_ms=scheduled.timestamp_ms,
            append_time_ms=scheduled.published_ms,
            priority=scheduled.priority,
            expiry_ms=scheduled.expiry_ms,
            deliver_at_ms=scheduled.due_ms,
        )

    async def fired(self, namespace: str, schedule: ScheduleInfo) -> calls.MessageInfo | None:
        """What a schedule has become, if it is still there."""
        # A schedule that was moved and has fired has forgotten where to: it may have been before its first time.
        for from_ms in (schedule.due_ms, parse_message_id(schedule.id).append_time_ms):
            call = calls.BrowseMessages(
                topic=schedule.topic,
                partition=schedule.partition,
                from_ms=from_ms,
                header=f"{SCHEDULED_ID}={schedule.id}",
                limit=1,
                value_bytes=calls.WHOLE_VALUES,
            )
            page = await self.browse(namespace, call)
            if page.messages:
                return page.messages[0]
        return None


class _Search:
    """One call on its way through the partitions of a topic."""

    def __init__(self, topics: Topics, topic: Topic, call: calls.BrowseMessages, clock: Clock) -> None:
        self._topics = topics
        self._topic = topic
        self._call = call
        self._clock = clock
        self._filter = MessageFilter(call)
        self._numbers = range(len(topic.partitions)) if call.partition is None else (call.partition,)
        if call.partition is not None and not 0 <= call.partition < len(topic.partitions):
            last = len(topic.partitions) - 1
            raise PartitionNotFound(f"topic {topic.name!r} has partitions 0 to {last}, not {call.partition}")
        self._after = parse_cursor(call.after, self._numbers)
        self._readers: dict[int, Reader] = {}

    def positions(self) -> dict[int, int]:
        """Where to go on in each partition."""
        untouched = {} if self._call.newest_first else dict.fromkeys(self._numbers, 0)
        return untouched | self._after | {number: reader.position for number, reader in self._readers.items()}

    async def page(self) -> calls.MessagePage:
        """The next messages that match."""
        call, found, size = self._call, list[calls.MessageInfo](), 0
        began_ms = self._clock.monotonic_ms()
        await self._open()
        waiting: list[tuple[int, int]] = []
        for number in self._readers:
            await self._line_up(waiting, number)
        heapify(waiting)
        while waiting:
            number = heappop(waiting)[1]
            reader = self._readers[number]
            batch = await reader.peek()
            if batch is None:
                continue  # retention was faster
            wanted = batch.append_time_us >= call.from_ms * 1000
            for row in self._filter.rows(batch, reverse=call.newest_first) if wanted else ():
                if reader.covers(row.offset):
                    reader.passed(row.offset)
                    found.append(_info(row, self._topic, number, batch.append_time_us, call.value_bytes))
                    size += len(found[-1].value or b"")
                    if len(found) == call.limit or size > _PAGE_BYTES_MAX:
                        return self._page(found, more=True)
            reader.drop()
            if self._clock.monotonic_ms() - began_ms > _WORK_MS:
                return self._page(found, more=True)
            # Others first: looking through a million messages is nobody's emergency.
            await asyncio.sleep(0)
            await self._line_up(waiting, number)
        return self._page(found, more=False)

    def _page(self, found: list[calls.MessageInfo], *, more: bool) -> calls.MessagePage:
        cursor = calls.cursor_text(self.positions())
        return calls.MessagePage(
            messages=found, after=cursor if more else "", tail="" if self._call.newest_first else cursor
        )

    async def _open(self) -> None:
        """Have a reader for each partition that was ever used; looking at a topic does not make files."""
        topics, topic, call = self._topics, self._topic, self._call
        numbers = [number for number in self._numbers if not topics.is_untouched(topic, number)]
        read_bytes = max(_READ_BYTES_MIN, min(_READ_BYTES, _ALL_READS_BYTES // max(1, len(numbers))))
        for number in numbers:
            if number in self._readers:
                continue
            await asyncio.sleep(0)  # opening takes a moment; others go first

            def locate(number: int = number) -> Any:
                return topics.partition_of(topic, number)

            partition = locate()
            first = max(call.offset or 0, partition.log.start_offset)
            if call.from_ms:
                first = max(first, partition.log.offset_at_time(call.from_ms * 1000))
            if call.newest_first:
                end = partition.high_watermark
                if call.until_ms:
                    end = min(end, partition.log.offset_at_time(call.until_ms * 1000))
                end = min(end, self._after.get(number, end))
                self._readers[number] = Backward(locate, end, first, read_bytes)
            else:
                self._readers[number] = Forward(locate, max(first, self._after.get(number, 0)), read_bytes)

    async def _line_up(self, waiting: list[tuple[int, int]], number: int) -> None:
        """Put a partition where its next batch belongs."""
        batch = await self._readers[number].peek()
        if batch is None:
            return
        time_us = batch.append_time_us
        if self._call.newest_first:
            heappush(waiting, (-time_us, number))
        elif not self._call.until_ms or time_us < self._call.until_ms * 1000:
            heappush(waiting, (time_us, number))


def parse_cursor(text: str, numbers: range | tuple[int]) -> dict[int, int]:
    offsets = calls.parse_cursor(text)
    for number in offsets:
        if number not in numbers:
            raise InvalidArgument(
                f"after={text[:80]!r} speaks of partition {number}, which is not among those asked for"
            )
    return offsets


def _info(row: Row, topic: Topic, number: int, append_us: int, value_bytes: int) -> calls.MessageInfo:
    value = row.value
    return calls.MessageInfo(
        id=message_id(append_us, topic.partition_uids[number], row.offset),
        topic=topic.name,
        partition=number,
        offset=row.offset,
        key=row.key,
        value=value and value[:value_bytes],
        size=len(value or b""),
        headers=readable_headers(row.raw_headers),
        timestamp_ms=row.timestamp_us // 1000,
        append_time_ms=append_us // 1000,
        priority=row.priority,
        expiry_ms=row.expiry_us // 1000,
    )


def _check(call: calls.BrowseMessages) -> None:
    if not 1 <= call.limit <= _PAGE_MESSAGES_MAX:
        raise InvalidArgument(f"limit must be between 1 and {_PAGE_MESSAGES_MAX}, not {call.limit}")
    for name in ("offset", "from_ms", "until_ms", "value_bytes", "wait_ms"):
        if (getattr(call, name) or 0) < 0:
            raise InvalidArgument(f"{name} must not be negative, it is {getattr(call, name)}")
    if call.wait_ms and call.newest_first:
        raise InvalidArgument("what is to come is newer than anything: wait_ms goes with the oldest first")
