"""CONNECT: who somebody is, what it asks for and what it is told that it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from millstream.broker.mqtt.rights import require_publish
from millstream.errors import MillstreamError
from millstream.mqtt.packets import NO_PROPERTIES, V5, Connect, Properties
from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.mqtt.topics import check_topic_name, is_special
from millstream.mqtt.window import PACKET_ID_MAX
from millstream.names import check_namespace

if TYPE_CHECKING:
    from millstream.broker.broker import Session as BrokerSession
    from millstream.broker.mqtt.mqtt import Mqtt

__all__ = ["Greeting"]


class Greeting:
    """What a CONNECT comes to.  Raises MillstreamError for one that cannot be."""

    def __init__(self, room: Mqtt, packet: Connect) -> None:
        settings = room.settings
        self.packet = packet
        self._room = room
        #: With which it comes, once it is open.
        self.key_id = ""
        asked = packet.properties
        if asked.authentication_method is not None:
            raise MqttViolation(Reason.BAD_AUTHENTICATION_METHOD, "a key is said as the password, in no other way")
        self.client_id = packet.client_id or self._assigned_id()
        if len(self.client_id.encode()) > settings.client_id_bytes_max:
            raise MqttViolation(
                Reason.CLIENT_IDENTIFIER_NOT_VALID,
                f"a client identifier has {settings.client_id_bytes_max} bytes at most",
            )
        longest_s = settings.session_expiry_max_ms // 1000
        if packet.version == V5:
            self.expiry_s = min(asked.session_expiry_s or 0, longest_s)
        else:
            self.expiry_s = 0 if packet.clean_start else longest_s
        self.keep_alive_s = packet.keep_alive_s
        # 3.1.1 cannot be told, so it gets what it has asked for.
        if (
            packet.version == V5
            and settings.keep_alive_max_s
            and not 0 < self.keep_alive_s <= settings.keep_alive_max_s
        ):
            self.keep_alive_s = settings.keep_alive_max_s
        self.inflight_max = min(asked.receive_maximum or PACKET_ID_MAX, settings.inflight_max)
        self.receive_maximum = settings.receive_maximum if packet.version == V5 else PACKET_ID_MAX
        self.topic_alias_maximum = min(asked.topic_alias_maximum or 0, settings.topic_alias_max)

    def _assigned_id(self) -> str:
        if self.packet.version != V5 and not self.packet.clean_start:
            raise MqttViolation(Reason.CLIENT_IDENTIFIER_NOT_VALID, "a session that lasts needs a client identifier")
        return self._room.draw_client_id()

    def open(self, address: str, end: Callable[[MillstreamError], None]) -> BrokerSession:
        """Who it is to the broker, and where: `team-a:device-7` is in the namespace `team-a`."""
        packet, broker = self.packet, self._room.broker
        namespace, colon, _ = (packet.username or "").partition(":")
        password = packet.password
        access = broker.access.authenticate(
            password.decode("utf-8", "replace") if password is not None else None, address
        )
        broker.access.admit_key(access)
        self.key_id = access.key_id
        namespace = check_namespace(namespace if colon else self._room.settings.namespace)
        who = broker.open_session(
            namespace=namespace,
            client_id=self.client_id,
            address=address,
            push=_ignore,
            door="mqtt",
            access=access,
            end=end,
            instead_of=self._predecessor(namespace),
        )
        try:
            self._check_will(who)
        except MillstreamError:
            broker.session_closed(who)
            raise
        return who

    def _predecessor(self, namespace: str) -> BrokerSession | None:
        """The connection that the client has already, and maybe does not know of any more: it is taken over."""
        world = self._room.worlds.get(namespace)
        session = world.sessions.get(self.client_id) if world is not None else None
        return session.client.who if session is not None and session.client is not None else None

    def _check_will(self, who: BrokerSession) -> None:
        will = self.packet.will
        if will is not None:
            if is_special(check_topic_name(will.topic)):
                raise MqttViolation(Reason.TOPIC_NAME_INVALID, "a will is published to an ordinary topic")
            require_publish(who, will.topic, self._room.broker.inboxes)

    def welcome(self) -> Properties:
        """What differs from what it has asked for, and our limits."""
        packet, settings = self.packet, self._room.settings
        if packet.version != V5:
            return NO_PROPERTIES
        asked = packet.properties
        return Properties(
            assigned_client_id=self.client_id if not packet.client_id else None,
            session_expiry_s=self.expiry_s if self.expiry_s != (asked.session_expiry_s or 0) else None,
            receive_maximum=settings.receive_maximum,
            maximum_packet_bytes=settings.max_packet_bytes,
            topic_alias_maximum=settings.topic_alias_max or None,
            server_keep_alive_s=self.keep_alive_s if self.keep_alive_s != packet.keep_alive_s else None,
            response_information=self._place_for_responses() if asked.request_response_information else None,
        )

    def _place_for_responses(self) -> str | None:
        """Below this nobody else is answered; there is no such place where its name would be a filter."""
        return None if "+" in self.client_id or "#" in self.client_id else f"responses/{self.client_id}"


def _ignore(_: object) -> None:
    """MQTT has no way to say what the broker pushes to others."""
