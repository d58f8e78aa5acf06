"""PUBLISH from a client: what it may send and how much of it, and the answers in their order."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from millstream.broker.mqtt.publishing import Owed, Publishing
from millstream.broker.mqtt.rights import require_topic
from millstream.errors import MillstreamError
from millstream.mqtt.aliases import IncomingAliases
from millstream.mqtt.messages import Message
from millstream.mqtt.packets import NO_PROPERTIES, V5, Properties, Puback, Publish, Pubrec
from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.mqtt.topics import check_topic_name, parse_queue

if TYPE_CHECKING:
    from millstream.broker.broker import Session as BrokerSession
    from millstream.broker.mqtt.client import Client
    from millstream.broker.mqtt.session import Session

__all__ = ["Receiving"]

#: Answers that a client may wait for before it is not read from any more; in version 5 it is told a lower number.
_OWED_MAX: Final = 1_000
#: Topics with a meaning of their own; others that begin with `$` are names like any, which no wildcard finds.
_SPECIAL: Final = ("$SYS/", "$queue/", "$admin/", "$share/")
#: PUBACK and PUBREC that say yes, in both versions.
_YES: Final = Struct(">BBH")
_FIRST_BYTE: Final = {1: 0x40, 2: 0x50}


class Receiving:
    """What one client publishes; made with its first message."""

    __slots__ = (
        "_aliases",
        "_allowed",
        "_at_least_once",
        "_client",
        "_publishing",
        "_session",
        "_unanswered",
        "_version",
        "_who",
        "received",
    )

    def __init__(self, client: Client, session: Session, who: BrokerSession, version: int) -> None:
        self._client = client
        self._session = session
        self._who = who
        self._version = version
        self._publishing = Publishing(session.world, who, self._settled, session)
        self._aliases = IncomingAliases(session.world.room.settings.topic_alias_max)
        #: The topic that it was last allowed to publish to, and the rights that said so.
        self._allowed: tuple[str, object] = ("", None)
        #: Publishes of QoS 1 and 2 that are not answered, and those of QoS 1 among them.
        self._unanswered = 0
        self._at_least_once = 0
        #: Since the end of the last read.
        self.received = 0

    def is_full(self) -> bool:
        return self._unanswered >= _OWED_MAX

    def flush(self) -> None:
        """Everything that came with one read was taken."""
        if self.received:
            self._session.world.room.broker.metrics.mqtt_received += self.received
            self.received = 0
            self._publishing.flush()

    def take(self, packet: Publish) -> None:
        """Raises MqttViolation when the connection must end."""
        self.received += 1
        qos, packet_id, told = packet.qos, packet.packet_id, packet.properties
        topic = packet.topic
        expiry_s = None
        if told is not NO_PROPERTIES:
            topic = self._aliases.resolve(topic, told.topic_alias)
            expiry_s = told.message_expiry_s
            told = _lasting(told)
        owed = Owed(qos, packet_id)
        if qos and not self._admit(qos, packet_id, owed):
            return
        try:
            if self._allowed != (topic, self._who.access):
                check_topic_name(topic)
                if topic.startswith(_SPECIAL):
                    self._take_special(packet, topic, owed)
                    return
                require_topic(self._who, "produce", topic)
                self._allowed = (topic, self._who.access)
            elif self._who.access.refusal is not None:
                raise self._who.access.refusal
            session = self._session
            now_us = session.world.room.clock.now_us()
            message = Message(
                topic,
                packet.payload,
                qos,
                packet.retain,
                told,
                session.client_id,
                now_us + expiry_s * 1_000_000 if expiry_s is not None else 0,
            )
            self._publishing.take(message, owed, now_us)
        except MillstreamError as error:
            if isinstance(error, MqttViolation) and (
                error.reason is not Reason.TOPIC_NAME_INVALID or "+" in topic or "#" in topic
            ):
                raise
            self._publishing.refuse(owed, error)

    def _admit(self, qos: int, packet_id: int, owed: Owed) -> bool:
        """False for a message of QoS 2 that has been sent before."""
        incoming = self._session.incoming
        is_known = qos == 2 and packet_id in incoming
        if self._version == V5 and self._at_least_once + len(incoming) >= incoming.limit and not is_known:
            maximum = self._session.world.room.settings.receive_maximum
            raise MqttViolation(Reason.RECEIVE_MAXIMUM_EXCEEDED, f"{maximum} publishes may be unconfirmed at a time")
        self._unanswered += 1
        if qos == 1:
            self._at_least_once += 1
            return True
        receiving = self._session.receiving
        if incoming.receive(packet_id):
            receiving[packet_id] = []
            self._session.unrecorded.add(packet_id)
            return True
        waiting = receiving.get(packet_id)
        if waiting is None:
            self._publishing.answer(owed, Reason.SUCCESS)
        else:
            waiting.append(self._publishing.owe(owed))  # its answer is still on its way to the disk
        return False

    def _take_special(self, packet: Publish, topic: str, owed: Owed) -> None:
        address = parse_queue(topic)
        if address is None:
            self._publishing.answer(owed, Reason.NOT_AUTHORIZED)  # `$SYS` is not for clients to write
        else:
            self._client.queue_topics().publish(address, packet, self._publishing, owed)

    # --- answers -------------------------------------------------------------------------------------------------

    def _settled(self, run: Sequence[Owed]) -> None:
        """Publishes have their answers; as many as there are go out together."""
        answers: list[bytes] = []
        client = self._client
        for owed in run:
            qos = owed.qos
            if not qos:
                if owed.error is not None:
                    self._session.count_dropped()
                continue
            self._unanswered -= 1
            if qos == 1:
                self._at_least_once -= 1
            else:
                self._received_twice(owed)
            if not owed.reason:
                answers.append(_YES.pack(_FIRST_BYTE[qos], 2, owed.packet_id))
                continue
            if self._version != V5 and owed.reason >= Reason.UNSPECIFIED_ERROR:
                # In 3.1.1 there is no way to say no, and yes would be a lie.
                client.send_raw(b"".join(answers))
                client.fail(owed.error or MqttViolation(owed.reason, "a message was not accepted"))
                return
            kind = Puback if qos == 1 else Pubrec
            answers.append(client.encoded(kind(owed.packet_id, owed.reason, client.explanation(owed.error))))
        if answers:
            client.send_raw(b"".join(answers))
            if self._unanswered < _OWED_MAX:
                client.resume()

    def _received_twice(self, owed: Owed) -> None:
        """Whoever has sent the same message of QoS 2 again meanwhile hears the same."""
        if owed.reason >= Reason.UNSPECIFIED_ERROR:
            self._session.incoming.release(owed.packet_id)
        self._session.unrecorded.discard(owed.packet_id)
        for waiting in self._session.receiving.pop(owed.packet_id, ()):
            waiting(owed.error)


def _lasting(told: Properties) -> Properties:
    """What belongs to the message, without what belongs to this packet only."""
    if told.subscription_ids:
        raise MqttViolation(Reason.PROTOCOL_ERROR, "clients publish without subscription identifiers")
    if told.topic_alias is None and told.message_expiry_s is None:
        return told
    kept = msgspec.structs.replace(told, topic_alias=None, message_expiry_s=None)
    return NO_PROPERTIES if kept == NO_PROPERTIES else kept
