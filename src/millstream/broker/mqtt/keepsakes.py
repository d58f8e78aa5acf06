"""Retained messages on their way to one client that has subscribed: as fast as it takes them, and in turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

from millstream.broker.mqtt.flight import Flight
from millstream.broker.mqtt.parcel import Grant, Parcel
from millstream.broker.mqtt.reading import Place
from millstream.broker.mqtt.retained import Kept

if TYPE_CHECKING:
    from millstream.broker.mqtt.client import Client
    from millstream.broker.mqtt.session import Session

__all__ = ["Found", "Keepsakes"]

#: What was kept for a filter, as it is looked for; None: others have their turn.
Found: TypeAlias = Iterator[tuple[Kept, Grant] | None]

#: Of the log of retained messages, where flights have their place as well.
_RETAINED_UID: Final = 0
#: Messages that a client gets before others have their turn: some milliseconds.
_AT_A_TIME: Final = 500


class Keepsakes:
    """What a session has asked for and its client has not been sent; made when there is some."""

    __slots__ = ("_asked", "_next", "_session", "_waits_its_turn")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked: deque[Found] = deque()
        #: Found for the first of them, when there was no room for it.
        self._next: tuple[Kept, Grant] | None = None
        self._waits_its_turn = False

    def __len__(self) -> int:
        """Filters for which there may be more."""
        return len(self._asked)

    def add(self, found: Found) -> None:
        self._asked.append(found)

    def send(self, client: Client) -> bool:
        """Says whether that was all; otherwise the session goes on when it is time, or its client has room."""
        if self._waits_its_turn:
            return False
        asked, left = self._asked, _AT_A_TIME
        if self._next is not None:
            if not self._send(client, *self._next):
                return False
            self._next = None
        while asked:
            for found in asked[0]:
                if found is None:
                    left = 0
                    break
                if not left or not self._send(client, *found):
                    self._next = found
                    break
                left -= 1
            else:
                asked.popleft()
                continue
            if not left:
                self._waits_its_turn = True
                self._session.world.room.loop.call_soon(self._have_turn)
            return False
        return True

    def _have_turn(self) -> None:
        self._waits_its_turn = False
        self._session.go_on()

    def _send(self, client: Client, kept: Kept, grant: Grant) -> bool:
        session = self._session
        parcel = Parcel(kept.message, session.world.room.clock.now_us())
        if client.is_slow:
            return False
        qos = min(grant.qos, kept.message.qos)
        if parcel.is_expired or (qos and not client.takes(parcel, grant)):
            return True
        if not qos:
            client.send_at_most_once(parcel, grant)
            return True
        place = Place("", 0, _RETAINED_UID, kept.offset) if session.lasts and kept.offset >= 0 else None
        return session.launch(parcel, grant, qos, Flight(kept.message, place))
