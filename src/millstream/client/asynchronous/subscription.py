"""The asynchronous subscription.  It reads ahead a little, then stops reading until that is handed out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from millstream.client.address import Target
from millstream.client.asynchronous.connection import AsyncConnection, AsyncLink
from millstream.client.messages import Message
from millstream.client.subscribing import RECEIVE_BYTES, Subscribing
from millstream.errors import ConnectionLost, MillstreamError
from millstream.wire.frames import FrameType
from millstream.wire.subscription_calls import Subscribed

__all__ = ["AsyncSubscription"]

#: Received and not handed out; beyond it the socket is left alone.
_AHEAD_BYTES_MAX: Final = RECEIVE_BYTES


class AsyncSubscription(Subscribing):
    """An endless sequence of messages; `async for message in subscription`.  For one task at a time."""

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
        self._link.on_push = self._on_push
        self._link.listen(self._ring)
        self._connection: AsyncConnection | None = None
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
        """The next message; None when none comes within `timeout_s` (None waits forever) or after `close`."""
        if not self._has_pending and not await self._advance(timeout_s):
            return None
        return next(self._pending)

    async def batches(self) -> AsyncIterator[list[Message]]:
        """Messages in lists, each from one partition: less work per message."""
        while True:
            if messages := list(self._pending):
                yield messages
            if not await self._advance(self._timeout_s):
                return

    async def _advance(self, wait_s: float | None) -> bool:
        """Make sure that there is a message to hand out; False when none came in time."""
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        await asyncio.sleep(0)  # messages that are there already must not keep everybody else waiting
        while not self._closed:
            if self._ready:
                self._pending = iter(self._ready.popleft())
                if not self._ready:
                    self._ahead_bytes = 0
                    if self._connection is not None:
                        self._connection.resume_reading()
                return True
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            remaining_s = 1.0 if deadline_s is None else deadline_s - time.monotonic()
            if remaining_s <= 0:
                return False
            await self._wait(min(1.0, remaining_s))
        return False

    async def _wait(self, wait_s: float) -> None:
        self._arrived.clear()
        deadline_s = time.monotonic() + wait_s
        if self._connection is None or not self._connection.usable:
            try:
                await self._subscribe(deadline_s)
            except ConnectionLost:
                return
            self.reconnects += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
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
        """Subscribe.  Raises what the broker has against it."""
        await self._link.open()
        await self._subscribe(time.monotonic() + self._target.timeout_s)

    async def _subscribe(self, deadline_s: float) -> None:
        connection = await self._link.get(deadline_s)
        number, timeout_s = self._link.next_correlation(), self._target.timeout_s
        try:
            await connection.call(number, self._call(), Subscribed, timeout_s=timeout_s)
        except BaseException:
            connection.close()  # it may be subscribed: asking again on it would double every message
            raise
        self._connection = connection

    # --- end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Unsubscribe and end the iteration."""
        if self._closed:
            return
        self._closed = True
        self._link.forget(self._ring)
        self._link.close()
        self._ring()

    async def __aenter__(self) -> AsyncSubscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
