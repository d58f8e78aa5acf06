"""`client.mqtt`: sessions of MQTT clients, and retained messages."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.client.asking import Ask
from millstream.wire import mqtt_calls as calls

__all__ = ["Mqtt"]

_PAGE = 1000


class Mqtt:
    """MQTT in one namespace.  Topics are named as in MQTT: `a/b`."""

    def __init__(self, call: Ask) -> None:
        self._call = call

    def overview(self, *, everywhere: bool = False) -> calls.MqttOverview:
        """Figures about connections, sessions and retained messages: of this namespace, or with `everywhere` of all."""
        return self._call(calls.DescribeMqtt(everywhere=everywhere), calls.MqttOverview)

    def sessions(self, prefix: str = "", *, connected: bool | None = None) -> Iterator[calls.SessionSummary]:
        """Iterate over sessions in the order of their client ids.

        `prefix` is how the client ids begin.  `connected` selects sessions whose client is connected, or is not.
        """
        call = calls.ListSessions(prefix=prefix, connected=connected, limit=_PAGE)
        while True:
            page = self._call(call, calls.SessionPage)
            yield from page.sessions
            if not page.after:
                return
            call.after = page.after

    def session(self, client_id: str) -> calls.SessionInfo:
        """One session: its subscriptions, and what waits for it.  Raises SessionNotFound."""
        return self._call(calls.ShowSession(client_id=client_id), calls.SessionInfo)

    def disconnect(self, client_id: str, reason: str = "") -> bool:
        """End the connection of a client, which may come back.  Raises SessionNotFound.

        Returns whether there was a connection.  A client of MQTT version 5 is told the reason.  The client's will is
        published.
        """
        call = calls.DisconnectSession(client_id=client_id, reason=reason)
        answer = self._call(call, calls.Disconnected)
        return answer.disconnected

    def forget(self, client_id: str) -> None:
        """End a session with all that waits for it, and the connection of its client.  Raises SessionNotFound."""
        self._call(calls.ForgetSession(client_id=client_id), object)

    def retained(self, topic_filter: str = "#") -> Iterator[calls.RetainedInfo]:
        """Iterate over retained messages, without their payloads, in the order of their topics."""
        call = calls.ListRetained(filter=topic_filter, limit=_PAGE)
        while True:
            page = self._call(call, calls.RetainedPage)
            yield from page.messages
            if not page.after:
                return
            call.after = page.after

    def retained_message(self, topic: str) -> calls.RetainedMessage:
        """The retained message of a topic, which new subscribers get first.  Raises MessageNotFound."""
        return self._call(calls.ShowRetained(topic=topic), calls.RetainedMessage)

    def clear_retained(self, topic_filter: str, *, dry_run: bool = False) -> int:
        """Remove the retained messages of a topic, or of all topics that match a filter.

        Returns how many were removed, or with `dry_run` how many there are.  Subscribers are not told.
        """
        call = calls.ClearRetained(filter=topic_filter, dry_run=dry_run)
        answer = self._call(call, calls.RetainedCleared)
        return answer.cleared
