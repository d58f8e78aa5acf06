"""Blocking sockets in virtual time: stand-ins for what clients in threads use of `socket` and `select`."""

from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final

from millstream.testing.processes import current_process
from millstream.testing.threads import Event, Thread, block, wake

__all__ = ["SELECT", "SOCKET"]


class _Socket:
    """One end of a connection of the simulated network, or of a pair within a process."""

    _numbers = itertools.count(1_000_000)

    def __init__(self) -> None:
        self._number = next(self._numbers)
        self._transport: Any = None
        self._partner: _Socket | None = None
        self._received = bytearray()
        self._room = bytearray(64 * 1024)
        self._error: Exception | None = None
        self._over = False
        self._blocking = True
        self._patience_s: float | None = None
        self.waiting: list[Thread] = []
        _sockets[self._number] = self

    def fileno(self) -> int:
        return self._number

    def settimeout(self, timeout: float | None) -> None:
        self._blocking = timeout != 0

    def setblocking(self, flag: bool) -> None:
        self._blocking = flag

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_RCVTIMEO) and isinstance(value, bytes):
            seconds, micros = struct.unpack("ll", value)
            self._patience_s = seconds + micros / 1_000_000

    def send(self, data: Any) -> int:
        if self._error is not None or self._over:
            raise self._error or BrokenPipeError(32, "Broken pipe")
        if self._partner is not None:
            self._partner.feed(bytes(data))
        else:
            self._transport.write(data)
        return len(data)

    def sendall(self, data: Any) -> None:
        self.send(data)

    def sendmsg(self, parts: Iterable[Any], ancdata: tuple[()] = (), flags: int = 0) -> int:  # noqa: ARG002
        return self.send(b"".join(parts))

    def readable(self) -> bool:
        return bool(self._received or self._over or self._error is not None)

    def recv_into(self, room: memoryview, size: int = 0, flags: int = 0) -> int:
        data = self.recv(size or len(room), flags)
        room[: len(data)] = data
        return len(data)

    def recv(self, size: int, flags: int = 0) -> bytes:
        wait_s = self._patience_s if self._blocking and not flags & socket.MSG_DONTWAIT else 0.0
        if not block((self.waiting,), self.readable, wait_s):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        if not self._received and self._error is not None:
            raise self._error
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def shutdown(self, how: int) -> None:  # noqa: ARG002
        self._over = True
        wake(self.waiting)

    def close(self) -> None:
        self._over = True
        _sockets.pop(self._number, None)
        if self._transport is not None:
            self._transport.close()
        wake(self.waiting)

    def feed(self, data: bytes) -> None:
        self._received += data
        wake(self.waiting)

    # The protocol that the network calls.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return memoryview(self._room)

    def buffer_updated(self, nbytes: int) -> None:
        self.feed(bytes(self._room[:nbytes]))

    def connection_lost(self, error: Exception | None) -> None:
        self._error, self._over = error, True
        wake(self.waiting)

    def pause_writing(self) -> None:
        """Nothing to do: what is written is kept."""

    def resume_writing(self) -> None:
        """Nothing to do: what is written is kept."""


_sockets: Final[dict[int, _Socket]] = {}


def _create_connection(address: tuple[str, int], timeout: float | None = None) -> _Socket:
    """Block until there is a connection, as `socket.create_connection` does."""
    loop, finished, sock = current_process().loop, Event(), _Socket()
    task = loop.create_task(loop.network.connect(lambda: sock, f"{address[0]}:{address[1]}"))
    task.add_done_callback(lambda _: finished.set())
    if not finished.wait(timeout):
        task.cancel()
        raise TimeoutError(110, "Connection timed out")
    task.result()
    return sock


def _socketpair() -> tuple[_Socket, _Socket]:
    near, far = _Socket(), _Socket()
    near._partner, far._partner = far, near
    return near, far


class _Poll:
    """Looks like `select.poll()`, for reading."""

    def __init__(self) -> None:
        self._sockets: list[_Socket] = []

    def register(self, which: _Socket | int, events: int) -> None:  # noqa: ARG002
        sock = _sockets.get(which) if isinstance(which, int) else which
        if sock is None:
            raise ValueError("the descriptor is closed")
        self._sockets.append(sock)

    def poll(self, timeout_ms: float | None = None) -> list[_Socket]:
        return _readable(self._sockets, None if timeout_ms is None else timeout_ms / 1000)


def _readable(sockets: Sequence[_Socket], timeout_s: float | None) -> list[_Socket]:
    block([sock.waiting for sock in sockets], lambda: any(sock.readable() for sock in sockets), timeout_s)
    return [sock for sock in sockets if sock.readable()]


def _select(
    reading: Sequence[_Socket], _: Sequence[_Socket], __: Sequence[_Socket], timeout_s: float | None = None
) -> list[_Socket]:
    return _readable(reading, timeout_s)


#: In the place of the modules `socket` and `select`.
SOCKET: Final = SimpleNamespace(
    **{**vars(socket), "create_connection": _create_connection, "socketpair": _socketpair},
)
SELECT: Final = SimpleNamespace(poll=_Poll, select=_select, POLLIN=1)
