"""Answers that go on: lines of JSON, for as long as the client reads and the broker runs.

The next piece is asked for when the socket has taken the last one, so a slow reader costs one piece of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Final

import msgspec
import structlog
from starlette.responses import Response

from millstream.broker.broker import Session
from millstream.errors import InternalError, MillstreamError
from millstream.server.http.endpoints import Exchange, disconnected
from millstream.server.http.problems import describe

__all__ = ["LineStream", "own_session"]

_log = structlog.get_logger("millstream.http")

#: For the end of an answer to reach a client that has stopped reading.
_GOODBYE_S: Final = 1.0


@contextlib.contextmanager
def own_session(exchange: Exchange[Any, Any], end: Callable[[MillstreamError], None]) -> Iterator[Session]:
    """A stream is a connection: in lists of them, in quotas, and ended as one."""
    asking, broker = exchange.session, exchange.broker
    session = broker.open_session(
        namespace=asking.namespace,
        client_id=asking.client_id,
        address=asking.address,
        push=asking.push,
        door="http",
        access=asking.access,
        end=end,
    )
    try:
        yield session
    finally:
        broker.session_closed(session)


class LineStream(Response):
    """NDJSON out of pieces that end with a line.

    Ends when the pieces do, when the client goes away and when the broker stops; then the generator is closed, which is
    where it lets go of what it holds.  An error of the generator is told in the last line, as `{"error": {...}}`.
    """

    media_type = "application/x-ndjson"

    def __init__(self, exchange: Exchange[Any, Any], pieces: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-store", **exchange.answer_headers})
        del self.headers["content-length"]
        self._exchange = exchange
        self._pieces = pieces

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope["method"] == "HEAD":  # all that was asked for
            await self._pieces.aclose()
            await send({"type": "http.response.body", "body": b""})
            return
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(disconnected(receive))
        closing = asyncio.ensure_future(self._exchange.closing.wait())
        try:
            await asyncio.wait((pump, gone, closing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = gone.done()
            for task in (pump, gone, closing):
                task.cancel()
            await asyncio.wait((pump, gone, closing))
            await self._pieces.aclose()
        if not left:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), _GOODBYE_S)

    async def _pump(self, send: Any) -> None:
        # Headers at once: a client that connects to a quiet stream must see that it is connected.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        try:
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as problem:
            if not isinstance(problem, MillstreamError):
                _log.error("a stream failed", path=self._exchange.scope["path"], exc_info=problem)
                problem = InternalError("the broker failed to go on; its log has the details")
            line = msgspec.json.encode({"error": describe(problem, self._exchange.request_id)}) + b"\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
