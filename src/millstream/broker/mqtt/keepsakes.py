"""Retained messages on their way to one client that has subscribed: as fast as it takes them, and in turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from millstream.broker.journal import Fact
from millstream.broker.mqtt.flight import Flight
from millstream.broker.mqtt.parcel import Grant, Parcel
from millstream.broker.mqtt.reading import Place
from millstream.broker.mqtt.retained import Kept

if TYPE_CHECKING:
    from millstream.broker.mqtt.client import Client
    from millstream.broker.mqtt.session import Session

__all__ = ["Keepsakes"]

#: Of the log of retained messages, where flights have their place as well.
_RETAINED_UID: Final = 0
#: Messages that a client gets before others have their turn: some milliseconds.
_AT_A_TIME: Final = 500


class Keepsakes:
    """What a session has asked for and its client has not been sent; made when there is some.

    A session that lasts goes on with it when its client comes back, also to another run of the broker.
    """

    __slots__ = ("_asked", "_changed", "_found", "_noted", "_session", "_waits_its_turn")

    def __init__(self, session: Session) -> None:
        self._session = session
        #: Filters for which there may be more, and the topics after which to go on.
        self._asked: dict[str, str] = {}
        #: What is looked through for the first of them; a None there: others have their turn.
        self._found: Iterator[Kept | None] | None = None
        #: Filters that are written down, and those of which something else is to be written.
        self._noted: set[str] = set()
        self._changed: dict[str, None] = {}
        self._waits_its_turn = False

    def __len__(self) -> int:
        """Filters for which there may be more."""
        return len(self._asked)

    def add(self, topic_filter: str) -> None:
        """All that is kept for a filter, from the beginning if it was asked for before."""
        self._remove(topic_filter)
        self._asked[topic_filter] = ""
        self._changed[topic_filter] = None

    def drop(self, filters: Iterable[str]) -> None:
        """There are no such subscriptions any more, which is written down as well."""
        for topic_filter in filters:
            self._remove(topic_filter)
            self._noted.discard(topic_filter)
            self._changed.pop(topic_filter, None)

    def _remove(self, topic_filter: str) -> None:
        if topic_filter in self._asked:
            if topic_filter == next(iter(self._asked)):
                self._found = None
            del self._asked[topic_filter]

    def pause(self) -> None:
        """The client is gone; the next one gets what is kept then, from where this one has come to."""
        self._found = None

    # --- what is remembered --------------------------------------------------------------------------------------

    def facts(self) -> Iterator[Fact]:
        for topic_filter, after in self._asked.items():
            yield ["kept", topic_filter, after]

    def replay(self, topic_filter: str, after: str | None) -> None:
        self.drop([topic_filter])
        if after is not None:
            self._asked[topic_filter] = after
            self._noted.add(topic_filter)

    def note(self) -> None:
        """Write down what has changed, with the flights of what was sent: a restart knows both or neither."""
        changed, self._changed = self._changed, {}
        for topic_filter in changed:
            after = self._asked.get(topic_filter)
            if after is not None:
                self._noted.add(topic_filter)
            elif topic_filter in self._noted:
                self._noted.discard(topic_filter)
            else:
                continue
            self._session.record(["kept", topic_filter, after])

    # --- to the client -------------------------------------------------------------------------------------------

    def send(self, client: Client) -> bool:
        """Says whether that was all; otherwise the session goes on when it is time, or its client has room."""
        if not self._waits_its_turn:
            self._send_some(client)
            self.note()
        return not self._asked

    def _send_some(self, client: Client) -> None:
        session, left = self._session, _AT_A_TIME
        while self._asked:
            topic_filter, after = next(iter(self._asked.items()))
            subscription = session.subscriptions[topic_filter]
            identifiers = (subscription.identifier,) if subscription.identifier else ()
            grant = Grant(subscription.qos, subscription.no_local, True, identifiers)
            if not self._has_room(client, grant):
                return
            if self._found is None:
                self._found = session.world.room.kept(session.world.namespace, topic_filter, after)
            for kept in self._found:
                if kept is None:
                    left = 0
                else:
                    self._send(client, kept, grant)
                    self._asked[topic_filter] = kept.message.topic
                    self._changed[topic_filter] = None
                    left -= 1
                if not left:
                    self._waits_its_turn = True
                    session.world.room.loop.call_soon(self._have_turn)
                    return
                if not self._has_room(client, grant):
                    return
            self._remove(topic_filter)
            self._changed[topic_filter] = None

    def _have_turn(self) -> None:
        self._waits_its_turn = False
        self._session.go_on()

    def _has_room(self, client: Client, grant: Grant) -> bool:
        return not client.is_slow and (not grant.qos or self._session.outgoing.room > 0)

    def _send(self, client: Client, kept: Kept, grant: Grant) -> None:
        session = self._session
        parcel = Parcel(kept.message, session.world.room.clock.now_us())
        qos = min(grant.qos, kept.message.qos)
        if parcel.is_expired or (grant.no_local and kept.message.client_id == session.client_id):
            return
        if not qos:
            client.send_at_most_once(parcel, grant)
        elif client.takes(parcel, grant):
            place = Place("", 0, _RETAINED_UID, kept.offset) if session.lasts and kept.offset >= 0 else None
            session.launch(parcel, grant, qos, Flight(kept.message, place))
