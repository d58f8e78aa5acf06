"""The asynchronous subscription.  It reads ahead a little, then stops reading until that is handed out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from millstream.client.address import Target
from millstream.client.asynchronous.connection import AsyncConnection, AsyncLink
from millstream.client.asynchronous.weak import beginning, weakly
from millstream.client.backoff import Backoff
from millstream.client.messages import Message
from millstream.client.subscribing import RECEIVE_BYTES, Subscribing
from millstream.errors import ConnectionLost, MillstreamError, RequestTimeout
from millstream.wire.frames import FrameType
from millstream.wire.subscription_calls import Subscribed

__all__ = ["AsyncSubscription"]

#: Received and not handed out; beyond it the socket is left alone.
_AHEAD_BYTES_MAX: Final = RECEIVE_BYTES


class AsyncSubscription(Subscribing):
    """An endless sequence of messages: `async for message in subscription`.

    Use it in one task at a time.
    """

    def __init__(
        self,
        target: Target,
        patterns: tuple[str, ...],
        *,
        timeout_s: float | None,
        reply: Callable[..., Any] | None,
    ) -> None:
        super().__init__(patterns, timeout_s=timeout_s, reply=reply)
        self._target = target
        self._link = AsyncLink(target, receive_bytes=RECEIVE_BYTES)
        self._loop = asyncio.get_running_loop()
        self._on_trouble = weakly(self._ring)
        self._link.on_push = weakly(self._on_push)
        self._link.listen(self._on_trouble)
        self._connection: AsyncConnection | None = None
        self._opening = beginning(self, self._link)
        self._backoff = Backoff()
        self._retry_at_s = 0.0
        self._arrived = asyncio.Event()
        self._ahead_bytes = 0
        self._failure: MillstreamError | None = None

    # --- reading -------------------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages as they come, until `close`, or until none came for `timeout_s`."""
        while True:
            for message in self._pending:
                yield message
            if not await self._advance(self._timeout_s):
                return

    async def next(self, timeout_s: float | None = None) -> Message | None:
        """The next message, or None if none comes within `timeout_s` (None waits forever) or after `close`."""
        if not self._has_pending and not await self._advance(timeout_s):
            return None
        return next(self._pending)

    async def batches(self) -> AsyncIterator[list[Message]]:
        """Iterate over lists of messages, each from one partition, which is less work per message."""
        while True:
            if messages := list(self._pending):
                yield messages
            if not await self._advance(self._timeout_s):
                return

    async def _advance(self, wait_s: float | None) -> bool:
        """Make sure that there is a message to hand out; False when none came in time."""
        self._link.check_loop()
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        await asyncio.sleep(0)  # messages that are there already must not keep everybody else waiting
        looked = False
        while not self._closed:
            if self._ready:
                self._current = self._ready.popleft()
                self._pending = iter(self._current)
                if not self._ready:
                    self._ahead_bytes = 0
                    if self._connection is not None:
                        self._connection.resume_reading()
                return True
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            remaining_s = 1.0 if deadline_s is None else deadline_s - time.monotonic()
            if remaining_s <= 0 and looked:
                return False
            looked = True
            await self._wait(max(0.0, min(1.0, remaining_s)))
        return False

    async def _wait(self, wait_s: float) -> None:
        self._arrived.clear()
        deadline_s = time.monotonic() + wait_s
        await self._connected(wait_s)
        until_s = deadline_s if self._is_subscribed else min(deadline_s, self._retry_at_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                await self._arrived.wait()

    def _on_push(self, kind: int, payload: memoryview) -> None:
        """Runs inside the connection's callback: the bytes are only valid here."""
        if kind != FrameType.DELIVERY:
            return
        try:
            self._ahead_bytes += self._take(payload)
        except MillstreamError as error:
            self._failure = self._failure or error
        if self._ahead_bytes > _AHEAD_BYTES_MAX and self._link.current is not None:
            self._link.current.pause_reading()
        self._ring()

    def _ring(self) -> None:
        self._arrived.set()

    # --- connection ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Subscribe.  Raises the error with which the broker refuses."""
        await self._link.open()
        await self._begin(await self._link.get(time.monotonic() + self._target.timeout_s))

    @property
    def _is_subscribed(self) -> bool:
        return self._connection is not None and self._connection.usable

    async def _connected(self, wait_s: float) -> None:
        """Subscribe again, with growing pauses, if the connection was lost."""
        if self._is_subscribed or time.monotonic() < self._retry_at_s:
            return
        try:
            await self._opening.result(max(0.25, wait_s))
        except TimeoutError:
            return  # it goes on
        except MillstreamError as error:
            if not error.retriable and not isinstance(error, ConnectionLost | RequestTimeout):
                raise
            self._retry_at_s = time.monotonic() + self._backoff.next_s()
        else:
            self._backoff.reset()

    async def _begin(self, connection: AsyncConnection) -> None:
        number, timeout_s = self._link.next_correlation(), self._target.timeout_s
        try:
            await connection.call(number, self._call(), Subscribed, timeout_s=timeout_s)
        except BaseException:
            connection.close()  # it may be subscribed: asking again on it would double every message
            raise
        if self._connection is not None:
            self.reconnects += 1
        self._connection = connection

    # --- end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Unsubscribe and end the iteration."""
        if self._closed:
            return
        self._closed = True
        self._current.clear()
        self._opening.cancel()
        self._link.forget(self._on_trouble)
        self._link.close()
        self._ring()

    async def __aenter__(self) -> AsyncSubscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or self._loop.is_closed():
            return
        self._closed = True
        link, opening = self._link, self._opening

        def end() -> None:
            opening.cancel()
            link.close()

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(end)
