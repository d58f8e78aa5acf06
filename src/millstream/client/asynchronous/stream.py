"""The asynchronous stream.  Each partition has at most one answer waiting and one fetch under way."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import operator
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from millstream.client.address import Target
from millstream.client.asynchronous.connection import AsyncConnection, AsyncLink
from millstream.client.commits import CommitTicket
from millstream.client.membership import Membership
from millstream.client.messages import Message, TopicPartition
from millstream.client.metadata import FETCH_WAIT_MS, METADATA_AGE_S, Place
from millstream.client.reading import Reading
from millstream.client.settings import StreamSettings
from millstream.errors import ConnectionLost, MillstreamError, RequestError, RequestTimeout
from millstream.names import is_pattern
from millstream.wire import calls
from millstream.wire.messages import encode_fetch

__all__ = ["AsyncStream"]

_log = logging.getLogger("millstream.client")

_SILENCE_S: Final = FETCH_WAIT_MS / 1000 + 15
_COMMIT_S: Final = 10.0


class AsyncStream(Reading):
    """An endless sequence of messages; `async for message in stream`.  See `Stream` for what is promised.

    For one task at a time.
    """

    def __init__(
        self, target: Target, settings: StreamSettings, call: Callable[[calls.Call, Any], Awaitable[Any]]
    ) -> None:
        super().__init__(settings)
        self._target = target
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._link = AsyncLink(target, receive_bytes=settings.max_bytes + 64 * 1024)
        self._link.listen(self._ring)
        self._connection: AsyncConnection | None = None
        self._arrived = asyncio.Event()
        self._failure: MillstreamError | None = None
        self._heard_s = 0.0
        self._topics: list[str] = []

    async def open(self) -> None:
        """Find the topics, join the group.  Raises TopicNotFound, or what the group has against us."""
        names = [topic for topic in self._settings.topics if not is_pattern(topic)]
        if names:
            self._learn(await self._call(*self._metadata_lookup(names)))
        if self._settings.group is not None:
            await self._join()
            return
        for pattern in filter(is_pattern, self._settings.topics):
            found: list[calls.TopicInfo] = await self._call(calls.ListTopics(pattern=pattern), list[calls.TopicInfo])
            names += [info.name for info in found if info.name not in names]
        self._topics = names
        await self._look_up_topics()

    async def _join(self) -> None:
        me, loop = weakref.ref(self), self._loop

        def on_change() -> None:
            def tell() -> None:
                stream = me()
                if stream is not None:
                    stream._attention = True
                    stream._ring()

            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell)

        def finished() -> dict[TopicPartition, int] | None:
            stream = me()
            return None if stream is None or loop.is_closed() else stream.finished()

        self._membership = Membership(self._target, self._settings, on_change=on_change, finished=finished)
        self._membership.start()
        try:
            await asyncio.to_thread(self._membership.wait_joined, self._target.timeout_s)
        except BaseException:
            await self.close()
            raise
        self._attention = True

    async def _look_up_topics(self) -> None:
        self._looked_up_s = time.monotonic()
        if not self._topics:
            return
        self._learn(await self._call(*self._metadata_lookup(self._topics)))
        new = [place for place in self._all_places(self._topics) if self._positions.get(place) is None]
        if new:
            await self._take(set(new))

    # --- reading -------------------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages as they come, until `close`, or until none came for `timeout_s`."""
        while True:
            for message in self._pending:
                self._last = message
                yield message
                if self._attention:
                    break
            if not await self._advance(self._settings.timeout_s):
                return

    async def next(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None when none comes within `timeout_s` (None waits forever) or the stream is closed."""
        ready = not self._attention and operator.length_hint(self._pending)
        if not ready and not await self._advance(timeout_s):
            return None
        self._last = message = next(self._pending)
        return message

    async def batches(self) -> AsyncIterator[list[Message]]:
        """Messages in lists, each from one partition: less work per message.  A whole list is in hand at a time."""
        while True:
            if not self._attention and (messages := list(self._pending)):
                self._last = None
                yield messages
            if not await self._advance(self._settings.timeout_s):
                return

    async def _advance(self, wait_s: float | None) -> bool:
        """Make sure that there is a message to hand out; False when none came in time."""
        self._finish()
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        # A loop over messages that are there already never gives way by itself; once per handout the others get a turn.
        await asyncio.sleep(0)
        while not self._closed:
            if self._attention:
                await self._attend()
            if operator.length_hint(self._pending):
                return True
            if self._ready:
                handout = self._ready.popleft()
                self._begin(handout)
                self._request()  # travels while this handout is being handled
                if handout.damage is not None:
                    raise handout.damage
                if not handout.messages:
                    self._finish()
                continue
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            remaining_s = 1.0 if deadline_s is None else deadline_s - time.monotonic()
            if remaining_s <= 0 and wait_s:
                return False
            await self._fetch(max(0.0, remaining_s))
            if remaining_s <= 0 and not self._ready:
                return False
        return False

    async def _fetch(self, wait_s: float) -> None:
        """Have fetches under way, then wait until something arrives, or a moment has passed."""
        self._arrived.clear()
        if not await self._connected(wait_s):
            return
        if self._membership is None and time.monotonic() - self._looked_up_s > METADATA_AGE_S:
            await self._look_up_topics()
        self._request()
        if not self._ready and self._failure is None and not self._attention:
            await self._wait(wait_s)
        if gone := self._out_of_range():
            lookups = [(call, kind) for call, kind in self._lookups(gone) if isinstance(call, calls.ListOffsets)]
            self._restart([await self._call(call, kind) for call, kind in lookups])

    async def _wait(self, wait_s: float) -> None:
        retry_ms = self._positions.next_retry_ms(_now_ms())
        if retry_ms is not None:
            wait_s = min(wait_s, max(0.001, retry_ms / 1000))
        try:
            async with asyncio.timeout(min(wait_s, 1.0)):
                await self._arrived.wait()
        except TimeoutError:
            silent = self._positions.fetching and time.monotonic() - self._heard_s > _SILENCE_S
            if silent and self._connection is not None:
                self._connection.close()

    def _ring(self) -> None:
        self._arrived.set()

    def _request(self) -> None:
        connection = self._connection
        if connection is None or not connection.usable:
            return
        requests = self._positions.requests(_now_ms())
        if requests:
            self._heard_s = time.monotonic()
            for correlation, _ in requests:
                connection.expect(correlation, self._on_answer)
            connection.send(*[encode_fetch(request, correlation) for correlation, request in requests])

    def _on_answer(self, correlation: int, answer: memoryview | ConnectionLost) -> None:
        """Runs inside the connection's callback: the bytes are only valid here."""
        if isinstance(answer, ConnectionLost):
            return
        self._heard_s = time.monotonic()
        try:
            fetched = self._positions.accept(correlation, answer, _now_ms())
            if fetched is not None:
                fetched.position.queued = True
                self._ready.append(self._positions.decode(fetched))
            else:
                self._request()
        except MillstreamError as error:
            self._failure = self._failure or error
        if self._ready or self._failure is not None or self._out_of_range():
            self._ring()

    async def _connected(self, wait_s: float) -> bool:
        connection = self._connection
        if connection is not None and connection.usable:
            return True
        if connection is not None:
            connection.close()
            self._connection = None
            self._positions.disconnected()
        try:
            async with asyncio.timeout(max(0.25, wait_s)):
                self._connection = await self._link.get(None)
        except TimeoutError:
            return False
        self._heard_s = time.monotonic()
        return True

    # --- the group -----------------------------------------------------------------------------------------------

    async def _attend(self) -> None:
        """Do what the group asks, between two messages."""
        changes = self._look_up_group()
        if changes is None:
            return
        if changes.lost:
            self._lose(changes.lost)
            await _tell(self._settings.on_revoked, sorted(changes.lost), True)
        if changes.give_up:
            await self._commit_finished(changes.give_up)
            await _tell(self._settings.on_revoked, sorted(changes.give_up), False)
            self._release(changes.give_up)
        if changes.take:
            await self._take(changes.take)

    async def _take(self, places: set[TopicPartition]) -> None:
        try:
            unknown = self._unknown_topics(places)
            if unknown:
                self._learn(await self._call(*self._metadata_lookup(unknown)))
            answers = [await self._call(call, kind) for call, kind in self._lookups(places)]
        except RequestError as error:
            if self._membership is None:
                raise
            _log.warning("stream: cannot begin with %s: %s", sorted(places), error)  # the topic is being deleted
            return
        self._add(self._starts(places, answers))
        if self._membership is not None:
            self._membership.took(places, self._epoch)
        await _tell(self._settings.on_assigned, sorted(places))

    async def _commit_finished(self, places: set[TopicPartition]) -> None:
        if not self._settings.commits_itself:
            return
        offsets = {place: offset for place, offset in self.finished().items() if place in places}
        try:
            await self._commit(offsets, min(_COMMIT_S, self._target.timeout_s))
        except MillstreamError as error:
            _log.warning("stream: progress could not be committed, messages will be delivered again: %s", error)

    async def _commit(self, offsets: dict[TopicPartition, int], timeout_s: float) -> None:
        assert self._membership is not None
        loop = self._loop
        done: asyncio.Future[None] = loop.create_future()

        def finish(error: MillstreamError | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def on_done(ticket: CommitTicket) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish, ticket.error)

        self._membership.commit(offsets, on_done)
        try:
            async with asyncio.timeout(timeout_s):
                await done
        except TimeoutError:
            raise RequestTimeout(f"the commit was not confirmed within {timeout_s:g} s") from None

    # --- what users do -------------------------------------------------------------------------------------------

    async def commit(self, message: Message | None = None) -> None:
        """Commit everything handed out, or everything up to and including a message of its partition.

        Waits for the broker.  Raises StaleGeneration or UnknownMember when the partition has moved to another member.
        """
        offsets = self._to_commit(message)
        if offsets:
            await self._commit(offsets, self._target.timeout_s)
            self._note_commit(offsets)

    async def seek(self, topic: str, partition: int, to: Place) -> None:
        """Go on from another place: an offset, a datetime, "earliest" or "latest"."""
        place = TopicPartition(topic, partition)
        lookup = self._seek_lookup(place, to)
        if lookup is None:
            assert type(to) is int
            self._move(self._known(place), to, explicit=True)
        else:
            (entry,) = await self._call(*lookup)
            self._move(self._known(place), entry.offset, explicit=False)

    async def close(self) -> None:
        """Commit what is finished (commit="auto"), leave the group, end the iteration."""
        if self._closed:
            return
        membership = self._membership
        places = self._positions.places
        try:
            if membership is not None and places and membership.failure is None:
                await self._commit_finished(places)
                await _tell(self._settings.on_revoked, sorted(places), False)
        finally:
            self._closed = True
            if membership is not None:
                await asyncio.to_thread(membership.stop)
            self._link.forget(self._ring)
            self._link.close()
            self._ring()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        self._closed = True
        if self._membership is not None:
            if self._settings.commits_itself:
                self._membership.commit(self.finished())
            self._membership.stop(wait_s=0)
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._link.close)


async def _tell(callback: Callable[..., Any] | None, *arguments: object) -> None:
    """Call a user's function, which may be a coroutine function."""
    if callback is not None:
        result = callback(*arguments)
        if inspect.isawaitable(result):
            await result


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
