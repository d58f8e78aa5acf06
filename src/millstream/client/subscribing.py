"""What a subscription has received.  Shared by both kinds; no sockets.

A subscription has a connection of its own, so every DELIVERY that comes is meant for it.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from millstream.client.messages import Message, TopicPartition, batches_in, messages_of
from millstream.client.settings import check_timeout
from millstream.errors import InvalidArgument
from millstream.names import check_pattern
from millstream.wire.deliveries import Delivered, decode_delivery
from millstream.wire.subscription_calls import OpenSubscription

__all__ = ["RECEIVE_BYTES", "Subscribing", "messages_in"]

#: How much is taken from the socket at a time; the rest waits there, and then at the broker.
RECEIVE_BYTES: Final = 1024 * 1024


def messages_in(delivered: Delivered, reply: Callable[..., Any] | None) -> list[Message]:
    """The messages of a delivery.  Copies what it needs: the buffer may be reused afterwards."""
    place = TopicPartition(delivered.topic, delivered.partition)
    messages: list[Message] = []
    for batch in batches_in(delivered.batches):
        messages += messages_of(batch, place, delivered.uid, None, reply)
    return messages


class Subscribing:
    """The state of one subscription."""

    def __init__(self, patterns: tuple[str, ...], *, timeout_s: float | None, reply: Callable[..., Any] | None) -> None:
        if not patterns:
            raise InvalidArgument("a subscription needs at least one pattern")
        check_timeout(timeout_s)
        self.patterns = tuple(map(check_pattern, patterns))
        #: Messages that came too fast for us: the broker did not send them, and will not.
        self.missed = 0
        #: How often the connection was lost.  What was published until it was back was missed, too, and is not counted.
        self.reconnects = 0
        self._timeout_s = timeout_s
        self._reply = reply
        self._ready: deque[list[Message]] = deque()
        #: The delivery that is being handed out; who closes the subscription takes what is left out of it.
        self._current: list[Message] = []
        self._pending: Iterator[Message] = iter(())
        self._closed = False

    def _call(self) -> OpenSubscription:
        return OpenSubscription(patterns=list(self.patterns))

    def _take(self, payload: memoryview) -> int:
        """Take in a DELIVERY; how many bytes of messages it had."""
        delivered = decode_delivery(payload)
        self.missed += delivered.missed
        messages = messages_in(delivered, self._reply)
        if messages:
            self._ready.append(messages)
        return len(delivered.batches)

    @property
    def _has_pending(self) -> bool:
        return operator.length_hint(self._pending) > 0
