"""Listens for HTTP: uvicorn's protocols on the broker's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import uvicorn

from millstream.broker.broker import Broker
from millstream.config import Settings
from millstream.server.http.app import App
from millstream.server.http.protocol import LimitedWebSocket, limited
from millstream.server.http.site import build

__all__ = ["HttpListener"]


class HttpListener:
    """One port for the API, the dashboard and the metrics."""

    def __init__(self, broker: Broker, settings: Settings, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._settings = settings
        self._metrics = broker.metrics
        self.app: App = build(broker, settings)
        self.address = ""
        self._server: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self.address}"

    async def open(self) -> None:
        http, server = self._settings.http, self._settings.server
        listening = await asyncio.to_thread(_bind, server.host, http.port)
        config = uvicorn.Config(
            self.app,
            loop="none",
            http=limited(
                connections_max=server.max_connections,
                request_s=http.request_ms / 1000,
                metrics=self._metrics,
                refusals=self.app.refusals,
            ),
            ws=LimitedWebSocket,
            ws_max_size=server.frame_bytes_max,
            ws_per_message_deflate=False,  # would cost each connection memory, and each frame time
            ws_ping_interval=server.heartbeat_ms / 1000,
            ws_ping_timeout=server.heartbeat_ms * server.heartbeat_misses / 1000,
            lifespan="off",
            log_config=None,
            # What it says of a WebSocket that opens has the key of the query in it; of bad requests we say enough.
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,  # nothing ticks here that would keep it right
            backlog=server.backlog,
            timeout_keep_alive=http.keep_alive_ms // 1000,
            timeout_graceful_shutdown=max(1, server.drain_ms // 1000),
        )
        config.load()
        config.ssl = self._tls
        serving = uvicorn.Server(config)
        serving.lifespan = config.lifespan_class(config)
        await serving.startup(sockets=[listening])
        self._server = serving
        host, port = listening.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def close(self) -> None:
        """Stop accepting, let what is under way finish, then close."""
        self.app.closing.set()
        await asyncio.gather(*(farewell() for farewell in self.app.on_closing))
        if self._server is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._server.shutdown()


def _bind(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    # With its protocol named, or asyncio would not know that it can switch off the delay of small packets.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening
