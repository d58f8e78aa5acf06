"""What a session has for its client now, and the client cannot take yet: in memory, within limits.

What came by a share is read from no position, so a session that lasts gives it its packet id at once and writes it
down: if the client goes before it was sent, it is still there when the client comes back.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from millstream.broker.mqtt.flight import Flight
from millstream.broker.mqtt.parcel import Grant, Parcel
from millstream.mqtt.messages import size_of

if TYPE_CHECKING:
    from millstream.broker.mqtt.client import Client
    from millstream.broker.mqtt.session import Session

__all__ = ["Waiting"]


class _Waiter(NamedTuple):
    parcel: Parcel
    grant: Grant
    flight: Flight
    #: 0 if it gets one when it is sent.
    packet_id: int


class Waiting:
    """The messages that wait in one connection, the oldest first."""

    __slots__ = ("_bytes", "_line", "_session")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._line: deque[_Waiter] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._line)

    def put(self, parcel: Parcel, grant: Grant, flight: Flight) -> bool:
        """Says whether there is room for one more."""
        session, settings = self._session, self._session.world.room.settings
        size = size_of(parcel.message)
        packet_id: int | None = None
        if session.queued < settings.queued_messages_max and self._bytes + size <= settings.queued_bytes_max:
            is_kept = session.lasts and flight.place is not None
            packet_id = session.reserve(min(grant.qos, parcel.message.qos), flight) if is_kept else 0
        if packet_id is None:
            session.count_dropped()
            return False
        self._line.append(_Waiter(parcel, grant, flight, packet_id))
        self._bytes += size
        return True

    def send(self, client: Client) -> bool:
        """Send what there is room for; says whether that was all."""
        while self._line:
            waiter = self._line[0]
            if client.is_slow or not self._send(waiter):
                return False
            self._line.popleft()
            self._bytes -= size_of(waiter.parcel.message)
        return True

    def _send(self, waiter: _Waiter) -> bool:
        session, (parcel, grant, flight, packet_id) = self._session, waiter
        if parcel.message.expiry_us:  # it has become older
            parcel = Parcel(parcel.message, session.world.room.clock.now_us())
        qos = min(grant.qos, parcel.message.qos)
        if packet_id:
            if parcel.is_expired:
                session.drop(packet_id)
                return True
            return session.launch_reserved(packet_id, parcel, grant, qos, flight)
        return parcel.is_expired or session.launch(parcel, grant, qos, flight)

    def left(self) -> list[tuple[Parcel, Flight]]:
        """Those that end with the connection, as nothing is written down of them."""
        return [(parcel, flight) for parcel, _, flight, packet_id in self._line if not packet_id]
