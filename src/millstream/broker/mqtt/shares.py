"""`$share/GROUP/FILTER` without a queue behind it: each message goes to one of those who are connected.

If nobody is, it waits for one whose session lasts.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import structlog

from millstream.broker.mqtt.parcel import Grant, Parcel
from millstream.broker.mqtt.reading import Place
from millstream.broker.mqtt.rereading import Rereading
from millstream.mqtt.topics import filter_matches
from millstream.mqtt.window import PUBLISHED

if TYPE_CHECKING:
    from millstream.broker.mqtt.flight import Flight
    from millstream.broker.mqtt.session import Session
    from millstream.broker.mqtt.subscription import Subscription

__all__ = ["Share", "give_back", "hand_over"]

_log = structlog.get_logger("millstream.mqtt")


class Share:
    """The members of one share; they take turns."""

    __slots__ = ("_away", "_lasting", "_turns", "filter", "group", "members")

    def __init__(self, group: str, topic_filter: str) -> None:
        self.group = group
        self.filter = topic_filter
        self.members: dict[Session, Grant] = {}
        #: Those that keep what they have got of it with QoS 1 and 2, also while they are away.
        self._lasting: set[Session] = set()
        #: Those that may be connected; whose turn it is comes first.
        self._turns: OrderedDict[Session, None] = OrderedDict()
        #: Those of the lasting ones that are away and have room for more; whose turn it is comes first.
        self._away: OrderedDict[Session, None] = OrderedDict()

    @property
    def is_durable(self) -> bool:
        """Whether its messages must be in a log, where those who keep them find them again."""
        return bool(self._lasting)

    def join(self, session: Session, subscription: Subscription) -> None:
        identifiers = (subscription.identifier,) if subscription.identifier else ()
        self.members[session] = Grant(subscription.qos, False, subscription.retain_as_published, identifiers)
        if session.lasts and subscription.qos:
            self._lasting.add(session)
        else:
            self._lasting.discard(session)
        self.returned(session)

    def returned(self, session: Session) -> None:
        """The client of a member is connected."""
        self._turns.setdefault(session)
        self._away.pop(session, None)

    def leave(self, session: Session) -> None:
        self.members.pop(session, None)
        self._turns.pop(session, None)
        self._away.pop(session, None)
        self._lasting.discard(session)

    def offer(self, parcel: Parcel, place: Place | None, *, but: Session | None = None) -> bool:
        """Give a message to the next member that takes it.  With `but` it is one that this member has not taken."""
        turns = self._turns
        for _ in range(len(turns)):
            session = next(iter(turns), None)
            if session is None:
                break
            if session.client is None:
                del turns[session]  # until it is back: a thousand who are away are not asked for every message
                if session in self._lasting:
                    self._away.setdefault(session)
                continue
            turns.move_to_end(session)
            if session is not but and session.offer(parcel, self.members[session], place, self):
                return True
        if place is None or not parcel.message.qos or (but is not None and but in self._lasting):
            return False  # a member that lasts keeps itself what nobody else takes
        return self._keep(parcel, place)

    def _keep(self, parcel: Parcel, place: Place) -> bool:
        """Have a message wait for the next member that is away."""
        away = self._away
        while away:
            session = next(iter(away))
            if session.client is None and session.keep(parcel, self.members[session], place, self):
                away.move_to_end(session)
                return True
            del away[session]  # it is back, or there is no room before it was back
        if not self._turns and self._lasting:
            next(iter(self._lasting)).count_dropped()
        return False


def hand_over(session: Session, others: Iterable[tuple[Parcel, Flight]]) -> None:
    """A connection is over: what the client has not been sent goes to other members of its shares, who are there.

    What none of them takes stays with the session.  `others` are not in flight, and are lost then.
    """
    world, now_us = session.world, session.world.room.clock.now_us()
    for packet_id, state, _, flight in session.outgoing.facts():
        if state != PUBLISHED or flight.was_sent or flight.share is None or flight.message is None:
            continue
        parcel = Parcel(flight.message, now_us)
        if parcel.is_expired or world.offer_again(flight.share, parcel, flight.place, but=session):
            session.drop(packet_id)
    for parcel, flight in others:
        if flight.share is not None:
            world.offer_again(flight.share, parcel, flight.place, but=session)


def give_back(session: Session) -> None:
    """A session is over: its unconfirmed messages of shares go to others, except those of QoS 2 that it may have."""
    lent = [
        flight for _, _, qos, flight in session.outgoing.facts() if flight.is_lent and (qos == 1 or not flight.was_sent)
    ]
    if lent:
        world = session.world
        world.room.own(asyncio.ensure_future(_give_back(session, lent, world.shares_of(session))))


async def _give_back(session: Session, lent: Sequence[Flight], shares: Sequence[Share]) -> None:
    """`shares` are those that it was a member of."""
    world = session.world
    again = Rereading(world, lent)
    for flight in lent:
        try:
            message = await again.message_of(flight)
        except Exception as error:  # whatever it is, the rest must not be lost with it
            _log.error("a message of a share is lost with a member", place=flight.place, reason=repr(error))
            continue
        if message is None:
            continue
        # By which share it came is not written down; there may be several.
        matching = (share for share in shares if filter_matches(share.filter, message.topic))
        share = flight.share or next(matching, None)
        parcel = Parcel(message, world.room.clock.now_us())
        if share is not None and not parcel.is_expired:
            world.offer_again(share, parcel, flight.place, but=session)
