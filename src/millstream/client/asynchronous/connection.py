"""One connection of the asynchronous client: requests out, answers to whoever waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Callable
from typing import Any, Final, cast

from millstream.client.address import Target
from millstream.client.asynchronous.ongoing import Ongoing
from millstream.client.backoff import Backoff
from millstream.client.outbox import may_be_lost
from millstream.client.publishing import encode_goodbye
from millstream.client.silence import Silence
from millstream.client.values import encode_call
from millstream.errors import (
    ConnectionLost,
    InvalidArgument,
    MillstreamError,
    ProtocolViolation,
    RequestTimeout,
    ShuttingDown,
)
from millstream.wire.calls import Call
from millstream.wire.frames import FrameReader, FrameType, encode_frame
from millstream.wire.messages import Welcome, decode_answer, decode_error
from millstream.writing import write_all

__all__ = ["AsyncConnection", "AsyncLink"]

_HEARTBEAT_FRAME: Final = encode_frame(FrameType.HEARTBEAT, b"")
_RECEIVE_BYTES: Final = 256 * 1024

#: Gets the payload of an answer, valid only during the call, or the error that ended the connection.
OnAnswer = Callable[[int, memoryview | ConnectionLost], None]


class AsyncConnection(asyncio.BufferedProtocol):
    """A socket after a successful handshake."""

    def __init__(self, target: Target, receive_bytes: int) -> None:
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(shared=bytearray(receive_bytes))
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._waiting: dict[int, OnAnswer] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._last_sent_s = time.monotonic()
        self._silence = Silence(0, self._last_sent_s)
        self._is_reading = True
        #: Something that was written waits until the broker takes more.
        self.unsent = False
        #: Something was sent that no answer is awaited for, and the broker may not have taken it.
        self.unproven = False
        #: How often everything written was sent, after there was something `unsent`.
        self.drains = 0
        self.welcome: Welcome
        self.lost: ConnectionLost | None = None
        self.goaway = False
        #: Called when the broker asks us to go, or the connection ends.
        self.on_trouble: Callable[[], None] | None = None
        #: Called with the type and the payload of frames that answer nothing; the payload is valid only then.
        self.on_push: Callable[[int, memoryview], None] | None = None
        #: Called when everything written is sent, after there was something `unsent`.
        self.on_sent: Callable[[], None] | None = None

    @classmethod
    async def open(cls, target: Target, *, timeout_s: float, receive_bytes: int = _RECEIVE_BYTES) -> AsyncConnection:
        """Connect and shake hands.  Raises ConnectionLost with a sentence that helps, or the broker's refusal."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(
                    lambda: cls(target, receive_bytes), target.host, target.port, ssl=target.tls
                )
                await connection._shake_hands()
        except TimeoutError as problem:
            raise target.unreachable(problem) from None
        except OSError as problem:
            raise target.unreachable(_plainest(problem)) from None
        except ProtocolViolation as problem:
            raise ConnectionLost(f"{target.address} is not a Millstream broker: {problem}") from None
        return connection

    async def _shake_hands(self) -> None:
        try:
            answer = await self.exchange(0, self._target.hello(0))
            self.welcome = decode_answer(memoryview(answer), Welcome)
        except ConnectionLost as problem:
            self.close()
            raise self._target.hung_up(problem) from None
        except BaseException:
            self.close()
            raise
        self._silence = Silence(self.welcome.heartbeat_ms, time.monotonic())
        self._keep_alive()

    @property
    def usable(self) -> bool:
        return self.lost is None and not self.goaway

    @property
    def idle(self) -> bool:
        """Open, with nobody waiting for anything and nothing left to send, or to be taken."""
        return self.lost is None and not self._waiting and not self.unsent and not self.unproven

    # --- out -----------------------------------------------------------------------------------------------------

    def send(self, *parts: bytes) -> None:
        """Write the pieces; never waits.  What is sent on a lost connection is lost."""
        if self.lost is None:
            self._last_sent_s = time.monotonic()
            write_all(self._transport, parts)

    def expect(self, correlation: int, on_answer: OnAnswer) -> None:
        """Call back when this request is answered; at once if it never can be."""
        if self.lost is not None:
            on_answer(correlation, self.lost)
        else:
            self._waiting[correlation] = on_answer

    async def call(self, correlation: int, call: Call, kind: Any, *, timeout_s: float) -> Any:
        """Make a call and decode its answer.  Raises the broker's error, ConnectionLost or RequestTimeout."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.exchange(correlation, encode_frame(FrameType.CALL, encode_call(call), correlation))
        except TimeoutError:
            raise RequestTimeout(f"the broker did not answer within {timeout_s:.3g} s") from None
        return decode_answer(memoryview(answer), kind)

    async def finish(self, correlation: int) -> None:
        """Let the broker take everything written, then close.  Raises ConnectionLost.

        That all of it is sent is not enough: while the system keeps it for the broker, a socket that is closed loses it
        with the next thing that the broker says.
        """
        if self.lost is None:
            try:
                await self.exchange(correlation, encode_goodbye(correlation))
                self.unproven = False
            except ConnectionLost:
                if self.unproven:  # else somebody else has asked as well, and was answered
                    raise
            self.close()

    def pause_reading(self) -> None:
        """Leave what comes where it is, until `resume_reading`."""
        if self.lost is None:
            self._is_reading = False
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.lost is None:
            self._is_reading = True
            self._transport.resume_reading()

    async def exchange(self, correlation: int, *parts: bytes) -> bytes:
        """Send a request and wait for the payload that answers it, or ConnectionLost."""
        future: asyncio.Future[bytes] = self._loop.create_future()

        def on_answer(_: int, answer: memoryview | ConnectionLost) -> None:
            if future.done():
                return
            if isinstance(answer, ConnectionLost):
                future.set_exception(ConnectionLost(str(answer)))
            else:
                future.set_result(bytes(answer))

        self.expect(correlation, on_answer)
        self.send(*parts)
        try:
            return await future
        finally:
            self._waiting.pop(correlation, None)

    def _keep_alive(self) -> None:
        now_s = time.monotonic()
        interval_s = self.welcome.heartbeat_ms / 3000
        if not self._is_reading:
            self._silence.heard = True  # while we do not listen its silence says nothing
        if self._silence.look(now_s):
            self._end(f"the broker at {self._target.address} {self._silence}")
            return
        if now_s - self._last_sent_s >= interval_s:
            self.send(_HEARTBEAT_FRAME)
        if self.lost is None:
            self._timer = self._loop.call_later(interval_s / 2, self._keep_alive)

    # --- in ------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=1, low=0)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def pause_writing(self) -> None:
        self.unsent = True

    def resume_writing(self) -> None:
        self.unsent = False
        self.drains += 1
        if self.on_sent is not None:
            self.on_sent()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.received(nbytes)
        self._silence.heard = True
        try:
            for kind, correlation, payload in self._reader.frames():
                if kind == FrameType.RESPONSE:
                    if correlation is None:
                        self._end(f"the broker ended the connection: {decode_error(payload)}")
                        return
                    on_answer = self._waiting.pop(correlation, None)
                    if on_answer is not None:  # otherwise its caller ran out of time
                        on_answer(correlation, payload)
                elif kind == FrameType.GOAWAY:
                    self.goaway = True
                    self._trouble()
                elif self.on_push is not None:
                    self.on_push(kind, payload)
        except MillstreamError as problem:
            self._end(f"the broker at {self._target.address} sent a damaged frame: {problem}")

    def eof_received(self) -> None:
        self._end(f"the connection to {self._target.address} is lost (closed)")  # nobody reads what is not sent yet

    def connection_lost(self, exc: Exception | None) -> None:
        why = f": {exc}" if exc is not None else " (closed)"
        self._end(f"the connection to {self._target.address} is lost{why}")

    # --- end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End it at once; what is not sent yet is lost."""
        self._end("the connection was closed")

    def _end(self, why: str) -> None:
        if self.lost is not None:
            return
        self.lost = ConnectionLost(why)
        self.unsent = False
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        waiting, self._waiting = self._waiting, {}
        for correlation, on_answer in waiting.items():
            on_answer(correlation, self.lost)
        self._trouble()

    def _trouble(self) -> None:
        if self.on_trouble is not None:
            self.on_trouble()


