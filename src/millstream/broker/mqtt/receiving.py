"""PUBLISH from a client: what it may send and how much of it, and the answers in their order."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from millstream.broker.mqtt.publishing import Owed, Publishing, Stretch
from millstream.broker.mqtt.rights import require_publish
from millstream.errors import MillstreamError, StorageFailed
from millstream.mqtt.aliases import IncomingAliases
from millstream.mqtt.messages import Message, expires_us, size_of
from millstream.mqtt.packets import NO_PROPERTIES, V5, Properties, Puback, Publish, Pubrec
from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.mqtt.topics import check_topic_name, is_special, parse_queue

if TYPE_CHECKING:
    from millstream.broker.broker import Session as BrokerSession
    from millstream.broker.mqtt.client import Client
    from millstream.broker.mqtt.session import Session

__all__ = ["Receiving"]

#: Answers that a client may wait for before it is not read from any more; in version 5 it is told a lower number.
_OWED_MAX: Final = 1_000
#: Messages that go together at most.
_STRETCH_MAX: Final = 1_000
#: PUBACK and PUBREC that say yes, in both versions.
_YES: Final = Struct(">BBH")
_FIRST_BYTE: Final = {1: 0x40, 2: 0x50}


class Receiving:
    """What one client publishes; made with its first message."""

    __slots__ = (
        "_aliases",
        "_at_least_once",
        "_client",
        "_held",
        "_held_max",
        "_publishing",
        "_session",
        "_stretch",
        "_taken_us",
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
        #: What was taken last and is not handed on yet: the next message may be like it.  And when it was taken.
        self._stretch: Stretch | None = None
        self._taken_us = 0
        #: Publishes of QoS 1 and 2 that are not answered, and those of QoS 1 among them.
        self._unanswered = 0
        self._at_least_once = 0
        #: Bytes of what is not stored or passed on yet, of QoS 0 as well.
        self._held = 0
        self._held_max = session.world.room.held_bytes_max
        #: Since the end of the last read.
        self.received = 0

    def is_full(self) -> bool:
        return self._unanswered >= _OWED_MAX or self._held >= self._held_max

    def flush(self) -> None:
        """Everything that came with one read was taken."""
        if self.received:
            self._session.world.room.broker.metrics.mqtt_received += self.received
            self.received = 0
            self.hand_on()
            self._publishing.flush()

    def take(self, packet: Publish) -> None:
        """Raises MqttViolation when the connection must end."""
        self.received += 1
        qos, packet_id, topic, told = packet.qos, packet.packet_id, packet.topic, packet.properties
        expiry_s = None
        if told is not NO_PROPERTIES:
            topic = self._aliases.resolve(topic, told.topic_alias)
            expiry_s = told.message_expiry_s
            told = _lasting(told)
        if qos and not self._admit(qos, packet_id):
            return
        plain = told is NO_PROPERTIES and expiry_s is None and not packet.retain
        if plain and (stretch := self._stretch) is not None and len(stretch.payloads) < _STRETCH_MAX:
            message, payloads, owed = stretch
            if topic == message.topic and qos == message.qos:
                payloads.append(packet.payload)
                owed.packet_ids.append(packet_id)
                return
        self.hand_on()
        owed = Owed(qos, packet_id)
        try:
            check_topic_name(topic)
            if is_special(topic):
                self._hold(owed, len(topic) + len(packet.payload))
                self._take_special(packet, topic, owed)
                return
            require_publish(self._who, topic, self._session.world.room.broker.inboxes)
        except MillstreamError as error:
            if isinstance(error, MqttViolation) and (
                error.reason is not Reason.TOPIC_NAME_INVALID or "+" in topic or "#" in topic
            ):
                raise
            self._publishing.refuse(owed, error)
            return
        now_us = self._session.world.room.clock.now_us()
        expiry_us = expires_us(expiry_s, now_us)
        message = Message(topic, packet.payload, qos, packet.retain, told, self._session.client_id, expiry_us)
        self._stretch, self._taken_us = Stretch(message, [packet.payload], owed), now_us
        if not plain:
            self.hand_on()

    def hand_on(self) -> None:
        """What comes now is different from what came before."""
        stretch, self._stretch = self._stretch, None
        if stretch is not None:
            message, payloads, owed = stretch
            self._hold(owed, size_of(message) - len(message.payload) + sum(map(len, payloads)))
            try:
                self._publishing.take(stretch, self._taken_us)
            except MillstreamError as error:
                self._publishing.refuse(owed, error)

    def _hold(self, owed: Owed, size: int) -> None:
        owed.size = size
        self._held += size

    def _admit(self, qos: int, packet_id: int) -> bool:
        """False for a message of QoS 2 that has been sent before."""
        session = self._session
        incoming = session.incoming
        if self._version == V5:
            is_known = qos == 2 and packet_id in incoming
            if self._at_least_once + len(incoming) >= incoming.limit and not is_known:
                most = session.world.room.settings.receive_maximum
                raise MqttViolation(Reason.RECEIVE_MAXIMUM_EXCEEDED, f"{most} publishes may be unconfirmed at a time")
        self._unanswered += 1
        if qos == 1:
            self._at_least_once += 1
            return True
        if incoming.receive(packet_id):
            session.receiving[packet_id] = []
            session.unrecorded.add(packet_id)
            return True
        self.hand_on()
        waiting = session.receiving.get(packet_id)
        if waiting is None:
            self._publishing.answer(Owed(qos, packet_id), Reason.SUCCESS)
        else:
            waiting.append(self._publishing.owe(Owed(qos, packet_id)))  # its answer is still on its way to the disk
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
            if owed.qos == 2:  # also behind one that ends the connection: whoever comes back with it waits for this
                self._received_twice(owed)
        for owed in run:
            qos, packet_ids = owed.qos, owed.packet_ids
            self._held -= owed.size
            if not qos:
                if owed.error is not None:
                    self._session.count_dropped(len(packet_ids))
                continue
            self._unanswered -= len(packet_ids)
            if qos == 1:
                self._at_least_once -= len(packet_ids)
            if not owed.reason:
                first = _FIRST_BYTE[qos]
                answers += [_YES.pack(first, 2, packet_id) for packet_id in packet_ids]
                continue
            if owed.reason >= Reason.UNSPECIFIED_ERROR and (self._version != V5 or _in_doubt(owed)):
                # In 3.1.1 there is no way to say no, and yes would be a lie.  What is in doubt is neither yes nor no.
                client.send_raw(answers)
                client.fail(owed.error or MqttViolation(owed.reason, "a message was not accepted"))
                return
            kind, why = Puback if qos == 1 else Pubrec, client.explanation(owed.error)
            answers += [client.encoded(kind(packet_id, owed.reason, why)) for packet_id in packet_ids]
        if answers:
            client.send_raw(answers)
        if not self.is_full():
            client.resume()

    def _received_twice(self, owed: Owed) -> None:
        """Whoever has sent the same message of QoS 2 again meanwhile hears the same."""
        session = self._session
        for packet_id in owed.packet_ids:
            if owed.reason >= Reason.UNSPECIFIED_ERROR:
                session.incoming.release(packet_id)
            session.unrecorded.discard(packet_id)
            for waiting in session.receiving.pop(packet_id, ()):
                waiting(owed.error)


def _in_doubt(owed: Owed) -> bool:
    """Whether a restart may find a packet id of QoS 2 on the disk that failed.

    After a no the client would use that id for another message, which would then be taken for a repetition.  Without
    an answer it comes back with the same message, until a broker knows what became of it.
    """
    return owed.qos == 2 and isinstance(owed.error, StorageFailed)


def _lasting(told: Properties) -> Properties:
    """What belongs to the message, without what belongs to this packet only."""
    if told.subscription_ids:
        raise MqttViolation(Reason.PROTOCOL_ERROR, "clients publish without subscription identifiers")
    if told.topic_alias is None and told.message_expiry_s is None:
        return told
    kept = msgspec.structs.replace(told, topic_alias=None, message_expiry_s=None)
    return NO_PROPERTIES if kept == NO_PROPERTIES else kept
