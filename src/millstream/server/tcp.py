"""The native door: frames from a socket become calls of the broker, its answers become frames.  Nothing else.

One protocol object per client.  It receives into the buffer where frames are parsed, hands all requests of one read to
the broker, then lets it append them together.  A client that does not read its answers is not read from either.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final, cast

import msgspec
import structlog

from millstream.broker.broker import Broker, FetchAnswer, FetchHandle, LeaseHandle, Session
from millstream.broker.logs import Sparing
from millstream.config import Settings
from millstream.errors import (
    InternalError,
    InvalidArgument,
    MillstreamError,
    PayloadTooLarge,
    QuotaExceeded,
    RequestTimeout,
    ShuttingDown,
)
from millstream.server.calling import AnswerSizes, Calls
from millstream.server.connections import Connections, peer_of
from millstream.vigil import Vigil
from millstream.wire.connection import Heartbeat, Refused, Request, ServerConnection, SettleRequest
from millstream.wire.deliveries import DELIVERY_BYTES, Delivery, encode_delivery_head
from millstream.wire.frames import PROTOCOL_VERSION, FrameType, encode_frame
from millstream.wire.leases import LeasePart, LeaseRequest, SettleResults, encode_lease_result, encode_settle_result
from millstream.wire.messages import (
    FETCH_RESULT_BYTES,
    FetchRequest,
    Hello,
    PublishRequest,
    Welcome,
    encode_error,
    encode_fetch_result_head,
    encode_json_response,
    encode_publish_result,
)
from millstream.wire.subscription_calls import FlowNotice
from millstream.writing import write_all

__all__ = ["NativeListener"]

_log = structlog.get_logger("millstream.tcp")

#: Requests that one client may have waiting; a client with more has lost its way.
_PARKED_REQUESTS_MAX: Final = 20_000
#: Who takes longer over the greetings, TLS's or ours, has something else in mind.
_HANDSHAKE_S: Final = 10.0
#: For the last words to reach a client that has stopped reading.
_GOODBYE_S: Final = 5.0
#: For those to go that nobody answers: a client hears of it, asks whether all was read, and closes.
_PATIENCE_S: Final = 2.0
#: Who moves more at a time does not wait for each answer.
_SMALL_BYTES: Final = 16 * 1024
_HEARTBEAT_FRAME: Final = encode_frame(FrameType.HEARTBEAT, b"")


class NativeConnection(asyncio.BufferedProtocol):
    """One client."""

    def __init__(self, listener: NativeListener) -> None:
        self._listener = listener
        self._broker = listener.broker
        self._settings = listener.settings
        self._wire = ServerConnection(frame_bytes_max=listener.settings.server.frame_bytes_max)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._session: Session | None = None
        self._tells_extensions = False
        #: Fetches and leases that wait for something to come.
        self._waiting: dict[int, FetchHandle | LeaseHandle] = {}
        #: Those that found the client slow to read; served when it has caught up.
        self._deferred: list[tuple[int, FetchRequest | LeaseRequest]] = []
        self._calls = Calls(
            listener, write=self._write, has_room=lambda: not self._is_slow, free_bytes=self._free_bytes
        )
        self._paused = False
        self._reads = True
        self._closing = False
        self._outgoing: list[bytes | memoryview] = []
        self._outgoing_bytes = 0
        self._outgoing_bytes_max = listener.settings.server.connection_memory_bytes // 4
        self._send_is_due = False
        #: A delivery was refused: whoever wanted it waits to hear that there is room.
        self._has_refused = False
        self._fetch_bytes_max = listener.settings.server.frame_bytes_max - FETCH_RESULT_BYTES - 16
        #: Publishes and settles whose answer waits for the disk.
        self._unconfirmed = 0
        #: The client publishes without being answered: what it has sent and we have not read is in nobody's hands.
        self._unanswered = False
        #: Ends it although it does not read its last words.
        self._farewell: asyncio.TimerHandle | None = None
        self._heard = True  # since the last tick
        self._came_ms = self._last_heard_ms = listener.now_ms()

    # --- life ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._transport.set_write_buffer_limits(self._outgoing_bytes_max)
        refusal = self._listener.connections.admit(self)
        if refusal is not None:
            self._close_with(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        if exc is not None and self._session is not None and not self._session.why:
            self._session.why = str(exc)
        self._listener.connections.forget(self)
        self._listener.vigil.forget(self)
        if self._farewell is not None:
            self._farewell.cancel()
        self._let_go()

    def _let_go(self) -> None:
        """Give back what the client holds, and ask for nothing more on its behalf."""
        for request in self._waiting.values():
            request.cancel()
        self._waiting.clear()
        self._deferred.clear()
        self._calls.forget()
        if self._session is not None:
            self._broker.session_closed(self._session)

    def _stop_reading(self) -> None:
        if self._reads and not self._closing:
            self._reads = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._reads and not self._closing and not self._paused and self._unconfirmed < _PARKED_REQUESTS_MAX:
            self._reads = True
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._paused = True
        self._stop_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._resume_reading()
        self._serve_deferred()
        self._has_room()

    def _has_room(self) -> None:
        self._has_refused = False
        if self._session is not None:
            self._broker.session_drained(self._session)

    def _serve_deferred(self) -> None:
        """Go on with requests that waited for the client to read what it has got already."""
        deferred, self._deferred = self._deferred, []
        for correlation, request in deferred:
            self._read(correlation, request)
        self._calls.go_on()

    @property
    def _is_slow(self) -> bool:
        """Whether the client has not read what it has got so far."""
        return self._paused or self._outgoing_bytes > self._outgoing_bytes_max

    def _free_bytes(self) -> int:
        """How much more may wait for the client."""
        held = self._outgoing_bytes + self._transport.get_write_buffer_size()
        return self._settings.server.connection_memory_bytes - held

    @property
    def busy(self) -> bool:
        """Whether answers are still owed that the client cannot simply ask for again, or it may have sent more.

        One that publishes without being answered goes by itself, when it knows that everything was read.
        """
        return bool(self._unconfirmed or self._calls.owed or (self._unanswered and self._listener.patient))

    def _note_end(self, why: MillstreamError) -> None:
        """Say in the log who is not let in, or not let go on."""
        session = self._session
        self._listener.connections.refusals.note(self.address, why, None if session is None else session.client_id)
        if session is not None:
            session.why = str(why)

    def say_goodbye(self) -> None:
        if self._session is not None:
            self._session.why = "the broker is shutting down"
        self._write(encode_frame(FrameType.GOAWAY, b'{"reason":"the broker is shutting down"}'))
        for correlation in list(self._waiting):
            self._waiting.pop(correlation).cancel()
            self._write(encode_error(ShuttingDown("the broker is shutting down"), correlation))

    def close(self) -> None:
        if not self._closing:
            self.send()
            self._closing = True
            self._transport.close()

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def tick(self, now_ms: int) -> None:
        """Called about every heartbeat interval: is the client alive, and does it know that we are?"""
        server = self._settings.server
        if self._heard or not self._reads:  # while we do not listen its silence says nothing
            self._heard, self._last_heard_ms = False, now_ms
        if now_ms - self._last_heard_ms > server.heartbeat_ms * server.heartbeat_misses:
            silent_ms = now_ms - self._last_heard_ms
            self._note_end(RequestTimeout(f"nothing was heard of the client for {silent_ms} ms"))
            self.abort()
        elif self._session is None and now_ms - self._came_ms > 1000 * _HANDSHAKE_S:
            self._note_end(RequestTimeout("the client does not say who it is"))
            self.abort()
        else:
            self._write(_HEARTBEAT_FRAME)

    @property
    def address(self) -> str:
        return peer_of(self._transport)

    # --- bytes in ------------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._wire.reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._closing:
            return
        self._heard = True
        self._send_is_due = True  # by the end of this call
        try:
            sole = self._wire.sole_publish(nbytes)
            if sole is not None:
                self._publish(*sole)
            else:
                self._wire.reader.received(nbytes)
                for request in self._wire.requests():
                    self._handle(request)
        except MillstreamError as error:
            # What came before the mistake was in order and is carried out.
            self._broker.metrics.protocol_errors += 1
            self._note_end(error)
            self._broker.flush()
            self._close_with(error)
        except Exception:
            _log.exception("request failed", address=self.address)
            self._broker.flush()
            self._close_with(InternalError("the broker failed to handle a request; its log has the details"))
        else:
            self._broker.flush()
            if self._listener.planned:
                # Whoever waits for messages gets them before their publisher is told that they are stored.
                self._send_is_due = False
                self._plan_to_send()
            else:
                self.send()
            if self._unconfirmed and nbytes <= _SMALL_BYTES:
                self._listener.vigil.step(self, awaits_disk=True)

    def _handle(self, request: Request) -> None:
        correlation, body = request
        kind = type(body)
        if kind is PublishRequest:
            self._publish(correlation, cast(PublishRequest, body))
        elif kind is FetchRequest or kind is LeaseRequest:
            self._read(correlation, cast(FetchRequest | LeaseRequest, body))
        elif kind is SettleRequest:
            self._settle(correlation, cast(SettleRequest, body))
        elif kind is Heartbeat:
            pass
        elif kind is Refused:
            self._broker.metrics.requests_failed += 1
            self._write(encode_error(cast(Refused, body).error, correlation))
        elif kind is Hello:
            self._hello(correlation, cast(Hello, body))
        else:
            self._call(correlation, body)

    def _hello(self, correlation: int, hello: Hello) -> None:
        try:
            self._session = self._broker.open_session(
                namespace=hello.namespace,
                client_id=hello.client_id,
                address=self.address,
                push=self._push,
                deliver=self._deliver,
                access=self._broker.access.authenticate(hello.token, self.address),
                end=self._close_with,
            )
        except MillstreamError as error:
            self._write(encode_error(error, correlation))
            raise
        self._tells_extensions = hello.extensions
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            node_id=self._broker.node_id,
            software=self._broker.software,
            heartbeat_ms=self._settings.server.heartbeat_ms,
            frame_bytes_max=self._settings.server.frame_bytes_max,
            epoch=self._broker.epoch,
        )
        self._write(encode_json_response(welcome, correlation))

    def _publish(self, correlation: int, request: PublishRequest) -> None:
        assert self._session is not None

        def confirmed(
            error: MillstreamError | None, label: int, base_offset: int, append_time_us: int, duplicate: bool
        ) -> None:
            if error is None:
                answer = encode_publish_result(correlation, label, base_offset, append_time_us, duplicate=duplicate)
            else:
                answer = encode_error(error, correlation)
            self._confirm(answer)

        wants_answer = request.acks != 0
        self._unconfirmed += wants_answer
        self._unanswered = self._unanswered or not wants_answer
        if self._unconfirmed >= _PARKED_REQUESTS_MAX:
            self._stop_reading()  # the disk is slower than this client; it waits instead of our memory
        try:
            if len(request.batch) > self._fetch_bytes_max:
                # It would fit into this frame, but not into the larger one that serves it to a reader.
                raise PayloadTooLarge(f"a batch has {self._fetch_bytes_max} bytes at most, not {len(request.batch)}")
            self._broker.publish(self._session, request, confirmed if wants_answer else None)
        except MillstreamError as error:
            self._broker.metrics.requests_failed += 1
            if wants_answer:
                self._confirm(encode_error(error, correlation))

    def _confirm(self, answer: bytes) -> None:
        """Answer what waited for the disk."""
        self._unconfirmed -= 1
        if not self._reads:
            self._resume_reading()
        if not self._closing:
            self._outgoing.append(answer)
            self._outgoing_bytes += len(answer)
            self._plan_to_send()
        if self._listener.connections.draining:
            self._listener.connections.progressed()

    def _read(self, correlation: int, request: FetchRequest | LeaseRequest) -> None:
        assert self._session is not None
        if self._is_slow:
            if len(self._deferred) >= _PARKED_REQUESTS_MAX:
                raise QuotaExceeded(f"a connection may have {_PARKED_REQUESTS_MAX} requests waiting")
            self._deferred.append((correlation, request))
            return
        try:
            if len(self._waiting) >= _PARKED_REQUESTS_MAX:
                raise QuotaExceeded(f"a connection may have {_PARKED_REQUESTS_MAX} requests waiting")
            if correlation in self._waiting:
                raise InvalidArgument(f"correlation id {correlation} is in use by another request")
            if request.max_bytes > self._fetch_bytes_max:
                request = request._replace(max_bytes=self._fetch_bytes_max)
            waiting = (
                self._fetch(correlation, request)
                if isinstance(request, FetchRequest)
                else self._lease(correlation, request)
            )
            if waiting is not None:
                self._waiting[correlation] = waiting
        except MillstreamError as error:
            self._broker.metrics.requests_failed += 1
            self._write(encode_error(error, correlation))

    def _fetch(self, correlation: int, request: FetchRequest) -> FetchHandle | None:
        def answer(result: FetchAnswer | MillstreamError) -> None:
            waited = self._waiting.pop(correlation, None) is not None
            if waited and self._is_slow and isinstance(result, FetchAnswer) and result.buffers:
                # Many may have waited for the same messages, which can be read again when there is room for them.
                self._deferred.append((correlation, request))
            else:
                self._answer_fetch(correlation, result)

        assert self._session is not None
        return self._broker.fetch(self._session, request, answer)

    def _lease(self, correlation: int, request: LeaseRequest) -> LeaseHandle | None:
        now_ms = self._listener.now_ms
        asked_ms = now_ms()

        def answer(result: Sequence[LeasePart] | MillstreamError) -> None:
            self._waiting.pop(correlation, None)
            if isinstance(result, MillstreamError):
                self._broker.metrics.requests_failed += 1
                self._write(encode_error(result, correlation))
            else:
                self._write(*encode_lease_result(correlation, result, now_ms() - asked_ms))

        assert self._session is not None
        return self._broker.lease(self._session, request, answer)

    def _settle(self, correlation: int, request: SettleRequest) -> None:
        def answer(result: SettleResults | MillstreamError) -> None:
            if isinstance(result, MillstreamError):
                self._broker.metrics.requests_failed += 1
                self._confirm(encode_error(result, correlation))
            else:
                lasting_ms = result.lasting_ms if self._tells_extensions else ()
                self._confirm(encode_settle_result(correlation, result, lasting_ms))

        assert self._session is not None
        self._unconfirmed += 1
        if self._unconfirmed >= _PARKED_REQUESTS_MAX:
            self._stop_reading()
        try:
            self._broker.settle(self._session, request.entries, answer)
        except MillstreamError as error:
            answer(error)

    def _answer_fetch(self, correlation: int, result: FetchAnswer | MillstreamError) -> None:
        if self._closing:
            return
        metrics = self._broker.metrics
        if isinstance(result, MillstreamError):
            metrics.requests_failed += 1
            self._write(encode_error(result, correlation))
            return
        size = sum(map(len, result.buffers))
        metrics.fetches += 1
        metrics.bytes_fetched += size
        head = encode_fetch_result_head(
            correlation,
            size=size,
            next_offset=result.next_offset,
            high_watermark=result.high_watermark,
            start_offset=result.start_offset,
            damaged=result.damaged,
        )
        self._write(head, *result.buffers)

    def _call(self, correlation: int, call: object) -> None:
        assert self._session is not None
        if self._calls.owed >= _PARKED_REQUESTS_MAX:
            raise QuotaExceeded(f"a connection may have {_PARKED_REQUESTS_MAX} requests waiting")
        self._calls.put(self._session, correlation, call)

    # --- bytes out -----------------------------------------------------------------------------------------------

    def _push(self, message: object) -> None:
        kind = FrameType.FLOW if isinstance(message, FlowNotice) else FrameType.REBALANCE
        self._write(encode_frame(kind, msgspec.json.encode(message)))

    def _deliver(self, delivery: Delivery) -> bool:
        """Send messages of a subscription, unless the client has not read what it has got so far."""
        size = sum(map(len, delivery.buffers))
        if self._is_slow or self._closing or size + DELIVERY_BYTES > self._settings.server.frame_bytes_max:
            self._has_refused = True
            if not self._paused and not self._closing:
                self._plan_to_send()  # without a pause there is no end of a pause, which would tell that there is room
            return False
        self._write(encode_delivery_head(delivery, size), *delivery.buffers)
        return True

    def _write(self, *data: bytes | memoryview) -> None:
        """Send, together with everything else that is written in this turn of the loop: one system call for all."""
        if not self._closing:
            self._outgoing += data
            self._outgoing_bytes += sum(map(len, data))
            self._plan_to_send()

    def _plan_to_send(self) -> None:
        if not self._send_is_due:
            self._send_is_due = True
            self._listener.plan(self)

    def send(self) -> None:
        self._send_is_due = False
        outgoing = self._outgoing
        if outgoing:
            if self._outgoing_bytes <= _SMALL_BYTES:
                self._listener.vigil.step(self)
            self._outgoing = []
            self._outgoing_bytes = 0
            if not self._transport.is_closing():
                write_all(self._transport, outgoing)
        if self._paused or self._closing:
            return
        if self._deferred or self._calls.waiting:
            self._listener.loop.call_soon(self._serve_deferred)
        if self._has_refused:
            self._has_room()

    def _close_with(self, error: MillstreamError) -> None:
        """Say what was wrong, then close: one sentence, no harm to others.

        What it holds is free at once: a client that has stopped reading would never hear of it, nor be gone.
        """
        if self._session is not None:
            self._session.why = str(error)
        self._let_go()
        self._write(encode_error(error, None))
        self.send()
        self.close()
        self._farewell = self._listener.loop.call_later(_GOODBYE_S, self.abort)


class NativeListener:
    """Accepts native connections, and ends them politely."""

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        now_ms: Callable[[], int],
        tls: ssl.SSLContext | None = None,
        *,
        stay_awake_us: int = 0,
    ) -> None:
        """`stay_awake_us` is for real time only: see `Vigil`."""
        self.broker = broker
        self._tls = tls
        self.settings = settings
        self.now_ms = now_ms
        self.address = ""
        self.loop = asyncio.get_running_loop()
        self.vigil = Vigil(self.loop, stay_awake_us)
        #: Connections that send something at the end of this turn of the loop.
        self.planned: list[NativeConnection] = []
        self.connections: Connections[NativeConnection] = Connections(broker, settings.server, "native")
        self.slow = Sparing()
        #: While it closes: whether those who publish without being answered may take their time to go.
        self.patient = True
        self.answer_sizes = AnswerSizes()
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        #: Calls under way.  A call goes on when its client is gone: what it has recorded must also take effect.
        self._calls: set[asyncio.Task[None]] = set()

    def plan(self, connection: NativeConnection) -> None:
        """Have a connection send what it has when everything that is ready now has been handled."""
        if not self.planned:
            self.loop.call_soon(self._send_planned)
        self.planned.append(connection)

    def _send_planned(self) -> None:
        planned, self.planned = self.planned, []
        for connection in planned:
            try:
                connection.send()
            except Exception:  # the others have nothing to do with it
                _log.exception("sending failed", address=connection.address)
                connection.abort()

    def own(self, call: asyncio.Task[None]) -> None:
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def open(self) -> None:
        server = self.settings.server
        self._server = await self.loop.create_server(
            lambda: NativeConnection(self),
            server.host,
            server.port,
            backlog=server.backlog,
            ssl=self._tls,
            ssl_handshake_timeout=_HANDSHAKE_S if self._tls else None,
        )
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._ticker = self.loop.create_task(self._tick())

    async def close(self) -> None:
        """Stop accepting, tell everybody, let what is under way finish, then close."""
        if self._server is not None:
            self._server.close()
        patience = self.loop.call_later(_PATIENCE_S, self._lose_patience)
        await self.connections.end()
        patience.cancel()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker

    def _lose_patience(self) -> None:
        self.patient = False
        self.connections.progressed()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.settings.server.heartbeat_ms / 1000)
            now_ms = self.now_ms()
            for connection in self.connections:
                connection.tick(now_ms)
