"""What waits in the log for sessions: from their positions to the ends of the partitions they read."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final

from millstream.broker.mqtt.session import Session
from millstream.mqtt.filters import FilterTrie
from millstream.mqtt.topics import from_topic, is_special
from millstream.wire.mqtt_calls import SessionPlace

if TYPE_CHECKING:
    from millstream.broker.mqtt.world import World
    from millstream.broker.registry import Topic

__all__ = ["backlog_of"]

#: Topics that are looked at before others get their turn: some milliseconds.
_AT_A_TIME: Final = 500


async def backlog_of(world: World, sessions: Collection[Session], *, opens: bool) -> dict[Session, list[SessionPlace]]:
    """The places where something waits.  Partitions that nobody has used since the start are looked at with `opens`."""
    readers: FilterTrie[Session] = FilterTrie()
    everything: dict[Session, list[SessionPlace]] = {}
    for session in sessions:
        for subscription in session.subscriptions.values() if session.lasts else ():
            if subscription.qos and not is_special(subscription.filter):
                readers.insert(subscription.filter, session, None)
                everything[session] = []
    for count, topic in enumerate(world.stored_topics() if everything else (), 1):
        # Who reads anything reads what is in no topic of its own as well, and steps over what it does not want.
        is_catch_all = topic.name == world.room.catch_all
        found = list(everything) if is_catch_all else [session for session, _ in readers.match(from_topic(topic.name))]
        if found:
            _add(world, topic, found, everything, opens=opens)
        if count % _AT_A_TIME == 0:
            await asyncio.sleep(0)
    for session in sessions:
        if left := list(_left_to(session, everything.get(session, []))):
            everything[session] = [*everything.get(session, []), *left]
    return everything


def _left_to(session: Session, counted: list[SessionPlace]) -> Iterator[SessionPlace]:
    """What waits for filters whose QoS has fallen to 0, where no other filter counts it."""
    leaving = [(it, it.leaves_at) for it in session.positions.values() if it.leaves_at > it.next]
    places = {(place.topic, place.partition) for place in counted} if leaving else ()
    for position, end in leaving:
        if (position.topic, position.partition) not in places:
            yield SessionPlace(topic=position.topic, partition=position.partition, offset=position.next, end=end)


def _add(
    world: World,
    topic: Topic,
    sessions: list[Session],
    everything: dict[Session, list[SessionPlace]],
    *,
    opens: bool,
) -> None:
    topics = world.room.broker.topics
    for number, uid in enumerate(topic.partition_uids):
        partition = topic.partitions[number]
        if partition is None:
            if not opens or topics.is_untouched(topic, number):
                continue
            partition = topics.partition_of(topic, number)
        start, end = partition.log.start_offset, partition.high_watermark
        for session in sessions:
            position = session.positions.get(uid)
            offset = max(start, 0 if position is None else position.next)
            if offset < end:
                everything[session].append(SessionPlace(topic=topic.name, partition=number, offset=offset, end=end))
