"""Listens for HTTP: uvicorn's protocols on the broker's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn

from millstream.broker.broker import Broker
from millstream.config import Settings
from millstream.server.http.app import App
from millstream.server.http.site import build

__all__ = ["HttpListener"]


class HttpListener:
    """One port for the API, the dashboard and the metrics."""

    def __init__(self, broker: Broker, settings: Settings) -> None:
        self._settings = settings
        self.app: App = build(broker, settings)
        self.address = ""
        self._server: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    async def open(self) -> None:
        http = self._settings.http
        listening = await asyncio.to_thread(_bind, self._settings.server.host, http.port)
        config = uvicorn.Config(
            self.app,
            loop="none",
            http="httptools",
            ws="websockets-sansio",
            ws_max_size=self._settings.server.frame_bytes_max,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,  # nothing ticks here that would keep it right
            backlog=self._settings.server.backlog,
            timeout_keep_alive=http.keep_alive_ms // 1000,
            timeout_graceful_shutdown=max(1, self._settings.server.drain_ms // 1000),
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listening])
        self._server = server
        host, port = listening.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def close(self) -> None:
        """Stop accepting, let what is under way finish, then close."""
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
