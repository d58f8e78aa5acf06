"""Sends requests into the world: the one HTTP client of the broker.

HTTP/1.1 over asyncio streams, with h11 for the grammar.  Redirects are not followed, proxies of the environment are
not used, certificates are verified against those of the system, and of an answer only the beginning is read.  The
connection goes to the address that was checked: a name that resolves to something else a moment later changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Iterable, Sequence
from typing import Final, SupportsIndex

import h11

from millstream.broker.webhooks.names import Names
from millstream.clock import Clock
from millstream.webhooks.targets import Target, is_public
from millstream.webhooks.verdicts import Answer, retry_after_ms

__all__ = ["Sender", "TargetForbidden"]

#: More of an answer is not read; the connection is closed instead.
_BODY_BYTES_MAX: Final = 64 * 1024
_HEAD_BYTES_MAX: Final = 64 * 1024
_READ_BYTES: Final = 16 * 1024
_IDLE_S: Final = 15.0
#: Connections that are kept for the next request, in all.
_IDLE_MAX: Final = 500


class TargetForbidden(Exception):
    """The host of a URL has an address that the broker must not connect to."""


class _Reader(asyncio.StreamReader):
    """Knows how much has come that nobody has read."""

    unread = 0

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.unread += len(bytes(data))
        super().feed_data(data)

    async def read(self, n: int = _READ_BYTES) -> bytes:
        data = await super().read(n)
        self.unread -= len(data)
        return data


class _Connection:
    """One connection to a receiver."""

    def __init__(self, reader: _Reader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES_MAX)
        self.expiry: asyncio.TimerHandle | None = None
        #: Whether anything has come since the last request.
        self.has_answered = False

    async def exchange(self, target: Target, headers: Sequence[tuple[str, str]], body: bytes, now_ms: int) -> Answer:
        self.has_answered = False
        head = [("Host", target.authority), *headers, ("Content-Length", str(len(body)))]
        request = h11.Request(method="POST", target=target.path, headers=head)
        pieces = [self.http.send(event) for event in (request, h11.Data(data=body), h11.EndOfMessage())]
        self.writer.write(b"".join(piece for piece in pieces if piece))
        with contextlib.suppress(ConnectionError):  # it may have answered before it closed
            await self.writer.drain()
        response, text = await self._response()
        said = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
        return Answer(
            response.status_code, text.decode("utf-8", "replace"), retry_after_ms(said.get("retry-after", ""), now_ms)
        )

    async def _response(self) -> tuple[h11.Response, bytes]:
        """The status is what counts: a body that is too long or ends early changes nothing about it."""
        response: h11.Response | None = None
        body = b""
        while response is None or len(body) <= _BODY_BYTES_MAX:
            try:
                event = self.http.next_event()
            except h11.RemoteProtocolError:
                if response is None:
                    raise
                break
            if event is h11.NEED_DATA:
                data = await self.reader.read()
                self.has_answered |= bool(data)
                if not data and response is None:
                    raise ConnectionResetError
                self.http.receive_data(data)
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif not isinstance(event, h11.InformationalResponse):
                break
        assert response is not None
        return response, body[:_BODY_BYTES_MAX]

    def is_reusable(self) -> bool:
        said_more = self.http.trailing_data[0]
        if self.http.our_state is self.http.their_state is h11.DONE and not said_more and self.is_quiet():
            self.http.start_next_cycle()
            return True
        return False

    def is_quiet(self) -> bool:
        """Whether the receiver has said nothing unasked: that would be taken for the answer to the next request."""
        return not self.reader.unread and not self.reader.at_eof() and not self.writer.is_closing()

    def close(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
        self.writer.transport.abort()  # nobody waits for the politeness of TLS


class Sender:
    """All requests of the broker to others.  Used on its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, clock: Clock, allow_private: bool) -> None:
        self._loop = loop
        self._clock = clock
        self._allow_private = allow_private
        self._idle: dict[tuple[bool, str, int], list[_Connection]] = {}
        self._idle_count = 0
        self._tls: ssl.SSLContext | None = None
        self._names = Names(loop)

    async def post(
        self, target: Target, headers: Sequence[tuple[str, str]], body: bytes, *, timeout_s: float
    ) -> Answer:
        """One request.  Whatever goes wrong is an answer too; only a forbidden target raises TargetForbidden."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._post(target, headers, body)
        except TimeoutError:
            return Answer(0, f"no answer within {timeout_s:g} s")
        except h11.ProtocolError as problem:
            return Answer(0, f"{target.authority} does not speak HTTP as it should: {problem}")
        except ssl.SSLCertVerificationError as problem:
            return Answer(0, f"the certificate of {target.host} is not accepted: {problem.verify_message}")
        except ConnectionResetError:
            return Answer(0, f"{target.authority} closed the connection without an answer")
        except OSError as problem:
            return Answer(0, f"{target.authority} cannot be reached: {_in_words(problem)}")

    async def check(self, target: Target) -> None:
        """Raise TargetForbidden if the target must not be connected to, as far as can be told now."""
        if not self._allow_private:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(5):
                    await self._addresses(target)

    async def _post(self, target: Target, headers: Sequence[tuple[str, str]], body: bytes) -> Answer:
        now_ms = self._clock.now_us() // 1000
        idle = self._take_idle(target)
        if idle is not None:
            try:
                return await self._use(idle, target, headers, body, now_ms)
            except OSError:
                # Its other end may have closed it a moment ago.  Or the receiver dies of this request: then all idle
                # ones would end like this, and it should not get the request on each of them.
                if idle.has_answered:
                    raise
        return await self._use(await self._connect(target), target, headers, body, now_ms)

    async def _use(
        self, connection: _Connection, target: Target, headers: Sequence[tuple[str, str]], body: bytes, now_ms: int
    ) -> Answer:
        try:
            answer = await connection.exchange(target, headers, body, now_ms)
        except BaseException:
            connection.close()
            raise
        if self._idle_count < _IDLE_MAX and connection.is_reusable():
            self._keep(connection, target)
        else:
            connection.close()
        return answer

    # --- connections ---------------------------------------------------------------------------------------------

    async def _connect(self, target: Target) -> _Connection:
        tls = await self._tls_context() if target.is_tls else None
        problem: OSError | None = None
        for address in await self._addresses(target):
            try:
                return await self._connect_to(address, target, tls)
            except ssl.SSLError:
                raise
            except OSError as error:
                problem = error
        raise problem or OSError(f"{target.host} has no address")

    async def _connect_to(self, address: str, target: Target, tls: ssl.SSLContext | None) -> _Connection:
        reader = _Reader(loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        transport, _ = await self._loop.create_connection(
            lambda: protocol, address, target.port, ssl=tls, server_hostname=target.host if tls else None
        )
        return _Connection(reader, asyncio.StreamWriter(transport, protocol, reader, self._loop))

    async def _addresses(self, target: Target) -> list[str]:
        """The addresses of a host, all of them checked."""
        found = await self._names.addresses(target.host)
        if not self._allow_private and not all(map(is_public, found)):
            raise TargetForbidden(f"{target.host} has a private address, which webhooks.allow_private = false forbids")
        return found

    async def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:  # reading the certificates of the system takes a moment
            self._tls = await self._loop.run_in_executor(None, ssl.create_default_context)
        return self._tls

    def _take_idle(self, target: Target) -> _Connection | None:
        key = (target.is_tls, target.host, target.port)
        while key in self._idle:
            connection = self._idle[key][-1]
            self._forget(key, connection)
            if connection.is_quiet():
                return connection
            connection.close()
        return None

    def _keep(self, connection: _Connection, target: Target) -> None:
        key = (target.is_tls, target.host, target.port)
        self._idle.setdefault(key, []).append(connection)
        self._idle_count += 1
        connection.expiry = self._loop.call_later(_IDLE_S, self._expire, key, connection)

    def _forget(self, key: tuple[bool, str, int], connection: _Connection) -> None:
        assert connection.expiry is not None
        connection.expiry.cancel()
        self._idle_count -= 1
        self._idle[key].remove(connection)
        if not self._idle[key]:
            del self._idle[key]

    def _expire(self, key: tuple[bool, str, int], connection: _Connection) -> None:
        self._forget(key, connection)
        connection.close()

    def close(self) -> None:
        for line in self._idle.values():
            for connection in line:
                connection.close()
        self._idle.clear()
        self._names.close()


def _in_words(problem: OSError) -> str:
    """Without numbers and addresses; asyncio and uvloop word them differently."""
    if problem.errno is not None and problem.errno > 0:
        return os.strerror(problem.errno).lower()
    return str(problem.strerror or problem).lower()
