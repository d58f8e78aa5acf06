"""`$share/GROUP/FILTER` without a queue behind it: each message goes to one of those who are connected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.broker.mqtt.parcel import Grant, Parcel
from millstream.broker.mqtt.reading import Place

if TYPE_CHECKING:
    from millstream.broker.mqtt.session import Session, Subscription

__all__ = ["Share"]


class Share:
    """The members of one share; they take turns."""

    __slots__ = ("filter", "group", "members")

    def __init__(self, group: str, topic_filter: str) -> None:
        self.group = group
        self.filter = topic_filter
        #: Whose turn it is comes first.
        self.members: dict[Session, Grant] = {}

    def join(self, session: Session, subscription: Subscription) -> None:
        identifiers = (subscription.identifier,) if subscription.identifier else ()
        self.members[session] = Grant(subscription.qos, False, subscription.retain_as_published, identifiers)

    def leave(self, session: Session) -> None:
        self.members.pop(session, None)

    def offer(self, parcel: Parcel, place: Place | None, *, but: Session | None = None) -> bool:
        """Give a message to the next member that takes it."""
        for session, grant in list(self.members.items()):
            if session.client is not None and session is not but:
                del self.members[session]
                self.members[session] = grant
                if session.offer(parcel, grant, place, self):
                    return True
        return False
