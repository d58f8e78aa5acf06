"""uvicorn's HTTP connection, with the limits that it leaves to a proxy in front: how many, how large, how slow."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millstream.broker.metrics import Metrics

__all__ = ["HEADER_BYTES_MAX", "limited"]

#: Of all headers of a request together, with its first line.
HEADER_BYTES_MAX: Final = 65_536


class _Limited(HttpToolsProtocol):
    """One client, who has to say what he wants within a time, in not too many words."""

    connections_max: int
    request_s: float
    metrics: Metrics
    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self.connections_max:
            self.metrics.connections_refused += 1
            transport.abort()  # no word: whoever floods a broker would not read it
            return
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_come()
        if self.transport is not None:  # as it is while a connection was turned away
            super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._wait()
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._grow(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._grow(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_come()
        super().on_headers_complete()

    def _grow(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEADER_BYTES_MAX:
            raise ValueError(f"the head of a request may have {HEADER_BYTES_MAX} bytes")

    def _wait(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.request_s, self._too_slow)

    def _has_come(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        self.transport.close()


def limited(*, connections_max: int, request_s: float, metrics: Metrics) -> type[asyncio.Protocol]:
    """The protocol with these limits; uvicorn makes one of it for each connection."""
    limits = {"connections_max": connections_max, "request_s": request_s, "metrics": metrics}
    return type("LimitedProtocol", (_Limited,), limits)
