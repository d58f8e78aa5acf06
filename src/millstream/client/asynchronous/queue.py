"""The asynchronous queue.  The event loop takes in what comes, says what has lingered and makes leases longer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final

from millstream.client.address import Target
from millstream.client.asynchronous.arrivals import Arrivals
from millstream.client.asynchronous.connection import AsyncConnection, AsyncLink
from millstream.client.asynchronous.weak import beginning, weakly
from millstream.client.backoff import Backoff
from millstream.client.leases import AsyncQueueMessage, Lease, QueueMessage, delay_ms
from millstream.client.leasing import LEASE_MESSAGES_MAX, LEASE_WAIT_MS, Frame, Leasing, QueueStats, Ticket
from millstream.client.queue_requests import open_call, uids_of
from millstream.client.settings import QueueSettings
from millstream.client.settling import raise_refused
from millstream.clock import monotonic_ms
from millstream.durations import Duration, parse_ms
from millstream.errors import ConnectionLost, InvalidArgument, MillstreamError, ReceiptInvalid, RequestTimeout
from millstream.wire import calls, queue_calls
from millstream.wire.leases import Settle, Settled

__all__ = ["AsyncQueue"]

_log = logging.getLogger("millstream.client")

_SILENCE_S: Final = LEASE_WAIT_MS / 1000 + 15
_CLOSE_S: Final = 5.0


class AsyncQueue:
    """The messages of a queue group: `async for message in queue`.  See `Queue` for what is promised.

    `next` and `lease` may be called in several tasks, and messages settled in any of them.  Messages may also be
    settled in threads, unless they wait for the answer.
    """

    def __init__(
        self, target: Target, settings: QueueSettings, call: Callable[[calls.Call, Any], Awaitable[Any]]
    ) -> None:
        self.group = settings.group
        self._target = target
        self._settings = settings
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._link = AsyncLink(target, receive_bytes=settings.max_bytes + 64 * 1024)
        self._on_trouble = weakly(self._trouble)
        self._on_answer = weakly(self._answered)
        self._link.listen(self._on_trouble)
        self._leasing = Leasing(
            settings,
            weakref.ref(self),
            AsyncQueueMessage,
            next_correlation=self._link.next_correlation,
            jitter=random.random,
        )
        self._connection: AsyncConnection | None = None
        self._connecting = asyncio.Lock()
        self._opening = beginning(self, self._link)
        self._backoff = Backoff()
        self._arrivals = Arrivals()
        self._failure: MillstreamError | None = None
        self._heard_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._say_at_s = 0.0
        self._draining = False
        self._closed = False

    async def open(self) -> None:
        """Connect and open the queue.  Raises the error with which the broker refuses, or ConnectionLost."""
        await self._link.open()
        await self._begin(await self._link.get(None))

    def reply_with(self, reply: Callable[..., object]) -> None:
        """Set how messages of this queue are replied to.  `reply` must not keep the client alive."""
        self._leasing.reply = reply

    @property
    def stats(self) -> QueueStats:
        return self._leasing.stats

    # --- taking messages -----------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[AsyncQueueMessage]:
        """Messages as they come, until `drain` or `close`, or until none came for `timeout_s`."""
        leasing = self._leasing
        try:
            while True:
                for message in leasing.pending:
                    yield message  # type: ignore[misc]
                    if leasing.disturbed or time.monotonic() >= leasing.pending_until_s:
                        break
                if not await self._advance(self._settings.timeout_s):
                    return
        finally:
            self._give_back()

    async def next(self, timeout_s: float | None = None) -> AsyncQueueMessage | None:
        """The next message, or None if none comes within `timeout_s` (None waits forever) or the queue is drained."""
        leasing = self._leasing
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if not leasing.disturbed and time.monotonic() < leasing.pending_until_s:
                message = next(leasing.pending, None)
                if message is not None:
                    return message  # type: ignore[return-value]
            remaining_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not await self._advance(remaining_s):
                return None

    async def lease(self, max: int = 1, wait: Duration = 0) -> list[AsyncQueueMessage]:  # noqa: A002
        """Lease up to `max` messages, as soon as there is one; an empty list if none comes within `wait`."""
        if type(max) is not int or not 1 <= max <= LEASE_MESSAGES_MAX:
            raise InvalidArgument(f"max is a number from 1 to {LEASE_MESSAGES_MAX}, not {max!r}")
        deadline_ms = monotonic_ms() + parse_ms(wait, "wait")
        while True:
            if self._leasing.unknown:
                await self._name()  # of what was kept because its caller was cancelled before it had a name
            if kept := self._leasing.kept(max, monotonic_ms()):
                return kept
            wait_ms = min(LEASE_WAIT_MS, deadline_ms - monotonic_ms()) if deadline_ms > monotonic_ms() else 0
            await self._connected(self._target.timeout_s)
            failure, self._failure = self._failure, None
            if self._closed or failure is not None or self._connection is None:
                raise failure or ConnectionLost("the queue is closed" if self._closed else "the broker is not there")
            ticket, answer = self._ticket()
            frame = self._leasing.ask(max, wait_ms, monotonic_ms(), ticket)
            if frame is not None:
                self._send([frame])
            try:
                messages: list[AsyncQueueMessage] = await self._result(answer, wait_ms / 1000)
                await self._name()
                await self._look()
            except BaseException:
                self._leasing.abandon(ticket)
                self._say(everything=False)
                raise
            messages = self._leasing.still_held(messages) or self._leasing.kept(max, monotonic_ms())
            if messages or monotonic_ms() >= deadline_ms:
                return messages

    async def _advance(self, wait_s: float | None) -> bool:
        """Make sure that there is a message to hand out; False when none came in time."""
        self._link.check_loop()
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        leasing = self._leasing
        # A loop over messages that are there already never gives way by itself; once per lease the others get a turn.
        await asyncio.sleep(0)
        looked = False
        while not self._closed and not self._draining:
            leasing.wanted = True
            if leasing.unknown:
                await self._name()
            await self._look()
            if leasing.refill(monotonic_ms()):
                if self._settings.auto_ack:
                    self._say(everything=False)  # nobody settles, so this is when there is room for more
                return True
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            remaining_s = 1.0 if deadline_s is None else min(1.0, deadline_s - time.monotonic())
            if remaining_s <= 0 and looked:
                return False
            looked = True
            with self._arrivals.expecting() as arrival:
                if await self._connected(remaining_s):
                    self._say(everything=True)  # nobody knows how long we wait
                    await self._wait(arrival, remaining_s)
        return False

    async def _wait(self, arrival: asyncio.Future[None], wait_s: float) -> None:
        retry_ms = self._leasing.retry_in_ms(monotonic_ms())
        if retry_ms is not None:
            wait_s = min(wait_s, retry_ms / 1000)
        try:
            async with asyncio.timeout(max(0.001, wait_s)):
                await arrival
        except TimeoutError:
            if self._leasing.waits and time.monotonic() - self._heard_s > _SILENCE_S and self._connection is not None:
                self._connection.close()

    async def _name(self) -> None:
        """Look up what the ids of messages are made of, for topics that are new to us."""
        while unknown := self._leasing.unknown:
            found: dict[str, list[int]] = {}
            with contextlib.suppress(MillstreamError):  # gone already
                found = uids_of(await self._call(calls.Metadata(topics=unknown), list[calls.TopicMetadata]))
            self._leasing.learn(unknown, found)

    async def _look(self) -> None:
        """Let the loop find the end of a connection behind what lay unread: then that is not ours any more."""
        if self._leasing.lay_unread:
            self._leasing.lay_unread = False
            await asyncio.sleep(0)

    # --- settling ------------------------------------------------------------------------------------------------

    async def ack(self, messages: Iterable[QueueMessage]) -> list[Settled]:
        """Ack messages and wait for the broker's answer: one result per message."""
        return await self._settle_many(Settle.ACK, messages, 0, "")

    async def nack(
        self, messages: Iterable[QueueMessage], reason: str = "", *, retry_after: Duration | None = None
    ) -> list[Settled]:
        value = -1 if retry_after is None else delay_ms("retry_after", retry_after)
        return await self._settle_many(Settle.NACK, messages, value, reason)

    async def reject(self, messages: Iterable[QueueMessage], reason: str = "") -> list[Settled]:
        return await self._settle_many(Settle.REJECT, messages, 0, reason)

    async def release(self, messages: Iterable[QueueMessage]) -> list[Settled]:
        return await self._settle_many(Settle.RELEASE, messages, 0, "")

    async def extend(self, messages: Iterable[QueueMessage], duration: Duration) -> list[Settled]:
        """Keep messages for `duration`, as far as the group's `processing_ms` allows; see their `lease_deadline`."""
        return await self._settle_many(Settle.EXTEND, messages, delay_ms("duration", duration), "")

    def flush(self) -> None:
        """Tell the broker now what was settled, without waiting for its answer."""
        self._say(everything=True)

    async def _settle_many(
        self, kind: Settle, messages: Iterable[QueueMessage], value: int, reason: str
    ) -> list[Settled]:
        chosen = self._leasing.checked(kind, messages, reason)
        if not chosen:
            return []
        ticket, answer = self._ticket(len(chosen))
        self._leasing.settle(kind, chosen, value, reason, ticket)
        self._say(everything=False)
        results: list[Settled] = await self._result(answer, 0)
        return results

    def _settle(self, kind: Settle, messages: Iterable[QueueMessage], value: int, reason: str, *, wait: bool) -> Any:
        """See leases.Owner."""
        if wait:
            return self._settle_one(kind, messages, value, reason)
        chosen = self._leasing.checked(kind, messages, reason)  # here: nobody hears what the loop would raise
        if threading.get_ident() == self._thread:
            self._settle_now(kind, chosen, value, reason)
            return None
        if self._loop.is_closed():
            raise ReceiptInvalid("the event loop of this message's queue has ended, and the message was given back")
        for message in chosen:
            lease = message.source.lease
            if kind != Settle.EXTEND and not lease.settled_before(message.offset):
                lease.announced.add(message.offset - lease.start)
        with contextlib.suppress(RuntimeError):  # the loop ends right now, and all of them are given back
            self._loop.call_soon_threadsafe(self._settle_now, kind, chosen, value, reason)
        return None

    async def _settle_one(self, kind: Settle, messages: Iterable[QueueMessage], value: int, reason: str) -> None:
        (message,) = messages
        again = message.source.lease.settled_before(message.offset)
        (result,) = await self._settle_many(kind, (message,), value, reason)
        raise_refused(result, again=again)

    def _settle_now(self, kind: Settle, messages: Iterable[QueueMessage], value: int, reason: str) -> None:
        self._leasing.settle(kind, messages, value, reason, None)
        if kind == Settle.EXTEND or self._leasing.urgent:
            self._say(everything=False)

    def _due(self, lease: Lease) -> None:
        if threading.get_ident() != self._thread:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._due, lease)
            return
        self._leasing.due(lease)
        if self._leasing.urgent:
            self._say(everything=False)

    async def _history(self, message: QueueMessage) -> list[queue_calls.AttemptInfo]:
        call = queue_calls.DescribeMessage(id=message.id, group=self.group)
        found: list[queue_calls.QueuedMessage] = await self._call(call, list[queue_calls.QueuedMessage])
        return [attempt for entry in found for attempt in entry.attempts]

    def _ticket(self, missing: int = 1) -> tuple[Ticket, asyncio.Future[Any]]:
        answer: asyncio.Future[Any] = self._loop.create_future()

        def on_done(ticket: Ticket) -> None:
            if not answer.done():
                answer.set_result(ticket.result) if ticket.error is None else answer.set_exception(ticket.error)

        return Ticket(on_done, missing), answer

    async def _result(self, answer: asyncio.Future[Any], wait_s: float) -> Any:
        try:
            async with asyncio.timeout(wait_s + self._target.timeout_s):
                return await answer
        except TimeoutError:
            raise RequestTimeout("the broker did not answer in time") from None

    # --- in and out ----------------------------------------------------------------------------------------------

    def _say(self, *, everything: bool) -> None:
        if self._connection is not None:
            self._send(self._leasing.outgoing(monotonic_ms(), everything=everything))

    def _send(self, frames: list[Frame]) -> None:
        connection = self._connection
        if connection is None or not frames:
            return
        self._heard_s = time.monotonic()
        for frame in frames:
            connection.expect(frame.correlation, self._on_answer)
        connection.send(*[frame.data for frame in frames])

    def _answered(self, correlation: int, answer: memoryview | ConnectionLost) -> None:
        """Runs inside the connection's callback: the bytes are only valid here."""
        if isinstance(answer, ConnectionLost):
            return
        self._heard_s = time.monotonic()
        leasing = self._leasing
        try:
            leasing.accept(correlation, answer, monotonic_ms())
        except ConnectionLost as error:
            self._disconnect(error)
        except MillstreamError as error:
            self._failure = self._failure or error
        self._say(everything=False)
        self._look_soon()
        self._arrivals.wake(leasing.ready_count if self._failure is None else None)

    def _look_after(self) -> None:
        """Say what has lingered, make leases longer, give up those that are over; again as long as there are any."""
        self._timer = None
        if self._closed or self._connection is None:
            return
        self._leasing.tend(monotonic_ms())
        now_s = time.monotonic()
        self._say(everything=now_s >= self._say_at_s)
        if now_s >= self._say_at_s:
            self._say_at_s = now_s + self._settings.ack_linger_ms / 1000
        self._look_soon()

    def _look_soon(self) -> None:
        """Set the timer, or an earlier one if a shorter lease has come."""
        if self._leasing.holds:
            at_s = self._loop.time() + self._leasing.pace_ms / 1000
            if self._timer is None or self._timer.when() > at_s:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_at(at_s, _look_after, weakref.ref(self))

    # --- connection ----------------------------------------------------------------------------------------------

    async def _connected(self, wait_s: float) -> bool:
        """Whether there is a connection; opened again, with growing pauses, if it was lost."""
        if self._connection is not None:
            return True
        deadline_s = time.monotonic() + max(0.25, wait_s)
        try:
            async with asyncio.timeout_at(self._loop.time() + max(0.25, wait_s)), self._connecting:
                while self._connection is None and not self._closed:
                    try:
                        await self._opening.result()
                    except MillstreamError as error:
                        pause_s = self._backoff.next_s()
                        if not error.retriable:
                            self._failure = self._failure or error
                            return False
                        if self._backoff.attempts == 1:
                            _log.warning("queue %s: %s; trying again", self._settings.name, error)
                        await asyncio.sleep(min(pause_s, max(0.0, deadline_s - time.monotonic())))
        except TimeoutError:
            return False
        return self._connection is not None

    async def _begin(self, connection: AsyncConnection) -> None:
        try:
            opened = await connection.call(
                self._link.next_correlation(),
                open_call(self._settings),
                queue_calls.QueueOpened,
                timeout_s=self._target.timeout_s,
            )
        except BaseException:
            connection.close()
            raise
        if self._closed:
            return
        if not connection.usable:  # lost just behind the answer: nobody tells us of that again
            connection.close()
            raise connection.lost or ConnectionLost("the broker asks its clients to go")
        self._leasing.opened(opened.consumer)
        self._connection = connection
        self._heard_s = time.monotonic()
        self._backoff.reset()

    def _trouble(self) -> None:
        """The connection is lost, or the broker asks us to go."""
        connection = self._connection
        if connection is not None and not connection.usable:
            if connection.lost is None:
                self._say(everything=True)
            self._disconnect(connection.lost or ConnectionLost("the broker asks its clients to go"))

    def _disconnect(self, error: ConnectionLost) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._leasing.disconnected(error)
            connection.close()
            if not self._closed:
                _log.info("queue %s: %s; connecting again", self._settings.name, error)
        self._arrivals.wake()

    # --- end -----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Hand out nothing more, and give back what was leased ahead; what is in hand can still be settled."""
        self._draining = True
        self._give_back()
        self._arrivals.wake()

    def _give_back(self) -> None:
        if not self._closed:
            self._leasing.give_back()
            self._say(everything=True)

    async def close(self) -> None:
        """Tell the broker what was settled, give back everything else, and end the iteration."""
        if self._closed:
            return
        try:
            self.drain()
            if self._connection is not None:
                ticket, answer = self._ticket()
                self._send([self._leasing.goodbye(ticket)])
                with contextlib.suppress(TimeoutError, MillstreamError):
                    async with asyncio.timeout(min(_CLOSE_S, self._target.timeout_s)):
                        await answer
        finally:
            self._end()

    def _end(self) -> None:
        self._closed = True
        self._leasing.closed()
        if self._timer is not None:
            self._timer.cancel()
        self._opening.cancel()
        self._link.forget(self._on_trouble)
        self._link.close()
        self._arrivals.wake()

    async def __aenter__(self) -> AsyncQueue:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or self._loop.is_closed():
            return
        self._closed = True
        link, leasing, connection, opening = self._link, self._leasing, self._connection, self._opening

        def end() -> None:
            opening.cancel()
            leasing.give_back()
            if connection is not None:
                connection.send(*[frame.data for frame in leasing.outgoing(monotonic_ms(), everything=True)])
            leasing.closed()
            link.close()

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(end)


def _look_after(queue_ref: weakref.ref[AsyncQueue]) -> None:
    queue = queue_ref()
    if queue is not None:
        queue._look_after()
