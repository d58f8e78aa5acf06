"""Reading on for sessions that were away or could not keep up: from their positions to the end of the log."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from millstream.broker.answers import FetchAnswer
from millstream.broker.journal import Fact
from millstream.broker.lost_ends import recovered_end
from millstream.broker.mqtt.parcel import Grant, Parcel
from millstream.broker.partition import Partition
from millstream.columns import write_validity
from millstream.errors import MillstreamError, OffsetOutOfRange
from millstream.headers import readable_headers
from millstream.mqtt.messages import Message
from millstream.mqtt.reasons import MqttViolation
from millstream.mqtt.stored import message_of
from millstream.mqtt.topics import check_topic_name, filter_matches, from_topic, is_special
from millstream.mqtt.window import PUBLISHED
from millstream.records import Batch
from millstream.slicing import batches_of, select_messages

if TYPE_CHECKING:
    from millstream.broker.mqtt.session import Session
    from millstream.broker.mqtt.subscription import Subscription
    from millstream.broker.mqtt.world import World
    from millstream.broker.registry import Topic

__all__ = ["Place", "Position", "Reading", "facts_of", "has_left", "messages_from", "messages_of"]

_log = structlog.get_logger("millstream.mqtt")

_CHUNK_BYTES: Final = 64 * 1024
#: Messages of a batch that are cut out together.
_CUT_AT_A_TIME: Final = 100
#: Messages that a session is given, or steps over, before others have their turn: some milliseconds.
_HANDED_OUT_AT_A_TIME: Final = 1_000
#: Sessions that are looked at before others have their turn: less than a millisecond.
_SESSIONS_AT_A_TIME: Final = 1_000


class Place(NamedTuple):
    """Where a message is stored."""

    topic: str
    partition: int
    uid: int
    offset: int


class Position:
    """How far a session has read one partition."""

    __slots__ = ("_since", "_until", "halfway", "is_dirty", "next", "partition", "reads", "topic", "uid")

    def __init__(self, topic: str, partition: int, uid: int, next_offset: int) -> None:
        self.topic = topic
        self.partition = partition
        self.uid = uid
        #: The next offset to hand out.
        self.next = next_offset
        #: Whether nothing that is written down says so yet.
        self.is_dirty = False
        #: Whether somebody is reading on from here.
        self.reads = False
        #: The first offset of a large batch that it is in the middle of; -1 if there is none.
        self.halfway = -1
        #: Filters that came later than others of its session, and from where on they count.
        self._since: dict[str, int] | None = None
        #: What some filters were before their QoS fell to 0, from where on they counted, and up to where they do.
        self._until: dict[str, tuple[int, int, Subscription]] | None = None

    def fact(self) -> Fact:
        return ["at", self.topic, self.partition, self.uid, self.next]

    def begins(self) -> Iterator[Fact]:
        """From where on filters count that came later."""
        for topic_filter, offset in (self._since or {}).items():
            if offset > self.next:
                yield ["since", self.uid, topic_filter, offset]

    def begin(self, topic_filter: str, offset: int) -> Fact:
        """A filter is for what comes from an offset on, although there are older messages to read for others."""
        self._since = {name: since for name, since in (self._since or {}).items() if since > self.next}
        self._since[topic_filter] = offset
        if self._until is not None and topic_filter in self._until:
            first, end, former = self._until[topic_filter]
            self._until[topic_filter] = first, min(end, offset), former
        return ["since", self.uid, topic_filter, offset]

    def begins_no_later(self, topic_filter: str) -> int:
        """Forget from where on a filter counts; returns that."""
        return (self._since or {}).pop(topic_filter, 0)

    def leave(self, former: Subscription, end: int) -> Fact:
        """The QoS of a filter falls to 0: what came before this end is for it as it was.

        The fact is that of a filter that begins there.  Before the fact of its lower QoS it means this.
        """
        first = self.begins_no_later(former.filter)
        self._until = {name: it for name, it in (self._until or {}).items() if it[1] > self.next}
        self._until[former.filter] = first, end, former
        return ["since", self.uid, former.filter, end]

    def leaving(self) -> dict[str, tuple[int, Subscription]]:
        """Filters that have left, and up to where there is something for them: their ends, and what they were."""
        return {name: (end, it) for name, (_, end, it) in (self._until or {}).items() if end > self.next}

    def take_back(self, end: int) -> list[Fact]:
        """The log ends here, sooner than it did: what comes next is new.  Returns what has changed by that."""
        facts: list[Fact] = []
        if self.next > end:
            self.next = end
            facts.append(self.fact())
        for topic_filter, since in list((self._since or {}).items()):
            if since > end:
                facts.append(self.begin(topic_filter, end))
        facts += [self.begin(name, end) for name, (until, _) in self.leaving().items() if until > end]
        return facts

    @property
    def furthest(self) -> int:
        return max(self.next, self.leaves_at, *(self._since or {}).values())

    @property
    def leaves_at(self) -> int:
        """Up to where there is something for filters whose QoS has fallen; 0 if there is no such filter."""
        return max((end for _, end, _ in self._until.values()), default=0) if self._until else 0

    def early(self, offset: int) -> frozenset[str]:
        """Filters that do not count yet as they are."""
        early = frozenset(name for name, since in (self._since or {}).items() if offset < since)
        return early if self._until is None else early | {name for name, it in self._until.items() if offset < it[1]}

    def former(self, offset: int) -> list[Subscription]:
        """What filters were that have left behind this offset."""
        return [it for first, end, it in (self._until or {}).values() if first <= offset < end]


def has_left(positions: Iterable[Position], former: Subscription | None, *, qos: int) -> None:
    """It was written down that a filter has this QoS from now on; where it has left, that was said just before."""
    if former is None or not former.qos or qos:
        return
    for position in positions:
        if (end := position.begins_no_later(former.filter)) > position.next:
            position.leave(former, end)


def facts_of(positions: Collection[Position], subscriptions: Mapping[str, Subscription]) -> Iterator[Fact]:
    """Everything that rebuilds the positions of a session whose subscriptions are told already."""
    left: dict[str, Subscription] = {}
    ends: list[Fact] = []
    for position in positions:
        yield position.fact()
        for name, (end, former) in position.leaving().items():
            if name in subscriptions:
                left[name] = former
                ends.append(["since", position.uid, name, end])
    if left:  # told as it was
        yield from (["sub", *former] for former in left.values())
        yield from ends
        yield from (["sub", *former._replace(qos=0)] for former in left.values())
    for position in positions:
        yield from position.begins()
    yield from (["sub", *subscriptions[name]] for name in left)


def messages_of(
    buffers: Sequence[bytes], topic: str | None, wanted: Container[int] | None = None
) -> Iterator[tuple[int, Message]]:
    """Offsets and messages of stored batches, or those of them whose offsets are wanted.

    Without a topic each message's key names its own; those whose key names none came through another door, and are
    nobody's.
    """
    for batch in batches_of(buffers):
        if wanted is None:
            yield from _messages_in(batch, topic)
            continue
        marks = write_validity(bytes([offset in wanted for offset in batch.offsets()]))
        if bits := int.from_bytes(marks, "little"):
            yield from _messages_in(_part_of(batch, bits), topic)


def messages_from(batch: Batch, topic: str | None, first: int) -> Iterator[tuple[int, Message]]:
    """The messages of a batch from an offset on, decoded a few at a time: the caller may stop after any of them."""
    at = bisect_left(batch.offsets(), first)
    step = max(1, min(_CUT_AT_A_TIME, _CHUNK_BYTES * batch.count // len(batch.block)))
    while at < batch.count:
        end = min(at + step, batch.count)
        yield from _messages_in(_part_of(batch, (1 << end) - (1 << at)), topic)
        at = end


def _part_of(batch: Batch, bits: int) -> Batch:
    """The messages of a batch whose places are the set bits."""
    if bits.bit_count() == batch.count:
        return batch
    return Batch.parse(select_messages(batch, bits), verify=False)


def _messages_in(batch: Batch, topic: str | None) -> Iterator[tuple[int, Message]]:
    keys = batch.keys() if topic is None else None
    headers, expiry = batch.raw_headers(), batch.expiry_us()
    for place, (offset, value) in enumerate(zip(batch.offsets(), batch.values(), strict=True)):
        name = topic if topic is not None else _topic_name(keys[place] if keys else None)
        if name is None:
            continue
        told = readable_headers(headers[place]) if headers else []
        yield offset, message_of(name, value or b"", told, expiry[place] if expiry else 0)


def _topic_name(key: bytes | None) -> str | None:
    try:
        return check_topic_name((key or b"").decode())
    except (UnicodeDecodeError, MqttViolation):
        return None


class Reading:
    """The log, as sessions of one namespace read it."""

    def __init__(self, world: World) -> None:
        self._world = world
        #: Who reads messages in flight again has it: many sessions may come back, or end, at the same time.
        self.turn = asyncio.Lock()

    def behind(self, session: Session) -> Iterator[Position | None]:
        """The positions of a session that are not at the end of their partition.

        There is a None whenever it is time to let others have their turn: after a start, partitions are opened here.
        """
        self._tidy(session)
        for place in self._world.partitions_for(session.subscriptions.values()):
            if place is None:
                yield None
            elif (position := self._position_behind(session, *place)) is not None:
                yield position
        for position in [it for it in session.positions.values() if it.leaves_at > it.next]:
            yield None
            topic = self._world.topic(position.topic)
            if topic is not None and self._position_behind(session, topic, position.partition) is position:
                yield position

    def leave(self, session: Session, subscriptions: Iterable[Subscription]) -> Iterator[None]:
        """These are about to hold.  What waits for a filter whose QoS falls to 0 comes to it all the same, as it was.

        Yields whenever others should have their turn, but not behind the ends that it takes.
        """
        known = session.subscriptions if session.lasts else {}
        fallen = [known[one.filter] for one in subscriptions if one.filter in known and not one.qos]
        fallen = [former for former in fallen if former.qos and not is_special(former.filter)]
        found: list[tuple[Position, Partition, list[Subscription]]] = []
        for place in self._world.partitions_for(fallen) if fallen else ():
            if place is None:
                yield
            elif (position := self._position_behind(session, *place)) is not None:
                name = None if position.topic == self._world.room.catch_all else from_topic(position.topic)
                leaving = [former for former in fallen if name is None or filter_matches(former.filter, name)]
                found.append((position, place[0].partitions[place[1]], leaving))
        for position, partition, leaving in found:
            if session.positions.get(position.uid) is position:
                session.behind[position.uid] = position
                session.record(position.fact())
                session.record(*(position.leave(former, partition.high_watermark) for former in leaving))
        if found:
            session.catch_up()

    def has_left(self, session: Session, topic: str, place: Place) -> bool:
        """Whether a message that passes by is for a filter that has left behind it, and is read from the log."""
        position = session.positions.get(place.uid)
        if position is None or place.offset >= position.leaves_at:
            return False
        return any(filter_matches(it.filter, topic) for it in position.former(place.offset))

    def _position_behind(self, session: Session, topic: Topic, number: int) -> Position | None:
        topics = self._world.room.broker.topics
        if topics.registry.find(topic.namespace, topic.name) is not topic or topics.is_untouched(topic, number):
            return None
        try:
            partition, uid = topics.partition_of(topic, number), topic.partition_uids[number]
        except MillstreamError as error:  # there is more to read than this
            _log.error("messages for a session cannot be read", topic=topic.name, reason=str(error))
            return None
        position = session.positions.get(uid)
        if position is None:
            position = session.positions[uid] = Position(topic.name, number, uid, 0)
        return position if position.next < partition.high_watermark else None

    def take_back(self, session: Session, *, clean: bool) -> list[Fact]:
        """After a start: positions and flights beyond a log that lost its end, or the next messages to get those
        offsets would count as sent.  Returns what has changed by that.

        `clean`: the last stop was orderly.  Then only topics in memory begin anew.
        """
        facts: list[Fact] = []
        for position in session.positions.values():
            if (end := self._end(position, position.furthest, clean)) is not None:
                facts += position.take_back(end)
        for packet_id, state, qos, flight in session.outgoing.facts():
            place = flight.place
            if state != PUBLISHED or place is None or not place.topic:
                continue
            at = Position(place.topic, place.partition, place.uid, place.offset)
            end = self._end(at, place.offset + 1, clean)
            if end is not None and place.offset >= end:
                facts.append(session.lose(packet_id, qos))
        return facts

    def _end(self, position: Position, known: int, clean: bool) -> int | None:
        """Where the log of a position ends, of which a session knows so much; None when that is as it was, or nobody
        can tell."""
        topics = self._world.room.broker.topics
        topic = topics.registry.find(self._world.namespace, position.topic)
        if topic is not None and topic.config.mode == "ephemeral":
            return 0
        if topic is None or position.uid not in topic.partition_uids or clean:
            return None
        return recovered_end(topics, topic, position.partition, known)

    def _tidy(self, session: Session) -> None:
        """Forget positions in topics that are gone."""
        for position in list(session.positions.values()):
            if self._partition_number(position) is None:
                self._forget(session, position)

    async def forget_topic(self, topic: Topic) -> None:
        """The same for all sessions, of one: some have been connected for so long that nobody has looked since."""
        gone = set(topic.partition_uids)
        for count, session in enumerate(list(self._world.sessions.values()), 1):
            if count % _SESSIONS_AT_A_TIME == 0:
                await asyncio.sleep(0)
            for uid in session.positions.keys() & gone:
                self._forget(session, session.positions[uid])

    def _forget(self, session: Session, position: Position) -> None:
        session.behind.pop(position.uid, None)
        session.positions.pop(position.uid, None)
        session.record(["gone", position.uid])

    def read_on(self, session: Session, position: Position) -> None:
        """Hand out what follows, as far as there is room; again when there is more room."""
        if position.reads:
            return
        partition = self.partition(position)
        if partition is None:
            self._forget(session, position)
            return
        batch = self._world.room.halfway.find(position.uid, position.halfway) if position.halfway >= 0 else None
        if batch is not None and batch.base_offset <= position.next < batch.next_offset:
            self._hand_out(session, position, partition, (batch,), batch.next_offset)
            return
        position.reads = True

        def answered(answer: FetchAnswer | MillstreamError) -> None:
            position.reads = False
            self._answered(session, position, partition, answer)

        try:
            partition.fetch(position.next, _CHUNK_BYTES, 0, answered)
        except MillstreamError as error:
            answered(error)

    def _answered(
        self, session: Session, position: Position, partition: Partition, answer: FetchAnswer | MillstreamError
    ) -> None:
        if session.client is None or session.positions.get(position.uid) is not position:
            return
        if isinstance(answer, MillstreamError):
            start = partition.log.start_offset
            if isinstance(answer, OffsetOutOfRange) and position.next < start:
                session.passed(position, start)  # retention was faster
                self._again(session, position)
            else:
                session.behind.pop(position.uid, None)
                _log.error("messages for a session cannot be read", topic=position.topic, reason=str(answer))
            return
        self._hand_out(session, position, partition, batches_of(answer.buffers), answer.next_offset)

    def _hand_out(
        self, session: Session, position: Position, partition: Partition, batches: Iterable[Batch], end: int
    ) -> None:
        world = self._world
        now_us = world.room.clock.now_us()
        topic = None if position.topic == world.room.catch_all else from_topic(position.topic)
        before, left = position.next, _HANDED_OUT_AT_A_TIME
        position.halfway = -1
        grants: dict[str, Grant | None] = {}
        for batch in batches:
            for offset, message in messages_from(batch, topic, position.next):
                if not left:
                    self._stop_within(batch, position)
                    self._again(session, position)
                    return
                left -= 1
                if early := position.early(offset):
                    grant = world.grant_for(session, message.topic, early, position.former(offset))
                else:
                    if message.topic not in grants:
                        grants[message.topic] = world.grant_for(session, message.topic)
                    grant = grants[message.topic]
                if grant is None or not grant.qos:
                    session.passed(position, offset + 1)
                elif not session.hand_out(
                    Parcel(message, now_us), grant, Place(position.topic, position.partition, position.uid, offset)
                ):
                    self._stop_within(batch, position)
                    return
        if position.next < end:
            session.passed(position, end)
        if position.next >= partition.high_watermark or position.next == before:
            session.behind.pop(position.uid, None)
        else:
            self._again(session, position)

    def _stop_within(self, batch: Batch, position: Position) -> None:
        """Who reads on from there finds a large batch as it is; others are read again."""
        if len(batch.block) > _CHUNK_BYTES:
            self._world.room.halfway.keep(position.uid, batch)
            position.halfway = batch.base_offset

    def _again(self, session: Session, position: Position) -> None:
        """Others go first."""
        self._world.room.loop.call_soon(self._if_there, session, position)

    def _if_there(self, session: Session, position: Position) -> None:
        if session.client is not None and session.behind.get(position.uid) is position:
            session.go_on()

    def partition(self, at: Position | Place) -> Partition | None:
        """None if it is gone; raises MillstreamError when it cannot be opened."""
        number = self._partition_number(at)
        if number is None:
            return None
        return self._world.room.broker.topics.partition(self._world.namespace, at.topic, number)

    def _partition_number(self, at: Position | Place) -> int | None:
        """None if it was in a topic that is gone, although there may be another one of that name."""
        topic = self._world.room.broker.topics.registry.find(self._world.namespace, at.topic)
        return at.partition if topic is not None and at.uid in topic.partition_uids else None
