"""One client at its WebSocket: carries out what it asks for, and sends it what there is for it.

A frame is answered when it is done, others are read meanwhile; how many, and how much they may hold, is bounded, and
beyond that the client is not read from.  Every consumer has a task that leases when there is credit and the socket has
taken what was leased before, so a slow client costs a frame per consumer and holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec
import structlog

from millstream.broker.background import comes_within
from millstream.broker.broker import Broker, Session
from millstream.errors import (
    InternalError,
    InvalidArgument,
    MillstreamError,
    QuotaExceeded,
    ShuttingDown,
    SubscriptionNotFound,
)
from millstream.server.http.families.messages import Outcome
from millstream.server.http.families.queues import leased_view
from millstream.server.http.outgoing import entries_of
from millstream.server.http.problems import describe
from millstream.server.http.socket import frames
from millstream.server.http.socket.mailbox import FRAME_BYTES, FRAME_MESSAGES, Mailbox
from millstream.server.publishing import publish
from millstream.values import Encoding
from millstream.wire import queue_calls
from millstream.wire.deliveries import Delivery
from millstream.wire.messages import FSYNC_POLICIES
from millstream.wire.subscription_calls import CloseSubscription, FlowNotice, OpenSubscription

__all__ = ["CONSUMERS_MAX", "SUBSCRIPTIONS_MAX", "Conversation", "Line"]

_log = structlog.get_logger("millstream.websocket")

#: Of one connection, each.
CONSUMERS_MAX: Final = 32
SUBSCRIPTIONS_MAX: Final = 32
#: Frames of one client that are being carried out.
_OPEN_MAX: Final = 100
#: What is said about one message that was published, without the name of its topic.
_RECEIPT_BYTES: Final = 160
_WAIT_MS: Final = 60_000
#: A lease that runs out tells nobody; who waits for room looks again this often.
_RECOUNT_S: Final = 1.0
#: For the last frames to reach a client that has stopped reading.
_GOODBYE_S: Final = 1.0
#: Close codes of RFC 6455.
_POLICY: Final = 1008
_RESTART: Final = 1012


class Line(Protocol):
    """The connection, as far as a conversation is concerned.  Its methods raise OSError when the client is gone."""

    async def receive(self) -> str | bytes | None:
        """What the client says next; None when it has gone."""

    async def send(self, text: str) -> None:
        """Returns when the client has read enough of what it was sent before."""

    async def close(self, code: int, reason: str) -> None: ...


class _Consumer:
    """One `consume` of a client."""

    def __init__(self, number: int, credit: int, encoding: Encoding) -> None:
        self.number = number
        self.credit = credit
        self.encoding: Encoding = encoding
        #: Something was settled, or there is more credit.
        self.room = asyncio.Event()
        #: Leases for it.
        self.pump: asyncio.Task[None]


class Conversation:
    """A client that was let in."""

    def __init__(
        self,
        broker: Broker,
        line: Line,
        *,
        bytes_max: int,
        admit: Callable[[Session], None],
        own: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`admit` raises when the client asks too often; `own` keeps tasks that go on when the client is gone."""
        self._broker = broker
        self._line = line
        self._bytes_max = bytes_max
        self._admit = admit
        self._own = own
        self._session: Session
        self._mailbox = Mailbox(bytes_max)
        self._consumers: dict[int, _Consumer] = {}
        #: One is opened after the other, so that their number is known.
        self._opening = asyncio.Lock()
        #: What is to be said about flow, the latest about each topic.
        self._notices: dict[str, FlowNotice] = {}
        self._mail = asyncio.Event()
        #: Frames that are being carried out, and their bytes with those of their answers.
        self._open: dict[asyncio.Task[None], int] = {}
        self._progress = asyncio.Event()
        self._ended = asyncio.Event()
        self._why: MillstreamError | None = None
        self._closed = False
        self._handlers: dict[type, Callable[[Any], Awaitable[Any]]] = {
            frames.Subscribe: self._subscribe,
            frames.Consume: self._consume,
            frames.Unsubscribe: self._unsubscribe,
            frames.Credit: self._credit,
            frames.Publish: self._publish,
            **dict.fromkeys(
                (frames.Ack, frames.Nack, frames.Reject, frames.Extend, frames.Release),
                self._settle,
            ),
        }

    # --- life ----------------------------------------------------------------------------------------------------

    async def run(self, session: Session, closing: asyncio.Event) -> None:
        """Until the client goes, its key is revoked or the broker stops; then what it holds goes back at once."""
        self._session = session
        reading = asyncio.ensure_future(self._read())
        mailing = asyncio.ensure_future(self._deliver_mail())
        stopping = asyncio.ensure_future(closing.wait())
        ended = asyncio.ensure_future(self._ended.wait())
        tasks: tuple[asyncio.Future[Any], ...] = (reading, mailing, stopping, ended)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()
            for own in (reading, mailing):
                if own.done() and not own.cancelled() and (problem := own.exception()) is not None:
                    _log.error("a WebSocket failed", address=session.address, exc_info=problem)
                    self._why = InternalError("the broker failed to go on; its log has the details")
            if stopping.done() and not ended.done():
                await self._finish_open()
                await self._leave(ShuttingDown("the broker is shutting down"), _RESTART)
            elif self._why is not None:
                await self._leave(self._why, _POLICY)
        finally:
            self._closed = True
            self._broker.session_closed(session)
            tasks += tuple(consumer.pump for consumer in self._consumers.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self, why: MillstreamError) -> None:
        """Say why, and close."""
        self._why = why
        self._ended.set()

    async def _finish_open(self) -> None:
        if self._open:
            drain_s = self._broker.settings.server.drain_ms / 1000
            await asyncio.wait(list(self._open), timeout=drain_s)

    async def _leave(self, why: MillstreamError, code: int) -> None:
        """What it holds goes back before it is told, so that another can have it while it reads."""
        self._closed = True
        self._session.why = str(why)
        self._broker.session_closed(self._session)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                if code == _RESTART:
                    await self._say(frames.Bye(reason=str(why)))
                else:
                    await self._say(frames.ErrorFrame(error=describe(why, "")))
                await self._line.close(code, str(why)[:100])

    # --- frames in -----------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        with contextlib.suppress(OSError):
            while (data := await self._line.receive()) is not None:
                frame = frames.decode(data)
                size = len(data) + _answer_bytes(frame)
                while self._open and (
                    len(self._open) >= _OPEN_MAX or sum(self._open.values()) + size > self._bytes_max
                ):
                    self._progress.clear()
                    await self._progress.wait()
                task = asyncio.ensure_future(self._handle(frame))
                self._open[task] = size
                self._own(task)
                task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._open[task]
        self._progress.set()

    async def _handle(self, frame: frames.ClientFrame | frames.Unreadable) -> None:
        answer: Any
        try:
            self._admit(self._session)
            if isinstance(frame, frames.Unreadable):
                raise frame.error
            if isinstance(frame, frames.Ping):
                answer = frames.Pong(id=frame.id, time_ms=self._broker.now_us() // 1000)
            elif isinstance(frame, frames.Auth):
                if self._broker.access.is_on:
                    raise InvalidArgument("a key is said once, with the request or in the first frame")
                answer = frames.Result(id=frame.id)  # nobody asked for it
            else:
                answer = frames.Result(id=frame.id, result=await self._handlers[type(frame)](frame))
        except Exception as problem:
            answer = self._refusal(problem, id=frame.id)
        if not self._closed:
            with contextlib.suppress(OSError):
                await self._say(answer)

    def _refusal(self, problem: Exception, **about: Any) -> frames.ErrorFrame:
        if not isinstance(problem, MillstreamError):
            _log.error("a frame failed", exc_info=problem)
            problem = InternalError("the broker failed to handle a frame; its log has the details")
        self._broker.metrics.requests_failed += 1
        return frames.ErrorFrame(error=describe(problem, ""), **about)

    def _say(self, frame: Any) -> Awaitable[None]:
        return self._line.send(frames.encode(frame))

    # --- publishing and settling ---------------------------------------------------------------------------------

    async def _publish(self, frame: frames.Publish) -> list[Outcome]:
        now_us = self._broker.now_us()
        messages = frame.messages if isinstance(frame.messages, list) else [frame.messages]
        entries, partitions = entries_of(messages, now_us=now_us)
        fsync = FSYNC_POLICIES.index(frame.fsync)
        results = await publish(
            self._broker, self._session, frame.topic, entries, partitions=partitions, fsync=fsync, now_us=now_us
        )
        self._forget_if_gone()
        return [
            Outcome(error=describe(result, "")) if isinstance(result, MillstreamError) else Outcome(receipt=result)
            for result in results
        ]

    async def _settle(self, frame: frames.SettleFrame) -> Any:
        return await self._broker.call(self._session, queue_calls.SettleMessages(items=frame.items()))

    # --- subscriptions -------------------------------------------------------------------------------------------

    async def _subscribe(self, frame: frames.Subscribe) -> Any:
        if len(self._mailbox) >= SUBSCRIPTIONS_MAX:
            raise QuotaExceeded(f"a WebSocket has {SUBSCRIPTIONS_MAX} subscriptions at most; name several patterns")
        opened: Any = await self._broker.call(self._session, OpenSubscription(patterns=frame.patterns))
        self._mailbox.open(opened.subscription, frame.credit, frame.encoding)
        self._forget_if_gone()
        return {"subscription": opened.subscription}

    def deliver(self, delivery: Delivery) -> bool:
        """Take messages of a subscription, unless the client has not read enough of what it has got."""
        taken = not self._closed and self._mailbox.offer(delivery)
        if taken or self._mailbox.owes_word:
            self._mail.set()
        return taken

    def push(self, message: object) -> None:
        """Take something that the client did not ask for."""
        if isinstance(message, FlowNotice):
            self._notices[message.topic] = message
            self._mail.set()

    async def _deliver_mail(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                await self._mail.wait()
                self._mail.clear()
                while self._notices:
                    _, notice = self._notices.popitem()
                    await self._say(frames.Flow(**msgspec.structs.asdict(notice)))
                for frame in self._mailbox.frames():
                    await self._say(frame)
                    await asyncio.sleep(0)  # a socket that takes everything at once waits for nobody
                if self._mailbox.refused:
                    self._mailbox.refused = self._mailbox.owes_word = False
                    self._broker.session_drained(self._session)

    # --- consumers -----------------------------------------------------------------------------------------------

    async def _consume(self, frame: frames.Consume) -> Any:
        async with self._opening:
            return await self._open_consumer(frame)

    async def _open_consumer(self, frame: frames.Consume) -> Any:
        if len(self._consumers) >= CONSUMERS_MAX:
            raise QuotaExceeded(f"a WebSocket has {CONSUMERS_MAX} consumers at most; a topic may be a pattern")
        policy = None if frame.policy is None else msgspec.to_builtins(frame.policy)
        call = queue_calls.OpenQueue(
            topic=frame.topic,
            group=frame.group,
            consumer=frame.name,
            lease_ms=frame.lease_ms,
            auto_ack=frame.auto_ack,
            policy=policy,
        )
        opened: Any = await self._broker.call(self._session, call)
        if not self._closed:
            consumer = _Consumer(opened.consumer, frame.credit, frame.encoding)
            self._consumers[consumer.number] = consumer
            consumer.pump = asyncio.ensure_future(self._lease(consumer))
            self._own(consumer.pump)
        self._forget_if_gone()
        return {"consumer": opened.consumer, "topics": opened.topics}

    async def _lease(self, consumer: _Consumer) -> None:
        try:
            held = self._broker.queues.consumer(self._session, consumer.number)
            held.on_settled = consumer.room.set
            while not self._closed:
                consumer.room.clear()
                room = consumer.credit - held.held()
                if room <= 0:
                    await comes_within(consumer.room, _RECOUNT_S if consumer.credit else None)
                    continue
                call = queue_calls.LeaseMessages(
                    consumer=consumer.number,
                    max=min(room, FRAME_MESSAGES),
                    max_bytes=FRAME_BYTES,
                    wait_ms=_WAIT_MS,
                )
                leased: Any = await self._broker.call(self._session, call)
                if leased:
                    messages = [leased_view(message, consumer.encoding) for message in leased]
                    await self._say(frames.LeasedMessages(consumer=consumer.number, messages=messages))
        except OSError:
            pass
        except Exception as problem:
            await self._end_consumer(consumer.number, problem)

    async def _end_consumer(self, number: int, problem: Exception) -> None:
        """The queue was deleted, or the client may not read it any more."""
        if self._consumers.pop(number, None) is not None and not self._closed:
            with contextlib.suppress(OSError, MillstreamError):
                await self._broker.call(self._session, queue_calls.CloseQueue(consumer=number))
                await self._say(self._refusal(problem, consumer=number))

    # --- both ----------------------------------------------------------------------------------------------------

    async def _unsubscribe(self, frame: frames.Unsubscribe) -> None:
        _check_one(frame)
        if frame.subscription is not None:
            await self._broker.call(self._session, CloseSubscription(subscription=frame.subscription))
            self._mailbox.close(frame.subscription)
            self._mail.set()  # there may be room for the others now
        elif frame.consumer is not None:
            await self._broker.call(self._session, queue_calls.CloseQueue(consumer=frame.consumer))
            consumer = self._consumers.pop(frame.consumer, None)
            if consumer is not None:
                consumer.pump.cancel()

    async def _credit(self, frame: frames.Credit) -> None:
        _check_one(frame)
        if frame.subscription is not None:
            if not self._mailbox.give(frame.subscription, frame.more):
                raise SubscriptionNotFound(f"this connection has no subscription {frame.subscription}")
            self._mail.set()
        elif frame.consumer is not None:
            consumer = self._consumers.get(frame.consumer)
            if consumer is None:
                raise SubscriptionNotFound(f"this connection has no consumer {frame.consumer}")
            if consumer.credit + frame.more > frames.CREDIT_MAX:
                raise InvalidArgument(f"a consumer holds {frames.CREDIT_MAX} messages at most")
            consumer.credit += frame.more
            consumer.room.set()

    def _forget_if_gone(self) -> None:
        """A call that ended after its client was gone must leave nothing behind."""
        if self._closed:
            self._broker.session_closed(self._session)


def _answer_bytes(frame: frames.ClientFrame | frames.Unreadable) -> int:
    """About how long an answer is that may be much longer than what it answers."""
    if isinstance(frame, frames.Publish) and isinstance(frame.messages, list):
        return len(frame.messages) * (_RECEIPT_BYTES + len(frame.topic))
    return 0


def _check_one(frame: frames.Unsubscribe | frames.Credit) -> None:
    if (frame.subscription is None) == (frame.consumer is None):
        raise InvalidArgument("name a subscription or a consumer")
