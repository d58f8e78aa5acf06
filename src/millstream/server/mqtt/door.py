"""What the clients of one way in share: who is let in, who looks after them, and how they are ended."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from millstream.broker.broker import Broker
from millstream.config import Settings
from millstream.server.connections import Connections
from millstream.server.mqtt.connection import MqttConnection
from millstream.server.mqtt.deadlines import TICK_MS, Deadlines

__all__ = ["TURNED_AWAY_MAX", "MqttDoor"]

#: Clients that were not let in and may still hear why; others beyond them are cut off without a word.
TURNED_AWAY_MAX: Final = 64


class MqttDoor:
    """One way in: a port, or a path."""

    def __init__(self, broker: Broker, settings: Settings, name: str) -> None:
        """`name` is what metrics call it."""
        self.broker = broker
        self.connections: Connections[MqttConnection] = Connections(broker, settings.server, name)
        self.deadlines = Deadlines(asyncio.get_running_loop())
        self.packet_bytes_max = settings.mqtt.max_packet_bytes
        self.connect_ticks = -(-settings.mqtt.connect_timeout_ms // TICK_MS)
        self._turned_away: set[MqttConnection] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        #: Those that have something to write.
        self._outgoing: list[MqttConnection] = []

    def connection(self) -> MqttConnection:
        """For a client that has just come."""
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self.deadlines.run())
        return MqttConnection(self)

    def outgoing(self, connection: MqttConnection) -> None:
        """Have a connection write what it has at the end of this turn of the event loop."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(connection)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        for connection in outgoing:
            connection.flush()

    def turn_away(self, connection: MqttConnection) -> bool:
        """Whether a connection that was not let in may wait to hear why."""
        if len(self._turned_away) >= TURNED_AWAY_MAX:
            return False
        self._turned_away.add(connection)
        return True

    def forget(self, connection: MqttConnection) -> None:
        self._turned_away.discard(connection)
        self.connections.forget(connection)

    async def close(self) -> None:
        """Tell everybody, let what is under way finish, then close."""
        for connection in list(self._turned_away):
            connection.abort()
        await self.connections.end()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
