"""Deliveries that a subscriber has not been sent yet, and the credit that it has given.  Does no I/O.

What waits is bounded.  Beyond that the broker is told that the client is slow, counts what it misses, and tells it so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

import structlog

from millstream.errors import MillstreamError
from millstream.server.http.incoming import ShownMessage, shown_messages
from millstream.server.http.socket.frames import DeliveredMessages
from millstream.values import Encoding
from millstream.wire.deliveries import Delivery

__all__ = ["FRAME_BYTES", "FRAME_MESSAGES", "Mailbox"]

_log = structlog.get_logger("millstream.websocket")

#: Of values in one frame of messages, unless a single one is larger; and messages in it.
FRAME_BYTES: Final = 256 * 1024
FRAME_MESSAGES: Final = 500
#: What a delivery takes besides its messages; one may have none, and only say how many were missed.
_DELIVERY_BYTES: Final = 500
#: A subscription that is not behind can have a delivery of this size, however much waits for the others.
_ALWAYS_BYTES: Final = 256 * 1024


class _Box:
    """One subscription."""

    def __init__(self, credit: int | None, encoding: Encoding) -> None:
        self.credit = credit
        self.encoding: Encoding = encoding
        self.waiting: deque[Delivery] = deque()
        #: The delivery that was opened last: its next message, and those behind it.
        self.next: ShownMessage | None = None
        self.opened: Iterator[ShownMessage] = iter(())
        self.opened_bytes = 0

    def has_something(self) -> bool:
        return (self.credit is None or self.credit > 0) and bool(self.waiting or self.next)


class Mailbox:
    """All subscriptions of one connection."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._boxes: dict[int, _Box] = {}
        #: Whether something was refused since the mailbox was last empty.
        self.refused = False
        #: Whether that was for a subscription for which nothing waits, which would not hear of it otherwise.
        self.owes_word = False

    def __len__(self) -> int:
        return len(self._boxes)

    def open(self, subscription: int, credit: int | None, encoding: Encoding) -> None:
        self._boxes[subscription] = _Box(credit, encoding)

    def close(self, subscription: int) -> None:
        box = self._boxes.pop(subscription, None)
        if box is not None:
            self._bytes -= sum(map(_size, box.waiting)) + box.opened_bytes

    def give(self, subscription: int, more: int) -> bool:
        """More credit; says whether there is such a subscription."""
        box = self._boxes.get(subscription)
        if box is not None and box.credit is not None:
            box.credit += more
        return box is not None

    def offer(self, delivery: Delivery) -> bool:
        """Take a delivery, unless the client is behind.  An idle subscription can have one, unless that is large."""
        box = self._boxes.get(delivery.subscription)
        if box is None:
            return False
        size = _size(delivery)
        is_due = not box.waiting and (size <= _ALWAYS_BYTES or not self._bytes)
        if not is_due and self._bytes + size > self._bytes_max:
            self.refused = True
            self.owes_word |= not box.waiting
            return False
        self._bytes += size
        box.waiting.append(delivery)
        return True

    def frames(self) -> Iterator[DeliveredMessages]:
        """Everything that may be sent, subscription by subscription, a frame of each at a time."""
        found = True
        while found:
            found = False
            for number, box in list(self._boxes.items()):
                if number in self._boxes and box.has_something():
                    found = True
                    yield self._frame(number, box)

    def _frame(self, number: int, box: _Box) -> DeliveredMessages:
        missed = 0 if box.next else self._open_first(box)
        messages: list[ShownMessage] = []
        room = FRAME_MESSAGES if box.credit is None else min(FRAME_MESSAGES, box.credit)
        size = 0
        while box.next and len(messages) < room and (not messages or size + box.next.size <= FRAME_BYTES):
            size += box.next.size
            messages.append(box.next)
            self._step(box)
        if box.credit is not None:
            box.credit -= len(messages)
        return DeliveredMessages(subscription=number, missed=missed, messages=messages)

    def _open_first(self, box: _Box) -> int:
        """Go on with the delivery that waits longest; returns how many messages were missed before it."""
        delivery = box.waiting.popleft()
        box.opened, box.opened_bytes = _messages(delivery, box.encoding), _size(delivery)
        self._step(box)
        return delivery.missed

    def _step(self, box: _Box) -> None:
        box.next = next(box.opened, None)
        if box.next is None:
            self._bytes -= box.opened_bytes
            box.opened_bytes = 0


def _messages(delivery: Delivery, encoding: Encoding) -> Iterator[ShownMessage]:
    """Lazily: a batch may hold a million."""
    for buffer in delivery.buffers:
        try:
            yield from shown_messages((buffer,), delivery.topic, delivery.partition, delivery.uid, 0, encoding)
        except MillstreamError as error:
            _log.error("messages for a subscriber cannot be read", topic=delivery.topic, reason=str(error))


def _size(delivery: Delivery) -> int:
    return _DELIVERY_BYTES + sum(map(len, delivery.buffers))
