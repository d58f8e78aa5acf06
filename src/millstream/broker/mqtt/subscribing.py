"""SUBSCRIBE and UNSUBSCRIBE: what holds at once, what must be on disk first, and the retained messages that follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from millstream.broker.mqtt.queue_messages import is_reply_address
from millstream.broker.mqtt.refusals import subscribe_reason
from millstream.broker.mqtt.rights import require_filter
from millstream.broker.mqtt.subscription import Subscription
from millstream.errors import MillstreamError, QuotaExceeded
from millstream.mqtt.packets import Filter, Suback, Subscribe, Unsuback, Unsubscribe
from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.mqtt.topics import LEVELS_MAX, check_topic_filter, parse_queue, parse_share, to_pattern

if TYPE_CHECKING:
    from millstream.broker.broker import Session as BrokerSession
    from millstream.broker.mqtt.client import Client
    from millstream.broker.mqtt.session import Session

__all__ = ["Subscribing", "Unsubscribing"]

#: Levels that the filters of a session may have on average: each is a step in memory, and perhaps for every message.
_LEVELS_EACH: Final = 10


class Subscribing:
    """One SUBSCRIBE."""

    def __init__(self, client: Client, session: Session, who: BrokerSession, packet: Subscribe) -> None:
        self._client = client
        self._session = session
        self._who = who
        self._packet = packet
        #: By filter; None while a queue is being opened.
        self._reasons: list[int | None] = []
        #: By filter, those that hold at once.
        self._taken: dict[str, Subscription] = {}
        self._new = 0
        #: Of all its filters; counted when there is a new one.
        self._levels: int | None = None
        #: Filters whose retained messages are asked for.
        self._retained: list[str] = []
        self._problem: MillstreamError | None = None

    def begin(self) -> Iterator[None]:
        """Whatever is ordinary holds when it is through; it pauses when others are to have their turn.

        Raises MqttViolation, before the first pause.
        """
        filters = self._packet.filters
        # As many as a session may have, of topics and of queues: a packet has room for a quarter of a million.
        at_most = 2 * self._session.world.room.settings.subscriptions_max
        for wanted in filters[:at_most]:
            try:
                self._reasons.append(self._take(wanted))
            except MillstreamError as error:
                if isinstance(error, MqttViolation) and error.reason is Reason.PROTOCOL_ERROR:
                    raise
                self._problem = error
                self._reasons.append(subscribe_reason(error))
        if len(filters) > at_most:
            self._problem = QuotaExceeded(f"a SUBSCRIBE has {at_most} filters at most")
            self._reasons += [subscribe_reason(self._problem)] * (len(filters) - at_most)
        yield from self._session.world.subscribe(self._session, list(self._taken.values()))
        # They hold, so they are recorded: a message that comes now says how far the session is, behind these facts.
        self._session.record(*(["sub", *subscription] for subscription in self._taken.values()))
        # So is what they ask for: a client that is told of its subscriptions does not ask again after a crash.
        self._session.ask_for_retained(self._retained)

    @property
    def waits(self) -> bool:
        """Whether there is more to do before it is answered."""
        return None in self._reasons or bool(self._taken and self._session.lasts)

    def _take(self, wanted: Filter) -> int | None:
        check_topic_filter(wanted.filter)
        if self._is_queue(wanted):
            self._client.queue_topics().expect(wanted.filter)
            return None
        require_filter(self._who, wanted.filter)
        told = self._packet.properties.subscription_ids
        subscription = Subscription(
            wanted.filter,
            wanted.qos,
            wanted.no_local,
            wanted.retain_as_published,
            wanted.retain_handling,
            told[0] if told else 0,
        )
        is_new = self._admit(wanted.filter)
        self._taken[wanted.filter] = subscription
        asks = subscription.retain_handling == 0 or (subscription.retain_handling == 1 and is_new)
        if asks and parse_share(wanted.filter) is None:
            self._retained.append(wanted.filter)
        return subscription.qos

    def _admit(self, topic_filter: str) -> bool:
        """Says whether the filter is new to the session.  Raises QuotaExceeded."""
        held, at_most = self._session.subscriptions, self._session.world.room.settings.subscriptions_max
        if topic_filter in held or topic_filter in self._taken:
            return topic_filter not in held
        if len(held) + self._new >= at_most:
            raise QuotaExceeded(f"a session has {at_most} subscriptions at most")
        if self._levels is None:
            self._levels = sum(map(_levels_of, held))
        levels, levels_max = self._levels + _levels_of(topic_filter), max(LEVELS_MAX, _LEVELS_EACH * at_most)
        if levels > levels_max:
            raise QuotaExceeded(f"the filters of a session have {levels_max} levels at most, all together")
        self._levels = levels
        self._new += 1
        return True

    def _is_queue(self, wanted: Filter) -> bool:
        share = parse_share(wanted.filter)
        if share is not None and wanted.no_local:
            raise MqttViolation(Reason.PROTOCOL_ERROR, "a shared subscription cannot leave out its own messages")
        inner = wanted.filter if share is None else share.filter
        address = parse_queue(inner, Reason.TOPIC_FILTER_INVALID)
        if address is not None:
            return not is_reply_address(address)
        is_durable = self._session.world.room.settings.share_durable
        return share is not None and is_durable and to_pattern(inner) is not None

    async def finish(self) -> None:
        """Open queues, put on disk what a session that lasts relies on, and answer."""
        for place, wanted in enumerate(self._packet.filters):
            if self._reasons[place] is None:
                try:
                    self._reasons[place] = await self._client.queue_topics().subscribe(wanted, self._packet)
                except MillstreamError as error:
                    self._problem = error
                    self._reasons[place] = subscribe_reason(error)
        if self._taken:
            await self._session.recorded()
        self.answer()

    def answer(self) -> None:
        reasons = tuple(reason for reason in self._reasons if reason is not None)
        self._client.write(Suback(self._packet.packet_id, reasons, self._client.explanation(self._problem)))
        if self._retained and self._session.client is self._client:  # another one may have taken its place meanwhile
            self._session.go_on()


class Unsubscribing:
    """One UNSUBSCRIBE."""

    def __init__(self, client: Client, session: Session, packet: Unsubscribe) -> None:
        self._client = client
        self._session = session
        self._packet = packet
        self._reasons: list[int | None] = []

    def begin(self) -> Iterator[None]:
        """Whatever is ordinary ends at once; it pauses when others are to have their turn."""
        client, session, filters = self._client, self._session, self._packet.filters
        ended = session.world.end(session, [wanted for wanted in filters if not client.has_queue(wanted)])
        names = dict.fromkeys(subscription.filter for subscription in ended)
        session.record(*(["unsub", name] for name in names))
        for topic_filter in filters:
            if client.has_queue(topic_filter):
                self._reasons.append(None)
            else:
                self._reasons.append(Reason.SUCCESS if topic_filter in names else Reason.NO_SUBSCRIPTION_EXISTED)
        yield from session.world.forget_positions(session, ended)

    @property
    def waits(self) -> bool:
        return True

    async def finish(self) -> None:
        for place, topic_filter in enumerate(self._packet.filters):
            if self._reasons[place] is None:
                was_there = await self._client.queue_topics().unsubscribe(topic_filter)
                self._reasons[place] = Reason.SUCCESS if was_there else Reason.NO_SUBSCRIPTION_EXISTED
        await self._session.recorded()
        reasons = tuple(reason for reason in self._reasons if reason is not None)
        self._client.write(Unsuback(self._packet.packet_id, reasons))


def _levels_of(topic_filter: str) -> int:
    return topic_filter.count("/") + 1
