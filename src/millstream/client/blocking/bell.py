"""A bell that another thread can ring while this one waits for a socket."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable

__all__ = ["Bell"]


class Bell:
    """Ring it from any thread; wait for it with `wait`, or for something else as well with `beside`.

    Its descriptors may be another's a moment after they are closed.  So whoever uses them says so first, and if it is
    closed meanwhile the last of them closes them.  There is no lock in this, which a signal's handler that rings could
    find taken by the code that it has interrupted: one step of the interpreter changes `_users`, another one `_closed`.
    """

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)
        self._users: list[None] = []
        self._closed = False

    def __enter__(self) -> int:
        """The descriptor to wait for, or -1 when the bell is closed."""
        self._users.append(None)
        return -1 if self._closed else self._out.fileno()  # in this order: who closes it looks the other way round

    def __exit__(self, *_: object) -> None:
        self._users.pop()
        if self._closed and not self._users:
            self.destroy()

    def fileno(self) -> int:
        return self._out.fileno()

    def ring(self) -> None:
        with self as descriptor, contextlib.suppress(OSError):  # full, so it has been rung
            if descriptor >= 0:
                self._in.send(b"!")

    def wait(self, wait_s: float) -> None:
        with self as descriptor, contextlib.suppress(OSError, ValueError):  # closed meanwhile
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(wait_s * 1000)
        self.clear()

    def beside(self, wait: Callable[[float, int], bool], wait_s: float) -> bool:
        """Call `wait`, which waits for something else and for this descriptor."""
        with self as descriptor:
            return wait(wait_s, descriptor)

    def clear(self) -> None:
        with self as descriptor, contextlib.suppress(OSError):
            while descriptor >= 0 and self._out.recv(4096):
                pass

    def close(self) -> None:
        """Wake whoever waits; nobody will again."""
        self.ring()
        self._closed = True
        if not self._users:
            self.destroy()

    def destroy(self) -> None:
        """Close it whoever waits: in a process that was forked off nobody does."""
        self._closed = True
        self._in.close()
        self._out.close()

    def __del__(self) -> None:
        # Of something that was never opened, say, or whose `close` was interrupted.
        if hasattr(self, "_closed"):
            self.destroy()