class AsyncLink:
    """A connection that is there when it is needed: opened again, with growing pauses, whenever it is lost."""

    def __init__(self, target: Target, *, receive_bytes: int = _RECEIVE_BYTES) -> None:
        self._target = target
        self._receive_bytes = receive_bytes
        self._loop = asyncio.get_running_loop()
        self._connection: AsyncConnection | None = None
        #: For all tasks that need it: in line behind each other, each would wait for the patience of all before it.
        self._opening = Ongoing(lambda: self._open(self._target.timeout_s))
        self._closed = False
        #: Shared by everything on this link, so that ids never meet.
        self.correlations = itertools.count(1)
        self.trouble: str = ""
        self.opened = 0
        self._listeners: list[Callable[[], None]] = []
        #: Gets what is received without having been asked for: type and payload.
        self.on_push: Callable[[int, memoryview], None] | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def current(self) -> AsyncConnection | None:
        connection = self._connection
        return connection if connection is not None and connection.usable else None

    def check_loop(self) -> None:
        """Raises InvalidArgument in another event loop than the one that it was made in: nothing here would wake it."""
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidArgument(
                "this client belongs to another event loop: connect in the loop that uses it, "
                "or hand over with asyncio.run_coroutine_threadsafe"
            )

    def listen(self, on_trouble: Callable[[], None]) -> None:
        """Be told when the connection is lost or should be left."""
        self._listeners.append(on_trouble)

    def forget(self, on_trouble: Callable[[], None]) -> None:
        with contextlib.suppress(ValueError):
            self._listeners.remove(on_trouble)

    async def open(self) -> None:
        """Connect now; raises ConnectionLost at once if that fails."""
        await self._open(self._target.timeout_s)

    async def _open(self, timeout_s: float) -> AsyncConnection:
        connection = await AsyncConnection.open(self._target, timeout_s=timeout_s, receive_bytes=self._receive_bytes)
        if self._closed:  # meanwhile: it has closed the connection that it knew of
            connection.close()
            raise ConnectionLost("the client is closed")
        connection.on_trouble = lambda: self._tell(connection)
        connection.on_push = self._pushed
        old, self._connection = self._connection, connection
        self.opened += 1
        self.trouble = ""
        if old is not None and old.idle:
            old.close()
        return connection

    def _pushed(self, kind: int, payload: memoryview) -> None:
        if self.on_push is not None:
            self.on_push(kind, payload)

    def _tell(self, connection: AsyncConnection) -> None:
        if connection.goaway and connection.idle:
            connection.close()
            return
        for listener in list(self._listeners):
            listener()

    async def get(self, deadline_s: float | None) -> AsyncConnection:
        """A usable connection.  Tries until the deadline; raises ConnectionLost after it."""
        self.check_loop()
        backoff = Backoff()
        while (connection := self.current) is None:
            if self._closed:
                raise ConnectionLost("the client is closed")
            remaining_s = 10.0 if deadline_s is None else max(0.05, deadline_s - time.monotonic())
            try:
                try:
                    return await self._opening.result(remaining_s)
                except TimeoutError as problem:
                    raise self._target.unreachable(problem) from None
            except (ConnectionLost, ShuttingDown) as error:
                self.trouble = str(error)
                wait_s = backoff.next_s()
                if deadline_s is not None and time.monotonic() + wait_s >= deadline_s:
                    raise ConnectionLost(str(error)) from None
            await asyncio.sleep(wait_s)
        return connection

    async def call(self, call: Call, kind: Any, *, repeatable: bool) -> Any:
        """Make a call; one whose answer is lost is made again if that cannot do harm."""
        deadline_s = time.monotonic() + self._target.timeout_s
        while True:
            connection = await self.get(deadline_s)
            try:
                remaining_s = max(0.001, deadline_s - time.monotonic())
                return await connection.call(self.next_correlation(), call, kind, timeout_s=remaining_s)
            except (ConnectionLost, ShuttingDown) as error:
                if isinstance(error, ConnectionLost) and not repeatable:
                    raise ConnectionLost(f"{error}; the request may or may not have been carried out") from None
                connection.goaway = True  # not for new requests
                if time.monotonic() >= deadline_s:
                    raise

    def next_correlation(self) -> int:
        return next(self.correlations) & 0x7FFF_FFFF

    async def finish(self, limit_s: float) -> None:
        """Let the broker take everything written, for as long as this; then close.  Raises what came in between."""
        try:
            if self._connection is not None:
                async with asyncio.timeout(limit_s):
                    await self._connection.finish(self.next_correlation())
        except TimeoutError:
            raise RequestTimeout(
                f"what was sent last may be lost: the broker has not taken it after {limit_s:.3g} s"
            ) from None
        except ConnectionLost as error:
            raise may_be_lost(error) from None
        finally:
            self.close()

    def close(self) -> None:
        self._closed = True
        self._opening.cancel()
        if self._connection is not None:
            self._connection.close()


def _plainest(problem: OSError) -> OSError:
    """asyncio reports several addresses that refused as one error without a kind."""
    if type(problem) is OSError and "Connect call failed" in str(problem):
        return ConnectionRefusedError(str(problem))
    return problem
