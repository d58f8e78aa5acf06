"""The MQTT of one namespace: its sessions, who is subscribed to what, and the way of messages to them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import structlog

from millstream.broker.mqtt import queue_defaults
from millstream.broker.mqtt.parcel import Grant, Parcel
from millstream.broker.mqtt.readers import Readers
from millstream.broker.mqtt.reading import Place, Position, Reading, messages_of
from millstream.broker.mqtt.session import Session
from millstream.broker.mqtt.shares import Share
from millstream.broker.mqtt.subscription import Subscription
from millstream.broker.registry import Topic
from millstream.broker.traffic.subscriptions import Subscription as Feed
from millstream.mqtt.filters import FilterTrie, remembered_size
from millstream.mqtt.messages import Message, with_payload
from millstream.mqtt.topics import filter_matches, from_topic, is_special, parse_share, to_topic
from millstream.names import INBOX_PREFIX, is_system
from millstream.wire import calls
from millstream.wire.deliveries import Delivery

if TYPE_CHECKING:
    from millstream.broker.broker import Session as BrokerSession
    from millstream.broker.mqtt.mqtt import Mqtt

__all__ = ["World"]

_log = structlog.get_logger("millstream.mqtt")

#: Everybody who gets messages of a topic: sessions with what they are granted, shares with nothing.
_Receivers: TypeAlias = tuple[tuple[Session, Grant] | tuple[Share, None], ...]
#: How much is remembered of topics and their receivers: see `remembered_size`.
_REMEMBERED_MAX: Final = 200_000
#: Messages that are no topic's and wait for sessions; beyond it the oldest are gone.
_CATCH_ALL_BYTES: Final = 1024 * 1024 * 1024
#: Topics, partitions and positions that are looked at before others have their turn: about a millisecond.
_LOOKED_AT_A_TIME: Final = 200


class World:
    """See the module.  To the broker's subscriptions it is one subscriber, of everything."""

    def __init__(self, room: Mqtt, namespace: str) -> None:
        self.room = room
        self.namespace = namespace
        self.client_id = "mqtt"
        #: For what the broker publishes and reads itself.
        self.own: BrokerSession = room.broker.own_session(namespace, "mqtt")
        self.sessions: dict[str, Session] = {}
        self.trie: FilterTrie[Session | Share] = FilterTrie()
        self.reading = Reading(self)
        self._shares: dict[tuple[str, str], Share] = {}
        self._feed: Feed | None = None
        self._receivers: dict[str, _Receivers] = {}
        #: Whether any of them finds it in the log, also after it was away.
        self._durable: dict[str, bool] = {}
        self._version = -1
        self._remembered = 0
        self._making: dict[str, asyncio.Task[None]] = {}

    # --- who is subscribed ---------------------------------------------------------------------------------------

    def subscribe(self, session: Session, subscriptions: Sequence[Subscription]) -> Iterator[None]:
        """Add subscriptions.  They hold when the iteration is over; yields whenever others should have their turn."""
        has_paused = False
        for _ in self._begin(session, subscriptions) if session.lasts else ():
            has_paused = True
            yield
        yield from self.reading.leave(session, subscriptions)
        for subscription in subscriptions:
            self.room.broker.metrics.mqtt_subscriptions += subscription.filter not in session.subscriptions
            session.subscriptions[subscription.filter] = subscription
            self.insert(session, subscription)
        session.subscriptions_changed()
        if has_paused:
            session.catch_up()  # messages have come behind the ends that were taken first

    def insert(self, session: Session, subscription: Subscription) -> None:
        share = parse_share(subscription.filter)
        if share is None:
            self.trie.insert(subscription.filter, session, subscription)
        else:
            found = self._shares.get(share)
            if found is None:
                found = self._shares[share] = Share(*share)
                self.trie.insert(share.filter, found, None)
            was_durable = found.is_durable
            found.join(session, subscription)
            self._changed(found, was_durable)
        if self._feed is None:
            self._feed = self.room.broker.subscriptions.open(self, ("#", self.room.catch_all))

    def unsubscribe(self, session: Session, filters: Iterable[str]) -> list[str]:
        """Returns those of the filters to which there was a subscription."""
        ended = self.end(session, filters)
        for _ in self.forget_positions(session, ended):
            pass
        return [subscription.filter for subscription in ended]

    def end(self, session: Session, filters: Iterable[str]) -> list[Subscription]:
        """As `unsubscribe`, but for the positions."""
        ended = []
        for topic_filter in filters:
            subscription = session.subscriptions.pop(topic_filter, None)
            if subscription is not None:
                self._remove(session, topic_filter)
                ended.append(subscription)
        session.subscriptions_changed([subscription.filter for subscription in ended])
        return ended

    def forget_positions(self, session: Session, ended: Sequence[Subscription]) -> Iterator[None]:
        """Drop the positions that only these subscriptions needed; yields whenever others should have their turn."""
        if not ended or not session.lasts:
            return
        gone, left = self._readers(ended), self._readers(session.subscriptions.values())
        for count, position in enumerate(list(session.positions.values()), 1):
            if count % _LOOKED_AT_A_TIME == 0:
                yield
            if gone.read(position.topic) and not left.read(position.topic):
                session.positions.pop(position.uid, None)
                session.behind.pop(position.uid, None)
                session.record(["gone", position.uid])

    def _remove(self, session: Session, topic_filter: str) -> None:
        share = parse_share(topic_filter)
        if share is None:
            self.trie.remove(topic_filter, session)
        else:
            found = self._shares[share]
            was_durable = found.is_durable
            found.leave(session)
            self._changed(found, was_durable)
            if not found.members:
                del self._shares[share]
                self.trie.remove(share.filter, found)
        self.room.broker.metrics.mqtt_subscriptions -= 1
        if self.trie.is_empty and self._feed is not None:
            self.room.broker.subscriptions.dismiss(self._feed)
            self._feed = None

    def _changed(self, share: Share, was_durable: bool) -> None:
        """What is remembered of topics may not hold any more: the trie knows nothing of a share's members."""
        if share.is_durable != was_durable:
            self._durable = {}

    def forget(self, session: Session) -> None:
        """The session is over."""
        for topic_filter in session.subscriptions:
            self._remove(session, topic_filter)
        self.room.broker.metrics.mqtt_subscriptions -= len(session.queues)
        session.subscriptions, session.queues = {}, {}
        del self.sessions[session.client_id]

    def shares_of(self, session: Session) -> list[Share]:
        """The shares that a session is a member of."""
        named = map(parse_share, session.subscriptions)
        return [self._shares[share] for share in named if share is not None]

    def offer_again(self, share: Share, parcel: Parcel, place: Place | None, *, but: Session) -> bool:
        """Give a message that a member of a share did not take to another; says whether there is one that takes it.

        The share may have lost all of its members since, and then others may have begun it anew.
        """
        found = self._shares.get((share.group, share.filter))
        return found is not None and found.offer(parcel, place, but=but)

    def _begin(self, session: Session, subscriptions: Sequence[Subscription]) -> Iterator[None]:
        """New subscriptions are for what comes from now on: the ends of everything that is there already.

        They are recorded here, before the subscriptions are: a position without one does no harm.
        """
        known = session.subscriptions
        if all(one.filter in known and (known[one.filter].qos or not one.qos) for one in subscriptions):
            return
        topics = self.room.broker.topics
        held, new = self._readers(known.values()), self._readers(subscriptions)
        for place in self._partitions_of(new):
            if place is None:
                yield
                continue
            topic, number = place
            uid = topic.partition_uids[number]
            leaving = uid in session.positions and bool(session.positions[uid].leaving())
            reads = held.read(topic.name) or leaving
            # What is in no topic of its own has one place for all filters.
            later = new.filters - held.filters if leaving or topic.name == self.room.catch_all else set()
            if (reads and not later) or self.topic(topic.name) is not topic or topics.is_untouched(topic, number):
                continue
            end = topics.partition_of(topic, number).high_watermark
            if not reads:
                position = session.positions[uid] = Position(topic.name, number, uid, end)
                session.behind.pop(uid, None)
                session.record(position.fact())
                continue
            position = session.position(Place(topic.name, number, uid, 0))
            if position.next < end:
                session.record(*(position.begin(topic_filter, end) for topic_filter in sorted(later)))

    def _readers(self, subscriptions: Iterable[Subscription]) -> Readers:
        return Readers(subscriptions, catch_all=self.room.catch_all)

    def _partitions_of(self, readers: Readers) -> Iterator[tuple[Topic, int] | None]:
        """The partitions that are read, and a None whenever others should have their turn: opening one takes time."""
        for count, topic in enumerate(self._topics_of(readers), 1):
            if count % _LOOKED_AT_A_TIME == 0:
                yield None
            if readers.read(topic.name):
                for number in range(len(topic.partition_uids)):
                    if topic.partitions[number] is None or number % _LOOKED_AT_A_TIME == _LOOKED_AT_A_TIME - 1:
                        yield None
                    yield topic, number

    def _topics_of(self, readers: Readers) -> Iterable[Topic]:
        """The topics that these readers may read; some of them turn out not to be."""
        if readers.wildcards:
            return self.stored_topics()
        names = {to_topic(topic_filter) for topic_filter in readers.filters}
        found = [self.topic(name) for name in names if name is not None and not is_system(name)]
        catch_all = self.topic(self.room.catch_all) if readers.filters else None
        return [topic for topic in (*found, catch_all) if topic is not None]

    def stored_topics(self) -> Iterator[Topic]:
        topics = self.room.broker.topics.registry.namespaces.get(self.namespace, {})
        for topic in list(topics.values()):
            if not topic.deleting and (not is_system(topic.name) or topic.name == self.room.catch_all):
                yield topic

    def partitions_for(self, subscriptions: Iterable[Subscription]) -> Iterator[tuple[Topic, int] | None]:
        """See `_partitions_of`."""
        return self._partitions_of(self._readers(subscriptions))

    # --- who gets what -------------------------------------------------------------------------------------------

    def receivers(self, topic: str) -> _Receivers:
        if self._version != self.trie.version:
            self._version = self.trie.version
            self._forget_receivers()
        found = self._receivers.get(topic)
        if found is None:
            found = tuple(
                (receiver, None) if isinstance(receiver, Share) else (receiver, _granted(values))
                for receiver, values in self.trie.match(topic)
            )
            size = remembered_size(topic, found)
            self._remembered += size
            if self._remembered > _REMEMBERED_MAX:
                self._forget_receivers()
                self._remembered = size
            self._receivers[topic] = found
        return found

    def _forget_receivers(self) -> None:
        self._receivers, self._durable, self._remembered = {}, {}, 0

    def grant_for(
        self, session: Session, topic: str, but: Collection[str] = (), former: Sequence[Subscription] = ()
    ) -> Grant | None:
        """What a session gets of a topic, if anything; some of its filters do not count, or as they were."""
        found = [
            subscription
            for subscription in session.subscriptions.values()
            if not is_special(subscription.filter)
            and filter_matches(subscription.filter, topic)
            and subscription.filter not in but
        ]
        found += [it for it in former if it.filter in session.subscriptions and filter_matches(it.filter, topic)]
        return _granted(found) if found else None

    def grant_of_share(self, session: Session, topic: str) -> Grant | None:
        """As `grant_for`, by one of the session's shared subscriptions, where it is not known which it was."""
        for topic_filter, subscription in session.subscriptions.items():
            share = parse_share(topic_filter)
            if share is not None and filter_matches(share.filter, topic):
                return _granted([subscription])
        return None

    def has_durable_reader(self, topic: str) -> bool:
        receivers = self.receivers(topic)
        found = self._durable.get(topic)
        if found is None:
            found = any(
                receiver.is_durable if isinstance(receiver, Share) else receiver.lasts and bool(grant and grant.qos)
                for receiver, grant in receivers
            )
            self._durable[topic] = found
        return found

    # --- where a publish goes ------------------------------------------------------------------------------------

    def place_for(self, topic: str) -> str | None:
        """The topic in which a message is stored; None if nobody wants it stored."""
        name = to_topic(topic)
        if name is not None and name.startswith("_"):
            if self.room.broker.inboxes.has(self.namespace, name):
                return name
            name = None
        rules = self.room.storage_rules
        store = next((rule.store for rule in rules if filter_matches(rule.filter, topic)), "auto") if rules else "auto"
        if name is not None and store != "never":
            if store == "always" or self.has_topic(name):
                return name
            broker = self.room.broker
            if self.has_durable_reader(topic):
                return name if broker.settings.topics.auto_create else self.room.catch_all
            awaited = broker.settings.topics.auto_create and broker.queues.registry.is_awaited(self.namespace, name)
            return name if awaited else None
        return self.room.catch_all if self.has_durable_reader(topic) else None

    def has_topic(self, name: str) -> bool:
        """Whether a message can be published there right now."""
        if name in self._making:
            return False  # others wait for it, and come first
        return self.topic(name) is not None or name.startswith(INBOX_PREFIX)

    def topic(self, name: str) -> Topic | None:
        return self.room.broker.topics.registry.find(self.namespace, name)

    def partitions_of(self, name: str) -> int:
        topic = self.topic(name)
        return len(topic.partition_uids) if topic is not None else 1

    def message_bytes_max(self, name: str) -> int:
        """The largest message that a topic takes, or would take if it were made."""
        topic = self.topic(name)
        if topic is not None:
            return topic.config.max_message_bytes
        if name in self._making or name.startswith(INBOX_PREFIX):
            return self.room.settings.max_packet_bytes
        return self.room.broker.topics.default_config.max_message_bytes

    async def make_topic(self, name: str, who: BrokerSession) -> None:
        """Raises MillstreamError when there can be no such topic."""
        await asyncio.shield(self._making.get(name) or self._begin_making(name, self._make(name, who)))

    def make_queue(self, name: str) -> asyncio.Task[None]:
        """Begin to make a topic that is used as a queue for the first time; whoever publishes to it awaits the task."""
        making = self._making.get(name)
        return making or self._begin_making(name, queue_defaults.make_queue(self.room.broker, self.own, name))

    def _begin_making(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        making = self._making[name] = asyncio.ensure_future(work)
        making.add_done_callback(lambda _: self._making.pop(name, None))
        return making

    async def _make(self, name: str, who: BrokerSession) -> None:
        broker = self.room.broker
        if name == self.room.catch_all:
            if self.topic(name) is None:
                await broker.topics.create_namespace(self.namespace, if_missing=True)
                # Longer than any session is remembered nobody waits for it.
                config = {
                    "retention_ms": self.room.settings.session_expiry_max_ms or 1,
                    "retention_bytes": _CATCH_ALL_BYTES,
                }
                await broker.topics.create(self.namespace, calls.CreateTopic(name=name, config=config))
        else:
            await broker.call(who, calls.Metadata(topics=[name], create=True))

    # --- the way of a message ------------------------------------------------------------------------------------

    def admit_unstored(self, payloads: Sequence[bytes]) -> None:
        """Raises MillstreamError when nobody may publish now, or this namespace not so much at a time.

        For messages that go to whoever is there and are in no batch; for others the broker asks.
        """
        broker = self.room.broker
        if (refusal := broker.modes.publish_refusal) is not None:
            raise refusal
        if broker.quotas.meters:
            broker.quotas.pass_on(self.namespace, len(payloads), sum(map(len, payloads)))

    def pass_on(self, message: Message, payloads: Sequence[bytes], now_us: int) -> bool:
        """Give whoever is there messages that are not stored, one like the other; says whether anybody was."""
        found = bool(self.receivers(message.topic))
        if found:
            for payload in payloads:
                self.dispatch(Parcel(with_payload(message, payload), now_us), None)
        name = to_topic(message.topic)
        if name is not None:
            found |= self.room.pass_to_others(self, name, message, payloads)
        return found

    def dispatch(self, parcel: Parcel, place: Place | None) -> bool:
        """Offer a message to everybody whose filters match; says whether there was anybody."""
        receivers = self.receivers(parcel.message.topic)
        for receiver, grant in receivers:
            if grant is None:
                receiver.offer(parcel, place)  # type: ignore[call-arg, arg-type]
            elif receiver.client is not None:  # type: ignore[union-attr]
                receiver.offer(parcel, grant, place)  # type: ignore[arg-type, call-arg]
        return bool(receivers)

    def deliver(self, delivery: Delivery) -> bool:
        """Messages of a stored topic have become visible.  What a durable session misses here it reads from the log."""
        name = delivery.topic
        if delivery.missed:
            self.room.own(asyncio.ensure_future(self._catch_up()))
        if delivery.buffers:
            topic = None if name == self.room.catch_all else from_topic(name)
            if topic is None or self.receivers(topic):
                self._deliver(name, topic, delivery)
        return True

    def _deliver(self, name: str, topic: str | None, delivery: Delivery) -> None:
        now_us = self.room.clock.now_us()
        try:
            for offset, message in messages_of(delivery.buffers, topic):
                parcel = Parcel(message, now_us)
                if not parcel.is_expired:
                    self.dispatch(parcel, Place(name, delivery.partition, delivery.uid, offset))
        except Exception:  # whoever stores messages must not suffer
            _log.exception("messages for MQTT subscribers cannot be read", topic=name)

    async def _catch_up(self) -> None:
        """There were too many messages at a time, and the broker's subscriptions have left some out."""
        for session in list(self.sessions.values()):
            if session.lasts and session.client is not None:
                session.catch_up()
                await asyncio.sleep(0)

    @property
    def is_deserted(self) -> bool:
        return not (self.sessions or self._making)


def _granted(subscriptions: Sequence[Subscription]) -> Grant:
    """One message for all subscriptions that overlap: with the best QoS, and everybody's identifiers."""
    others = [subscription for subscription in subscriptions if not subscription.no_local]
    no_local = len(others) < len(subscriptions)
    return Grant(
        max(subscription.qos for subscription in subscriptions),
        no_local,
        any(subscription.retain_as_published for subscription in subscriptions),
        tuple(subscription.identifier for subscription in subscriptions if subscription.identifier),
        _granted(others) if no_local and others else None,
    )
