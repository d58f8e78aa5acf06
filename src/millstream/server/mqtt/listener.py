"""Listens for MQTT on a port of its own."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final

from millstream.broker.broker import Broker
from millstream.config import Settings
from millstream.server.mqtt.door import MqttDoor

__all__ = ["MqttListener"]

#: Who takes longer over TLS's greetings has something else in mind.
_HANDSHAKE_S: Final = 10.0


class MqttListener:
    """Accepts MQTT connections, and ends them politely."""

    def __init__(self, broker: Broker, settings: Settings, tls: ssl.SSLContext | None = None) -> None:
        self._settings = settings
        self._tls = tls
        self._door = MqttDoor(broker, settings, "mqtt")
        self._server: asyncio.Server | None = None
        self.address = ""

    @property
    def url(self) -> str:
        return f"{'mqtts' if self._tls else 'mqtt'}://{self.address}"

    async def open(self) -> None:
        server = self._settings.server
        self._server = await asyncio.get_running_loop().create_server(
            self._door.connection,
            server.host,
            self._settings.mqtt.port,
            backlog=server.backlog,
            ssl=self._tls,
            ssl_handshake_timeout=_HANDSHAKE_S if self._tls else None,
        )
        for listening in self._server.sockets:
            # Sockets inherit it from the one that accepts them, which is cheaper than telling each.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def close(self) -> None:
        """Stop accepting, tell everybody, let what is under way finish, then close."""
        if self._server is not None:
            self._server.close()
        await self._door.close()
