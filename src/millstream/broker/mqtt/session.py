"""A session: what the broker remembers of one client id, and how messages reach the client behind it.

A session that lasts (it has an expiry) is a reader of the log.  For every partition of the topics it is subscribed to
with QoS 1 or 2 it has a position; messages are handed out from there on, and what was handed out stays in flight until
the client has confirmed it.  While the client is away nothing happens at all: the messages are in the log.  A session
that ends with its connection, and everything of QoS 0, gets what passes by, from a queue with limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from millstream.broker.journal import Fact
from millstream.broker.mqtt.departing import Departing
from millstream.broker.mqtt.flight import Flight
from millstream.broker.mqtt.keepsakes import Keepsakes
from millstream.broker.mqtt.parcel import Grant, Parcel
from millstream.broker.mqtt.reading import Place, Position, facts_of, has_left
from millstream.broker.mqtt.rereading import Rereading
from millstream.broker.mqtt.rights import may_receive
from millstream.broker.mqtt.shares import hand_over
from millstream.broker.mqtt.store import entity_of
from millstream.broker.mqtt.subscription import QueueSubscription, Subscription
from millstream.broker.mqtt.waiting import Waiting
from millstream.broker.mqtt.wills import LeftWill
from millstream.errors import MillstreamError
from millstream.mqtt.messages import Message
from millstream.mqtt.packets import Pubrel
from millstream.mqtt.reasons import Reason
from millstream.mqtt.window import PUBLISHED, RELEASED, Incoming, InFlight, Outgoing

if TYPE_CHECKING:
    from millstream.broker.mqtt.client import Client
    from millstream.broker.mqtt.shares import Share
    from millstream.broker.mqtt.world import World

__all__ = ["Session"]


class Session:
    """See the module."""

    __slots__ = (
        "_departing",
        "_is_looking",
        "_keepsakes",
        "_look_anew",
        "_must_look",
        "_resuming",
        "_waiting",
        "behind",
        "client",
        "client_id",
        "created_ms",
        "dropped",
        "ends_us",
        "entity",
        "expiry_s",
        "incoming",
        "lasts",
        "outgoing",
        "positions",
        "queues",
        "receiving",
        "subscriptions",
        "unrecorded",
        "will",
        "world",
    )

    def __init__(self, world: World, client_id: str, *, created_ms: int) -> None:
        self.world = world
        self.client_id = client_id
        self.entity = entity_of(world.namespace, client_id)
        self.created_ms = created_ms
        self.client: Client | None = None
        #: How long it goes on without its client; 0: it ends with the connection.
        self.expiry_s = 0
        #: Whether it is written down, and reads the log.
        self.lasts = False
        #: When it ends if its client does not come back; 0 while the client is there.
        self.ends_us = 0
        self.subscriptions: dict[str, Subscription] = {}
        self.queues: dict[str, QueueSubscription] = {}
        settings = world.room.settings
        self.outgoing: Outgoing[Flight] = Outgoing(settings.inflight_max)
        self.incoming = Incoming()
        #: Packet ids of QoS 2 that are not answered, and who else waits to hear of them.
        self.receiving: dict[int, list[Callable[[MillstreamError | None], None]]] = {}
        #: Those of them whose message is not there yet.
        self.unrecorded: set[int] = set()
        self.will: LeftWill | None = None
        #: By the uid of the partition.
        self.positions: dict[int, Position] = {}
        #: Positions that have not reached the end of their partition.
        self.behind: dict[int, Position] = {}
        #: Whether it is looked which positions these are, whether once more, and whether not to the end before.
        self._is_looking = False
        self._must_look = False
        self._look_anew = False
        #: What its client cannot take yet.
        self._waiting: Waiting | None = None
        #: Messages that it has missed because of a limit.
        self.dropped = 0
        self._resuming = False
        self._departing = Departing(self)
        #: Retained messages that the client has asked for.
        self._keepsakes: Keepsakes | None = None

    @property
    def is_resuming(self) -> bool:
        """Whether it must get something from before first."""
        return self._resuming

    @property
    def queued(self) -> int:
        """What waits for its client and is read from no position."""
        return max(self.outgoing.waiting, len(self._waiting or ()))

    # --- what is remembered --------------------------------------------------------------------------------------

    def record(self, *facts: Fact) -> None:
        if self.lasts:
            for fact in facts:
                self.world.room.store.record(self.entity, fact)

    async def recorded(self) -> None:
        """Wait until all that it has recorded is on disk.  Raises StorageFailed."""
        if self.lasts:
            await self.world.room.store.journal.sync()

    async def record_durably(self, *facts: Fact) -> None:
        """Raises StorageFailed.  Once it is over its facts would be those of the next session of its client id."""
        if self.lasts:
            await self.world.room.store.journal.ready()
        if self.lasts:
            await self.world.room.store.record_durably(self.entity, *facts)

    def facts(self) -> Iterator[Fact]:
        """Everything that rebuilds the session."""
        yield self.begun_fact()
        for subscription in self.subscriptions.values():
            yield ["sub", *subscription]
        for queue in self.queues.values():
            yield ["queue", *queue]
        for packet_id, state, qos, flight in self.outgoing.facts():
            if flight.is_recorded(qos):
                yield flight.fact(packet_id, qos)
                if state == RELEASED:
                    yield ["rec", packet_id]
        # Behind the flights, which say how far it has come as well: one may be of a message that a crash has taken.
        yield from facts_of(self.positions.values(), self.subscriptions)
        if self._keepsakes is not None:
            yield from self._keepsakes.facts()
        for packet_id in self.incoming.facts():
            if packet_id not in self.unrecorded:
                yield self.received_fact(packet_id)
        if self.will is not None:
            yield self.will_fact()
        if self.ends_us:
            yield ["left", self.ends_us]

    def begun_fact(self) -> Fact:
        return ["is", self.expiry_s, self.created_ms]

    def will_fact(self) -> Fact:
        return ["will", None if self.will is None else msgspec.msgpack.encode(self.will)]

    @staticmethod
    def received_fact(*packet_ids: int) -> Fact:
        return ["got", *packet_ids]

    def replay(self, facts: Iterable[Fact]) -> None:
        for kind, *rest in facts:
            if kind == "is":
                self.expiry_s, self.created_ms = rest
            elif kind == "sub":
                has_left(self.positions.values(), self.subscriptions.get(rest[0]), qos=rest[1])
                self.subscriptions[rest[0]] = Subscription(*rest)
            elif kind == "unsub":
                self.subscriptions.pop(rest[0], None)
                self.subscriptions_changed(rest)
            elif kind == "kept" and rest[0] in self.subscriptions:
                self._asked_for().replay(*rest)
            elif kind == "queue":
                self.queues[rest[0]] = QueueSubscription(*rest)
            elif kind == "unqueue":
                self.queues.pop(rest[0], None)
            elif kind == "at":
                self.position(Place(*rest)).next = rest[-1]
            elif kind == "since":
                uid, topic_filter, offset = rest
                if uid in self.positions:
                    self.positions[uid].begin(topic_filter, offset)
            elif kind == "gone":
                self.positions.pop(rest[0], None)
            elif kind in ("sent", "lent"):
                packet_id, qos, *place = rest
                # What was retained is in no topic, and is nobody else's.
                flight = Flight(None, Place(*place), is_lent=kind == "lent" and bool(place[0]))
                self.outgoing.restore([(packet_id, PUBLISHED, qos, flight)])
                if kind == "sent":
                    position = self.position(Place(*place))
                    position.next = max(position.next, place[-1] + 1)
            elif kind == "held":
                # Its message is nowhere to be had: all that is left to do is to release the packet id.
                self.outgoing.restore([(rest[0], PUBLISHED, 2, Flight(None, None)), (rest[0], RELEASED, 2, None)])
            elif kind == "rec":
                self.outgoing.pubrec(rest[0], ok=True)
            elif kind == "done":
                self.outgoing.forget(rest[0])
            elif kind == "got":
                self.incoming.restore(rest)
            elif kind == "rel":
                self.incoming.release(rest[0])
            elif kind == "will":
                self.will = None if rest[0] is None else msgspec.msgpack.decode(rest[0], type=LeftWill)
            elif kind == "left":
                (self.ends_us,) = rest

    # --- messages for it -----------------------------------------------------------------------------------------

    def offer(self, parcel: Parcel, grant: Grant, place: Place | None, share: Share | None = None) -> bool:
        """A message that matches its subscriptions has come; says whether it was taken for the client."""
        message = parcel.message
        stored = place if self.lasts and share is None else None
        if stored is not None and (grant.qos or self.world.reading.has_left(self, message.topic, stored)):
            self._offer_stored(parcel, grant, stored)
            return True
        client, granted = self.client, self._granted(grant, message)
        if client is None or granted is None:
            return False
        grant = granted
        qos = min(grant.qos, message.qos)
        if not qos:
            return client.send_at_most_once(parcel, grant)
        if not client.takes(parcel, grant):
            return False
        # With the place of a message of a share it can wait for another member.
        flight = Flight(message, place if self.lasts or share is not None else None, share)
        if self._waiting or self._resuming or client.is_slow or not self.launch(parcel, grant, qos, flight):
            if self._waiting is None:
                self._waiting = Waiting(self)
            return self._waiting.put(parcel, grant, flight)
        return True

    def _granted(self, grant: Grant, message: Message) -> Grant | None:
        """What it gets of a message, which may be its own."""
        return grant.of_own if grant.no_local and message.client_id == self.client_id else grant

    def count_dropped(self, messages: int = 1) -> None:
        self.dropped += messages
        self.world.room.broker.metrics.mqtt_dropped += messages

    def launch(self, parcel: Parcel, grant: Grant, qos: int, flight: Flight) -> bool:
        """Send with a packet id, if the client takes one more."""
        packet_id = self.outgoing.send(qos, flight)
        if packet_id is None:
            return False
        if not self.lasts or not flight.is_recorded(qos):
            self.send(packet_id, parcel, grant, qos)
            return True
        # Recorded now, whenever it is sent: no fact may say that the session has come further than those before it.
        self.record(flight.fact(packet_id, qos))
        if qos == 1 and flight.share is None:
            self.send(packet_id, parcel, grant, qos)
        else:
            self._departing.put(packet_id, parcel, grant, qos, flight)
        return True

    def reserve(self, qos: int, flight: Flight) -> int | None:
        """Give a message its packet id, which is written down, before it is sent; None if there are no more of them."""
        packet_id = self.outgoing.wait(qos, flight)
        if packet_id is not None:
            flight.was_sent = False
            self.record(flight.fact(packet_id, qos))
            self._departing.sync()
        return packet_id

    def keep(self, parcel: Parcel, grant: Grant, place: Place, share: Share) -> bool:
        """Have a message of a share for the client when it is back; False if too many wait for it."""
        if len(self.outgoing) >= self.world.room.settings.queued_messages_max:
            return False
        return self.reserve(min(grant.qos, parcel.message.qos), Flight(None, place, share)) is not None

    def launch_reserved(self, packet_id: int, parcel: Parcel, grant: Grant, qos: int, flight: Flight) -> bool:
        """As `launch`, with the packet id that the message has already."""
        if not self.outgoing.go(packet_id):
            return False
        self._departing.put(packet_id, parcel, grant, qos, flight)
        return True

    def send(self, packet_id: int, parcel: Parcel, grant: Grant, qos: int, *, dup: bool = False) -> None:
        if self.client is not None:
            self.client.send(parcel, grant, qos=qos, packet_id=packet_id, dup=dup)

    # --- from the log --------------------------------------------------------------------------------------------

    def _offer_stored(self, parcel: Parcel, grant: Grant, place: Place) -> None:
        if self.client is None:
            return
        position = self.position(place)
        if place.offset < position.next:
            return
        if place.offset > position.next or position.uid in self.behind or not self.hand_out(parcel, grant, place):
            self.fall_behind(position)

    def position(self, place: Place) -> Position:
        position = self.positions.get(place.uid)
        if position is None:
            # What was there when it subscribed has positions; this topic came later.
            position = self.positions[place.uid] = Position(place.topic, place.partition, place.uid, 0)
        return position

    def hand_out(self, parcel: Parcel, grant: Grant, place: Place) -> bool:
        """Give the client the message at its position; False when it can take no more now."""
        client = self.client
        if client is None or self._resuming or client.is_slow:
            return False
        message = parcel.message
        position = self.positions[place.uid]
        granted = self._granted(grant, message)
        if granted is not None and not parcel.is_expired:
            grant = granted
            qos = min(grant.qos, message.qos)
            if qos == 0:
                client.send_at_most_once(parcel, grant)
            elif client.takes(parcel, grant):
                if not self.launch(parcel, grant, qos, Flight(message, place)):
                    return False
                position.next = place.offset + 1  # its flight says so
                return True
        self.passed(position, place.offset + 1)
        return True

    def passed(self, position: Position, next_offset: int) -> None:
        """Move a position on past messages that are not sent, so that no fact of a flight records it."""
        position.next = next_offset
        if not position.is_dirty:
            position.is_dirty = True
            self.world.room.moved[self] = None

    def fall_behind(self, position: Position) -> None:
        if position.uid not in self.behind:
            self.behind[position.uid] = position
        self.go_on()

    def go_on(self, *, for_few: bool = False) -> None:
        """There may be room again: send what waits, then read on, `for_few` also if it is for a message or two."""
        client = self.client
        if client is None or self._resuming or client.is_slow:
            return
        more = self.outgoing.resume_more()
        if more:
            self._resend(more)
            return
        if self._waiting and not self._waiting.send(client):
            return
        if self._keepsakes and not self._keepsakes.send(client):
            return
        for position in list(self.behind.values()):
            # As a rule not for few: each time a part of the log is decoded.
            if self.outgoing.room < 1 or (self.outgoing.is_nearly_full and not for_few) or client.is_slow:
                return
            self.world.reading.read_on(self, position)

    def ask_for_retained(self, filters: Iterable[str]) -> None:
        """What was kept for whoever subscribes, as fast as the client takes it once the session goes on."""
        for topic_filter in filters:
            self._asked_for().add(topic_filter)
        if self._keepsakes is not None:
            self._keepsakes.note()

    def _asked_for(self) -> Keepsakes:
        if self._keepsakes is None:
            self._keepsakes = Keepsakes(self)
        return self._keepsakes

    def note_positions(self) -> None:
        """Write down how far it has read, where no flight says so."""
        for position in self.positions.values():
            if position.is_dirty:
                position.is_dirty = False
                self.record(position.fact())

    # --- answers of the client -----------------------------------------------------------------------------------

    def puback(self, packet_id: int, *, ok: bool = True) -> None:
        """The client has the message, or does not want it."""
        flight = self.outgoing.puback(packet_id)
        if flight is not None and flight.on_arrival is not None:
            flight.on_arrival(ok)
        self._finished(packet_id, flight, 1)

    def _finished(self, packet_id: int, flight: Flight | None, qos: int) -> None:
        if flight is not None:
            if flight.is_recorded(qos):
                self.record(["done", packet_id])
            if self.behind or self._waiting or self._keepsakes or self.outgoing.is_held:
                self.go_on()
            if self.client is not None:
                self.client.has_room()

    def pubrec(self, packet_id: int, *, ok: bool) -> None:
        """The client has the message (or does not want it); the packet id is released next."""
        again = self.outgoing.is_released(packet_id)
        flight = self.outgoing.pubrec(packet_id, ok=ok)
        client = self.client
        assert client is not None
        if flight is not None and flight.on_arrival is not None and not again:
            flight.on_arrival(ok)
        if flight is None:
            if ok:
                client.write(Pubrel(packet_id, Reason.PACKET_IDENTIFIER_NOT_FOUND))
        elif not ok:
            self._finished(packet_id, flight, 2)
        elif not self.lasts:
            client.write(Pubrel(packet_id))
        else:
            # Also what is in no log, and needs no fact: PUBRELs go out in the order of the PUBRECs.
            flight.message = None
            self.world.room.own(asyncio.ensure_future(self._release(client, packet_id)))

    async def _release(self, client: Client, packet_id: int) -> None:
        """Once the client is told that it may forget the packet id, nobody may send the message under it again."""
        try:
            await self.record_durably(["rec", packet_id])
        except MillstreamError as error:
            client.fail(error)
        else:
            client.write(Pubrel(packet_id))

    def pubcomp(self, packet_id: int) -> None:
        self._finished(packet_id, self.outgoing.pubcomp(packet_id), 2)

    def give_up_leases(self) -> None:
        """What it has got of queues is not sent again: somebody else gets it."""
        for packet_id, state, qos, flight in self.outgoing.facts():
            if flight.on_arrival is not None:
                flight.on_arrival = None
                if state == PUBLISHED:
                    self.lose(packet_id, qos)

    # --- coming and going ----------------------------------------------------------------------------------------

    def attach(self, client: Client, *, inflight_max: int, receive_maximum: int) -> None:
        self.client = client
        self.ends_us = 0
        self.outgoing.limit = inflight_max
        self.incoming.resume(receive_maximum)

    def begin(self) -> None:
        """The client knows that it is connected: send again what it has not confirmed, then what has come since."""
        if len(self.outgoing):
            self._resend(self.outgoing.resume())
        else:
            self._catch_up()

    def _resend(self, flights: Sequence[InFlight[Flight]]) -> None:
        """Nothing else is sent before."""
        assert self.client is not None
        self._resuming = True
        self.world.room.own(asyncio.ensure_future(self.client.or_fail(self._resume(self.client, flights))))

    async def _resume(self, client: Client, flights: Sequence[InFlight[Flight]]) -> None:
        if self.lasts and any(qos == 2 or flight.has_no_position for _, _, qos, flight in flights):
            await self.world.room.store.journal.sync()  # what is written of them may be on its way to the disk
        again = Rereading(self.world, (flight for _, state, _, flight in flights if state != RELEASED))
        for packet_id, state, qos, flight in flights:
            if self.client is not client:
                return
            if state == RELEASED:
                client.write(Pubrel(packet_id))
                continue
            try:
                message = await again.message_of(flight)
            except MillstreamError:
                continue  # it stays in flight: the next connection may get it
            if self.client is not client or packet_id not in self.outgoing:
                continue
            parcel = None if message is None else Parcel(message, self.world.room.clock.now_us())
            held = None if message is None else self._held(flight, message.topic)
            if message is None or parcel is None or not self._may_repeat(client, parcel, qos, held):
                self._give_up(client, packet_id, qos, flight)
                continue
            grant = held or Grant(qos, False, False, ())
            grant = self._granted(grant, message) or grant
            if flight.place is not None and not flight.place.topic:
                grant = grant._replace(retain_as_published=True)
            self.send(packet_id, parcel, grant, qos, dup=flight.was_sent)
            flight.was_sent = True
        if self.client is client:
            self._resuming = False
            self._catch_up()
            client.has_room()

    def _held(self, flight: Flight, topic: str) -> Grant | None:
        """What it gets of a message in flight by subscriptions that it still has."""
        lent = flight.share.members.get(self) if flight.share is not None else None
        return lent or (self.world.grant_of_share if flight.is_lent else self.world.grant_for)(self, topic)

    def _may_repeat(self, client: Client, parcel: Parcel, qos: int, held: Grant | None) -> bool:
        """Whether a message may be sent again: the client may take only smaller packets now, or have fewer rights."""
        if parcel.is_expired or not client.takes(parcel, Grant(qos, False, False, ())):
            return False
        return held is not None or (client.who is not None and may_receive(client.who, parcel.message.topic))

    def _give_up(self, client: Client, packet_id: int, qos: int, flight: Flight) -> None:
        """A message in flight is gone: retention was faster than the client, for example."""
        if not flight.was_sent:
            self.drop(packet_id)
            return
        self.record(self.lose(packet_id, qos))
        if qos == 2:
            client.write(Pubrel(packet_id))

    def drop(self, packet_id: int) -> None:
        """A message that the client has not been sent is not for it any more."""
        self.outgoing.forget(packet_id)
        self.record(["done", packet_id])

    def lose(self, packet_id: int, qos: int) -> Fact:
        """A message in flight cannot be sent again.  Returns what has changed by that."""
        if qos == 2:
            # It may have the message, and would take the next one under the same id for a repetition.
            self.outgoing.pubrec(packet_id, ok=True)
            return ["rec", packet_id]
        self.outgoing.forget(packet_id)
        return ["done", packet_id]

    def catch_up(self) -> None:
        """Something may have passed by."""
        if self.client is not None and not self._resuming:
            self._catch_up()

    def _catch_up(self) -> None:
        if self.lasts:
            self._must_look = True
            if not self._is_looking:
                self._is_looking = True
                self.world.room.own(asyncio.ensure_future(self._look_behind()))
        self.go_on()

    def subscriptions_changed(self, ended: Iterable[str] = ()) -> None:
        """The topics that are looked through are perhaps not its own any more."""
        if self._keepsakes is not None:
            self._keepsakes.drop(ended)
        if self._is_looking:
            self._must_look = self._look_anew = True

    async def _look_behind(self) -> None:
        """Find out where it has not come to the end.  What passes by meanwhile finds its positions by itself."""
        try:
            while self._must_look and self.client is not None:
                self._must_look = self._look_anew = False
                for position in self.world.reading.behind(self):
                    if position is None:
                        self.go_on()
                        await asyncio.sleep(0)
                        if self.client is None or self._look_anew:
                            break
                    else:
                        self.behind[position.uid] = position
                self.go_on()
        except MillstreamError as error:
            if self.client is not None:
                self.client.fail(error)
        finally:
            self._is_looking = False

    def detach(self) -> None:
        """The connection is gone; the session may go on."""
        self.client = None
        self._resuming = False
        self.behind.clear()
        self._departing.cancel()
        waiting, self._waiting = self._waiting, None
        hand_over(self, waiting.left() if waiting is not None else ())
        if not self.lasts:
            self._keepsakes = None
        elif self._keepsakes is not None:
            self._keepsakes.pause()
        self.note_positions()
        for _, _, _, flight in self.outgoing.facts() if self.lasts else ():
            if flight.place is not None:
                flight.message = None
