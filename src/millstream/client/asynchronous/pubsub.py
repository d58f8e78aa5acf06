"""The part of the asynchronous client that subscribes, asks and replies, and takes what comes without being asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal, overload

from millstream.client.address import Target
from millstream.client.asynchronous.connection import AsyncLink
from millstream.client.asynchronous.opening import Opening
from millstream.client.asynchronous.requester import AsyncRequester
from millstream.client.asynchronous.subscription import AsyncSubscription
from millstream.client.flow import FlowNotices
from millstream.client.messages import Message, Receipt
from millstream.client.requests import encode_reply, is_inbox, replier, reply_address
from millstream.client.values import Headers, Key, Value
from millstream.durations import Duration, parse_ms
from millstream.entries import Priority
from millstream.errors import InvalidArgument
from millstream.wire.frames import FrameType

__all__ = ["AsyncPubSub", "OpeningSubscription"]


class OpeningSubscription(Opening[AsyncSubscription]):
    """A subscription to be; `async for` works on it directly."""

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._each()


class AsyncPubSub:
    """Inherited by `AsyncClient`, which knows how to publish."""

    _target: Target
    _link: AsyncLink
    publish: Callable[..., Awaitable[Receipt]]
    queue: Callable[..., Any]
    _adopt: Callable[[Any], None]

    def _prepare_pubsub(self) -> None:
        #: Given to messages, so that they can reply.
        self._replier = replier(self)
        self._requester = AsyncRequester(self._link, self._replier)
        self._flow = FlowNotices()
        self._link.on_push = self._on_push
        self._link.listen(self._flow.forget)

    def _on_push(self, kind: int, payload: memoryview) -> None:
        if kind == FrameType.DELIVERY:
            self._requester.take(payload)
        elif kind == FrameType.FLOW:
            self._flow.take(payload)

    @overload
    def subscribe(
        self, *patterns: str, durable: None = None, timeout_s: float | None = None, **options: Any
    ) -> OpeningSubscription: ...
    @overload
    def subscribe(self, *patterns: str, durable: str, timeout_s: float | None = None, **options: Any) -> Any: ...

    def subscribe(
        self, *patterns: str, durable: str | None = None, timeout_s: float | None = None, **options: Any
    ) -> Any:
        """Get the messages published from now on to all topics that match.

        Use it with `async for`, `async with` or `await`.  See `Client.subscribe` for what patterns and `durable` mean.
        """
        if durable is not None:
            if len(patterns) != 1:
                raise InvalidArgument(f"a durable subscription has one pattern, not {len(patterns)}")
            return self.queue(patterns[0], group=durable, timeout_s=timeout_s, **{"start": "latest", **options})
        if options:
            raise InvalidArgument(f"{', '.join(options)}: only a durable subscription takes options of a queue")

        async def open_subscription() -> AsyncSubscription:
            subscription = AsyncSubscription(self._target, patterns, timeout_s=timeout_s, reply=self._replier)
            self._adopt(subscription)
            await subscription.open()
            return subscription

        return OpeningSubscription(open_subscription)

    async def request(
        self,
        topic: str,
        value: Value = None,
        *,
        timeout: Duration = 30,  # noqa: ASYNC109 - it also says how long the request is worth doing
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

        async def send(asking: Headers) -> Receipt:
            options = {"json": json, "partition": partition, "priority": priority, "fsync": fsync, "ttl": timeout_s}
            return await self.publish(topic, value, key=key, headers=asking, **options)

        return await self._requester.request(send, headers, timeout_s)

    async def reply(
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
            return await self.publish(address, value, json=json, key=key, headers=needed)
        batch = encode_reply(value, json, key, needed)
        return await self._requester.reply(address, batch, self._target.timeout_s)

    @property
    def late_replies(self) -> int:
        """How many replies to this client's requests came after their timeout, or twice."""
        return self._requester.late
