"""The asynchronous producer.  `await producer.send(...)` only really waits when there is no room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeAlias, Unpack

import mmh3

from millstream.client.asynchronous.connection import AsyncConnection, AsyncLink
from millstream.client.backoff import Backoff
from millstream.client.delivery import SealedBatch, Settled
from millstream.client.flow import FlowNotices
from millstream.client.messages import BatchFailure, ProducerStats, Receipt, TopicPartition, receipts
from millstream.client.metadata import Topic
from millstream.client.outbox import Outbox, left_all
from millstream.client.settings import ProducerSettings
from millstream.client.values import HeaderItems, Headers, Key, SendOptions, Value, make_entry
from millstream.entries import AnyEntry
from millstream.errors import (
    ConnectionLost,
    InvalidArgument,
    MillstreamError,
    PartitionNotFound,
    RequestError,
    RequestTimeout,
    TopicNotFound,
)
from millstream.vigil import Vigil
from millstream.wire.frames import FrameType
from millstream.wire.messages import PublishResult

__all__ = ["AsyncProducer"]

#: Who waits for a message, and the message itself if it is to be sent again.
_Ticket: TypeAlias = tuple[asyncio.Future[Receipt], AnyEntry | None]

_log = logging.getLogger("millstream.client")

_hash: Final = mmh3.hash
_IDLE_S: Final = 1.0


class AsyncProducer:
    """A producer for one topic.  It batches messages and sends them in order, each exactly once.

    The next `send`, `flush` or `close` raises the first error; `on_error` is told all of them.  After an error the
    producer continues.  It belongs to one event loop.
    """

    def __init__(
        self,
        link: AsyncLink,
        topic: Topic,
        settings: ProducerSettings,
        identity: int,
        *,
        request_timeout_s: float,
        new_identity: Callable[[], Awaitable[int]],
        look_up: Callable[[str], Awaitable[Topic]],
        on_error: Callable[[BatchFailure], None] | None = None,
        on_gone: Callable[[], None] | None = None,
        owns_link: bool = True,
        flow: FlowNotices | None = None,
        vigil: Vigil | None = None,
    ) -> None:
        """`on_gone` is told when the broker does not know the topic, or a partition of it, any more.

        `flow` is where the broker's notices are, for a link that carries more than this.

        `vigil` is told when messages leave that somebody waits for, and when they are confirmed.
        """
        self._link = link
        self._owns_link = owns_link
        self._vigil = vigil
        self._new_identity = new_identity
        self._look_up = look_up
        self._on_error = on_error
        self._on_gone = on_gone
        self._outbox = Outbox(
            topic, settings, identity, request_timeout_s=request_timeout_s, correlations=link.correlations, flow=flow
        )
        if flow is None:
            link.on_push = self._on_push
            link.listen(self._outbox.flow.forget)
        self._accumulator = self._outbox.accumulator
        self._loop = asyncio.get_running_loop()
        self._connection: AsyncConnection | None = None
        self._wake = asyncio.Event()
        #: When the background task looks around next by itself; how soon time alone can matter to a new batch.
        self._awake_at_s = 0.0
        self._patience_s = min(request_timeout_s, settings.delivery_timeout_s)
        self._progress: asyncio.Future[None] | None = None
        self._soon: asyncio.Handle | None = None
        self._closing = False
        self._closed = asyncio.Event()
        #: Messages that wait for something before they are taken; when the last ones were sent on their way.
        self._coming = 0
        self._used_at_s = self._loop.time()
        self._looking: asyncio.Task[None] | None = None
        #: Without confirmations: brokers that have asked us to go are asked whether they have taken everything.
        self._leaving: set[asyncio.Task[None]] = set()
        #: How many connections there had been when the topic was looked up.
        self._looked_up_on = link.opened
        self._task = self._loop.create_task(self._run(), name=f"millstream-producer-{topic.name}")
        link.listen(self._on_trouble)

    # --- sending -------------------------------------------------------------------------------------------------

    async def send(
        self,
        value: Value = None,
        key: Key = None,
        headers: Headers | HeaderItems | None = None,
        **options: Unpack[SendOptions],
    ) -> None:
        """Buffer a message to be sent; wait only while `buffer_bytes` are waiting already, `send_timeout_s` at most."""
        if type(value) is bytes and headers is None and not options:
            accumulator = self._accumulator
            if key is None:
                pile = accumulator.sticky
                left = pile.left - len(value) - pile.surcharge
                if left > 0:
                    pile.left = left
                    pile.entries.append(value)
                    return
            elif type(key) is bytes:
                piles = accumulator.piles
                pile = piles[_hash(key, 0, False) % len(piles)]
                left = pile.left - len(value) - len(key) - pile.surcharge
                if left > 0:
                    accumulator.special = True
                    pile.left = left
                    pile.entries.append((value, key))
                    return
        entry, partition = make_entry(value, key, headers, **options), options.get("partition")
        if self._accumulator.take(entry, partition):
            return
        await self.add(entry, partition)
        # A loop of sends never gives way by itself; once per batch the answers get their turn.
        await asyncio.sleep(0)

    def submit_quickly(self, entry: AnyEntry, partition: int | None, *, alone: bool) -> asyncio.Future[Receipt] | None:
        """As `submit`; None if something is in the way, which is for `submit` to see to.

        Not a coroutine: to start and to end one costs more than all that is done here.
        """
        if self._closing or self._outbox.full:
            return None
        if self._soon is None:  # once in a turn of the loop, not once per message
            self._link.check_loop()
        future: asyncio.Future[Receipt] = self._loop.create_future()
        if not self._accumulator.put(entry, partition, (future, entry if alone else None)):
            return None
        if self._soon is None:
            self._soon = self._loop.call_soon(self._seal_soon)
        return future

    async def submit(self, entry: AnyEntry, partition: int | None, *, alone: bool) -> asyncio.Future[Receipt]:
        """Put a message on its way with whatever else is published in this turn of the loop; the receipt follows.

        `alone`: when the batch is refused this message is sent again by itself, as others may be the reason.
        """
        future = self.submit_quickly(entry, partition, alone=alone)
        if future is None:
            future = self._loop.create_future()
            await self.add(entry, partition, (future, entry if alone else None))
        return future

    async def add(self, entry: AnyEntry, partition: int | None, ticket: _Ticket | None = None) -> None:
        """The slow path: whatever may be in the way of a message is dealt with here."""
        outbox = self._outbox
        self._link.check_loop()
        self._accumulator.check_size(entry)
        self._coming += 1
        try:
            if not outbox.knows(partition):
                await self._look_again()
            self._check()
            if outbox.full:
                limit_s = outbox.settings.send_timeout_s
                await self._await(lambda: not outbox.full, limit_s, "no room in the producer's buffer")
                self._check()
        finally:
            self._coming -= 1
        idle = not self._accumulator.gate_open
        outbox.add(entry, partition, ticket)
        if not outbox.settings.linger_ms:
            # Not now: whatever else is published in this turn of the loop travels in the same batch.
            if self._soon is None:
                self._soon = self._loop.call_soon(self._seal_soon)
            return
        if idle:
            self._wake.set()
        self._pump()

    def _seal_soon(self) -> None:
        self._soon = None
        self._used_at_s = self._loop.time()
        self._outbox.seal_all()
        self._pump()
        if self._vigil is not None:
            self._vigil.step(self._link, awaits_disk=True)
        self._wake_if_needed()

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything sent so far is confirmed.  Raises the first error, or RequestTimeout."""
        outbox = self._outbox
        if not self._task.done():
            outbox.seal_all()
            self._pump()
            self._wake.set()
            marks = outbox.marks()
            left = left_all(marks, lambda: None if outbox.wants_answers else self._connection)
            await self._await(left, self._limit_s(timeout_s), "messages are not confirmed yet")
        self._outbox.raise_failure()

    async def close(self, timeout_s: float | None = None) -> None:
        """Flush, then close the connection.  Raises the first error that was not raised before.

        Without confirmations, it waits until the broker has taken everything.  Messages that other tasks send from now
        on are refused.  A second close waits for the first.
        """
        if self._closing:
            if not self._closed.is_set():
                await self._wait_closed(timeout_s)
            return
        self._closing = True
        # Before the flush: behind it, a message on the fast path would be taken and never sent.
        self._accumulator.close_gate()
        deadline_s = self._loop.time() + self._limit_s(timeout_s)
        try:
            await self.flush(timeout_s)
            if not self._outbox.wants_answers:
                await self._finish(deadline_s)
        finally:
            for ending in (self._task, *self._leaving):
                ending.cancel()
            self._link.forget(self._on_trouble)
            self._settle(self._outbox.abandon(ConnectionLost("the producer was closed")))
            if self._owns_link:
                self._link.close()
            self._moved()  # whoever else waits: what is not sent will never be
            try:  # last of all: who is cancelled meanwhile leaves nothing open, and hears of that
                await asyncio.wait((self._task,))
            finally:
                self._closed.set()
        self._outbox.raise_failure()

    async def _finish(self, deadline_s: float) -> None:
        """Wait until the broker has taken everything, over all connections."""
        if self._leaving:
            left_s = max(0.0, deadline_s - self._loop.time())
            _, staying = await asyncio.wait(self._leaving, timeout=left_s)
            if staying:
                raise RequestTimeout("what was sent last may be lost: the broker that stops has not taken it")
        await self._link.finish(deadline_s - self._loop.time())

    def _limit_s(self, timeout_s: float | None) -> float:
        return self._outbox.settings.delivery_timeout_s + 2 * _IDLE_S if timeout_s is None else timeout_s

    async def _wait_closed(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()
        except TimeoutError:
            raise RequestTimeout(f"messages are not confirmed yet after {timeout_s:g} s") from None
        self._outbox.raise_failure()

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            await self.close()
            return
        with contextlib.suppress(MillstreamError):  # the exception that ended the block says more
            await self.close()

    @property
    def closing(self) -> bool:
        """Nothing more is taken."""
        return self._closing

    def check_sizes(self, entries: Iterable[tuple[AnyEntry, int | None]]) -> None:
        """Raises PayloadTooLarge if the topic does not allow one of them."""
        limit = self._accumulator.message_bytes_max
        for entry, _ in entries:
            if type(entry) is not bytes or len(entry) > limit:
                self._accumulator.check_size(entry)

    @property
    def unused_s(self) -> float:
        """For how long nothing was published by `submit`; -1 while something is under way."""
        busy = self._coming or not self._outbox.delivery.idle or not self._accumulator.empty
        return -1.0 if busy else self._loop.time() - self._used_at_s

    @property
    def stats(self) -> ProducerStats:
        return self._outbox.stats(self._link.opened)

    # --- state ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closing:
            raise InvalidArgument("the producer is closed")
        self._outbox.raise_failure()

    async def _await(self, reached: Callable[[], bool], limit_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while not reached():
                    if self._progress is None:
                        self._progress = self._loop.create_future()
                    await asyncio.shield(self._progress)
        except TimeoutError:
            raise RequestTimeout(f"{what} after {limit_s:g} s") from None

    def _moved(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None and not progress.done():
            progress.set_result(None)

    def _pump(self) -> None:
        """Send what may be sent."""
        connection, outbox = self._connection, self._outbox
        if connection is None or not connection.usable:
            return
        # What no answer is awaited for is settled when it is sent: it stays where it counts until there is room for it.
        while (outbox.wants_answers or not connection.unsent) and (frame := outbox.next_frame()) is not None:
            correlation, *parts = frame
            if outbox.wants_answers:
                connection.expect(correlation, self._on_answer)
            else:
                connection.unproven = True
            connection.send(*parts)
        if not outbox.wants_answers:
            self._moved()

    def _on_answer(self, correlation: int, answer: memoryview | ConnectionLost) -> None:
        if isinstance(answer, ConnectionLost):
            return  # the loss of the connection is dealt with as a whole
        self._settle(self._outbox.answered(correlation, answer))
        if self._vigil is not None:
            self._vigil.step(self._link)
        self._pump()
        self._wake_if_needed()

    def _on_push(self, kind: int, payload: memoryview) -> None:
        if kind == FrameType.FLOW:
            self._outbox.flow.take(payload)

    def _on_trouble(self) -> None:
        self._wake.set()
        self._moved()

    def _settle(self, outcomes: list[Settled]) -> None:
        for settled in outcomes:
            if settled.batch.ticket is not None:
                self._resolve(settled)
        while (failure := self._outbox.next_failure()) is not None:
            if self._on_error is not None:
                self._loop.call_soon(self._on_error, failure)
        if outcomes:
            self._moved()

    def _resolve(self, settled: Settled) -> None:
        """Answer those who wait for single messages of a batch."""
        batch, result, error = settled
        tickets: list[_Ticket] = batch.ticket
        if result is not None:
            if self._looked_up_on == self._link.opened:
                self._confirm(batch, result)
            else:  # the broker may have been restarted, and what it keeps in memory has other partitions then
                self._look_beside().add_done_callback(lambda _: self._confirm(batch, result))
            return
        assert error is not None
        if self._on_gone is not None and isinstance(error, TopicNotFound | PartitionNotFound):
            self._on_gone()
        refused = isinstance(error, RequestError) and not settled.in_doubt and batch.count > 1
        again: list[tuple[AnyEntry, _Ticket]] = []
        for future, entry in tickets:
            if future.done():
                continue
            if refused and entry is not None:
                again.append((entry, (future, entry)))
            else:
                told = type(error)(str(error))  # each its own: who raises it adds where
                told.__cause__ = error.__cause__
                future.set_exception(told)
        if again:
            self._outbox.send_singly(batch, again)

    def _confirm(self, batch: SealedBatch, result: PublishResult) -> None:
        topic, tickets = self._outbox.topic, batch.ticket
        place = TopicPartition(topic.name, batch.line.partition)
        made = receipts(place, topic.uid(place.partition), result, len(tickets))
        for (future, _), confirmed in zip(tickets, made, strict=True):
            if not future.done():  # else it was cancelled
                future.set_result(confirmed)

    # --- the background task -------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = Backoff()
        try:
            while True:
                try:
                    await self._deliver()
                except Exception:  # no memory, say; without this task what is sent would wait for ever
                    _log.exception("what was sent to %r could not be delivered; trying again", self._outbox.topic.name)
                    await asyncio.sleep(backoff.next_s())
        except asyncio.CancelledError:
            if not self._closing:
                self._end_with_loop()
            raise
        finally:
            if self._looking is not None:
                self._looking.cancel()

    def _end_with_loop(self) -> None:
        """Nobody has closed the producer, and there is no time left to send anything: at least say so."""
        outcomes = self._outbox.abandon(ConnectionLost("the event loop ended before the producer was closed"))
        self._settle(outcomes)
        if lost := sum(settled.batch.count for settled in outcomes):
            _log.error(
                "%d messages to %r were not confirmed, because their producer was not closed before the event loop "
                "ended: use `async with`, or await its close()",
                lost,
                self._outbox.topic.name,
            )

    async def _deliver(self) -> None:
        backoff = Backoff()
        while True:
            self._wake.clear()
            idle = self._tick()
            if self._outbox.outdated() and not idle:
                self._look_beside()
            if self._connection is None and not idle:
                await self._reconnect()
            elif self._outbox.delivery.wants_identity:
                if await self._renew():
                    backoff.reset()
                else:
                    await asyncio.sleep(backoff.next_s())
            else:
                await self._sleep(None if idle else self._outbox.wait_s(_IDLE_S))

    def _tick(self) -> bool:
        """Seal what has waited, give up what waited too long, move what can move; True when there is nothing to do."""
        outbox, connection = self._outbox, self._connection
        outbox.seal_due()
        if connection is not None:
            if outbox.overdue():
                connection.close()
            if connection.lost is not None or (connection.goaway and not outbox.delivery.flying):
                if connection.unproven and connection.lost is None:
                    leaving = self._loop.create_task(self._leave(connection), name="millstream-producer-leaving")
                    self._leaving.add(leaving)
                    leaving.add_done_callback(self._leaving.discard)
                self._connection = None
                outbox.delivery.disconnected()
        outbox.trouble = self._link.trouble
        self._settle(outbox.expire())
        self._pump()
        return outbox.come_to_rest()

    async def _leave(self, connection: AsyncConnection) -> None:
        """Have the broker take what was sent, whose answer nobody awaits, before the connection is closed."""
        try:
            await connection.finish(self._link.next_correlation())
        except ConnectionLost as error:
            self._outbox.doubt(error)
        finally:
            connection.close()

    def _wake_if_needed(self) -> None:
        """In steady traffic it sleeps: being woken for every batch would cost more than the batch."""
        connection, outbox = self._connection, self._outbox
        delivery = outbox.delivery
        lost = connection is None or not connection.usable or delivery.wants_identity
        held = delivery.ready and (not delivery.flying or outbox.waits_for_time)
        hasty = bool(delivery.flying) and self._loop.time() + self._patience_s < self._awake_at_s
        if lost or held or hasty:
            self._wake.set()

    async def _sleep(self, wait_s: float | None) -> None:
        self._awake_at_s = math.inf if wait_s is None else self._loop.time() + wait_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._wake.wait()

    async def _reconnect(self) -> None:
        deadline_s = time.monotonic() + self._outbox.wait_s(10 * _IDLE_S)
        try:
            self._connection = await self._link.get(deadline_s)
            if not self._outbox.wants_answers:
                self._connection.on_sent = self._pump
        except ConnectionLost:
            await asyncio.sleep(max(0.0, min(_IDLE_S, deadline_s - time.monotonic())))
        except MillstreamError as error:
            self._link.trouble = str(error)
            await asyncio.sleep(_IDLE_S)

    async def _renew(self) -> bool:
        try:
            identity = await self._new_identity()
        except MillstreamError:
            return False
        self._outbox.delivery.renew(identity)
        return True

    def _look_beside(self) -> asyncio.Task[None]:
        """Look again, and go on with what is to be delivered: the answer may take as long as a call may."""
        self._outbox.topic.loaded_s = time.monotonic()
        if self._looking is None or self._looking.done():
            self._looking = self._loop.create_task(self._look_again(), name="millstream-producer-partitions")
        return self._looking

    async def _look_again(self) -> None:
        """More partitions may have been added to the topic."""
        self._outbox.topic.loaded_s = time.monotonic()  # whatever comes of it, not again at once
        connections = self._link.opened
        with contextlib.suppress(MillstreamError):
            self._outbox.learn(await self._look_up(self._outbox.topic.name))
        self._looked_up_on = connections
