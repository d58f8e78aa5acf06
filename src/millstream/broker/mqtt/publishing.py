"""Messages from one MQTT client on their way into the broker, and what it is told about them.

Everything that came with one read and goes to one topic is stored as one batch.  A client is answered in the order in
which it has published, whatever was on disk first.  With QoS 2 and a session that lasts, the packet id and the message
are one fact: a restart knows both or neither.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from millstream.broker.mqtt.parcel import Parcel
from millstream.broker.mqtt.refusals import publish_reason
from millstream.broker.transfer import Target
from millstream.entries import AnyEntry, Entry, encode_entries, is_delayed, routing_key, split_entries
from millstream.errors import MillstreamError
from millstream.ids import SCHEDULES
from millstream.mqtt.messages import Message
from millstream.mqtt.reasons import Reason
from millstream.mqtt.stored import entry_of
from millstream.names import INBOX_PREFIX
from millstream.partitioning import key_partition
from millstream.wire.messages import PublishRequest

if TYPE_CHECKING:
    from millstream.broker.broker import Session as BrokerSession
    from millstream.broker.mqtt.session import Session
    from millstream.broker.mqtt.world import World

__all__ = ["Owed", "Publishing"]

_LEADER: Final = 1
_BATCH_BYTES: Final = 1024 * 1024
_BATCH_MESSAGES: Final = 10_000


class Owed:
    """An answer that a client waits for, or nobody does."""

    __slots__ = ("error", "packet_id", "qos", "reason", "waits_for")

    def __init__(self, qos: int, packet_id: int) -> None:
        self.qos = qos
        self.packet_id = packet_id
        #: Places where the message must be stored before there is an answer.
        self.waits_for = 1
        self.reason = Reason.SUCCESS
        self.error: MillstreamError | None = None


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
        self._piles: dict[str, list[tuple[AnyEntry, Owed]]] = {}
        self._once: dict[str, list[tuple[AnyEntry, Owed]]] = {}
        #: For topics that are being made; whatever else comes for them waits behind it.
        self._waiting: dict[tuple[str, bool], list[tuple[AnyEntry, Owed]]] = {}

    @property
    def owed(self) -> int:
        """Answers that are still to come."""
        return len(self._owed)

    # --- taking in -----------------------------------------------------------------------------------------------

    def take(self, message: Message, owed: Owed, now_us: int) -> None:
        """Publish a message; `flush` is due when everything of one read was taken.

        Raises QuotaExceeded when it was to be retained and there is no room.
        """
        world = self._world
        if message.retain:
            stored = world.room.retained.put(world.namespace, message)
            owed.waits_for += 1
            self._own(self._retain(stored, owed))
        self._owed.append(owed)
        name = world.place_for(message.topic)
        if name is None:
            self._pass_on(message, owed, now_us)
            return
        key = message.topic.encode() if name == world.room.catch_all else None
        entry = entry_of(message, key=key, now_us=now_us)
        # An inbox keeps nothing, so there is nothing to move there.
        once = owed.qos == 2 and self._lasts and not name.startswith(INBOX_PREFIX)
        (self._once if once else self._piles).setdefault(name, []).append((entry, owed))

    def put(self, name: str, entry: AnyEntry, owed: Owed) -> None:
        """Publish to a topic of the broker, as it is."""
        self._owed.append(owed)
        # A schedule, and what has an id to be recognised by, must pass through the broker's own checks.
        plain = not (isinstance(entry, Entry) and (entry.deliver_at_us or entry.dedup_id))
        piles = self._once if owed.qos == 2 and self._lasts and plain else self._piles
        piles.setdefault(name, []).append((entry, owed))

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
        """Store what has been taken since the last time."""
        if self._piles:
            piles, self._piles = self._piles, {}
            for name, pile in piles.items():
                self._when_there(name, pile, once=False)
            self._world.room.broker.flush()
        if self._once:
            once, self._once = self._once, {}
            for name, pile in once.items():
                self._when_there(name, pile, once=True)

    def _pass_on(self, message: Message, owed: Owed, now_us: int) -> None:
        """Nobody wants it stored: whoever is there gets it now."""
        found = self._world.pass_on(Parcel(message, now_us))
        if not found:
            owed.reason = Reason.NO_MATCHING_SUBSCRIBERS
        if owed.qos == 2 and self._lasts:
            assert self._session is not None
            self._own(self._remember(self._session, owed))
        else:
            self._one_less(owed)

    async def _remember(self, session: Session, owed: Owed) -> None:
        try:
            await session.record_durably(session.received_fact(owed.packet_id))
            session.unrecorded.discard(owed.packet_id)
        except MillstreamError as error:
            self._fail(owed, error)
        else:
            self._one_less(owed)

    async def _retain(self, stored: Awaitable[None], owed: Owed) -> None:
        try:
            await stored
        except MillstreamError as error:
            self._fail(owed, error)
        else:
            self._one_less(owed)

    # --- storing -------------------------------------------------------------------------------------------------

    def _when_there(self, name: str, pile: list[tuple[AnyEntry, Owed]], *, once: bool) -> None:
        """Store messages; if their topic must be made first, whatever comes meanwhile waits behind them."""
        waiting = self._waiting.get((name, once))
        if waiting is not None:
            waiting += pile
        elif not self._world.has_topic(name):
            self._waiting[name, once] = pile
            self._own(self._create(name, once=once))
        elif once:
            self._own(self._move(name, pile))
        else:
            self._store(name, pile)

    async def _create(self, name: str, *, once: bool) -> None:
        try:
            await self._world.make_topic(name, self._who)
        except MillstreamError as error:
            for _, owed in self._waiting.pop((name, once)):
                self._fail(owed, error)
            return
        pile = self._waiting.pop((name, once))
        if once:
            self._own(self._move(name, pile))
        else:
            self._store(name, pile)
            self._world.room.broker.flush()

    def _store(self, name: str, pile: list[tuple[AnyEntry, Owed]]) -> None:
        for number, part in self._parts(name, pile):
            entries, owed = [entry for entry, _ in part], [owed for _, owed in part]
            if len(part) <= _BATCH_MESSAGES and not any(
                isinstance(entry, Entry) and entry.dedup_id for entry in entries
            ):
                self._publish(name, number, entries, owed)  # of one read, so it cannot be much
                continue
            for first, last in split_entries(entries, bytes_max=_BATCH_BYTES, messages_max=_BATCH_MESSAGES):
                self._publish(name, number, entries[first:last], owed[first:last])

    def _publish(self, name: str, number: int, entries: list[AnyEntry], owed: list[Owed]) -> None:
        def reply(error: MillstreamError | None, _label: int, _base: int, _time: int, _again: bool) -> None:
            for one in owed:
                one.waits_for -= 1
                if error is not None:
                    one.error, one.reason = error, publish_reason(error)
            self._answer()

        broker = self._world.room.broker
        head, tail = encode_entries(entries, base_timestamp_us=self._world.room.clock.now_us())
        who = self._world.own if name == self._world.room.catch_all else self._who
        try:
            batch = memoryview(bytearray(head + tail))
            broker.publish(who, PublishRequest(name, number, _LEADER, 0, batch), reply)
        except MillstreamError as error:
            reply(error, 0, 0, 0, False)

    async def _move(self, name: str, pile: list[tuple[AnyEntry, Owed]]) -> None:
        """Exactly once: see broker/transfer.py."""
        session, room = self._session, self._world.room
        assert session is not None
        try:
            room.broker.check_publish(self._world.own if name == room.catch_all else self._who, name)
            for number, part in self._parts(name, pile):
                head, tail = encode_entries([entry for entry, _ in part], base_timestamp_us=room.clock.now_us())
                facts = [(session.entity, session.received_fact(owed.packet_id)) for _, owed in part]

                def recorded(part: list[tuple[AnyEntry, Owed]] = part) -> None:
                    for _, owed in part:
                        session.unrecorded.discard(owed.packet_id)
                        self._one_less(owed)

                target = Target(self._world.namespace, name, number)
                await room.store.transfer.move(target, bytearray(head + tail), facts, on_recorded=recorded)
        except MillstreamError as error:
            for _, owed in pile:
                if owed.waits_for > 0:
                    self._fail(owed, error)

    def _parts(self, name: str, pile: list[tuple[AnyEntry, Owed]]) -> list[tuple[int, list[tuple[AnyEntry, Owed]]]]:
        """Which messages go to which partition: by key, and what has none stays together for the sake of its order."""
        count = self._world.partitions_of(name)
        if count == 1 and not any(is_delayed(entry) for entry, _ in pile):
            return [(0, pile)]
        parts: dict[int, list[tuple[AnyEntry, Owed]]] = {}
        for entry, owed in pile:
            key = routing_key(entry) or self._who.client_id.encode()
            number = key_partition(key, count)
            if isinstance(entry, Entry) and is_delayed(entry):
                number |= SCHEDULES
            parts.setdefault(number, []).append((entry, owed))
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
            run.append(line.popleft())
        if run:
            self._settled(run)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        self._world.room.own(asyncio.ensure_future(work))
