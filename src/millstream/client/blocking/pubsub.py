"""The part of the synchronous client that subscribes, asks and replies, and takes what comes without being asked."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

from millstream.client.address import Target
from millstream.client.blocking.connection import Connection
from millstream.client.blocking.link import Link
from millstream.client.blocking.publisher import Publisher
from millstream.client.blocking.requester import Requester
from millstream.client.blocking.subscription import Subscription
from millstream.client.messages import Message, Receipt
from millstream.client.requests import encode_reply, is_inbox, replier, reply_address
from millstream.client.values import Headers, Key, Value
from millstream.durations import Duration, parse_ms
from millstream.entries import Priority
from millstream.errors import InvalidArgument
from millstream.wire.frames import Frame, FrameType

if TYPE_CHECKING:
    from millstream.client.blocking.queue import Queue

__all__ = ["PubSub"]


class PubSub:
    """Inherited by `Client`, which knows how to publish."""

    _target: Target
    _link: Link
    publish: Callable[..., Receipt]
    queue: Callable[..., Queue]
    _adopt: Callable[[Any], None]
    _publisher: Publisher

    def _open_pubsub(self) -> None:
        #: Given to messages, so that they can reply.
        self._replier = replier(self)
        self._requester = Requester(self._link, self._replier)
        self._flow = self._publisher.flow
        me = weakref.ref(self)

        def on_push(connection: Connection, frame: Frame) -> None:
            client = me()
            if client is not None:
                client._on_push(connection, frame)

        self._link.on_push = on_push

    def _on_push(self, connection: Connection, frame: Frame) -> None:
        """Runs in whichever thread is reading."""
        if frame.type == FrameType.DELIVERY:
            self._requester.take(connection, frame.payload)
        elif frame.type == FrameType.FLOW and connection is self._link.current:  # the others are on their way out
            self._flow.take(frame.payload)

    @overload
    def subscribe(
        self, *patterns: str, durable: None = None, timeout_s: float | None = None, **options: Any
    ) -> Subscription: ...
    @overload
    def subscribe(self, *patterns: str, durable: str, timeout_s: float | None = None, **options: Any) -> Queue: ...

    def subscribe(
        self, *patterns: str, durable: str | None = None, timeout_s: float | None = None, **options: Any
    ) -> Subscription | Queue:
        """Get the messages published from now on to all topics that match, present or future; see `Subscription`.

        In patterns, `*` stands for one level and a final `#` for any number of levels: `orders.*.created`, `logs.#`.

        With `durable`, the broker remembers under this name what was not acked, even while nobody is connected.  Such a
        subscription is a queue group over one pattern, and takes the options of `queue`.
        """
        if durable is not None:
            if len(patterns) != 1:
                raise InvalidArgument(f"a durable subscription has one pattern, not {len(patterns)}")
            return self.queue(patterns[0], group=durable, timeout_s=timeout_s, **{"start": "latest", **options})
        if options:
            raise InvalidArgument(f"{', '.join(options)}: only a durable subscription takes options of a queue")
        subscription = Subscription(self._target, patterns, timeout_s=timeout_s, reply=self._replier)
        self._adopt(subscription)
        subscription.open()
        return subscription

    def request(
        self,
        topic: str,
        value: Value = None,
        *,
        timeout: Duration = 30,
        key: Key = None,
        headers: Headers | None = None,
        json: Any = None,
        partition: int | None = None,
        priority: Priority | None = None,
        fsync: Literal["group", "interval", "always", "never"] | None = None,
    ) -> Message:
        """Publish a message and wait for the reply to it.  Raises RequestTimeout if none comes in time.

        A queue no longer hands the request out when nobody waits for the reply.
        """
        timeout_s = parse_ms(timeout, "timeout") / 1000

        def send(asking: Headers) -> Receipt:
            options = {"json": json, "partition": partition, "priority": priority, "fsync": fsync, "ttl": timeout_s}
            return self.publish(topic, value, key=key, headers=asking, **options)

        return self._requester.request(send, headers, timeout_s)

    def reply(
        self,
        message: Message,
        value: Value = None,
        *,
        json: Any = None,
        key: Key = None,
        headers: Headers | None = None,
    ) -> Receipt | None:
        """Answer a request; the same as `message.reply`.

        Returns None if the requester is gone.  Raises NoReplyAddress if the message is not a request.
        """
        address, needed = reply_address(message, headers)
        if not is_inbox(address):
            return self.publish(address, value, json=json, key=key, headers=needed)
        batch = encode_reply(value, json, key, needed)
        return self._requester.reply(address, batch, self._target.timeout_s)

    @property
    def late_replies(self) -> int:
        """How many replies to this client's requests came after their timeout, or twice."""
        return self._requester.late
