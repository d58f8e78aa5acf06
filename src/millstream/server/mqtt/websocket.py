"""MQTT over WebSocket: the same connections, on a path of the HTTP port, in binary frames of any size."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any, Final

import structlog

from millstream.config import Settings
from millstream.errors import InvalidArgument
from millstream.server.http.app import App, Receive, Scope, Send
from millstream.server.http.visitors import RequestHeaders
from millstream.server.mqtt.connection import MqttConnection
from millstream.server.mqtt.door import MqttDoor

__all__ = ["PATH", "mount"]

_log = structlog.get_logger("millstream.mqtt")

PATH: Final = "/mqtt"
_SUBPROTOCOL: Final = "mqtt"
#: Unsent bytes above which a client is slow, and below which it is so no longer.
_HIGH: Final = 64 * 1024
_LOW: Final = _HIGH // 4
_FRAME_BYTES: Final = 64 * 1024


def mount(app: App, settings: Settings) -> None:
    if settings.mqtt.enabled:
        way_in = _WayIn(app, settings)
        app.mounted[PATH] = way_in
        app.on_closing.append(way_in.door.close)


class _WayIn:
    """All clients that come over WebSocket."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self.door = MqttDoor(app.broker, settings, "mqtt-websocket")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            problem = InvalidArgument(f"{PATH} is MQTT over WebSocket: connect to it with ws:// or wss://")
            await self._app.refuse(problem, scope, secrets.token_hex(8), send)
            return
        await receive()  # websocket.connect
        try:
            self._app.admit(scope, RequestHeaders(scope))
            if _SUBPROTOCOL not in scope["subprotocols"]:
                raise InvalidArgument(
                    f"{PATH} speaks the WebSocket subprotocol {_SUBPROTOCOL!r}, which was not asked for"
                )
        except Exception as problem:
            await self._app.refuse(problem, scope, secrets.token_hex(8), send, kind="websocket.http.response")
            return
        connection = self.door.connection()
        transport = _Transport(connection, scope.get("client"))
        with contextlib.suppress(OSError):  # the client has gone
            await send({"type": "websocket.accept", "subprotocol": _SUBPROTOCOL})
            await transport.run(receive, send)


class _Transport(asyncio.Transport):
    """What a connection takes for its socket."""

    def __init__(self, connection: MqttConnection, client: Any) -> None:
        super().__init__({"peername": client and tuple(client)})
        self._connection = connection
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._is_slow = False
        self._closing = False
        #: Something is to be sent, or it is over.
        self._wake = asyncio.Event()
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, receive: Receive, send: Send) -> None:
        """Until one side closes."""
        self._tasks = [asyncio.create_task(self._read(receive)), asyncio.create_task(self._write(send))]
        self._connection.connection_made(self)
        try:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._closing and not self._tasks[1].done():
                await asyncio.wait(self._tasks[1:])  # what was said last is still on its way
        finally:
            self._closing = True
            for task in self._tasks:
                task.cancel()
            for result in await asyncio.gather(*self._tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, OSError):  # which says that it has gone
                    _log.error("a WebSocket failed", exc_info=result)
            self._connection.connection_lost(None)

    async def _read(self, receive: Receive) -> None:
        while not self._closing:
            await self._may_read.wait()
            event = await receive()
            data = event.get("bytes")
            if event["type"] != "websocket.receive" or data is None:
                return  # it has gone, or has sent text
            self._connection.data_received(data)

    async def _write(self, send: Send) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._unsent:
                data, self._unsent = b"".join(self._unsent), []
                # `send` waits until what was sent before is on its way, so only small frames are held up in time.
                for at in range(0, len(data), _FRAME_BYTES):
                    await send({"type": "websocket.send", "bytes": data[at : at + _FRAME_BYTES]})
                    self._unsent_bytes -= min(_FRAME_BYTES, len(data) - at)
                if self._is_slow and self._unsent_bytes <= _LOW:
                    self._is_slow = False
                    self._connection.resume_writing()
            elif self._closing:
                await send({"type": "websocket.close", "code": 1000, "reason": ""})
                return
            if self._unsent or self._closing:
                self._wake.set()

    # --- what the connection calls -------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._unsent.append(bytes(data))
        self._unsent_bytes += len(data)
        self._wake.set()
        if self._unsent_bytes > _HIGH and not self._is_slow:
            self._is_slow = True
            self._connection.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True
        self._wake.set()

    def abort(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
