"""The asynchronous stream.  Each partition has at most one answer waiting and one fetch under way.

When much waits to be handed out, the socket is left alone until half of it is: partitions may be many.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import operator
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from millstream.client.address import Target
from millstream.client.asynchronous.connection import AsyncConnection, AsyncLink
from millstream.client.asynchronous.weak import weakly
from millstream.client.backoff import Backoff
from millstream.client.commits import CommitTicket, Progress
from millstream.client.following import Following
from millstream.client.membership import Membership
from millstream.client.messages import Message, TopicPartition
from millstream.client.metadata import FETCH_WAIT_MS, Place
from millstream.client.settings import StreamSettings
from millstream.clock import monotonic_ms
from millstream.errors import ConnectionLost, MillstreamError, RequestTimeout
from millstream.wire import calls
from millstream.wire.messages import encode_fetch

__all__ = ["AsyncStream"]

_SILENCE_S: Final = FETCH_WAIT_MS / 1000 + 15
#: Received and not handed out; beyond it nothing more is read.
_AHEAD_BYTES_MAX: Final = 8 * 1024 * 1024


class AsyncStream(Following):
    """An endless sequence of messages: `async for message in stream`.  See `Stream` for what is promised.

    Use it in one task at a time.
    """

    def __init__(
        self, target: Target, settings: StreamSettings, call: Callable[[calls.Call, Any], Awaitable[Any]]
    ) -> None:
        super().__init__(target, settings)
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._link = AsyncLink(target, receive_bytes=settings.max_bytes + 64 * 1024)
        self._on_trouble = weakly(self._ring)
        self._on_answer = weakly(self._answered)
        self._link.listen(self._on_trouble)
        self._connection: AsyncConnection | None = None
        self._backoff = Backoff()
        self._arrived = asyncio.Event()
        self._ahead_bytes = 0
        self._is_reading = True
        self._failure: MillstreamError | None = None
        self._heard_s = 0.0

    async def open(self) -> None:
        """Find the topics and join the group.  Raises TopicNotFound, or the error with which the group refuses."""
        if self._settings.group is not None:
            await self._find_topics()
            await self._join()
            return
        try:
            # Connected first: whatever becomes of the broker after it was asked, it costs us this connection.
            try:
                await self._link.open()
            except MillstreamError as error:
                if not error.retriable:
                    raise
            self._connection = self._link.current
            if self._connection is not None:
                self._reached(self._connection.welcome.epoch)
            await self._find_topics()
        except BaseException:
            await self.close()
            raise
        if self._connection is None:
            self._disconnected()

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

        def progress() -> Progress | None:
            stream = me()
            return None if stream is None or loop.is_closed() else stream._progress()

        self._membership = Membership(self._target, self._settings, on_change=on_change, progress=progress)
        self._membership.start()
        try:
            await asyncio.to_thread(self._membership.wait_joined, self._target.timeout_s)
        except BaseException:
            self._membership.stop(wait_s=0)  # at once: who waits for it keeps a thread busy, which others may need
            await self.close()
            raise
        self._attention = True

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
        """The next message, or None if none comes within `timeout_s` (None waits forever) or the stream is closed."""
        ready = not self._attention and operator.length_hint(self._pending)
        if not ready and not await self._advance(timeout_s):
            return None
        self._last = message = next(self._pending)
        return message

    async def batches(self) -> AsyncIterator[list[Message]]:
        """Iterate over lists of messages, each from one partition, which is less work per message.

        A whole list is in hand at a time.
        """
        while True:
            if not self._attention and (messages := list(self._pending)):
                self._last = None
                yield messages
            if not await self._advance(self._settings.timeout_s):
                return

    async def _advance(self, wait_s: float | None) -> bool:
        """Make sure that there is a message to hand out; False when none came in time."""
        self._finish()
        self._link.check_loop()
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        # A loop over messages that are there already never gives way by itself; once per handout the others get a turn.
        await asyncio.sleep(0)
        while not self._closed:
            if not self._attention_in_s() and not await self._attended():
                return False
            if operator.length_hint(self._pending):
                return True
            if self._ready:
                handout = self._begin()
                self._ahead_bytes -= handout.size
                self._read_on()
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
            await self._fetch(max(0.0, min(remaining_s, self._attention_in_s())))
            if remaining_s <= 0 and not self._ready:
                return False
        return False

    async def _fetch(self, wait_s: float) -> None:
        """Have fetches under way, then wait until something arrives, or a moment has passed."""
        self._arrived.clear()
        if not await self._connected(wait_s):
            return
        self._read_on()
        if not self._look_up_in_s():
            await self._look_up_again()
        self._request()
        if not self._ready and self._failure is None and not self._attention:
            await self._wait(wait_s)
        if gone := self._out_of_range():
            await self._restart(gone)

    async def _wait(self, wait_s: float) -> None:
        retry_ms = self._positions.next_retry_ms(monotonic_ms())
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
        requests = self._requests()
        if requests:
            self._heard_s = time.monotonic()
            for correlation, _ in requests:
                connection.expect(correlation, self._on_answer)
            connection.send(*[encode_fetch(request, correlation) for correlation, request in requests])

    def _answered(self, correlation: int, answer: memoryview | ConnectionLost) -> None:
        """Runs inside the connection's callback: the bytes are only valid here."""
        if isinstance(answer, ConnectionLost):
            return
        self._heard_s = time.monotonic()
        try:
            fetched = self._positions.accept(correlation, answer, monotonic_ms())
            if fetched is not None:
                fetched.position.queued = True
                self._ready.append(handout := self._positions.decode(fetched))
                self._ahead_bytes += handout.size
                if self._ahead_bytes > _AHEAD_BYTES_MAX and self._connection is not None:
                    self._is_reading = False
                    self._connection.pause_reading()
            else:
                self._request()
        except MillstreamError as error:
            self._failure = self._failure or error
        if self._ready or self._failure is not None or self._out_of_range():
            self._ring()

    def _read_on(self) -> None:
        """Read again, if enough of what waited was handed out or given back."""
        if not self._ready:
            self._ahead_bytes = 0
        if not self._is_reading and self._ahead_bytes <= _AHEAD_BYTES_MAX // 2:
            self._is_reading = True
            self._heard_s = time.monotonic()  # until now it was we who did not listen
            if self._connection is not None:
                self._connection.resume_reading()

    async def _connected(self, wait_s: float) -> bool:
        connection = self._connection
        if connection is not None and connection.usable:
            return True
        if connection is not None:
            connection.close()
            self._connection = None
            self._disconnected()
        try:
            async with asyncio.timeout(max(0.25, wait_s)):
                self._connection = await self._link.get(None)
        except TimeoutError:
            return False
        except MillstreamError as error:
            if self._closed:  # meanwhile, by another task
                return False
            if not error.retriable:
                raise
            await self._pause(min(max(0.25, wait_s), self._backoff.next_s()))
            return False
        self._backoff.reset()
        self._heard_s = time.monotonic()
        self._reached(self._connection.welcome.epoch)
        return True

    async def _pause(self, wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._arrived.wait()

    # --- how to wait (see following.py) ------------------------------------------------------------------------------

    async def _ask(self, call: calls.Call, kind: Any) -> Any:
        return await self._call(call, kind)

    async def _tell(self, callback: Callable[..., Any] | None, *arguments: object) -> None:
        if callback is not None:
            result = callback(*arguments)
            if inspect.isawaitable(result):
                await result

    async def _commit(self, offsets: dict[TopicPartition, int], epoch: int | None, timeout_s: float) -> None:
        assert self._membership is not None
        loop = self._loop
        done: asyncio.Future[None] = loop.create_future()

        def finish(error: MillstreamError | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def on_done(ticket: CommitTicket) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish, ticket.error)

        self._membership.commit(offsets, self._holdings(offsets), epoch, on_done)
        try:
            async with asyncio.timeout(timeout_s):
                await done
        except TimeoutError:
            raise RequestTimeout(f"the commit was not confirmed within {timeout_s:g} s") from None

    # --- what users do -------------------------------------------------------------------------------------------

    async def commit(self, message: Message | None = None) -> None:
        """Commit everything handed out, or `message` and everything before it in its partition.

        Waits for the broker.  Raises StaleGeneration or UnknownMember if the partition has moved to another member,
        even if it has come back since the message was read.
        """
        offsets = self._to_commit(message)
        if offsets:
            self._note_commit(offsets)  # first: an automatic commit may follow before this task runs again
            await self._commit(offsets, self._epoch_of(message), self._target.timeout_s)

    async def seek(self, topic: str, partition: int, to: Place) -> None:
        """Continue from another place: an offset, a datetime, "earliest" or "latest"."""
        await self._seek(TopicPartition(topic, partition), to)

    async def close(self) -> None:
        """Commit what is finished (commit="auto"), leave the group, and end the iteration."""
        if self._closed or self._closing:  # by another one, or by whom we tell that its partitions go
            return
        self._closing = True
        try:
            await self._let_go()
        finally:
            self._closed = self._attention = True  # what is left of the handout is for others
            self._link.forget(self._on_trouble)
            self._link.close()
            self._ring()
            if self._membership is not None:  # last of all: whoever is cancelled meanwhile leaves nothing open
                await asyncio.to_thread(self._membership.stop)

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
                epoch, finished = self._progress()
                self._membership.commit(finished, self._holdings(finished), epoch)
            self._membership.stop(wait_s=0)
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._link.close)
