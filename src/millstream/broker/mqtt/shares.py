"""`$share/GROUP/FILTER` without a queue behind it: each message goes to one of those who are connected."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from millstream.broker.mqtt.parcel import Grant, Parcel
from millstream.broker.mqtt.reading import Place
from millstream.broker.mqtt.rereading import Rereading
from millstream.mqtt.topics import filter_matches

if TYPE_CHECKING:
    from millstream.broker.mqtt.flight import Flight
    from millstream.broker.mqtt.session import Session
    from millstream.broker.mqtt.subscription import Subscription

__all__ = ["Share", "give_back"]

_log = structlog.get_logger("millstream.mqtt")


class Share:
    """The members of one share; they take turns."""

    __slots__ = ("_turns", "filter", "group", "members")

    def __init__(self, group: str, topic_filter: str) -> None:
        self.group = group
        self.filter = topic_filter
        self.members: dict[Session, Grant] = {}
        #: Those that may be connected; whose turn it is comes first.
        self._turns: OrderedDict[Session, None] = OrderedDict()

    def join(self, session: Session, subscription: Subscription) -> None:
        identifiers = (subscription.identifier,) if subscription.identifier else ()
        self.members[session] = Grant(subscription.qos, False, subscription.retain_as_published, identifiers)
        self.returned(session)

    def returned(self, session: Session) -> None:
        """The client of a member is connected."""
        self._turns.setdefault(session)

    def leave(self, session: Session) -> None:
        self.members.pop(session, None)
        self._turns.pop(session, None)

    def offer(self, parcel: Parcel, place: Place | None, *, but: Session | None = None) -> bool:
        """Give a message to the next member that takes it."""
        turns = self._turns
        for _ in range(len(turns)):
            session = next(iter(turns), None)
            if session is None:
                break
            if session.client is None:
                del turns[session]  # until it is back: a thousand who are away are not asked for every message
                continue
            turns.move_to_end(session)
            if session is not but and session.offer(parcel, self.members[session], place, self):
                return True
        return False


def give_back(session: Session) -> None:
    """A session is over: its unconfirmed messages of shares go to others, except with QoS 2, where it may have them."""
    lent = [flight for _, _, qos, flight in session.outgoing.facts() if qos == 1 and flight.is_lent]
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
