"""`$queue/...`, `$admin/queue/...` and shares with a queue behind them: queues, as MQTT clients use them.

Publishing to `$queue/a/b` enqueues.  Whoever subscribes there is a consumer of a queue group, and settles what it gets
by publishing to `$queue/a/b/$ack`, `/$nack` or `/$reject`; a client of 3.1.1, which is told no ids, by its PUBACK, and
with QoS 0 by nothing but its being there.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from millstream.broker.mqtt import queue_defaults
from millstream.broker.mqtt.admin_topics import AdminTopics, StatisticsFeed
from millstream.broker.mqtt.parcel import Parcel
from millstream.broker.mqtt.queue_messages import (
    MESSAGE_ID,
    RECEIPT_HANDLE,
    entry_for_queue,
    is_reply_address,
    whole_number,
)
from millstream.broker.mqtt.queue_reader import QueueReader, SettledBy
from millstream.broker.mqtt.subscription import QueueSubscription
from millstream.dead_letters import DEAD_LETTER_GROUP
from millstream.errors import InvalidArgument, InvalidName, MessageGone, MillstreamError, QuotaExceeded, ReceiptInvalid
from millstream.mqtt.messages import Message, expires_us
from millstream.mqtt.packets import V5, Filter, Publish, Subscribe
from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.mqtt.topics import QueueAddress, from_topic, parse_queue, parse_share, to_pattern
from millstream.names import check_group, is_pattern, is_system
from millstream.queues.letters import dead_letter_topic
from millstream.queues.records import Result
from millstream.receipts import ReceiptHandle
from millstream.wire import queue_calls
from millstream.wire.leases import REASON_BYTES_MAX, Scope, Settle, SettleEntry

if TYPE_CHECKING:
    from millstream.broker.broker import Session as BrokerSession
    from millstream.broker.mqtt.client import Client
    from millstream.broker.mqtt.mqtt import Mqtt
    from millstream.broker.mqtt.publishing import Owed, Publishing
    from millstream.broker.mqtt.session import Session

__all__ = ["QueueTopics"]

_log = structlog.get_logger("millstream.mqtt")

_CONSUMER_GROUP: Final = "consumer-group"
_RETRY_AFTER_MS: Final = "retry-after-ms"
_REASON: Final = "reason"
#: Where the part of a client id that many clients have in common ends.
_PREFIX_END: Final = re.compile(r"[-_:.]")
_KINDS: Final = {"ack": Settle.ACK, "nack": Settle.NACK, "reject": Settle.REJECT}


class QueueTopics:
    """The queues of one client."""

    def __init__(self, room: Mqtt, client: Client) -> None:
        assert client.session is not None
        assert client.who is not None
        self._room = room
        self._client = client
        self._session: Session = client.session
        self._who: BrokerSession = client.who
        self._world = client.session.world
        self._admin = AdminTopics(room, client.who)
        self._joined: dict[str, QueueReader | StatisticsFeed] = {}
        #: Filters whose turn has not come.
        self._expected: set[str] = set()
        self._closed = False

    # --- publishing ----------------------------------------------------------------------------------------------

    def publish(self, address: QueueAddress, packet: Publish, publishing: Publishing, owed: Owed) -> None:
        try:
            if address.is_admin:
                self._admin.publish(address, packet, publishing, owed)
            elif address.action:
                self._settle(address, packet, publishing, owed)
            elif is_reply_address(address):
                self._reply(address, packet, publishing, owed)
            else:
                self._enqueue(address, packet, publishing, owed)
        except MillstreamError as error:
            publishing.refuse(owed, error)

    def _enqueue(self, address: QueueAddress, packet: Publish, publishing: Publishing, owed: Owed) -> None:
        name = address.topic
        if address.dead_letters or is_system(name):
            raise MqttViolation(Reason.TOPIC_NAME_INVALID, "what is there comes from the broker alone")
        self._room.broker.check_publish(self._who, name)
        now_us = self._room.clock.now_us()
        topic = self._world.topic(name)
        recognised = topic is None or topic.config.dedup_window_ms > 0  # queues that are made here recognise ids
        entry = entry_for_queue(self._message(address, packet, now_us), now_us, recognised=recognised)
        if not self._world.has_topic(name):
            queue_defaults.check_first(name, entry)
            self._world.make_queue(name)  # publishing waits for it
        publishing.put(name, entry, owed)

    def _reply(self, address: QueueAddress, packet: Publish, publishing: Publishing, owed: Owed) -> None:
        """An answer for whoever waits for it now; there is nothing to keep for anybody else."""
        access, namespace = self._who.access, self._who.namespace
        if not access.may("produce", namespace):  # as with inboxes: workers reply although they only consume
            access.require("consume", namespace)
        self._world.admit_unstored([packet.payload])
        now_us = self._room.clock.now_us()
        found = self._world.dispatch(Parcel(self._message(address, packet, now_us), now_us), None)
        publishing.answer(owed, Reason.SUCCESS if found else Reason.NO_MATCHING_SUBSCRIBERS)

    def _message(self, address: QueueAddress, packet: Publish, now_us: int) -> Message:
        told = packet.properties
        return Message(
            f"$queue/{from_topic(address.topic)}",
            packet.payload,
            qos=packet.qos,
            properties=msgspec.structs.replace(told, topic_alias=None, message_expiry_s=None),
            client_id=self._session.client_id,
            expiry_us=expires_us(told.message_expiry_s, now_us),
        )

    def _settle(self, address: QueueAddress, packet: Publish, publishing: Publishing, owed: Owed) -> None:
        self._who.access.require("consume", self._who.namespace, address.topic)
        topic = self._topic_of(address)
        told = dict(reversed(packet.properties.user))
        kind = _KINDS[address.action]
        delay_ms = told.get(_RETRY_AFTER_MS)
        value = whole_number(_RETRY_AFTER_MS, delay_ms) if delay_ms is not None and kind == Settle.NACK else -1
        reason = told.get(_REASON, "") if kind != Settle.ACK else ""
        if len(reason.encode()) > REASON_BYTES_MAX:
            raise InvalidArgument(f"a reason has {REASON_BYTES_MAX} bytes at most")
        try:
            receipt = self._receipt(topic, told, packet.payload)
            entry = SettleEntry(kind, receipt.nonce, Scope.ONE, receipt.offset, value, reason=reason)
        except ReceiptInvalid as error:
            self._too_late(error, publishing, owed)
            return
        done = publishing.owe(owed)

        def answer(results: Sequence[int] | MillstreamError) -> None:
            if isinstance(results, MillstreamError):
                done(results)
                return
            for reader in self._joined.values():
                if isinstance(reader, QueueReader):
                    reader.settled(receipt)
            if results[0] == Result.INVALID and self._client.version == V5:
                done(ReceiptInvalid("the lease of this message has ended: somebody else may have it"))
            elif results[0] == Result.GONE and self._client.version == V5:
                done(MessageGone("this message is not in the log any more, and is not delivered again"))
            else:
                done(None)

        try:
            self._room.broker.settle(self._who, [entry], answer)
        except MillstreamError as error:
            done(error)

    def _too_late(self, error: MillstreamError, publishing: Publishing, owed: Owed) -> None:
        """In 3.1.1 no is said by hanging up, which would cost the client all it has; there it is only counted."""
        self._room.broker.metrics.settles_refused += 1
        if self._client.version == V5:
            publishing.refuse(owed, error)
        else:
            publishing.answer(owed, Reason.SUCCESS)

    def _receipt(self, topic: str, told: dict[str, str], payload: bytes) -> ReceiptHandle:
        """Which delivery is meant.  Version 3.1.1 says it in the payload."""
        name = told.get(RECEIPT_HANDLE) or told.get(MESSAGE_ID) or payload.decode("utf-8", "replace").strip()
        if not name:
            raise InvalidArgument(f"which message?  Say it with a user property {MESSAGE_ID!r} or {RECEIPT_HANDLE!r}")
        for reader in self._joined.values():
            if isinstance(reader, QueueReader) and reader.topic == topic:
                receipt = reader.receipt_of(name)
                if receipt is not None:
                    return receipt
        try:
            receipt = ReceiptHandle.parse(name)
        except InvalidArgument:
            receipt = None
        if receipt is None or receipt.topic != topic:
            raise ReceiptInvalid(f"this client has no message {name[:80]!r} of {topic!r}")
        return receipt

    # --- subscribing ---------------------------------------------------------------------------------------------

    def expect(self, topic_filter: str) -> None:
        """Somebody is about to subscribe."""
        self._expected.add(topic_filter)

    def has(self, topic_filter: str) -> bool:
        return topic_filter in self._joined or topic_filter in self._expected or topic_filter in self._session.queues

    async def subscribe(self, wanted: Filter, packet: Subscribe) -> int:
        """Make the client a consumer; returns what it is granted, or raises MillstreamError."""
        self._expected.discard(wanted.filter)
        session, settings = self._session, self._room.settings
        if wanted.filter not in session.queues and len(session.queues) >= settings.subscriptions_max:
            raise QuotaExceeded(f"a session has {settings.subscriptions_max} subscriptions to queues at most")
        identifiers = packet.properties.subscription_ids
        qos = 0 if wanted.filter.startswith("$admin/") else wanted.qos
        identifier = identifiers[0] if identifiers else 0
        subscription = QueueSubscription(wanted.filter, self._group(wanted, packet), qos, identifier)
        await self._take_up(subscription)
        if self._closed:
            return subscription.qos
        if self._world.unsubscribe(session, [wanted.filter]):  # a share from a time when none had a queue behind it
            session.record(["unsub", wanted.filter])
        self._room.broker.metrics.mqtt_subscriptions += wanted.filter not in session.queues
        session.queues[wanted.filter] = subscription
        if session.lasts:
            await session.record_durably(["queue", *subscription])
        return subscription.qos

    async def resume(self) -> None:
        """Take up again what the session remembers."""
        for subscription in list(self._session.queues.values()):
            try:
                await self._take_up(subscription)
            except MillstreamError as error:
                _log.warning(
                    "a queue cannot be taken up again",
                    client=self._session.client_id,
                    filter=subscription.filter,
                    reason=str(error),
                )

    async def unsubscribe(self, topic_filter: str) -> bool:
        """Says whether there was such a subscription."""
        await self._leave(topic_filter)
        if self._session.queues.pop(topic_filter, None) is None:
            return False
        self._room.broker.metrics.mqtt_subscriptions -= 1
        if self._session.lasts:
            await self._session.record_durably(["unqueue", topic_filter])
        return True

    def _group(self, wanted: Filter, packet: Subscribe) -> str:
        share = parse_share(wanted.filter)
        if share is not None:
            return check_group(share.group, "share")
        named = next((value for name, value in packet.properties.user if name == _CONSUMER_GROUP), None)
        if named is not None:
            return check_group(named, _CONSUMER_GROUP)
        address = parse_queue(wanted.filter, Reason.TOPIC_FILTER_INVALID)
        if address is not None and (address.dead_letters or address.is_admin):
            return DEAD_LETTER_GROUP if address.dead_letters else ""
        client_id = self._session.client_id
        try:
            return check_group(_PREFIX_END.split(client_id, maxsplit=1)[0] or client_id)
        except InvalidName:
            raise InvalidArgument(
                f"client id {client_id[:80]!r} makes no name for a queue group; "
                f"say one with a user property {_CONSUMER_GROUP!r}, or subscribe to '$share/GROUP/{wanted.filter[:80]}'"
            ) from None

    async def _take_up(self, subscription: QueueSubscription) -> None:
        """Begin to consume, instead of whatever the same filter stood for."""
        await self._leave(subscription.filter)
        if self._closed:
            return
        share = parse_share(subscription.filter)
        inner = subscription.filter if share is None else share.filter
        address = parse_queue(inner, Reason.TOPIC_FILTER_INVALID)
        if address is not None and address.is_admin:
            if address.action != "stats" or share is not None:
                raise MqttViolation(Reason.TOPIC_FILTER_INVALID, "subscribers of '$admin/queue/' get statistics only")
            self._who.access.require("admin", self._who.namespace, address.topic)
            feed = StatisticsFeed(self._room, self._client, address.topic, subscription)
            self._joined[subscription.filter] = feed
            self._room.loop.call_soon(feed.go_on)
            return
        if address is not None and address.action:
            raise MqttViolation(Reason.TOPIC_FILTER_INVALID, "settles are published, nobody subscribes to them")
        reader = await (self._join_share(inner, subscription) if address is None else self._join(address, subscription))
        if reader is not None:
            self._joined[subscription.filter] = reader
            self._room.loop.call_soon(reader.go_on)  # the SUBACK goes first

    async def _join(self, address: QueueAddress, subscription: QueueSubscription) -> QueueReader | None:
        if is_system(address.topic):
            raise MqttViolation(Reason.TOPIC_FILTER_INVALID, "the broker's own topics are no queues")
        self._who.access.require("consume", self._who.namespace, address.topic)
        if not self._world.has_topic(address.topic):
            await asyncio.shield(self._world.make_queue(address.topic))
        topic = self._topic_of(address)
        if address.dead_letters:
            await queue_defaults.make_letters(self._room.broker, self._world.namespace, address.topic, topic)
        # Who is told no ids and asked for no answer cannot settle: then it is at most once, as QoS 0 says.
        unasked: SettledBy = "arrival" if subscription.qos else "sending"
        settled_by: SettledBy = "message" if self._client.version == V5 else unasked
        name = f"$queue/{'dlq/' if address.dead_letters else ''}{from_topic(address.topic)}"
        return await self._open(topic, subscription, name, settled_by, start="")

    async def _join_share(self, topic_filter: str, subscription: QueueSubscription) -> QueueReader | None:
        """`$share` with a queue behind it: from now on nothing is lost, whoever of its members is there."""
        pattern = to_pattern(topic_filter)
        if pattern is None or is_system(pattern):
            raise MqttViolation(Reason.TOPIC_FILTER_INVALID, "no topic can match this filter")
        self._who.access.require("consume", self._who.namespace, pattern)
        if is_pattern(pattern):
            await self._room.broker.topics.create_namespace(self._world.namespace, if_missing=True)
        elif not self._world.has_topic(pattern):
            await self._world.make_topic(pattern, self._world.own)
        settled_by: SettledBy = "arrival" if subscription.qos else "sending"
        return await self._open(pattern, subscription, None, settled_by, start="latest")

    async def _open(
        self, topic: str, subscription: QueueSubscription, name: str | None, settled_by: SettledBy, *, start: str
    ) -> QueueReader | None:
        call = queue_calls.OpenQueue(
            topic=topic,
            group=subscription.group,
            by_receipt=True,
            start=start,  # type: ignore[arg-type]
        )
        registry = self._room.broker.queues.registry  # what the client may do was asked before
        opened = await registry.open(self._who, call)
        if self._closed:
            self._end_consumer(opened.consumer)
            return None
        return QueueReader(
            self._room, self._client, subscription, opened.consumer, topic, delivered_as=name, settled_by=settled_by
        )

    async def _leave(self, topic_filter: str) -> None:
        reader = self._joined.pop(topic_filter, None)
        if reader is not None:
            reader.close()
            if isinstance(reader, QueueReader):
                self._end_consumer(reader.consumer)

    def _end_consumer(self, number: int) -> None:
        queues = self._room.broker.queues
        for consumer in queues.consumers_of(self._who):
            if consumer.number == number:
                queues.remove_consumer(consumer)

    def _topic_of(self, address: QueueAddress) -> str:
        """The topic that a queue address speaks of.  Raises Forbidden if its letters lie with those of other topics."""
        if not address.dead_letters:
            return address.topic
        topic = self._room.broker.topics.registry.find(self._world.namespace, address.topic)
        letters = dead_letter_topic(address.topic, topic.config.dead_letter_topic if topic is not None else "")
        if letters != dead_letter_topic(address.topic, ""):
            self._who.access.require("consume", self._who.namespace, letters)
        return letters

    # --- life ----------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """The client may take more."""
        for reader in list(self._joined.values()):
            if isinstance(reader, QueueReader):
                reader.go_on()

    def close(self) -> None:
        """The connection ends; what it had goes back with the consumers of its session."""
        self._closed = True
        for reader in self._joined.values():
            reader.close()
        self._session.give_up_leases()
