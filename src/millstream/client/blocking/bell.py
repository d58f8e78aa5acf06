"""A bell that another thread can ring while this one waits for a socket."""

from __future__ import annotations

import contextlib
import select
import socket

__all__ = ["Bell"]


class Bell:
    """Ring it from any thread; wait for its descriptor with `select` or `poll`."""

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)

    def fileno(self) -> int:
        return self._out.fileno()

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # full, so it has been rung; or closed, so nobody listens
            self._in.send(b"!")

    def wait(self, wait_s: float) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            select.select([self._out], [], [], wait_s)
        self.clear()

    def clear(self) -> None:
        try:
            while self._out.recv(4096):
                pass
        except OSError:
            pass

    def close(self) -> None:
        self._in.close()
        self._out.close()
