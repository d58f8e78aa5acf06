"""One HTTP request: find its endpoint, see who asks, read what was sent, call, answer.

This is ASGI written out by hand: what a framework would add to each request costs more than a publish does.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

import msgspec
import structlog
from starlette.datastructures import Headers
from starlette.responses import Response

from millstream.broker.broker import Broker, Session
from millstream.config import Settings
from millstream.errors import InternalError, InvalidArgument, MethodNotAllowed, MillstreamError, UnavailableError
from millstream.names import check_namespace
from millstream.server.http.endpoints import Endpoint, Exchange, Family, decode_body, decode_query, read_body
from millstream.server.http.problems import describe, status_of
from millstream.server.http.router import Router

__all__ = ["API", "App"]

_log = structlog.get_logger("millstream.http")

#: Where the endpoints of families stand.
API: Final = "/api/v1"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
#: Something outside the API: a page, a WebSocket.
Mounted = Callable[[Scope, Receive, Send], Awaitable[None]]

_JSON: Final = (b"content-type", b"application/json")
_RETRY_AFTER: Final = (b"retry-after", b"1")
_encode: Final = msgspec.json.Encoder().encode


class App:
    """The ASGI application."""

    def __init__(self, broker: Broker, settings: Settings, families: Iterable[Family]) -> None:
        self.broker = broker
        self.families = list(families)
        self._body_bytes_max = settings.server.frame_bytes_max
        self._router: Router[Endpoint] = Router()
        #: Served before anything else, by exact path; then by the longest prefix, which ends with a slash.
        self.mounted: dict[str, Mounted] = {}
        self.prefixes: dict[str, Mounted] = {}
        for family in self.families:
            for endpoint in family.endpoints:
                self._router.add(endpoint.method, API + endpoint.path, endpoint)
                if family.namespaced:
                    self._router.add(endpoint.method, f"{API}/namespaces/{{namespace}}{endpoint.path}", endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        mounted = self.mounted.get(path) or self._under_prefix(path)
        if mounted is not None:
            await mounted(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": f"WebSocket is at {API}/ws"})

    def _under_prefix(self, path: str) -> Mounted | None:
        return next((mounted for prefix, mounted in self.prefixes.items() if path.startswith(prefix)), None)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")[:100] or secrets.token_hex(8)
        answer_headers: dict[str, str] = {}
        try:
            raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
            endpoint, variables = self._router.find(scope["method"], raw_path.partition(b"?")[0].decode("latin-1"))
            session = self.session(scope, headers, variables.get("namespace", "default"))
            exchange = Exchange(
                broker=self.broker,
                session=session,
                path=variables,
                query=decode_query(endpoint.query, scope["query_string"]),
                body=await self._body(endpoint, receive),
                headers=headers,
                request_id=request_id,
                answer_headers=answer_headers,
                scope=scope,
                receive=receive,
            )
            answer = await endpoint.handler(exchange)
        except Exception as problem:
            await self._refuse(problem, scope, request_id, send)
            return
        if isinstance(answer, Response):
            answer.headers["x-request-id"] = request_id
            await answer(scope, receive, send)
            return
        body = b"" if endpoint.answer is None else _encode(answer)
        start = [_JSON] if body else []
        start += [(b"content-length", str(len(body)).encode()), (b"x-request-id", request_id.encode("latin-1"))]
        start += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer_headers.items()]
        await send({"type": "http.response.start", "status": endpoint.status, "headers": start})
        await send({"type": "http.response.body", "body": body})

    def session(self, scope: Scope, headers: Headers, namespace: str) -> Session:
        """Who asks.  A request has no connection to the broker: what it leases is held by its deadline alone."""
        client = scope.get("client")
        return Session(
            namespace=check_namespace(namespace),
            client_id=headers.get("x-client-id", "http")[:200],
            address=f"{client[0]}:{client[1]}" if client else "",
            push=_ignore,
            deliver=_refuse_delivery,
        )

    async def _body(self, endpoint: Endpoint, receive: Receive) -> Any:
        data = await read_body(receive, self._body_bytes_max)
        if endpoint.body is bytes:
            return data
        if endpoint.body is None:
            if data:
                raise InvalidArgument("this endpoint takes no request body")
            return None
        return decode_body(endpoint.body, data or b"{}")

    async def _refuse(self, problem: Exception, scope: Scope, request_id: str, send: Send) -> None:
        if not isinstance(problem, MillstreamError):
            _log.error("request failed", method=scope["method"], path=scope["path"], exc_info=problem)
            problem = InternalError("the broker failed to handle the request; its log has the details")
        self.broker.metrics.requests_failed += 1
        body = _encode(describe(problem, request_id))
        headers = [_JSON, (b"content-length", str(len(body)).encode())]
        headers.append((b"x-request-id", request_id.encode("latin-1", "replace")))
        if isinstance(problem, MethodNotAllowed):
            headers.append((b"allow", ", ".join(problem.allowed).encode()))
        if isinstance(problem, UnavailableError):
            headers.append(_RETRY_AFTER)
        await send({"type": "http.response.start", "status": status_of(problem), "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _ignore(_: object) -> None:
    """Nothing can be pushed to a client that only asks."""


def _refuse_delivery(_: object) -> bool:
    return False
