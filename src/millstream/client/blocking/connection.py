"""Requests and answers over one connection, from any number of threads.

The thread that waits for an answer reads the socket itself, so a single caller never waits for another thread.  When
several wait, one of them reads for all: it hands out the answers of the others as they come, and when it has its own it
passes the reading on.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import Any, Final

import msgspec

from millstream.client.blocking.transport import Transport
from millstream.errors import ConnectionLost, MillstreamError, RequestTimeout
from millstream.wire.calls import Call
from millstream.wire.frames import FrameType, encode_frame
from millstream.wire.messages import decode_json, response_body

__all__ = ["Connection"]

_encode: Final = msgspec.json.Encoder().encode
_RESPONSE: Final = int(FrameType.RESPONSE)


class _Slot:
    """Where an answer will be put."""

    __slots__ = ("answer", "bell", "error")

    def __init__(self) -> None:
        self.answer: bytes | None = None
        self.error: MillstreamError | None = None
        #: Locked while its owner sleeps; made only when somebody else reads.
        self.bell: threading.Lock | None = None


class Connection:
    """One connection that answers requests."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._read_lock = threading.Lock()
        self._slots: dict[int, _Slot] = {}
        self._correlations = itertools.count(1)
        self._retired = False

    @property
    def usable(self) -> bool:
        return self.transport.lost is None and not self.transport.goaway

    def next_correlation(self) -> int:
        return next(self._correlations) & 0x7FFF_FFFF

    def call(self, call: Call, kind: Any, *, deadline_s: float) -> Any:
        """Make a call and decode its answer.  Raises the broker's error, ConnectionLost or RequestTimeout."""
        correlation = self.next_correlation()
        frame = encode_frame(FrameType.CALL, _encode(call), correlation)
        return decode_json(response_body(memoryview(self.request(correlation, frame, deadline_s=deadline_s))), kind)

    def request(self, correlation: int, *parts: bytes, deadline_s: float) -> bytes:
        """Send a request and wait for the payload that answers it."""
        slot = self._slots[correlation] = _Slot()
        try:
            self.transport.send(*parts)
            while slot.answer is None:
                if slot.error is not None:
                    raise slot.error
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    raise RequestTimeout("the broker did not answer in time")
                if self._read_lock.acquire(blocking=False):
                    try:
                        self._read_until(slot, deadline_s)
                    finally:
                        self._read_lock.release()
                        self._pass_on()
                else:
                    self._sleep(slot, remaining_s)
            return slot.answer
        finally:
            del self._slots[correlation]
            if self._retired and not self._slots:
                self.close()

    def _sleep(self, slot: _Slot, remaining_s: float) -> None:
        """Wait until the reading thread has our answer, or wants us to read."""
        bell = threading.Lock()
        bell.acquire()
        slot.bell = bell
        # Looked at again now that we can be woken: the reader may have left in between.
        if slot.answer is None and slot.error is None and self._read_lock.locked():
            bell.acquire(timeout=min(remaining_s, 1.0))
        slot.bell = None

    def _read_until(self, slot: _Slot, deadline_s: float) -> None:
        try:
            while slot.answer is None and slot.error is None:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    return
                if self.transport.receive(remaining_s):
                    self._dispatch()
        except ConnectionLost as error:
            self._fail_all(error)

    def _dispatch(self) -> None:
        transport = self.transport
        try:
            for frame in transport.reader.frames():
                kind, correlation, payload = frame
                if kind != _RESPONSE or correlation is None:
                    transport.note(frame)
                    continue
                slot = self._slots.get(correlation)
                if slot is not None:  # otherwise its caller ran out of time
                    slot.answer = bytes(payload)
                    if slot.bell is not None:
                        _ring(slot)
        except MillstreamError as problem:
            raise transport.damaged(problem) from None

    def _fail_all(self, error: ConnectionLost) -> None:
        for slot in list(self._slots.values()):
            slot.error = ConnectionLost(str(error))
            _ring(slot)

    def _pass_on(self) -> None:
        """Wake one of those who wait, so that it reads from now on."""
        if len(self._slots) < 2:
            return
        for slot in list(self._slots.values()):
            if slot.bell is not None:
                _ring(slot)
                return

    def poll(self) -> None:
        """Take in what has arrived, without waiting: pushes, heartbeats, a goodbye.  Raises ConnectionLost."""
        if self._read_lock.acquire(blocking=False):
            try:
                while self.transport.receive(0):
                    self._dispatch()
            except ConnectionLost as error:
                self._fail_all(error)
                raise
            finally:
                self._read_lock.release()
                self._pass_on()

    def retire(self) -> None:
        """Close as soon as the answers under way are in."""
        self._retired = True
        if not self._slots:
            self.close()

    def close(self) -> None:
        self.transport.close()


def _ring(slot: _Slot) -> None:
    bell = slot.bell
    if bell is not None:
        with contextlib.suppress(RuntimeError):  # rung already
            bell.release()
