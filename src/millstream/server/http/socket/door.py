"""Who comes to a WebSocket: whether it may come in, by which key, and what it is told if not.

A key stands in `Authorization` or `X-Api-Key`; a browser, which cannot send these, says it in the query (`key=`) or in
its first frame (`{"type":"auth","key":…}`).  Frames count as requests where requests are limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Annotated, Any, Final
from urllib.parse import unquote

import msgspec

from millstream.broker.broker import Session
from millstream.config import Settings
from millstream.errors import (
    InvalidArgument,
    MillstreamError,
    PathNotFound,
    QuotaExceeded,
    ShuttingDown,
    Unauthorized,
)
from millstream.names import check_namespace
from millstream.server.http.app import API, App, Receive, Scope, Send
from millstream.server.http.endpoints import decode_query
from millstream.server.http.problems import describe
from millstream.server.http.socket import frames
from millstream.server.http.socket.conversation import Conversation
from millstream.server.http.visitors import RequestHeaders, key_in

__all__ = ["mount"]

#: For a client without a key in its request to say it in a frame.
_AUTH_S: Final = 10.0
_POLICY: Final = 1008
_GOODBYE_S: Final = 2.0


class _Query(msgspec.Struct, forbid_unknown_fields=True):
    namespace: str = ""
    key: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    #: A name for people.
    client_id: Annotated[str, msgspec.Meta(max_length=200)] = ""


def mount(app: App, settings: Settings) -> None:
    door = Door(app, settings)
    app.websocket = door
    app.mounted[f"{API}/ws"] = door
    app.on_closing.append(door.close)


class _AsgiLine:
    """A WebSocket as ASGI sees it."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send

    async def receive(self) -> str | bytes | None:
        event = await self._receive()
        if event["type"] != "websocket.receive":
            return None
        text: str | bytes | None = event.get("text")
        return event.get("bytes") if text is None else text

    async def send(self, text: str) -> None:
        await self._send({"type": "websocket.send", "text": text})

    async def close(self, code: int, reason: str) -> None:
        await self._send({"type": "websocket.close", "code": code, "reason": reason})


class Door:
    """All WebSockets of a broker."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._broker = app.broker
        self._settings = settings.server
        self._conversations: set[asyncio.Task[Any]] = set()
        #: Frames that are being carried out; they go on when their client is gone.
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            problem = InvalidArgument(f"{API}/ws is a WebSocket: connect to it with ws:// or wss://")
            await self._app.refuse(problem, scope, secrets.token_hex(8), send)
            return
        await receive()  # websocket.connect
        headers = RequestHeaders(scope)
        try:
            query = decode_query(_Query, scope["query_string"])
            namespace = _namespace_of(scope, query)
            address = self._app.admit(scope, headers)
            self._admit_connection(address)
            key = key_in(headers) or query.key or None
            if key is not None or not self._broker.access.is_on:
                self._broker.access.authenticate(key, address).require("any", check_namespace(namespace))
        except Exception as problem:
            await self._app.refuse(problem, scope, secrets.token_hex(8), send, kind="websocket.http.response")
            return
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        self._broker.metrics.count_connections("websocket", len(self._conversations))
        try:
            await send({"type": "websocket.accept"})
            await self._converse(_AsgiLine(receive, send), namespace, address, key, query.client_id)
        except OSError:
            pass  # the client has gone
        finally:
            self._conversations.discard(task)
            self._broker.metrics.count_connections("websocket", len(self._conversations))

    def _admit_connection(self, address: str) -> None:
        metrics, refusal = self._broker.metrics, self._broker.modes.connect_refusal
        if self._app.closing.is_set():
            refusal = ShuttingDown("the broker is shutting down")
        elif len(self._conversations) >= self._settings.max_connections:
            refusal = QuotaExceeded(f"the broker serves {len(self._conversations)} WebSockets, its limit")
        try:
            if refusal is not None:
                raise refusal
            self._broker.access.admit_connection(address)
        except MillstreamError:
            metrics.connections_refused += 1
            raise

    async def _converse(self, line: _AsgiLine, namespace: str, address: str, key: str | None, client_id: str) -> None:
        conversation = Conversation(
            self._broker,
            line,
            bytes_max=self._settings.connection_memory_bytes // 4,
            admit=self._admit_frame,
            own=self._own,
        )
        try:
            if key is None and self._broker.access.is_on:
                key = await self._asked_key(line)
            access = self._broker.access.authenticate(key, address)
            self._broker.access.admit_key(access)
            session = self._broker.open_session(
                namespace=namespace,
                client_id=client_id or "websocket",
                address=address,
                push=conversation.push,
                deliver=conversation.deliver,
                door="websocket",
                access=access,
                end=conversation.end,
            )
        except MillstreamError as refusal:
            self._app.refusals.note(address, refusal)
            await line.send(frames.encode(frames.ErrorFrame(error=describe(refusal, ""))))
            await line.close(_POLICY, str(refusal)[:100])
            return
        try:
            await line.send(frames.encode(self._welcome(namespace)))
        except OSError:
            self._broker.session_closed(session)
            return
        await conversation.run(session, self._app.closing)

    async def _asked_key(self, line: _AsgiLine) -> str:
        """The key in a client's first frame."""
        first, stopping = asyncio.ensure_future(line.receive()), asyncio.ensure_future(self._app.closing.wait())
        try:
            await asyncio.wait((first, stopping), timeout=_AUTH_S, return_when=asyncio.FIRST_COMPLETED)
            data = first.result() if first.done() else ""
        finally:
            first.cancel()
            stopping.cancel()
        if self._app.closing.is_set():
            raise ShuttingDown("the broker is shutting down")
        if data is None:
            raise ConnectionResetError
        frame = frames.decode(data)
        if not isinstance(frame, frames.Auth):
            raise Unauthorized('this broker asks for a key: send {"type":"auth","key":"…"} first')
        return frame.key

    def _welcome(self, namespace: str) -> frames.Welcome:
        return frames.Welcome(
            node_id=self._broker.node_id,
            software=self._broker.software,
            namespace=namespace,
            frame_bytes_max=self._settings.frame_bytes_max,
            credit_max=frames.CREDIT_MAX,
            ping_ms=self._settings.heartbeat_ms,
        )

    def _admit_frame(self, session: Session) -> None:
        self._broker.access.admit_request(session.address)
        self._broker.access.admit_key(session.access)

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Called when the broker begins to stop: wait until everybody was told."""
        if self._conversations:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.drain_ms / 1000 + _GOODBYE_S):
                    await asyncio.wait(self._conversations)


def _namespace_of(scope: Scope, query: _Query) -> str:
    """`/api/v1/ws`, or `/api/v1/namespaces/{namespace}/ws`."""
    raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
    path = raw_path.decode("latin-1")
    if path == f"{API}/ws":
        return query.namespace or "default"
    prefix, suffix = f"{API}/namespaces/", "/ws"
    name = path.removeprefix(prefix).removesuffix(suffix)
    if path != f"{prefix}{name}{suffix}" or not name or "/" in name:
        raise PathNotFound(f"WebSocket is at {API}/ws, not at {path[:200]}")
    if query.namespace:
        raise InvalidArgument("the namespace is said twice, in the path and in the query")
    return unquote(name)
