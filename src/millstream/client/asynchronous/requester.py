"""Requests and replies of the asynchronous client, over the connection it has anyway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from millstream.client.asynchronous.connection import AsyncConnection, AsyncLink
from millstream.client.messages import Message, Receipt, TopicPartition, receipt
from millstream.client.requests import Inbox
from millstream.errors import ConnectionLost, MillstreamError, RequestTimeout, ShuttingDown, TopicNotFound
from millstream.wire.messages import decode_publish_result, encode_publish_head
from millstream.wire.subscription_calls import OpenInbox, Subscribed

__all__ = ["AsyncRequester"]


class AsyncRequester:
    """The requests of one client."""

    def __init__(self, link: AsyncLink, reply: Callable[..., Any]) -> None:
        self._link = link
        self._reply = reply
        self._inbox = Inbox()
        #: The connection on which the inbox is open.
        self._open_on: AsyncConnection | None = None
        self._lock = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._reopening: asyncio.Task[None] | None = None
        link.listen(self._on_trouble)

    @property
    def late(self) -> int:
        return self._inbox.late

    async def request(
        self,
        send: Callable[[Mapping[str, str | bytes]], Awaitable[object]],
        headers: Mapping[str, str | bytes] | None,
        timeout_s: float,
    ) -> Message:
        """Send with headers that ask for a reply, then wait for it.  Raises RequestTimeout."""
        number = self._inbox.next_number()
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self._open(time.monotonic() + timeout_s)
                await send(self._inbox.headers(number, headers))
                return await future
        except TimeoutError:
            raise RequestTimeout(f"no reply came within {timeout_s:g} s") from None
        finally:
            del self._waiting[number]
            if not future.cancel() and not future.cancelled():
                future.exception()  # of one that ended before anybody came to wait for it

    async def reply(self, address: str, batch: tuple[bytes, bytes], timeout_s: float) -> Receipt | None:
        """Send a reply to somebody's inbox; None when that is gone."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            connection = await self._link.get(deadline_s)
            number = self._link.next_correlation()
            head = encode_publish_head(
                address.encode(), 0, acks=1, fsync=0, batch_size=sum(map(len, batch)), correlation=number
            )
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline_s - time.monotonic()):
                    answer = await connection.exchange(number, head, *batch)
                result = decode_publish_result(memoryview(answer))
                return receipt(TopicPartition(address, 0), 0, result)
            except TopicNotFound:
                return None
            except TimeoutError:
                raise RequestTimeout(f"the reply was not taken within {timeout_s:g} s") from None
            except (ConnectionLost, ShuttingDown):
                connection.goaway = True  # not for new requests
                if time.monotonic() >= deadline_s:
                    raise

    async def _open(self, deadline_s: float) -> None:
        """Make sure that replies arrive."""
        if self._open_on is not None and self._open_on is self._link.current:
            return
        async with self._lock:
            connection = await self._link.get(deadline_s)
            if connection is not self._open_on:
                call = OpenInbox(address=self._inbox.address)
                remaining_s = max(0.001, deadline_s - time.monotonic())
                await connection.call(self._link.next_correlation(), call, Subscribed, timeout_s=remaining_s)
                self._open_on = connection

    def _on_trouble(self) -> None:
        """The connection is lost: whoever waits still wants replies."""
        if self._waiting and (self._reopening is None or self._reopening.done()):
            self._reopening = asyncio.get_running_loop().create_task(self._reopen())

    async def _reopen(self) -> None:
        while self._waiting:
            try:
                await self._open(time.monotonic() + 1.0)
                return
            except (ConnectionLost, RequestTimeout):
                if self._link.closed:
                    break
            except MillstreamError:
                break
        self._fail("the connection is lost, and with it the replies")

    def _fail(self, why: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionLost(why))

    def take(self, payload: memoryview) -> None:
        """Hand a DELIVERY to whoever waits for it."""
        for number, message in self._inbox.replies(payload, self._reply):
            future = self._waiting.get(number)
            if future is None or future.done():
                self._inbox.late += 1
            else:
                future.set_result(message)

    async def close(self) -> None:
        self._link.forget(self._on_trouble)
        self._fail("the client is closed")
        if self._reopening is not None:
            self._reopening.cancel()
            await asyncio.wait((self._reopening,))  # who is cancelled himself meanwhile hears of it
