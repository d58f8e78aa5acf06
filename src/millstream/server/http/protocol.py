"""uvicorn's connections, with the limits that it leaves to a proxy in front: how many, how large, how slow."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final
from uuid import uuid4

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from millstream.broker.metrics import Metrics
from millstream.errors import ProtocolViolation, QuotaExceeded
from millstream.server.connections import Refusals, peer_of
from millstream.server.http.problems import describe

__all__ = ["HEADER_BYTES_MAX", "LimitedWebSocket", "limited"]

#: Of all headers of a request together, with its first line.
HEADER_BYTES_MAX: Final = 65_536
#: For whoever waits for a body to say that it did not come.
_LATER_S: Final = 1.0
#: For the last bytes to reach a client that has stopped reading.
_GOODBYE_S: Final = 5.0
#: So many times as long as a client has for a request, it may read nothing of the answer before the connection is cut.
#: The kernel holds megabytes of it, and says in large steps how much of them was read.
_UNREAD_TIMES: Final = 4
#: Close codes of RFC 6455: bytes that are no frame, and data that is not of the kind it says.
_VIOLATION: Final = 1002
_NOT_TEXT: Final = 1007


class _NotHttp(ProtocolViolation):
    remedy = "Check that the client speaks HTTP on this port, with a method that HTTP has."


class _Limited(HttpToolsProtocol):
    """One client, who has to say what he wants within a time, in not too many words."""

    connections_max: int
    request_s: float
    metrics: Metrics
    refusals: Refusals
    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0
    #: A head has begun and has not ended, and how much of it came in pieces that had no end of anything in them.
    _in_head = False
    _unfinished = 0
    _upgraded = False

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self.connections_max:
            self.metrics.connections_refused += 1
            refusal = QuotaExceeded(f"the broker serves {len(self.connections)} HTTP connections, its limit")
            self.refusals.note(peer_of(transport), refusal)
            transport.abort()  # no word: whoever floods a broker would not read it
            return
        super().connection_made(transport)
        #: Requests without a whole answer, as they came: one may follow before the one before it is answered.
        self._under_way: deque[RequestResponseCycle] = deque()
        self._wait(self.request_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_come()
        if self.transport is not None:  # as it is while a connection was turned away
            for cycle in self._unanswered():  # uvicorn tells the one that came last, which may not even have begun
                cycle.disconnected = True
                cycle.message_event.set()
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head, before = self._in_head, self._head_bytes
        super().data_received(data)
        if was_in_head and self._in_head and self._head_bytes == before:
            # The parser says what a header is when it has ended, and until then keeps it, however long it is.
            self._unfinished += len(data)
            if self._unfinished > HEADER_BYTES_MAX and not self.transport.is_closing():
                self.send_400_response("Invalid HTTP request received.")
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.timeout_keep_alive_task is None and not self._upgraded:
            # Bytes that begin no request, such as blank lines, have ended uvicorn's patience with an idle client.
            self._wait(self.request_s)

    def handle_websocket_upgrade(self) -> None:
        if self._unanswered():
            # Its answer would go on between the frames, and nobody would tell it that the client has gone.
            self.transport.abort()
            return
        self._upgraded = True
        self._has_come()
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        self._has_come()
        self._wait(self.request_s)
        self._head_bytes = self._unfinished = 0
        self._in_head = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._grow(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._grow(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_come()
        self._wait(self.request_s + _LATER_S)  # for its body; whoever reads that has given up by then, and said so
        self._in_head = False
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # as it is for an upgrade
            self._unanswered().append(self.cycle)

    def on_message_complete(self) -> None:
        self._has_come()
        super().on_message_complete()

    def _unanswered(self) -> deque[RequestResponseCycle]:
        """What is under way; answers are given in the order of the requests."""
        while self._under_way and self._under_way[0].response_complete:
            self._under_way.popleft()
        return self._under_way

    def _grow(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEADER_BYTES_MAX:
            raise ValueError(f"the head of a request may have {HEADER_BYTES_MAX} bytes")

    def _wait(self, seconds: float) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _has_come(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.flow.read_paused:
            self._wait(self.request_s)  # while we do not listen its silence says nothing
        else:
            self.transport.close()
            self._see_off()

    # --- the end: a transport that closes waits until everything was read, however long that takes -----------------

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - ours says more
        refusal = _NotHttp(f"this is no HTTP request, or its head is larger than {HEADER_BYTES_MAX} bytes")
        self.refusals.note(peer_of(self.transport), refusal)
        request_id = uuid4().hex[:16]
        body = msgspec.json.encode(describe(refusal, request_id))
        lines = [
            STATUS_LINE[400],
            *(name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers),
        ]
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nx-request-id: {request_id}\r\n"
        self.transport.write(b"".join((*lines, head.encode(), b"connection: close\r\n\r\n", body)))
        self.transport.close()
        self._see_off()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._see_off()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._see_off()

    def _see_off(self) -> None:
        """Cut it off if for long it takes nothing of what is left for it."""
        self._has_come()
        if self in self.connections:
            left = self.transport.get_write_buffer_size()
            self._deadline = self.loop.call_later(_UNREAD_TIMES * self.request_s, self._look_after, left)

    def _look_after(self, left: int) -> None:
        self._deadline = None
        if self.transport.get_write_buffer_size() < left:
            self._see_off()
        else:
            self.transport.abort()


def limited(*, connections_max: int, request_s: float, metrics: Metrics, refusals: Refusals) -> type[asyncio.Protocol]:
    """The protocol with these limits; uvicorn makes one of it for each connection."""
    limits = {"connections_max": connections_max, "request_s": request_s, "metrics": metrics, "refusals": refusals}
    return type("LimitedProtocol", (_Limited,), limits)


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """A client after its upgrade: what it does wrong ends its connection, without a traceback for each."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: What has come of a message after its first piece.
        self._rest = bytearray()
        self._farewell: asyncio.TimerHandle | None = None

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.initial_response is not None:
            self.handshake_complete = True  # or uvicorn logs an error for everybody who is refused

    def handle_cont(self, event: Frame) -> None:
        self._rest += event.data  # not a list of pieces: they may be empty, and as many as a client likes
        if event.fin:
            self.frames.append(bytes(self._rest))
            self._rest.clear()
            self.send_receive_event_to_app()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()  # every ping is answered: one who sends them and reads nothing would fill memory

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    def handle_ping(self) -> None:
        super().handle_ping()
        if not self.writable.is_set():
            self.transport.pause_reading()

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not _is_text(b"".join(self.frames)):
            self.frames = []
            self.conn.fail(_NOT_TEXT, "a text frame is not UTF-8")
            self.handle_parser_exception()
        else:
            super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        if self.conn.close_sent is None:  # it did not wait to hear whether it is let in
            self.handshake_complete = True
            self.queue.put_nowait({"type": "websocket.disconnect", "code": _VIOLATION})
            self.transport.close()
        else:
            super().handle_parser_exception()
        self.disconnected = True  # whoever is about to send something to it learns that it has gone

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.disconnected = True
        self._see_off(_GOODBYE_S)

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self._see_off(_GOODBYE_S if self.transport.is_closing() else self.close_timeout + _GOODBYE_S)

    def _see_off(self, seconds: float) -> None:
        """Cut it off then: it may never read what is left for it, and a transport that closes waits for that."""
        if self._farewell is None and self in self.connections:
            self._farewell = self.loop.call_later(seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._farewell is not None:
            self._farewell.cancel()


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
