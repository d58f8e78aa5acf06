"""Messages from one MQTT client on their way into the broker, and what it is told about them.

Everything that came with one read and goes to one topic is stored as one batch.  Messages that differ in nothing but
their payloads go together from the beginning, as a *stretch*: whatever must be asked is asked once for all of them.
A client is answered in the order in which it has published, whatever was on disk first.  With QoS 2 and a session that
lasts, the packet id and the message are one fact: a restart knows both or neither.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import structlog

from millstream.broker.journal import EntityFact
from millstream.broker.mqtt.refusals import publish_reason
from millstream.broker.transfer import Target
from millstream.entries import (
    AnyEntry,
    Entry,
    alike,
    encode_alike,
    encode_entries,
    entry_bytes,
    has_dedup_id,
    is_delayed,
    routing_key,
)
from millstream.errors import MillstreamError, PayloadTooLarge
from millstream.ids import SCHEDULES
from millstream.mqtt.messages import Message, size_of
from millstream.mqtt.reasons import Reason
from millstream.mqtt.stored import entry_of
from millstream.names import INBOX_PREFIX
from millstream.partitioning import key_partition
from millstream.records import BatchHeader
from millstream.wire.messages import PublishRequest

if TYPE_CHECKING:
    from millstream.broker.broker import Session as BrokerSession
    from millstream.broker.mqtt.session import Session
    from millstream.broker.mqtt.world import World
    from millstream.broker.traffic.duplicates import Duplicates

__all__ = ["Owed", "Publishing", "Stretch"]

_log = structlog.get_logger("millstream.mqtt")

_LEADER: Final = 1
_BATCH_BYTES: Final = 1024 * 1024
_BATCH_MESSAGES: Final = 10_000


class Owed:
    """The answer to messages that were published one after the other; or nobody waits for it."""

    __slots__ = ("error", "packet_ids", "qos", "reason", "retained", "size", "waits_for")

    def __init__(self, qos: int, packet_id: int) -> None:
        self.qos = qos
        #: One for each message.
        self.packet_ids = [packet_id]
        #: Bytes that the messages hold until then.
        self.size = 0
        #: Places where the messages must be stored before there is an answer.
        self.waits_for = 1
        self.reason = Reason.SUCCESS
        self.error: MillstreamError | None = None
        #: What is kept, until it turns out that it is refused.
        self.retained: Message | None = None


class Stretch(NamedTuple):
    """Messages that were published one after the other and differ in nothing but their payloads."""

    #: The first of them.
    message: Message
    payloads: list[bytes]
    owed: Owed


class _Stored(NamedTuple):
    """A stretch on its way into a topic."""

    #: The first of its messages.
    entry: AnyEntry
    values: list[bytes]
    owed: Owed


_Pile: TypeAlias = list[_Stored]


class Publishing:
    """What one client publishes.  `settled` is called with answers, in their order, as many as there are at a time."""

    def __init__(
        self,
        world: World,
        who: BrokerSession,
        settled: Callable[[Sequence[Owed]], None],
        session: Session | None = None,
    ) -> None:
        """`session` is where packet ids of QoS 2 are remembered, if it lasts."""
        self._world = world
        self._who = who
        self._settled = settled
        self._session = session
        self._owed: deque[Owed] = deque()
        self._piles: dict[str, _Pile] = {}
        self._once: dict[str, _Pile] = {}
        #: For topics that are being made; whatever else comes for them waits behind it.
        self._waiting: dict[tuple[str, bool], _Pile] = {}

    # --- taking in -----------------------------------------------------------------------------------------------

    def take(self, stretch: Stretch, now_us: int) -> None:
        """Publish messages; `flush` is due when everything of one read was taken.

        Raises MillstreamError when they were to be retained or are not stored, and are refused.
        """
        world = self._world
        message, payloads, owed = stretch
        if message.retain:
            world.room.retained.admit(world.namespace, message)
        name = world.place_for(message.topic)
        if name is None:
            world.admit_unstored(payloads)
            self._owed.append(owed)
            if message.retain:
                self._retain(message, owed)
            self._pass_on(stretch, now_us)
            return
        key = message.topic.encode() if name == world.room.catch_all else None
        entry = entry_of(message, key=key, now_us=now_us)
        # An inbox keeps nothing, so there is nothing to move there.
        once = owed.qos == 2 and self._lasts and not name.startswith(INBOX_PREFIX)
        if message.retain:
            self._check(name, message)
        self._pile_up(name, _Stored(entry, payloads, owed), once=once)
        if message.retain and owed.error is None:
            self._retain(message, owed)

    def _check(self, name: str, message: Message) -> None:
        """Ask at once what is asked again when a message is stored: it is retained before.  Raises MillstreamError.

        Not later, because those behind it are newer, and there may be room for one of them only.
        """
        broker = self._world.room.broker
        broker.check_publish(self._publisher_to(name), name)
        if broker.quotas.meters:
            broker.quotas.check(self._world.namespace, size_of(message))

    def put(self, name: str, entry: Entry, owed: Owed) -> None:
        """Publish to a topic of the broker, as it is."""
        # What tells the broker its id is recognised by the partition itself; a move would pass it by.
        once = owed.qos == 2 and self._lasts and not entry.options
        self._pile_up(name, _Stored(entry, [entry.value or b""], owed), once=once)

    def _pile_up(self, name: str, stretch: _Stored, *, once: bool) -> None:
        entry, values, owed = stretch
        piles = self._once if once else self._piles
        limit = self._world.message_bytes_max(name)
        others = _bytes_beside(entry)
        if max(map(len, values)) + others <= limit:
            self._owed.append(owed)
            piles.setdefault(name, []).append(stretch)
            return
        # Each for itself, or those beside it would be refused with what is too large.
        for one, value, packet_id in zip(alike(entry, values), values, owed.packet_ids, strict=True):
            its = owed
            if len(values) > 1:
                its = Owed(owed.qos, packet_id)
                its.size, owed.size = owed.size, 0  # the first counts for all
            if len(value) + others > limit:
                size = len(value) + others
                self.refuse(its, PayloadTooLarge(f"a message has {size} bytes, the topic allows {limit}"))
            else:
                self._owed.append(its)
                piles.setdefault(name, []).append(_Stored(one, [value], its))

    def answer(self, owed: Owed, reason: Reason) -> None:
        """Answer without publishing anything."""
        owed.reason = reason
        self._owed.append(owed)
        self._one_less(owed)

    def refuse(self, owed: Owed, error: MillstreamError) -> None:
        """Answer that it was not published, and why."""
        self._owed.append(owed)
        self._fail(owed, error)

    def owe(self, owed: Owed) -> Callable[[MillstreamError | None], None]:
        """Take a place in the line of answers; what is returned says how it went."""
        self._owed.append(owed)

        def done(error: MillstreamError | None) -> None:
            self._fail(owed, error) if error is not None else self._one_less(owed)

        return done

    @property
    def _lasts(self) -> bool:
        return self._session is not None and self._session.lasts

    def flush(self) -> None:
        """Store what has been taken since the last time, and answer what was not to be stored."""
        if self._piles:
            piles, self._piles = self._piles, {}
            for name, pile in piles.items():
                self._when_there(name, pile, once=False)
            self._world.room.broker.flush()
        if self._once:
            once, self._once = self._once, {}
            for name, pile in once.items():
                self._when_there(name, pile, once=True)
        self._answer()

    def _pass_on(self, stretch: Stretch, now_us: int) -> None:
        """Nobody wants it stored: whoever is there gets it now."""
        owed = stretch.owed
        if not self._world.pass_on(stretch.message, stretch.payloads, now_us):
            owed.reason = Reason.NO_MATCHING_SUBSCRIBERS
        if owed.qos == 2 and self._lasts:
            assert self._session is not None
            self._own(self._remember(self._session, owed))
        else:
            owed.waits_for -= 1  # and `flush` answers

    async def _remember(self, session: Session, owed: Owed) -> None:
        try:
            await session.record_durably(session.received_fact(*owed.packet_ids))
            session.unrecorded.difference_update(owed.packet_ids)
        except MillstreamError as error:
            self._fail(owed, error)
        else:
            self._one_less(owed)

    def _retain(self, message: Message, owed: Owed) -> None:
        owed.waits_for += 1
        owed.retained = message
        self._own(self._retained(self._world.room.retained.propose(self._world.namespace, message), owed))

    async def _retained(self, stored: Awaitable[None], owed: Owed) -> None:
        try:
            await stored
        except MillstreamError as error:
            self._fail(owed, error)
        else:
            self._one_less(owed)

    def _settle_retained(self, message: Message, *, refused: bool) -> None:
        """Nothing is kept of which its publisher hears that it was refused."""
        stored = self._world.room.retained.settle(self._world.namespace, message, refused=refused)
        if stored is not None:
            self._own(self._restored(stored, message.topic))

    async def _restored(self, stored: Awaitable[None], topic: str) -> None:
        try:
            await stored
        except MillstreamError as error:
            _log.warning("a retained message that was refused may come back", topic=topic, reason=str(error))

    # --- storing -------------------------------------------------------------------------------------------------

    def _when_there(self, name: str, pile: _Pile, *, once: bool) -> None:
        """Store messages; if their topic must be made first, whatever comes meanwhile waits behind them."""
        waiting = self._waiting.get((name, once))
        if waiting is not None:
            waiting += pile
        elif not self._world.has_topic(name):
            self._waiting[name, once] = pile
            self._own(self._create(name, once=once))
        elif not once and (unread := self._unread(name, pile)):
            self._waiting[name, once] = pile
            self._own(self._read_ids(name, unread))
        elif once:
            self._move(name, pile)
        else:
            self._store(name, pile)

    async def _create(self, name: str, *, once: bool) -> None:
        try:
            self._world.room.broker.check_publish(self._publisher_to(name), name)
            await self._world.make_topic(name, self._who)
        except MillstreamError as error:
            for stretch in self._waiting.pop((name, once)):
                self._fail(stretch.owed, error)
            return
        pile = self._waiting.pop((name, once))
        if once:
            self._move(name, pile)
        else:
            self._store(name, pile)
            self._world.room.broker.flush()

    def _unread(self, name: str, pile: _Pile) -> list[Duplicates]:
        """Where the broker must read which dedup ids it has seen, before it can judge these messages."""
        topic = self._world.topic(name)
        with_ids = [stretch for stretch in pile if has_dedup_id(stretch.entry)]
        if topic is None or not topic.config.dedup_window_ms or not with_ids:
            return []
        topics, window_ms = self._world.room.broker.topics, topic.config.dedup_window_ms
        parts = [topics.partition_of(topic, number) for number, _ in self._parts(name, with_ids)]
        return [ids for ids in (partition.duplicates(window_ms) for partition in parts) if ids.is_reading]

    async def _read_ids(self, name: str, unread: Sequence[Duplicates]) -> None:
        for ids in unread:
            await ids.known()
        self._store(name, self._waiting.pop((name, False)))
        self._world.room.broker.flush()

    def _store(self, name: str, pile: _Pile) -> None:
        for number, part in self._parts(name, pile):
            for batch in _batches(part):
                self._publish(name, number, batch)

    def _publish(self, name: str, number: int, stretches: _Pile) -> None:
        answers = [stretch.owed for stretch in stretches]  # not the messages, which the batch has as well

        def reply(error: MillstreamError | None, _label: int, _base: int, _time: int, _again: bool) -> None:
            for owed in answers:
                owed.waits_for -= 1
                if error is not None:
                    owed.error, owed.reason = error, publish_reason(error)
            self._answer()

        broker = self._world.room.broker
        try:
            batch = memoryview(self._encode(stretches))
            broker.publish(self._publisher_to(name), PublishRequest(name, number, _LEADER, 0, batch), reply)
        except MillstreamError as error:
            reply(error, 0, 0, 0, False)

    def _publisher_to(self, name: str) -> BrokerSession:
        """In whose name: what is no topic of the client's is stored by the broker."""
        return self._world.own if name == self._world.room.catch_all else self._who

    def _move(self, name: str, pile: _Pile) -> None:
        """All partitions at the same time: what comes next for one of them must not be first there."""
        for number, part in self._parts(name, pile):
            for batch in _batches(part):
                self._own(self._move_batch(Target(self._world.namespace, name, number), batch))

    async def _move_batch(self, target: Target, stretches: _Pile) -> None:
        """Exactly once: see broker/transfer.py."""
        session, room = self._session, self._world.room
        assert session is not None
        is_recorded = False
        answers = [stretch.owed for stretch in stretches]

        def received() -> Iterator[EntityFact]:
            """Asked for when they are written: by then the client may have begun another session."""
            for owed in answers if session.lasts else ():
                yield session.entity, session.received_fact(*owed.packet_ids)

        def recorded() -> None:
            nonlocal is_recorded
            is_recorded = True
            for owed in answers:
                session.unrecorded.difference_update(owed.packet_ids)
                self._one_less(owed)

        try:
            batch = self._encode(stretches)
            del stretches  # the batch has the messages as well
            self._check_move(target, batch)
            await room.store.transfer.move(target, batch, received(), on_recorded=recorded)
        except MillstreamError as error:
            if not is_recorded:  # otherwise the client was told, or waits for nothing but what is retained
                for owed in answers:
                    self._fail(owed, error)

    def _check_move(self, target: Target, batch: bytearray) -> None:
        """Whoever publishes is asked this by the broker; a move is not.  Raises MillstreamError."""
        room, topic = self._world.room, self._world.topic(target.topic)
        broker = room.broker
        broker.check_publish(self._publisher_to(target.topic), target.topic)
        broker.quotas.publish(target.namespace, memoryview(batch))
        if target.partition >= SCHEDULES:
            schedules = broker.topics.partition(*target)
            _, due_us = schedules.check(memoryview(batch), len(batch))
            if due_us is not None and schedules.admit is not None:
                schedules.admit(due_us)
        elif topic is not None and topic.config.max_depth:
            broker.flow.check_depth(topic, target.partition, BatchHeader(batch).count)

    def _encode(self, stretches: _Pile) -> bytearray:
        now_us = self._world.room.clock.now_us()
        if len(stretches) == 1:
            entry, values, _ = stretches[0]
            head, tail = encode_alike(entry, values, base_timestamp_us=now_us)
        else:
            entries = [entry for stretch in stretches for entry in alike(stretch.entry, stretch.values)]
            head, tail = encode_entries(entries, base_timestamp_us=now_us)
        return bytearray(head + tail)

    def _parts(self, name: str, pile: _Pile) -> list[tuple[int, _Pile]]:
        """Which messages go to which partition: by key, and what has none stays together for the sake of its order."""
        count = self._world.partitions_of(name)
        if count == 1 and not any(is_delayed(stretch.entry) for stretch in pile):
            return [(0, pile)]
        parts: dict[int, _Pile] = {}
        for stretch in pile:
            key = routing_key(stretch.entry) or self._who.client_id.encode()
            number = key_partition(key, count)
            if is_delayed(stretch.entry):
                number |= SCHEDULES
            parts.setdefault(number, []).append(stretch)
        return list(parts.items())

    # --- answers -------------------------------------------------------------------------------------------------

    def _fail(self, owed: Owed, error: MillstreamError) -> None:
        owed.error = error
        owed.reason = publish_reason(error)
        self._one_less(owed)

    def _one_less(self, owed: Owed) -> None:
        owed.waits_for -= 1
        self._answer()

    def _answer(self) -> None:
        """Say everything that can be said without changing the order."""
        line = self._owed
        run = []
        while line and line[0].waits_for <= 0:
            owed = line.popleft()
            if owed.retained is not None:
                self._settle_retained(owed.retained, refused=owed.error is not None)
            run.append(owed)
        if run:
            self._settled(run)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        self._world.room.own(asyncio.ensure_future(work))


def _bytes_beside(entry: AnyEntry) -> int:
    """What counts of a message besides its value."""
    if isinstance(entry, bytes):
        return 0
    return len(entry[1] or b"") + (len(entry.headers) if isinstance(entry, Entry) else 0)


def _batches(part: _Pile) -> Iterator[_Pile]:
    """What is stored together.  A stretch is never too much for a batch: it came with one read."""
    batch: _Pile = []
    messages = size = 0
    alone = False
    for stretch in part:
        more = len(stretch.values)
        more_bytes = entry_bytes(stretch.entry) + sum(map(len, stretch.values[1:]))
        was_alone, alone = alone, has_dedup_id(stretch.entry)
        full = messages + more > _BATCH_MESSAGES or size + more_bytes > _BATCH_BYTES
        if batch and (full or alone or was_alone):
            yield batch
            batch, messages, size = [], 0, 0
        batch.append(stretch)
        messages += more
        size += more_bytes
    yield batch
