"""The synchronous subscription: messages as they are published, read in the thread that iterates.

It has a connection of its own.  What arrives waits in the socket's buffer until it is asked for, then at the broker,
which drops what does not fit there and says how much: a subscriber that is too slow harms nobody but itself.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from millstream.client.address import Target
from millstream.client.backoff import Backoff
from millstream.client.blocking.bell import Bell
from millstream.client.blocking.transport import Transport
from millstream.client.messages import Message
from millstream.client.subscribing import RECEIVE_BYTES, Subscribing
from millstream.errors import ConnectionLost, MillstreamError, RequestTimeout
from millstream.wire.frames import FrameType, encode_frame
from millstream.wire.messages import decode_error

__all__ = ["Subscription"]

_log = logging.getLogger("millstream.client")

_CORRELATION: Final = 1
_HEARTBEATS_MISSED_MAX: Final = 3


class Subscription(Subscribing):
    """An endless sequence of messages: `for message in subscription`.

    Use it in one thread at a time; `close` may be called from any.
    """

    def __init__(
        self,
        target: Target,
        patterns: tuple[str, ...],
        *,
        timeout_s: float | None,
        reply: Callable[..., Any] | None,
    ) -> None:
        self._bell = Bell()  # first: there may be no descriptor left, and nothing to close then
        super().__init__(patterns, timeout_s=timeout_s, reply=reply)
        self._target = target
        self._transport: Transport | None = None
        self._backoff = Backoff()
        self._retry_at_s = 0.0
        self._heard_s = 0.0

    # --- reading -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Message]:
        """Messages as they come, until `close`, or until none came for `timeout_s`."""
        while True:
            yield from self._pending
            if not self._advance(self._timeout_s):
                return

    def next(self, timeout_s: float | None = None) -> Message | None:
        """The next message, or None if none comes within `timeout_s` (None waits forever) or after `close`."""
        if not self._has_pending and not self._advance(timeout_s):
            return None
        for message in self._pending:  # a call of `next` could be interrupted with the message in nobody's hands
            return message
        return None  # closed meanwhile, by another thread

    def batches(self) -> Iterator[list[Message]]:
        """Iterate over lists of messages, each from one partition, which is less work per message."""
        while True:
            if messages := [*self._pending]:  # not by a call: see `next`
                yield messages
            if not self._advance(self._timeout_s):
                return

    def _advance(self, wait_s: float | None) -> bool:
        """Make sure that there is a message to hand out; False when none came in time."""
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        while not self._closed:
            if self._ready:
                self._current = self._ready[0]
                self._pending = iter(self._current)
                del self._ready[0]  # not by a call: see `next`
                return self._is_open()
            remaining_s = 1.0 if deadline_s is None else deadline_s - time.monotonic()
            self._receive(max(0.0, min(1.0, remaining_s)))
            if remaining_s <= 0 and not self._ready:
                return False
        return False

    def _is_open(self) -> bool:
        if self._closed:  # meanwhile, by another thread: it has emptied what it knew of
            self._current.clear()
        return not self._closed

    def _receive(self, wait_s: float) -> None:
        transport = self._connected(wait_s)
        if transport is None:
            return
        try:
            if self._take_what_came(transport):
                return
            if wait_s <= 0 or not self._bell.beside(transport.wait, wait_s):
                self._check_silence(transport)
                return
            self._bell.clear()
            self._take_what_came(transport)
        except ConnectionLost as error:
            self._disconnect(error)

    def _take_what_came(self, transport: Transport) -> bool:
        try:
            if not transport.receive(0):
                return False
            self._heard_s = time.monotonic()
            self._take_in(transport)
        except MillstreamError:
            raise
        except BaseException as problem:  # of a signal's handler: what came may be lost, or taken in twice
            self._disconnect(ConnectionLost(f"interrupted by {problem!r}"))
            raise
        if transport.goaway:
            raise ConnectionLost("the broker asks its clients to go")
        return True

    def _take_in(self, transport: Transport) -> bool:
        """Work through what has arrived; True when the answer to `sub.open` was among it."""
        opened, refusal = False, None
        try:
            for frame in transport.reader.frames():
                if frame.type == FrameType.DELIVERY:
                    self._take(frame.payload)
                elif frame.type == FrameType.RESPONSE and frame.correlation is not None:
                    if frame.correlation == _CORRELATION:  # the answer to HELLO may still be here, too
                        opened = True
                        refusal = decode_error(frame.payload)
                else:
                    transport.note(frame)
        except MillstreamError as problem:
            raise transport.damaged(problem) from None
        if refusal is not None:
            raise refusal
        return opened

    def _check_silence(self, transport: Transport) -> None:
        """The broker sends heartbeats; without any it is gone, even if nobody has told us."""
        silent_s = time.monotonic() - self._heard_s
        if silent_s > _HEARTBEATS_MISSED_MAX * transport.welcome.heartbeat_ms / 1000:
            raise ConnectionLost("the broker has been silent for too long")

    # --- connection ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Subscribe.  Raises the error with which the broker refuses."""
        self._subscribe(self._target.timeout_s)

    def _subscribe(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        transport = Transport.open(self._target, timeout_s=timeout_s, receive_bytes=RECEIVE_BYTES)
        try:
            transport.send(encode_frame(FrameType.CALL, msgspec.json.encode(self._call()), _CORRELATION))
            while True:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    raise RequestTimeout("the broker did not answer in time")
                if transport.receive(remaining_s) and self._take_in(transport):
                    self._heard_s = time.monotonic()
                    self._transport = transport
                    if self._closed:  # meanwhile, by another thread: it has closed the connection that it knew of
                        raise ConnectionLost("the subscription is closed")
                    return
        except BaseException:
            transport.close()
            raise

    def _connected(self, wait_s: float) -> Transport | None:
        if self._transport is not None:
            return self._transport
        now_s = time.monotonic()
        if now_s < self._retry_at_s:
            self._bell.wait(min(wait_s, self._retry_at_s - now_s))
            return None
        try:
            self._subscribe(min(self._target.timeout_s, self._backoff.patience_s(wait_s)))
        except MillstreamError as error:
            if not error.retriable and not isinstance(error, ConnectionLost | RequestTimeout):
                raise
            self._retry_at_s = time.monotonic() + self._backoff.next_s()
            return None
        self._backoff.reset()
        self.reconnects += 1
        return self._transport

    def _disconnect(self, error: MillstreamError) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        if not self._closed:
            _log.info("subscription: %s; connecting again", error)

    def keep_alive(self, now_s: float) -> None:
        transport = self._transport
        if transport is not None:
            with contextlib.suppress(MillstreamError):  # the reading thread finds out
                transport.keep_alive(now_s)

    # --- end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Unsubscribe and end the iteration."""
        if self._closed:
            return
        self._closed = True
        self._current.clear()
        transport = self._transport
        if transport is not None:
            transport.close()
        self._bell.close()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A loop that ends with `break` drops its subscription without closing it.
        if not getattr(self, "_closed", True):
            self.close()
