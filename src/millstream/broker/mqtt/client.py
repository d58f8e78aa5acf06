"""One connected MQTT client: what it asks for is done, what it is told is written.  One object per connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from millstream.broker.mqtt.greeting import Greeting
from millstream.broker.mqtt.parcel import Grant, Parcel
from millstream.broker.mqtt.receiving import Receiving
from millstream.broker.mqtt.refusals import connect_reason
from millstream.broker.mqtt.rights import require_filter
from millstream.broker.mqtt.subscribing import Subscribing, Unsubscribing
from millstream.errors import ConnectionLost, InternalError, MillstreamError, ShuttingDown
from millstream.mqtt.aliases import OutgoingAliases
from millstream.mqtt.packets import (
    NO_PROPERTIES,
    V5,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
)
from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.mqtt.writer import encode

if TYPE_CHECKING:
    from millstream.broker.broker import Session as BrokerSession
    from millstream.broker.mqtt.mqtt import Mqtt
    from millstream.broker.mqtt.queue_topics import QueueTopics
    from millstream.broker.mqtt.session import Session

__all__ = ["Client", "Line"]

_log = structlog.get_logger("millstream.mqtt")

_PINGRESP: Final = encode(Pingresp(), V5)
#: SUBSCRIBEs and UNSUBSCRIBEs that may wait for their turn; what a client says behind them waits too.
_TURNS_MAX: Final = 100


class Line(Protocol):
    """The connection, as far as this room is concerned."""

    is_slow: bool

    @property
    def unsent(self) -> int:
        """Bytes that the client has not read yet."""

    def send(self, data: bytes, packets: int = 1, /) -> None: ...

    def close(self) -> None:
        """After what was sent."""

    def resume(self) -> None:
        """The client is not full any more."""

    def set_keep_alive(self, seconds: int, /) -> None: ...


class Client:
    """See the module.  `handle` raises MillstreamError when the connection must end; `violated` says why."""

    __slots__ = (
        "_address",
        "_bytes_max",
        "_explains",
        "_gone",
        "_line",
        "_outgoing_aliases",
        "_queues",
        "_receiving",
        "_released",
        "_room",
        "_turn",
        "_turns",
        "keep_alive_s",
        "session",
        "version",
        "who",
    )

    def __init__(self, room: Mqtt, line: Line, address: str) -> None:
        self._room = room
        self._line = line
        self._address = address
        self.version = 0
        self.who: BrokerSession | None = None
        self.session: Session | None = None
        self.keep_alive_s = 0
        #: The largest packet that the client takes.
        self._bytes_max: int | None = None
        #: Whether it wants to know why something went wrong.
        self._explains = True
        self._gone = False
        self._outgoing_aliases: OutgoingAliases | None = None
        self._receiving: Receiving | None = None
        #: Packet ids of QoS 2 that it has released with this read.
        self._released: list[int] | None = None
        self._queues: QueueTopics | None = None
        #: Subscriptions are changed one after the other.
        self._turn: asyncio.Task[None] | None = None
        self._turns = 0

    # --- what it says --------------------------------------------------------------------------------------------

    def handle(self, packets: Iterable[Packet]) -> None:
        """What came with one read, or as much of it as there is room for.

        Whatever came before a mistake is carried out.
        """
        count = 0
        try:
            for packet in packets:
                count += 1
                if type(packet) is Publish and self._receiving is not None:
                    self._receiving.take(packet)
                else:
                    self._handle(packet)
                    if self._turns >= _TURNS_MAX:
                        break  # the rest comes when there is room again
                if self._gone:
                    break
        finally:
            self._room.broker.metrics.mqtt_packets_received += count
            self._end_of_read()

    def _handle(self, packet: Packet) -> None:
        if self.session is None:
            if not isinstance(packet, Connect):
                raise MqttViolation(Reason.PROTOCOL_ERROR, "the first packet of a client is CONNECT")
            self._connect(packet)
            return
        kind = type(packet)
        handler = _HANDLERS.get(kind)
        if handler is None:
            raise MqttViolation(Reason.PROTOCOL_ERROR, f"{kind.__name__.upper()} is not for clients to send now")
        if self._receiving is not None:
            self._receiving.hand_on()
        handler(self, packet)

    def _end_of_read(self) -> None:
        if self._receiving is not None:
            self._receiving.flush()
        if self._released is not None:
            released, self._released = self._released, None
            self._room.own(asyncio.ensure_future(self.or_fail(self._complete(released))))

    def is_full(self) -> bool:
        """Whether nothing more should be read from it for now."""
        return self._turns >= _TURNS_MAX or (self._receiving is not None and self._receiving.is_full())

    # --- CONNECT -------------------------------------------------------------------------------------------------

    def _connect(self, packet: Connect) -> None:
        self.version = packet.version
        asked = packet.properties
        self._bytes_max = asked.maximum_packet_bytes
        self._explains = asked.request_problem_information != 0
        greeting = Greeting(self._room, packet)
        self.who = greeting.open(self._address, self.fail)
        if self._bytes_max is not None and not self.encoded(welcome := Connack(properties=greeting.welcome())):
            raise _too_large(welcome)  # as long as there is no session: it may be told with fewer bytes
        session, present = self._room.begin(self, self.who.namespace, greeting)
        self.session = session
        self.keep_alive_s = greeting.keep_alive_s
        if greeting.topic_alias_maximum:
            self._outgoing_aliases = OutgoingAliases(greeting.topic_alias_maximum)
        self._line.set_keep_alive(greeting.keep_alive_s)
        self.write(Connack(Reason.SUCCESS, present, greeting.welcome()))
        if present:
            self._check_rights(session, self.who)
        session.begin()
        if session.queues:
            self._in_turn(self.queue_topics().resume())

    def _check_rights(self, session: Session, who: BrokerSession) -> None:
        """The session may be of somebody else, or of a key that had more rights: what is not allowed now ends."""
        refused = []
        for topic_filter in session.subscriptions:
            try:
                require_filter(who, topic_filter)
            except MillstreamError as error:
                refused.append(topic_filter)
                session.record(["unsub", topic_filter])
                _log.warning(
                    "a subscription ends", client=session.client_id, filter=topic_filter[:80], reason=str(error)
                )
        session.world.unsubscribe(session, refused)

    # --- PUBLISH -------------------------------------------------------------------------------------------------

    def _publish_first(self, packet: Publish) -> None:
        assert self.session is not None
        assert self.who is not None
        self._receiving = Receiving(self, self.session, self.who, self.version)
        self._receiving.take(packet)

    def resume(self) -> None:
        """It is not full any more."""
        self._line.resume()

    # --- handshakes ----------------------------------------------------------------------------------------------

    def _pubrel(self, packet: Pubrel) -> None:
        session = self.session
        assert session is not None
        packet_id = packet.packet_id
        if packet_id not in session.incoming:
            self.write(Pubcomp(packet_id, Reason.PACKET_IDENTIFIER_NOT_FOUND))
        elif not session.lasts:
            session.incoming.release(packet_id)
            self.write(Pubcomp(packet_id))
        elif self._released is None:
            self._released = [packet_id]
        else:
            self._released.append(packet_id)

    async def _complete(self, packet_ids: list[int]) -> None:
        """Once the client may use a packet id again, nobody may take its next message for the one before.

        Until that is on disk the id is not free: if the disk fails, the client comes back with its PUBREL, and must not
        be told that nobody knows the id.
        """
        session = self.session
        assert session is not None
        await session.record_durably(*(["rel", packet_id] for packet_id in packet_ids))
        for packet_id in packet_ids:
            session.incoming.release(packet_id)
            self.write(Pubcomp(packet_id))

    def _puback(self, packet: Puback) -> None:
        assert self.session is not None
        self.session.puback(packet.packet_id, ok=packet.reason < Reason.UNSPECIFIED_ERROR)

    def _pubrec(self, packet: Pubrec) -> None:
        assert self.session is not None
        self.session.pubrec(packet.packet_id, ok=packet.reason < Reason.UNSPECIFIED_ERROR)

    def _pubcomp(self, packet: Pubcomp) -> None:
        assert self.session is not None
        self.session.pubcomp(packet.packet_id)

    # --- SUBSCRIBE -----------------------------------------------------------------------------------------------

    def _subscribe(self, packet: Subscribe) -> None:
        assert self.session is not None
        assert self.who is not None
        subscribing = Subscribing(self, self.session, self.who, packet)
        if not self._is_begun(subscribing):
            return
        if subscribing.waits:
            self._in_turn(subscribing.finish())
        else:
            subscribing.answer()
            self._turns += 1  # until others have had theirs
            self._room.loop.call_soon(self._end_turn)

    def _unsubscribe(self, packet: Unsubscribe) -> None:
        assert self.session is not None
        unsubscribing = Unsubscribing(self, self.session, packet)
        if self._is_begun(unsubscribing):
            self._in_turn(unsubscribing.finish())

    def _is_begun(self, change: Subscribing | Unsubscribing) -> bool:
        """False if that takes so long that it must pause; then it is seen to, and the client waits."""
        steps = change.begin()
        if next(steps, True):
            return True
        self._turns += _TURNS_MAX
        self._in_turn(self._begin(change, steps))
        return False

    async def _begin(self, change: Subscribing | Unsubscribing, steps: Iterator[None]) -> None:
        try:
            while not self._gone:
                if next(steps, True):
                    break
                await asyncio.sleep(0)
        finally:
            self._turns -= _TURNS_MAX
        if not self._gone:
            self.resume()
            await change.finish()

    def queue_topics(self) -> QueueTopics:
        """Its queues, from the first time on that it has to do with any."""
        if self._queues is None:
            self._queues = self._room.queue_topics(self)
        return self._queues

    def has_queue(self, topic_filter: str) -> bool:
        return self._queues is not None and self._queues.has(topic_filter)

    # --- the rest ------------------------------------------------------------------------------------------------

    def _pingreq(self, _: Pingreq) -> None:
        self._line.send(_PINGRESP)

    def _auth(self, _: Auth) -> None:
        raise MqttViolation(Reason.PROTOCOL_ERROR, "there was no authentication method to go on with")

    def _connect_again(self, _: Connect) -> None:
        raise MqttViolation(Reason.PROTOCOL_ERROR, "a client says CONNECT once")

    def _disconnect(self, packet: Disconnect) -> None:
        session = self.session
        assert session is not None
        self._end_of_read()  # its will may be due, and comes after all that it has said before
        expiry_s = packet.properties.session_expiry_s
        if expiry_s is not None:
            if expiry_s and not session.expiry_s:
                raise MqttViolation(Reason.PROTOCOL_ERROR, "a session that ends with its connection cannot last")
            self._room.change_expiry(session, min(expiry_s, self._room.settings.session_expiry_max_ms // 1000))
        changes = session.lasts and (session.will is not None or not session.expiry_s)
        if packet.reason == Reason.SUCCESS and session.will is not None:
            session.will = None
            session.record(session.will_fact())
        if self.who is not None:
            self.who.why = f"the client said DISCONNECT, reason {int(packet.reason)}"
        self._leave(lost=packet.reason != Reason.SUCCESS)
        if changes:
            self._room.store.journal.flush()  # a client that is gone cannot say it again
        self._line.close()

    # --- what it is told -----------------------------------------------------------------------------------------

    @property
    def is_slow(self) -> bool:
        return self._line.is_slow

    def write(self, packet: Packet) -> None:
        if self._gone:
            return
        if data := self.encoded(packet):
            self._line.send(data)
        elif self.version == V5 and not isinstance(packet, Disconnect):
            # It would wait for ever.  Not at once: whoever writes has not finished.
            self._room.loop.call_soon(self.fail, _too_large(packet))

    def encoded(self, packet: Packet) -> bytes:
        return encode(packet, self.version, self._bytes_max)

    def send_raw(self, packets: Sequence[bytes]) -> None:
        """Packets that are encoded already."""
        if packets and not self._gone:
            self._line.send(b"".join(packets), len(packets))

    def explanation(self, problem: MillstreamError | None) -> Properties:
        """Why something went wrong, for those who want to know."""
        if problem is None or not self._explains or self.version != V5:
            return NO_PROPERTIES
        return Properties(reason_string=str(problem))

    def send_at_most_once(self, parcel: Parcel, grant: Grant) -> bool:
        """A message that nobody waits for; one who does not read misses it."""
        if self._line.is_slow and self._line.unsent > self._room.settings.queued_bytes_max:
            self._count_dropped()
            return False
        if not self.takes(parcel, grant):
            return False
        self.send(parcel, grant, qos=0, packet_id=0)
        return True

    def takes(self, parcel: Parcel, grant: Grant) -> bool:
        """Whether a message fits into the packets that the client takes; if not it is dropped, as it asked for."""
        if self._bytes_max is None:
            return True
        alias = None if self._outgoing_aliases is None else 1  # it is the longest with its name and a number for it
        packet = parcel.packet(self.version, qos=1, retain=False, identifiers=grant.identifiers, alias=alias)
        fits = len(packet) <= self._bytes_max
        if not fits:
            self._count_dropped()
        return fits

    def _count_dropped(self) -> None:
        if self.session is not None:
            self.session.count_dropped()

    def send(self, parcel: Parcel, grant: Grant, *, qos: int, packet_id: int, dup: bool = False) -> None:
        if self._gone:
            return
        retain = grant.retain_as_published and parcel.message.retain
        topic: bytes | None = None
        alias: int | None = None
        if self._outgoing_aliases is not None:
            name, alias = self._outgoing_aliases.alias_for(parcel.message.topic)
            topic = name.encode()
        data = parcel.packet(
            self.version,
            qos=qos,
            retain=retain,
            identifiers=grant.identifiers,
            packet_id=packet_id,
            dup=dup,
            topic=topic,
            alias=alias,
        )
        self._line.send(data)
        self._room.broker.metrics.mqtt_sent += 1

    def drained(self) -> None:
        """The client has read what it was sent."""
        if self.session is not None:
            self.session.go_on()
        self.has_room()

    def has_room(self) -> None:
        """The client can take more: of its queues, after what its session has for it."""
        if self._queues is not None:
            self._queues.go_on()

    # --- the end -------------------------------------------------------------------------------------------------

    def violated(self, error: MillstreamError) -> None:
        """Say why the connection ends; the door closes it."""
        if self._gone:
            return
        if self.session is None:
            if self.version:
                told = Properties(reason_string=str(error)) if self.version == V5 else NO_PROPERTIES
                self.write(Connack(connect_reason(error), properties=told))
        else:
            reason = error.reason if isinstance(error, MqttViolation) else _farewell_reason(error)
            self._say_goodbye(reason, str(error))
        self._lose()

    def fail(self, error: MillstreamError) -> None:
        """The broker ends the connection and says why."""
        self.violated(error)
        self._line.close()

    def taken_over(self) -> None:
        """Another connection goes on with the session."""
        self._say_goodbye(Reason.SESSION_TAKEN_OVER, "another client has the same identifier")
        self._lose()
        self._line.close()

    def silent(self) -> None:
        """Nothing was heard for longer than it said."""
        self._say_goodbye(Reason.KEEP_ALIVE_TIMEOUT, "nothing was heard for one and a half times the keep-alive")
        self._lose()

    def shutting_down(self) -> None:
        """The broker stops, as soon as what it has been asked for is on disk."""
        self._say_goodbye(Reason.SERVER_SHUTTING_DOWN, "the broker is shutting down")
        self._leave()
        self._line.close()

    def lost(self) -> None:
        """The connection is gone."""
        if self.who is not None and not self.who.why:
            self.who.why = "the connection was lost"
        self._lose()

    def _say_goodbye(self, reason: Reason, text: str) -> None:
        if self.who is not None:
            self.who.why = text
        if self.version == V5 and self.session is not None:
            self.write(Disconnect(reason, Properties(reason_string=text)))

    def _lose(self) -> None:
        session = self.session
        if not self._gone and session is not None:
            self._leave(lost=True)
        else:
            self._leave()

    def _leave(self, *, lost: bool = False) -> None:
        """Leave nothing behind but the session."""
        if self._gone:
            return
        self._gone = True
        session, who = self.session, self.who
        if self._queues is not None:
            self._queues.close()
        if who is not None:
            self._room.broker.session_closed(who)
        if session is not None:
            self._room.left(session, self, lost=lost)

    # --- one after the other -------------------------------------------------------------------------------------

    def _in_turn(self, work: Awaitable[None]) -> None:
        self._turns += 1
        self._turn = asyncio.ensure_future(self._after(self._turn, work))
        self._room.own(self._turn)

    async def _after(self, before: asyncio.Task[None] | None, work: Awaitable[None]) -> None:
        if before is not None and not before.done():
            await asyncio.wait([before])
        await self.or_fail(work)
        self._end_turn()

    def _end_turn(self) -> None:
        self._turns -= 1
        if self._turns < _TURNS_MAX:
            self.resume()

    async def or_fail(self, work: Awaitable[None]) -> None:
        """End the connection when it does not succeed."""
        try:
            await work
        except MillstreamError as error:
            self.fail(error)
        except Exception:
            _log.exception("packet failed", address=self._address)
            self.fail(InternalError("the broker failed to handle a packet; its log has the details"))


_HANDLERS: Final[dict[type, Callable[[Client, Any], None]]] = {
    Publish: Client._publish_first,
    Pubrel: Client._pubrel,
    Puback: Client._puback,
    Pubrec: Client._pubrec,
    Pubcomp: Client._pubcomp,
    Subscribe: Client._subscribe,
    Unsubscribe: Client._unsubscribe,
    Pingreq: Client._pingreq,
    Disconnect: Client._disconnect,
    Auth: Client._auth,
    Connect: Client._connect_again,
}


def _too_large(packet: Packet) -> MqttViolation:
    name = type(packet).__name__.upper()
    return MqttViolation(Reason.PACKET_TOO_LARGE, f"the {name} is larger than the client's Maximum Packet Size")


def _farewell_reason(error: MillstreamError) -> Reason:
    if isinstance(error, ShuttingDown):
        return Reason.SERVER_SHUTTING_DOWN
    if isinstance(error, ConnectionLost):  # by whoever runs the broker
        return Reason.ADMINISTRATIVE_ACTION
    reason = connect_reason(error)
    if reason is Reason.SERVER_UNAVAILABLE:  # which is for those who are not let in
        return Reason.UNSPECIFIED_ERROR
    return Reason.NOT_AUTHORIZED if reason is Reason.BAD_USER_NAME_OR_PASSWORD else reason
