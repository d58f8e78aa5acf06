"""Messages in flight, read from the log once more: for a client that comes back, or for others when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import structlog

from millstream.broker.mqtt.reading import Place, messages_of
from millstream.errors import MillstreamError, OffsetOutOfRange
from millstream.mqtt.messages import Message
from millstream.mqtt.topics import from_topic

if TYPE_CHECKING:
    from millstream.broker.mqtt.flight import Flight
    from millstream.broker.mqtt.world import World

__all__ = ["Rereading"]

_log = structlog.get_logger("millstream.mqtt")

#: Messages that one session gets before others have their turn: some milliseconds.
_AT_A_TIME: Final = 100


class Rereading:
    """The messages of some flights, one after the other.

    Flights come in the order of the log, and all of them that are in a batch are decoded together.
    """

    def __init__(self, world: World, flights: Iterable[Flight]) -> None:
        self._world = world
        #: All offsets, by the uid of the partition.
        self._wanted: dict[int, set[int]] = {}
        for flight in flights:
            if flight.place is not None:
                self._wanted.setdefault(flight.place.uid, set()).add(flight.place.offset)
        #: By the uid as well: what is wanted of the batch that was read last, and why a partition cannot be read.
        self._found: dict[int, dict[int, Message]] = {}
        self._problems: dict[int, MillstreamError] = {}
        self._count = 0

    async def message_of(self, flight: Flight) -> Message | None:
        """None if it is gone.  Raises MillstreamError when nobody can tell, as its partition cannot be read now."""
        place = flight.place
        if flight.message is not None or place is None:
            return flight.message
        if place.uid in self._problems:
            raise self._problems[place.uid]
        found = self._found.get(place.uid, {})
        if place.offset not in found:
            try:
                found = self._found[place.uid] = await self._read(place)
            except MillstreamError as error:
                self._problems[place.uid] = error
                _log.error("messages in flight cannot be read", topic=place.topic, reason=str(error))
                raise
        self._count += 1
        if self._count % _AT_A_TIME == 0:
            await asyncio.sleep(0)
        return found.get(place.offset)

    async def _read(self, place: Place) -> dict[int, Message]:
        """What is wanted of the batch at a place."""
        reading, room = self._world.reading, self._world.room
        partition = reading.partition(place) if place.topic else None
        if partition is not None:
            await partition.warm(place.offset)
        async with reading.turn:
            await asyncio.sleep(0)
            if not place.topic:
                kept = room.retained.read(place.offset)
                return {} if kept is None else {place.offset: kept}
            if partition is None:
                return {}
            try:
                chunk = partition.log.read(place.offset, 1, before=partition.high_watermark)
            except OffsetOutOfRange:
                return {}
            topic = None if place.topic == room.catch_all else from_topic(place.topic)
            return dict(messages_of(chunk.buffers, topic, self._wanted[place.uid]))
