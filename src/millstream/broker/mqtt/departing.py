"""Messages that go out as soon as what is written of them is on disk, as many as there are in one turn together.

A packet id of QoS 2 that the broker forgets is a message that the client takes for another one.  A message of a share
that the broker forgets is nobody's.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from millstream.broker.mqtt.flight import Flight
from millstream.broker.mqtt.parcel import Grant, Parcel
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from millstream.broker.mqtt.session import Session

__all__ = ["Departing"]


class Departing:
    """Those of one session that lasts."""

    __slots__ = ("_is_syncing", "_must_sync", "_session", "_unsent")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._unsent: list[tuple[int, Parcel, Grant, int, Flight]] = []
        self._must_sync = False
        self._is_syncing = False

    def put(self, packet_id: int, parcel: Parcel, grant: Grant, qos: int, flight: Flight) -> None:
        flight.was_sent = False
        self._unsent.append((packet_id, parcel, grant, qos, flight))
        self.sync()

    def sync(self) -> None:
        """Have what was recorded on disk soon."""
        self._must_sync = True
        if not self._is_syncing:
            self._is_syncing = True
            self._session.world.room.own(asyncio.ensure_future(self._send()))

    def cancel(self) -> None:
        """The client is gone; another one gets it as everything else that is in flight."""
        self._unsent.clear()

    async def _send(self) -> None:
        session = self._session
        try:
            while self._must_sync:
                self._must_sync = False
                client, unsent, self._unsent = session.client, self._unsent, []
                await session.world.room.store.journal.sync()
                if session.client is client:
                    for packet_id, parcel, grant, qos, flight in unsent:
                        flight.was_sent = True
                        session.send(packet_id, parcel, grant, qos)
        except MillstreamError as error:
            if session.client is not None:
                session.client.fail(error)
        finally:
            self._is_syncing = False
