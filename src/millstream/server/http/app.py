"""One HTTP request: find its endpoint, see who asks, read what was sent, call, answer.

This is ASGI written out by hand: what a framework would add to each request costs more than a publish does.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from itertools import count
from time import perf_counter_ns
from typing import Any, Final

import msgspec
import structlog
from starlette.responses import Response

from millstream.broker.broker import Broker, Session
from millstream.broker.latency import Histogram
from millstream.broker.logs import SLOW_MS, Sparing, details, waits_ms
from millstream.config import Settings
from millstream.errors import (
    InternalError,
    InvalidArgument,
    MethodNotAllowed,
    MillstreamError,
    PayloadTooLarge,
    RequestTimeout,
    Unauthorized,
    UnavailableError,
)
from millstream.names import check_namespace
from millstream.server.connections import Refusals
from millstream.server.http.endpoints import Endpoint, Exchange, Family, decode_body, decode_query, read_body
from millstream.server.http.problems import describe, status_of
from millstream.server.http.router import Router
from millstream.server.http.visitors import RequestHeaders, check_origin, key_in

__all__ = ["API", "App"]

_log = structlog.get_logger("millstream.http")

#: Where the endpoints of families stand.
API: Final = "/api/v1"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
#: Something outside the API: a page, a WebSocket.
Mounted = Callable[[Scope, Receive, Send], Awaitable[None]]

#: The status of a request whose client did not wait for the answer; nobody is told, but the log.
_GIVEN_UP: Final = 499
_JSON: Final = (b"content-type", b"application/json")
_encode: Final = msgspec.json.Encoder().encode


class App:
    """The ASGI application."""

    def __init__(self, broker: Broker, settings: Settings, families: Iterable[Family]) -> None:
        self.broker = broker
        self.families = list(families)
        self._body_bytes_max = settings.server.frame_bytes_max
        self._request_s = settings.http.request_ms / 1000
        self._checks_origin = not (settings.is_public or settings.needs_keys or settings.access.insecure)
        self._router: Router[Endpoint] = Router()
        self.refusals = Refusals("http")
        self._slow = Sparing()
        self._id_prefix, self._ids = secrets.token_hex(4), count()
        #: Served before anything else, by exact path.
        self.mounted: dict[str, Mounted] = {}
        #: Serves every WebSocket that no path above is for.
        self.websocket: Mounted | None = None
        #: Set when the broker begins to stop: whatever waits or streams ends then.
        self.closing = asyncio.Event()
        #: Awaited then, before connections are closed.
        self.on_closing: list[Callable[[], Awaitable[None]]] = []
        for family in self.families:
            for endpoint in family.endpoints:
                self._router.add(endpoint.method, API + endpoint.path, endpoint)
                if family.namespaced:
                    self._router.add(endpoint.method, f"{API}/namespaces/{{namespace}}{endpoint.path}", endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        mounted = self.mounted.get(path)
        if mounted is not None:
            await mounted(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "websocket" and self.websocket is not None:
            await self.websocket(scope, receive, send)

    def _new_id(self) -> str:
        """For a request that came without one: unique, but nothing that would have to be drawn."""
        return f"{self._id_prefix}{next(self._ids):08x}"

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = RequestHeaders(scope)
        request_id = headers.get("x-request-id")[:100] or self._new_id()
        answer_headers: dict[str, str] = {}
        began_ns, family = perf_counter_ns(), ""
        exchange, status = None, _GIVEN_UP
        try:
            raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
            endpoint, variables = self._router.find(scope["method"], raw_path.partition(b"?")[0].decode("latin-1"))
            family = endpoint.family.name
            session = self._session_for(endpoint, scope, headers, variables)
            query, body = decode_query(endpoint.query, scope["query_string"]), await self._body(endpoint, receive)
            came_ns = perf_counter_ns()
            exchange = Exchange(
                broker=self.broker,
                session=session,
                path=variables,
                query=query,
                body=body,
                headers=headers,
                request_id=request_id,
                answer_headers=answer_headers,
                scope=scope,
                receive=receive,
                closing=self.closing,
            )
            answer = await endpoint.handler(exchange)
            status = answer.status_code if isinstance(answer, Response) else endpoint.status
        except Exception as problem:
            status = await self.refuse(problem, scope, request_id, send)
            return
        finally:
            self._measure(family, began_ns)
            if exchange is not None and (took_ms := (perf_counter_ns() - came_ns) // 1_000_000) > SLOW_MS:
                self._note_slow(exchange, status, took_ms)
            if details.on:
                took_ms = (perf_counter_ns() - began_ns) // 1_000_000
                who = {} if exchange is None else _who(exchange)
                path = scope["path"]  # without the query, which may have a key in it
                _log.debug("request", method=scope["method"], path=path, status=status, took_ms=took_ms, **who)
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

    def _measure(self, family: str, began_ns: int) -> None:
        if family:  # otherwise nobody has an endpoint there
            by_family = self.broker.metrics.latency.http
            histogram = by_family.get(family)
            if histogram is None:
                histogram = by_family[family] = Histogram()
            histogram.observe((perf_counter_ns() - began_ns) // 1000)

    def _note_slow(self, exchange: Exchange[Any, Any], status: int, took_ms: int) -> None:
        if took_ms > SLOW_MS + waits_ms(exchange.query, exchange.body):
            scope = exchange.scope
            about = {"status": status, "took_ms": took_ms, **_who(exchange)}
            self._slow.write(_log.warning, "slow request", method=scope["method"], path=scope["path"], **about)

    def _session_for(
        self, endpoint: Endpoint, scope: Scope, headers: RequestHeaders, variables: Mapping[str, str]
    ) -> Session:
        if endpoint.family.namespaced or "namespace" in variables:
            return self.session(scope, headers, variables.get("namespace", "default"), endpoint.permission)
        session = self.session(scope, headers, "default", "open" if endpoint.permission == "open" else "any")
        if endpoint.permission != "open":
            session.access.require_role(endpoint.permission)
        return session

    def session(self, scope: Scope, headers: RequestHeaders, namespace: str, permission: str = "any") -> Session:
        """Who asks, and whether it may in this namespace; what its calls name is checked by the broker.

        A request has no connection to the broker: what it leases is held by its deadline alone.
        """
        control = self.broker.access
        try:
            address = self.admit(scope, headers)
            key = key_in(headers)
            access = control.anonymous if permission == "open" and key is None else control.authenticate(key, address)
            control.admit_key(access)
        except MillstreamError as refusal:
            self.refusals.note(address_of(scope), refusal)
            raise
        check_namespace(namespace)
        if permission not in ("open", "any"):
            access.require(permission, namespace)
        return Session(
            namespace=namespace,
            client_id=headers.get("x-client-id", "http")[:200],
            address=address,
            push=_ignore,
            deliver=_refuse_delivery,
            door="http",
            access=access,
        )

    def admit(self, scope: Scope, headers: RequestHeaders) -> str:
        """The address of whoever asks, unless it asks too often or is a page of another site."""
        address = address_of(scope)
        self.broker.access.admit_request(address)
        if self._checks_origin:
            check_origin(headers)
        return address

    async def _body(self, endpoint: Endpoint, receive: Receive) -> Any:
        data = await read_body(receive, self._body_bytes_max, self._request_s)
        if endpoint.body is bytes:
            return data
        if endpoint.body is None:
            if data:
                raise InvalidArgument("this endpoint takes no request body")
            return None
        return decode_body(endpoint.body, data or b"{}")

    async def refuse(
        self, problem: Exception, scope: Scope, request_id: str, send: Send, *, kind: str = "http.response"
    ) -> int:
        """Answer with what is wrong; returns the status."""
        if not isinstance(problem, MillstreamError):
            _log.error("request failed", method=scope.get("method"), path=scope["path"], exc_info=problem)
            problem = InternalError("the broker failed to handle the request; its log has the details")
        self.broker.metrics.requests_failed += 1
        if scope["type"] == "websocket":
            self.refusals.note(address_of(scope), problem)
        body = _encode(describe(problem, request_id))
        headers = [_JSON, (b"content-length", str(len(body)).encode())]
        headers.append((b"x-request-id", request_id.encode("latin-1", "replace")))
        if isinstance(problem, MethodNotAllowed):
            headers.append((b"allow", ", ".join(problem.allowed).encode()))
        if isinstance(problem, Unauthorized):
            headers.append((b"www-authenticate", b"Bearer"))
        if isinstance(problem, UnavailableError):
            wait_s = -(-getattr(problem, "retry_after_ms", 0) // 1000) or 1
            headers.append((b"retry-after", str(wait_s).encode()))
        if isinstance(problem, PayloadTooLarge | RequestTimeout) and kind == "http.response":
            headers.append((b"connection", b"close"))  # the rest of its body may still come; nobody waits for it
        status = int(status_of(problem))
        await send({"type": f"{kind}.start", "status": status, "headers": headers})
        await send({"type": f"{kind}.body", "body": body})
        return status


def address_of(scope: Scope) -> str:
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else ""


def _who(exchange: Exchange[Any, Any]) -> dict[str, str]:
    session = exchange.session
    return {"client": session.client_id, "address": session.address, "request": exchange.request_id}


def _ignore(_: object) -> None:
    """Nothing can be pushed to a client that only asks."""


def _refuse_delivery(_: object) -> bool:
    return False
