"""A client whose answers come at once waits for the next one awake, and sleeps again when they do not."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

from millstream.client.address import Target
from millstream.client.blocking.transport import Transport

_ANSWER = b"stored"
_TARGET = Target.of("localhost:9092", client_id=None, key=None, timeout_s=10)


class _Socket:
    """Has its answer at once, or only for who waits for it asleep."""

    def __init__(self) -> None:
        self.is_quick = True
        self.sleeps = 0

    def send(self, data: bytes) -> int:
        return len(data)

    def recv_into(self, buffer: memoryview, _size: int, flags: int) -> int:
        if flags & socket.MSG_DONTWAIT:
            if not self.is_quick:
                raise BlockingIOError
        else:
            self.sleeps += 1
            if not self.is_quick:
                time.sleep(0.001)
        buffer[: len(_ANSWER)] = _ANSWER
        return len(_ANSWER)


def _ask(transport: Transport, times: int) -> None:
    room = memoryview(bytearray(100))
    for _ in range(times):
        transport.send_frame(b"publish")
        assert transport.receive_answer(room, 10.0) == len(_ANSWER)


def test_while_answers_come_at_once_nobody_sleeps() -> None:
    sock = _Socket()
    transport = Transport(sock, _TARGET, receive_bytes=100)  # type: ignore[arg-type]
    _ask(transport, 100)
    slept = sock.sleeps
    assert slept < 50, "apart from the first ones, and what a busy machine delays"


def test_late_answers_are_awaited_asleep_and_so_are_those_after_them() -> None:
    sock = _Socket()
    transport = Transport(sock, _TARGET, receive_bytes=100)  # type: ignore[arg-type]
    _ask(transport, 100)
    sock.is_quick, sock.sleeps = False, 0
    _ask(transport, 4)
    assert sock.sleeps == 4
    sock.is_quick = True
    _ask(transport, 10)
    assert sock.sleeps == 14


def test_who_does_not_want_to_stay_awake_sleeps() -> None:
    sock = _Socket()
    transport = Transport(sock, replace(_TARGET, stay_awake=False), receive_bytes=100)  # type: ignore[arg-type]
    _ask(transport, 100)
    assert sock.sleeps == 100
