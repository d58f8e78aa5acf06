"""TLS for clients: which authorities to trust, and a blocking socket that speaks it.

The socket keeps TLS's state apart from the network (a memory BIO), under a lock of its own: one thread may wait for
data while others send, which a wrapped socket does not allow.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from typing import Final, Protocol

from millstream.errors import InvalidArgument

__all__ = ["PlainSocket", "TlsSocket", "client_context"]

_RECEIVE_BYTES: Final = 64 * 1024


def client_context(tls: bool | ssl.SSLContext | None, ca: str | None, *, wanted: bool) -> ssl.SSLContext | None:
    """What `connect(tls=..., ca=...)` and the address mean; None = no TLS."""
    if isinstance(tls, ssl.SSLContext):
        if ca is not None:
            raise InvalidArgument("ca= is for connections that make their own context: load it into yours")
        return tls
    if tls is False or (tls is None and ca is None and not wanted):
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, TypeError, ssl.SSLError) as problem:
        reason = getattr(problem, "strerror", None) or getattr(problem, "reason", None) or problem
        raise InvalidArgument(f"the authorities in ca={ca!r} cannot be used: {reason}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class PlainSocket(Protocol):
    """What a transport needs of its socket."""

    def fileno(self) -> int: ...

    def send(self, data: bytes, /) -> int: ...

    def sendall(self, data: bytes, /) -> None: ...

    def sendmsg(self, buffers: tuple[bytes, ...], ancdata: tuple[()] = (), flags: int = 0, /) -> int: ...

    def recv_into(self, buffer: memoryview, nbytes: int, flags: int, /) -> int: ...

    def setsockopt(self, level: int, optname: int, value: bytes, /) -> None: ...

    def setblocking(self, flag: bool, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class TlsSocket:
    """A socket whose other end was checked.  One thread receives; any thread may send."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._state = threading.Lock()
        #: Held while records travel, so that they leave in the order in which they were made.
        self._sending = threading.Lock()
        #: Records that were made and that the system has not taken yet.
        self._unsent = b""

    def shake_hands(self, deadline_s: float) -> None:
        """Raises OSError: a certificate that is not trusted, a peer that speaks something else, or the time is up."""
        while True:
            try:
                with self._state:
                    self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._sock.settimeout(max(0.001, deadline_s - time.monotonic()))
                received = self._sock.recv(_RECEIVE_BYTES)
                if not received:
                    raise ConnectionResetError("the connection was closed during TLS's greetings") from None
                self._incoming.write(received)
            except BaseException:
                self._flush()  # the peer may know why
                raise
            else:
                self._flush()
                self._sock.settimeout(None)
                return

    @property
    def pending(self) -> bool:
        """Whether something was received and not yet read: the descriptor does not show that."""
        with self._state:
            return bool(self._tls.pending() or self._incoming.pending)

    @property
    def unsent(self) -> int:
        """How many bytes of records wait until the system takes more: see `sendmsg`."""
        return len(self._unsent)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, data: bytes, /) -> int:
        with self._sending:
            with self._state:
                self._tls.write(data)
                records = self._outgoing.read()
            self._sock.sendall(records)
        return len(data)

    def sendall(self, data: bytes, /) -> None:
        self.send(data)

    def sendmsg(self, buffers: tuple[bytes, ...], ancdata: tuple[()] = (), flags: int = 0, /) -> int:  # noqa: ARG002
        """As of a socket.  With MSG_DONTWAIT it takes everything, and what the system does not take is `unsent`."""
        data = b"".join(buffers)
        if not flags & socket.MSG_DONTWAIT:
            return self.send(data)
        with self._sending:
            with self._state:
                if data:
                    self._tls.write(data)
                self._unsent += self._outgoing.read()
            self._push(flags)
        return len(data)

    def _push(self, flags: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._unsent = self._unsent[self._sock.send(self._unsent, flags) :]

    def recv_into(self, buffer: memoryview, nbytes: int, flags: int, /) -> int:
        """As of a socket.  Raises BlockingIOError when there is not yet a whole record."""
        while True:
            try:
                with self._state:
                    size: int = self._tls.read(nbytes or len(buffer), buffer)  # type: ignore[assignment]
                    return size
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                return 0
            if self._outgoing.pending:  # an answer of TLS's own, to new keys for example
                self._flush()
            received = self._sock.recv(_RECEIVE_BYTES, flags)
            if not received:
                return 0
            with self._state:
                self._incoming.write(received)

    def setsockopt(self, level: int, optname: int, value: bytes, /) -> None:
        self._sock.setsockopt(level, optname, value)

    def setblocking(self, flag: bool, /) -> None:
        self._sock.setblocking(flag)

    def shutdown(self, how: int, /) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()

    def _flush(self) -> None:
        with self._sending:
            with self._state:
                records = self._outgoing.read()
            if self._unsent:
                self._unsent += records  # nothing may come into the middle of a record
            elif records:
                self._sock.sendall(records)
