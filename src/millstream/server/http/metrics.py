"""`/metrics`: for Prometheus, in whichever of its formats it asks for."""

from __future__ import annotations

import asyncio
import gzip
import secrets
from typing import Any, Final

from starlette.responses import Response

from millstream.errors import MethodNotAllowed
from millstream.server.http.app import App, Receive, Scope, Send
from millstream.server.http.visitors import RequestHeaders
from millstream.wire.stats_calls import Metrics, MetricsText

__all__ = ["mount"]

_METHODS: Final = ("GET", "HEAD")


def mount(app: App) -> None:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "there is no WebSocket here"})
            return
        headers = RequestHeaders(scope)
        try:
            if scope["method"] not in _METHODS:
                refusal = MethodNotAllowed(f"{scope['method']} is not allowed here")
                refusal.allowed = _METHODS
                raise refusal
            session = app.session(scope, headers, "default")
            answer: Any = await app.broker.call(session, Metrics(accept=headers.get("accept")))
            response = await _response(answer, "gzip" in headers.get("accept-encoding"))
        except Exception as problem:
            await app.refuse(problem, scope, secrets.token_hex(8), send)
            return
        await response(scope, receive, send)

    app.mounted["/metrics"] = serve


async def _response(answer: MetricsText, compressed: bool) -> Response:
    body, headers = answer.text.encode(), {"cache-control": "no-store"}
    if compressed:
        body = await asyncio.to_thread(gzip.compress, body, 1)
        headers |= {"content-encoding": "gzip", "vary": "accept, accept-encoding"}
    return Response(body, media_type=answer.media_type, headers=headers)
