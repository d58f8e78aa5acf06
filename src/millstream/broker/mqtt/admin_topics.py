"""`$admin/queue/...`: making and changing queues by publishing JSON, and their statistics for whoever subscribes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from millstream.broker.mqtt import queue_defaults
from millstream.broker.mqtt.parcel import Grant, Parcel
from millstream.broker.mqtt.subscription import QueueSubscription
from millstream.broker.registry import Topic
from millstream.errors import InternalError, InvalidArgument, MillstreamError
from millstream.mqtt.messages import Message
from millstream.mqtt.packets import Properties, Publish
from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.mqtt.topics import QueueAddress, from_topic, to_topic
from millstream.queues.letters import dead_letter_topic
from millstream.wire import calls, queue_calls
from millstream.wording import in_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.broker.broker import Session as BrokerSession
    from millstream.broker.mqtt.client import Client
    from millstream.broker.mqtt.mqtt import Mqtt
    from millstream.broker.mqtt.publishing import Owed, Publishing

__all__ = ["AdminTopics", "StatisticsFeed"]

#: Time between two rounds of statistics.
_INTERVAL_S: Final = 5.0
_JSON: Final = Properties(payload_format=1, content_type="application/json")


class AdminTopics:
    """What one client does about queues themselves."""

    def __init__(self, room: Mqtt, who: BrokerSession) -> None:
        self._room = room
        self._who = who

    def publish(self, address: QueueAddress, packet: Publish, publishing: Publishing, owed: Owed) -> None:
        """Raises MillstreamError; otherwise it is answered when it is done."""
        if address.action == "stats":
            raise MqttViolation(Reason.TOPIC_NAME_INVALID, "statistics come from the broker: subscribe to them")
        asked = _object(packet.payload)
        partitions = asked.pop("partitions", None)
        if partitions is not None and type(partitions) is not int:
            raise InvalidArgument(f"partitions is a number, not {partitions!r}")
        call: calls.CreateTopic | calls.AlterTopic
        if address.action == "create":
            name = asked.pop("name", None)
            topic = to_topic(name) if isinstance(name, str) else None
            if topic is None:
                raise InvalidArgument("'name' says which queue: levels of letters, digits, '-' and '_', as in 'a/b'")
            config = {**queue_defaults.CONFIG, **asked}
            call = calls.CreateTopic(name=topic, partitions=partitions or queue_defaults.PARTITIONS, config=config)
        else:
            call = calls.AlterTopic(name=address.topic, config=asked, partitions=partitions)
        self._room.own(asyncio.ensure_future(self._do(call, publishing.owe(owed))))

    async def _do(self, call: object, done: Callable[[MillstreamError | None], None]) -> None:
        try:
            await self._room.broker.call(self._who, call)
        except MillstreamError as error:
            done(error)
        except BaseException:
            done(InternalError("the broker failed to change a queue; its log has the details"))
            raise
        else:
            done(None)


class StatisticsFeed:
    """The statistics of one queue for one client: now, and every few seconds from now on."""

    def __init__(self, room: Mqtt, client: Client, topic: str, subscription: QueueSubscription) -> None:
        self._room = room
        self._client = client
        self._topic = topic
        self._name = f"$admin/queue/{from_topic(topic)}/stats"
        identifiers = (subscription.identifier,) if subscription.identifier else ()
        self._grant = Grant(0, False, False, identifiers)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def go_on(self) -> None:
        if not self._closed:
            self._timer = self._room.loop.call_later(_INTERVAL_S, self.go_on)
            self._room.own(asyncio.ensure_future(self._send()))

    async def _send(self) -> None:
        try:
            told = await self._statistics()
        except MillstreamError as error:
            told = {"name": from_topic(self._topic), "error": str(error)}
        if not self._closed:
            message = Message(self._name, msgspec.json.encode(told), properties=_JSON)
            self._client.send_at_most_once(Parcel(message, self._room.clock.now_us()), self._grant)

    async def _statistics(self) -> dict[str, Any]:
        """As somebody who may see everything: whether the client may was asked when it subscribed."""
        broker = self._room.broker
        who = self._client.who
        assert who is not None
        own = self._room.world(who.namespace).own
        topic = broker.topics.registry.get(own.namespace, self._topic)
        groups: Any = await broker.call(own, queue_calls.ListQueues(topic=self._topic))
        dead_letters = await self._dead_letters(topic)
        await broker.queues.open(topic)
        return {
            "name": from_topic(topic.name),
            "time_ms": self._room.clock.now_us() // 1000,
            "partitions": len(topic.partitions),
            "depth": broker.queues.depth(topic),
            "groups": [{name: getattr(group, name) for name in _SHOWN} for group in groups],
            "dead_letters": dead_letters,
        }

    async def _dead_letters(self, topic: Topic) -> int:
        broker = self._room.broker
        name = dead_letter_topic(topic.name, topic.config.dead_letter_topic)
        letters = broker.topics.registry.find(topic.namespace, name)
        return 0 if letters is None else await broker.queues.letters_in(letters)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()


_SHOWN: Final = ("group", "depth", "ready", "leased", "waiting", "consumers", "paused")


def _object(payload: bytes) -> dict[str, Any]:
    try:
        asked: dict[str, Any] = msgspec.json.decode(payload or b"{}", type=dict[str, Any])
    except msgspec.DecodeError as problem:
        raise MqttViolation(Reason.PAYLOAD_FORMAT_INVALID, f"a JSON object is expected: {in_words(problem)}") from None
    return asked
