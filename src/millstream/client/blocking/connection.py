"""Requests and answers over one connection, from any number of threads.

The thread that waits for an answer reads the socket itself, so a single caller never waits for another thread.  When
several wait, one of them reads for all: it hands out the answers of the others as they come, and when it has its own it
passes the reading on.

Whoever holds the read lock is the only one to hand out answers.  So a publisher that finds nobody waiting takes the
lock before it sends, and then its answer straight out of the receive buffer; others find the lock taken and wait as
they do for any reader.  Whatever else arrives in place of that answer is left to the reader of frames: see `publish`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from millstream.client.blocking.transport import Transport
from millstream.client.values import encode_call
from millstream.errors import ConnectionLost, MillstreamError, RequestTimeout
from millstream.wire.calls import Call
from millstream.wire.frames import FrameType, encode_frame
from millstream.wire.messages import (
    PublishResult,
    decode_answer,
    decode_publish_result,
    encode_publish_head,
    sole_publish_result,
)

__all__ = ["Connection"]

_RESPONSE: Final = int(FrameType.RESPONSE)
#: Up to here copying a batch into one piece costs less than sending it in several, and sending it does not block.
_ONE_PIECE_BYTES: Final = 16 * 1024


class _Slot:
    """Where an answer will be put."""

    __slots__ = ("answer", "bell", "error")

    def __init__(self) -> None:
        self.answer: bytes | None = None
        self.error: MillstreamError | None = None
        #: Locked while its owner sleeps; made only when somebody else reads.
        self.bell: threading.Lock | None = None

    def result(self) -> bytes:
        """What came; nothing means that the time was up."""
        if self.answer is not None:
            return self.answer
        raise self.error or RequestTimeout("the broker did not answer in time")


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
        frame = encode_frame(FrameType.CALL, encode_call(call), correlation)
        return decode_answer(memoryview(self.request(correlation, frame, deadline_s=deadline_s)), kind)

    def request(self, correlation: int, *parts: bytes, deadline_s: float) -> bytes:
        """Send a request and wait for the payload that answers it."""
        with self.expecting(correlation):
            self.transport.send(*parts)
            return self.wait(correlation, deadline_s)

    @contextlib.contextmanager
    def expecting(self, correlation: int) -> Iterator[None]:
        """Have a place for an answer: to a request of this number, or one that `fulfil` announces."""
        self._slots[correlation] = _Slot()
        try:
            yield
        except MillstreamError:
            raise
        except BaseException:
            self._abandon()
            raise
        finally:
            del self._slots[correlation]
            if self._slots:
                if not self._read_lock.locked():  # we may have been woken to read, and ran out of time instead
                    self._pass_on()
            elif self._retired:
                self._close_when_idle()

    def wait(self, correlation: int, deadline_s: float) -> bytes:
        """Wait for the answer that is expected under this number."""
        slot = self._slots[correlation]
        while slot.answer is None and slot.error is None:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                break
            if self._read_lock.acquire(blocking=False):
                try:
                    self._read_until(slot, deadline_s)
                finally:
                    self._stop_reading()
            else:
                self._sleep(slot, remaining_s)
        return slot.result()

    def awaits(self, correlation: int) -> bool:
        slot = self._slots.get(correlation)
        return slot is not None and slot.answer is None

    def fulfil(self, correlation: int) -> None:
        """What is expected under this number has come by another way.  Called by the thread that reads."""
        slot = self._slots.get(correlation)
        if slot is not None:
            slot.answer = b""
            _ring(slot)

    def publish(
        self, topic: bytes, partition: int, fsync: int, head: bytes, tail: bytes, deadline_s: float
    ) -> PublishResult:
        """Publish a batch and wait until it is stored.  Raises the broker's error, ConnectionLost or RequestTimeout."""
        try:
            return self._publish(topic, partition, fsync, head, tail, deadline_s)
        except MillstreamError:
            raise
        except BaseException:  # out here, because it may come right after the lock was taken, or before it is let go of
            self._abandon()
            raise

    def _publish(
        self, topic: bytes, partition: int, fsync: int, head: bytes, tail: bytes, deadline_s: float
    ) -> PublishResult:
        correlation = next(self._correlations) & 0x7FFF_FFFF
        size = len(head) + len(tail)
        front = encode_publish_head(topic, partition, acks=1, fsync=fsync, batch_size=size, correlation=correlation)
        if size > _ONE_PIECE_BYTES or self._slots or not self._read_lock.acquire(False):
            answer = self.request(correlation, front, head, tail, deadline_s=deadline_s)
            return decode_publish_result(memoryview(answer))
        try:
            transport = self.transport
            reader = transport.reader
            transport.send_frame(front + head + tail)
            room = reader.buffer()
            size = transport.receive_answer(room, deadline_s - transport.last_sent_s)
            # In the middle of a frame (a rest of some earlier answer) the bytes cannot be looked at by themselves.
            result = None if reader.owned_bytes else sole_publish_result(room, size, correlation)
            if result is None:
                reader.received(size)
                result = self._late_result(correlation, deadline_s)
            return result
        except ConnectionLost as error:
            self._fail_all(error)
            raise
        finally:
            self._stop_reading()

    def _late_result(self, correlation: int, deadline_s: float) -> PublishResult:
        """What has arrived is not our result alone: go on as any reader does, which takes a slot."""
        slot = self._slots[correlation] = _Slot()
        try:
            self._dispatch()
            self._read_until(slot, deadline_s)
            return decode_publish_result(memoryview(slot.result()))
        finally:
            del self._slots[correlation]

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

    def _stop_reading(self) -> None:
        self._read_lock.release()
        if self._slots:
            self._pass_on()
        elif self._retired:
            self._close_when_idle()

    def _pass_on(self) -> None:
        """Wake one of those who wait, so that it reads from now on."""
        for slot in list(self._slots.values()):
            # One that was answered may not have noticed yet; it would leave, and the others would sleep on.
            if slot.bell is not None and slot.answer is None and slot.error is None:
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
                self._stop_reading()

    def retire(self) -> None:
        """Close as soon as the answers under way are in."""
        self._retired = True
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        # A locked read lock may mean a publisher without a slot.  It comes here, too, when it has let go.
        if not self._slots and not self._read_lock.locked():
            self.close()

    def _abandon(self) -> None:
        """An exception from outside (of a signal's handler) has ended a request wherever it was.

        The lock may be taken for ever, half a frame be sent, bytes received that no reader knows of: only a connection
        that is opened again is in a known state.
        """
        self.close()
        self._fail_all(ConnectionLost("a request was interrupted"))

    def close(self) -> None:
        self.transport.close()


def _ring(slot: _Slot) -> None:
    bell = slot.bell
    if bell is not None:
        with contextlib.suppress(RuntimeError):  # rung already
            bell.release()
