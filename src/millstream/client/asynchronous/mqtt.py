"""`client.mqtt`: sessions of MQTT clients, and retained messages."""

from __future__ import annotations

from collections.abc import AsyncIterator

from millstream.client.asking import AsyncAsk
from millstream.wire import mqtt_calls as calls

__all__ = ["AsyncMqtt"]

_PAGE = 1000


class AsyncMqtt:
    """MQTT in one namespace.  Topics are named as in MQTT: `a/b`."""

    def __init__(self, call: AsyncAsk) -> None:
        self._call = call

    async def overview(self, *, everywhere: bool = False) -> calls.MqttOverview:
        """Figures about connections, sessions and retained messages: of this namespace, or with `everywhere` of all."""
        return await self._call(calls.DescribeMqtt(everywhere=everywhere), calls.MqttOverview)

    async def sessions(self, prefix: str = "", *, connected: bool | None = None) -> AsyncIterator[calls.SessionSummary]:
        """Iterate over sessions in the order of their client ids.

        `prefix` is how the client ids begin.  `connected` selects sessions whose client is connected, or is not.
        """
        call = calls.ListSessions(prefix=prefix, connected=connected, limit=_PAGE)
        while True:
            page = await self._call(call, calls.SessionPage)
            for session in page.sessions:
                yield session
            if not page.after:
                return
            call.after = page.after

    async def session(self, client_id: str) -> calls.SessionInfo:
        """One session: its subscriptions, and what waits for it.  Raises SessionNotFound."""
        return await self._call(calls.ShowSession(client_id=client_id), calls.SessionInfo)

    async def disconnect(self, client_id: str, reason: str = "") -> bool:
        """End the connection of a client, which may come back.  Raises SessionNotFound.

        Returns whether there was a connection.  A client of MQTT version 5 is told the reason.  The client's will is
        published.
        """
        call = calls.DisconnectSession(client_id=client_id, reason=reason)
        answer = await self._call(call, calls.Disconnected)
        return answer.disconnected

    async def forget(self, client_id: str) -> None:
        """End a session with all that waits for it, and the connection of its client.  Raises SessionNotFound."""
        await self._call(calls.ForgetSession(client_id=client_id), object)

    async def retained(self, topic_filter: str = "#") -> AsyncIterator[calls.RetainedInfo]:
        """Iterate over retained messages, without their payloads, in the order of their topics."""
        call = calls.ListRetained(filter=topic_filter, limit=_PAGE)
        while True:
            page = await self._call(call, calls.RetainedPage)
            for message in page.messages:
                yield message
            if not page.after:
                return
            call.after = page.after

    async def retained_message(self, topic: str) -> calls.RetainedMessage:
        """The retained message of a topic, which new subscribers get first.  Raises MessageNotFound."""
        return await self._call(calls.ShowRetained(topic=topic), calls.RetainedMessage)

    async def clear_retained(self, topic_filter: str, *, dry_run: bool = False) -> int:
        """Remove the retained messages of a topic, or of all topics that match a filter.

        Returns how many were removed, or with `dry_run` how many there are.  Subscribers are not told.
        """
        call = calls.ClearRetained(filter=topic_filter, dry_run=dry_run)
        answer = await self._call(call, calls.RetainedCleared)
        return answer.cleared
