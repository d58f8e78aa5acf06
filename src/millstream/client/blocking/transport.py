"""One connection to the broker as a blocking socket: frames out, frames in, and nothing about what they mean."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from millstream.client.address import Target
from millstream.client.forks import belongs_to_one_process
from millstream.client.silence import Silence
from millstream.client.tls import PlainSocket, TlsSocket
from millstream.errors import ConnectionLost, MillstreamError, ProtocolViolation
from millstream.vigil import Pace
from millstream.wire.frames import Frame, FrameReader, FrameType, encode_frame
from millstream.wire.messages import Welcome, decode_answer, decode_error

__all__ = ["Transport"]

#: A blocking receive returns this often, so that deadlines and `close` are noticed.  The kernel keeps the time: a
#: timeout of Python's own would cost one more system call per operation.
_SLICE_S: Final = 0.25
_SEND_S: Final = 30
#: The longest that an answer is awaited awake, while they seldom take longer.  Time for a sync by a good disk.
_STAY_AWAKE_S: Final = 0.0006
#: An answer has a request before it, which came at once as well.
_STEPS: Final = 2
_yield: Final[Callable[[], None]] = getattr(os, "sched_yield", lambda: None)
_HEARTBEAT_FRAME: Final = encode_frame(FrameType.HEARTBEAT, b"")
_RECEIVE_BYTES: Final = 64 * 1024
#: More pieces than this the system does not take at once (IOV_MAX).
_PIECES_MAX: Final = 1024
_RESPONSE: Final = int(FrameType.RESPONSE)  # an IntEnum compares slowly


class Transport:
    """A socket after a successful handshake.  One thread receives; any thread may send."""

    def __init__(self, sock: PlainSocket, target: Target, *, receive_bytes: int) -> None:
        self._sock = sock
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self._target = target
        # A buffer of its own: the one that readers share by default belongs to a single thread.
        self.reader = FrameReader(shared=bytearray(receive_bytes))
        self._send_lock = threading.Lock()
        self._send_s: float = _SEND_S
        #: What was offered and the system has not taken yet; when it took something last.
        self._rest = b""
        self._taken_s = 0.0
        #: How often everything offered was sent, after there was something `unsent`.
        self.drains = 0
        self.welcome: Welcome
        self.lost: MillstreamError | None = None
        #: The broker asked us to go: finish, then connect again.
        self.goaway = False
        self.last_sent_s = time.monotonic()
        self._pace = Pace()
        self._silence = Silence(0, self.last_sent_s)
        #: Called with frames that answer nothing (REBALANCE, DELIVERY, FLOW), in the receiving thread.
        self.on_push: Callable[[Frame], None] | None = None
        belongs_to_one_process(self)

    @classmethod
    def open(cls, target: Target, *, timeout_s: float | None = None, receive_bytes: int = _RECEIVE_BYTES) -> Transport:
        """Connect and shake hands.  Raises ConnectionLost with a sentence that helps, or the broker's refusal."""
        deadline_s = time.monotonic() + (target.timeout_s if timeout_s is None else timeout_s)
        try:
            sock = socket.create_connection((target.host, target.port), max(0.001, deadline_s - time.monotonic()))
        except OSError as problem:
            raise target.unreachable(problem) from None
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(_SLICE_S))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_S))
        try:
            secured = _secured(sock, target, deadline_s)
        except OSError as problem:
            sock.close()
            raise target.unreachable(problem) from None
        transport = cls(secured, target, receive_bytes=receive_bytes)
        try:
            transport.send(target.hello(0))
            transport.welcome = transport._shake_hands(deadline_s)
            transport._silence = Silence(transport.welcome.heartbeat_ms, time.monotonic())
        except BaseException:
            transport.close()
            raise
        return transport

    def _shake_hands(self, deadline_s: float) -> Welcome:
        while True:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise ConnectionLost(f"{self._target.address} does not answer: is it the native port of a broker?")
            try:
                if not self.receive(remaining_s):
                    continue
            except ConnectionLost as problem:
                raise self._target.hung_up(problem) from None
            try:
                for frame in self.reader.frames():
                    if frame.type == FrameType.RESPONSE:
                        welcome: Welcome = decode_answer(frame.payload, Welcome)
                        return welcome
            except ProtocolViolation as problem:
                raise ConnectionLost(f"{self._target.address} is not a Millstream broker: {problem}") from None

    def fileno(self) -> int:
        return self._sock.fileno()

    # --- out -----------------------------------------------------------------------------------------------------

    def send(self, *parts: bytes) -> None:
        """Send the pieces as one, without joining them unless they are very many.  Raises ConnectionLost."""
        if len(parts) > _PIECES_MAX:
            parts = (b"".join(parts),)
        size = sum(map(len, parts))
        try:
            with self._send_lock:
                sent = self._sock.sendmsg(parts)
                if sent < size:  # rare: the socket's buffer is full
                    self._sock.sendall(b"".join(parts)[sent:])
        except OSError as problem:
            raise self._not_sent(problem) from None
        self.last_sent_s = time.monotonic()

    def send_frame(self, frame: bytes) -> None:
        """As `send`, for a single piece: without the price of gathering."""
        try:
            with self._send_lock:
                sent = self._sock.send(frame)
                if sent < len(frame):
                    self._sock.sendall(frame[sent:])
        except OSError as problem:
            raise self._not_sent(problem) from None
        self.last_sent_s = time.monotonic()

    def offer(self, *parts: bytes) -> None:
        """Send what the system takes at once.  The rest is `unsent`, and goes first with the next call, which may bring
        nothing: it is for one who waits for other things as well.  Raises ConnectionLost."""
        before = self.unsent
        try:
            with self._send_lock:
                if self._rest:
                    parts = (self._rest, *parts)
                try:
                    sent = self._sock.sendmsg(parts, (), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    sent = 0
                self._rest = b"".join(parts)[sent:] if sent < sum(map(len, parts)) else b""
        except OSError as problem:
            raise self._not_sent(problem) from None
        unsent = self.unsent
        if unsent < before or not before:
            self._taken_s = self.last_sent_s = time.monotonic()
        elif time.monotonic() - self._taken_s >= self._send_s:
            raise self._not_sent(BlockingIOError())
        if before and not unsent:
            self.drains += 1

    @property
    def unsent(self) -> int:
        """How many bytes of what was offered wait until the broker takes more."""
        return len(self._rest) if self._tls is None else self._tls.unsent

    def _not_sent(self, problem: OSError) -> ConnectionLost:
        if isinstance(problem, BlockingIOError):
            return self._break(f"the broker at {self._target.address} takes no data for {self._send_s:g} s")
        return self._break(f"the connection to {self._target.address} is lost: {problem.strerror}")

    def hurry(self, wait_s: float) -> None:
        """From now on, wait no longer than this for a broker that takes no data, or not at all: we are about to go."""
        self._send_s = min(self._send_s, wait_s)
        with contextlib.suppress(OSError):  # closed by another thread
            if self._send_s > 0:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(self._send_s))
            else:
                self._sock.setblocking(False)  # a time of 0 would mean any

    def keep_alive(self, now_s: float) -> None:
        """Say that we are here, if we said nothing for a third of what the broker tolerates."""
        if self.unsent:
            return  # it says as much, and nothing may come into the middle of it
        if now_s - self.last_sent_s >= self.welcome.heartbeat_ms / 3000 and self.lost is None:
            self.send(_HEARTBEAT_FRAME)

    def check_silence(self, now_s: float) -> None:
        """End the connection if the broker has vanished.  For who takes in what arrives all the time."""
        if self._silence.look(now_s) and self.lost is None:
            raise self._break(f"the broker at {self._target.address} {self._silence}")

    # --- in ------------------------------------------------------------------------------------------------------

    def receive(self, wait_s: float) -> bool:
        """Wait for bytes, a moment at most; True when there may be frames.  Raises ConnectionLost."""
        size = self.receive_into(self.reader.buffer(), wait_s)
        self.reader.received(size)
        return size > 0

    def receive_into(self, room: memoryview, wait_s: float) -> int:
        """Wait for bytes, a moment at most, without telling the reader; how many came.  Raises ConnectionLost."""
        flags = 0
        if wait_s < _SLICE_S:
            if wait_s > 0 and not self.wait(wait_s):
                return 0
            flags = socket.MSG_DONTWAIT
        try:
            size = self._sock.recv_into(room, 0, flags)
        except BlockingIOError:
            return 0
        except OSError as problem:
            raise self._break(f"the connection to {self._target.address} is lost: {problem.strerror}") from None
        if not size:
            raise self._break(f"the broker at {self._target.address} closed the connection")
        self._silence.heard = True
        return size

    def receive_answer(self, room: memoryview, wait_s: float) -> int:
        """As `receive_into`, right after a request.  While answers come at once, the next one is awaited awake.

        Being put to sleep and woken takes longer than a broker that is not busy needs for its answer.
        """
        size = self._look_out(room) if self._pace.brisk and self._target.stay_awake else 0
        if not size:
            size = self.receive_into(room, wait_s)
        self._pace.note(prompt=time.monotonic() - self.last_sent_s < _STAY_AWAKE_S, steps=_STEPS)
        return size

    def _look_out(self, room: memoryview) -> int:
        until_s = self.last_sent_s + _STAY_AWAKE_S
        while time.monotonic() < until_s:
            size = self.receive_into(room, 0)
            if size:
                return size
            _yield()  # to the broker, for one, if it shares our processor
        return 0

    def wait(self, wait_s: float, bell: int | None = None) -> bool:
        """Whether something arrives within this time, here or at another descriptor; nothing is taken.

        Or whether more of what is `unsent` can be sent.
        """
        if self._tls is not None and self._tls.pending:
            return True
        try:
            poll = select.poll()
            poll.register(self._sock.fileno(), select.POLLIN | select.POLLOUT if self.unsent else select.POLLIN)
            if bell is not None:
                poll.register(bell, select.POLLIN)
            return bool(poll.poll(wait_s * 1000))
        except (OSError, ValueError):  # closed by another thread
            return True

    def frames(self) -> Iterator[Frame]:
        """Answers among the frames received.  Exhaust it before receiving again; payloads are valid until then."""
        try:
            for frame in self.reader.frames():
                if frame.type == _RESPONSE and frame.correlation is not None:
                    yield frame
                else:
                    self.note(frame)
        except MillstreamError as problem:
            raise self.damaged(problem) from None

    def note(self, frame: Frame) -> None:
        """Act on a frame that answers nothing."""
        if frame.type == FrameType.RESPONSE:
            raise self._break(f"the broker ended the connection: {decode_error(frame.payload)}")
        if frame.type == FrameType.GOAWAY:
            self.goaway = True
        elif frame.type != FrameType.HEARTBEAT and self.on_push is not None:
            self.on_push(frame)

    def damaged(self, problem: MillstreamError) -> ConnectionLost:
        """What becomes of the connection after an error in its frames."""
        if isinstance(problem, ConnectionLost):
            return problem
        return self._break(f"the broker at {self._target.address} sent a damaged frame: {problem}")

    # --- end -----------------------------------------------------------------------------------------------------

    def _break(self, why: str) -> ConnectionLost:
        self.lost = self.lost or ConnectionLost(why)
        self.close()
        return ConnectionLost(str(self.lost))  # of the first reason: what comes after it is a consequence

    def close(self) -> None:
        """End the connection; a thread that is receiving notices."""
        self.lost = self.lost or ConnectionLost("the connection was closed")
        with contextlib.suppress(OSError):
            # Wakes a receiver in another thread, which closing alone does not.
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _forked(self) -> None:
        """Only the descriptor is closed: ending the connection would end the parent's."""
        self._send_lock = threading.Lock()
        self.lost = ConnectionLost("the connection belongs to the process that this one was forked from")
        self._sock.close()


def _secured(sock: socket.socket, target: Target, deadline_s: float) -> PlainSocket:
    if target.tls is None:
        return sock
    secured = TlsSocket(sock, target.tls, target.host)
    secured.shake_hands(deadline_s)
    return secured


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
